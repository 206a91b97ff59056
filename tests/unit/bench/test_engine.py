"""The benchmark of the engine on the tiny Llama: what is counted, and what is refused."""

from __future__ import annotations

import os
from collections import namedtuple

import pytest
import torch

from headrace.bench import engine as bench_engine
from headrace.bench.engine import Case, Run, Variant, make_row, measure, why_not
from headrace.bench.floors import Limits
from headrace.config import EngineSettings, Settings
from headrace.engine.native import library
from headrace.errors import RequestCancelled

SETTINGS = Settings(engine=EngineSettings(block_size_tokens=16, max_step_tokens=32))
TORCH = Variant("torch", "float32", 1)
BACKENDS = [
    "torch",
    pytest.param("cpu", marks=pytest.mark.skipif(library.load() is None, reason="no kernels")),
]


@pytest.fixture
def quick_meter(monkeypatch):
    """A machine that reads 1 GB/s and computes 1 GFLOP/s."""

    class Meter:
        def __init__(self, working_set_bytes: int, dtype: torch.dtype, num_threads: int) -> None:
            assert working_set_bytes > 0

        def measure(self) -> Limits:
            return Limits(1e9, 1e9)

    monkeypatch.setattr(bench_engine, "Meter", Meter)


@pytest.mark.usefixtures("quick_meter")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_for_each_case(tiny_model_files, backend):
    affinity = os.sched_getaffinity(0)
    cases = [Case("prefill", 1, 70), Case("decode", 3, 40), Case("decode", 1, 5)]
    rows = list(measure(tiny_model_files, SETTINGS, Variant(backend, "float32", 1), cases, 2))
    assert [(row.phase, row.batch, row.context, row.runs) for row in rows] == [
        ("prefill", 1, 70, 2),
        ("decode", 3, 40, 2),
        ("decode", 1, 5, 2),
    ]
    for row in rows:
        assert (row.backend, row.dtype, row.compute_dtype, row.kv_dtype) == (backend, *3 * ["float32"])
        assert row.fraction_of_floor == pytest.approx(row.tokens_per_s / row.floor_tokens_per_s)
        assert 0 < row.overhead_ms < row.step_ms
        assert (row.read_gb_per_s, row.gemm_gflops) == (1.0, 1.0)
    # 90,368 weights of 4 bytes and, of each sequence, KV of 256 numbers a token. The decode steps, 4 to get warm and 16
    # that are measured, see 41 to 60 tokens: from 45 on, so the middle is 52.5.
    decode_bytes = 4 * 90_368 + 3 * 52.5 * 4 * 128
    decode_flops = 3 * (2 * 90_368 + 2 * 4 * 2 * 2 * 16 * 52.5)
    assert rows[1].floor_tokens_per_s == pytest.approx(3 / max(decode_bytes / 1e9, decode_flops / 1e9))
    prefill_flops = 2 * (70 * 73_728 + 16_640) + 2 * 4 * 2 * 2 * 16 * 70 * 71 / 2
    assert rows[0].floor_tokens_per_s == pytest.approx(70 / (prefill_flops / 1e9))
    assert os.sched_getaffinity(0) == affinity


@pytest.mark.usefixtures("quick_meter")
@pytest.mark.skipif(library.load() is None, reason="no kernels")
@pytest.mark.parametrize(("dtype", "bits"), [("int8", 8.5), ("int4", 5.0)])
def test_quantized_weights_have_their_own_floor(tiny_model_files, dtype, bits):
    [row] = measure(tiny_model_files, SETTINGS, Variant("cpu", dtype, 1), [Case("decode", 1, 5)], 1)
    weight_bytes = (73_728 * bits + 16_640 * 8.5) / 8
    # 12 steps that see 6 to 17 tokens, of which the last 8 count.
    kv_row_bytes = 4 if row.kv_dtype == "float32" else 2
    read_bytes = weight_bytes + 13.5 * 128 * kv_row_bytes
    flops = 2 * 90_368 + 2 * 4 * 2 * 2 * 16 * 13.5
    assert row.floor_tokens_per_s == pytest.approx(1 / max(read_bytes / 1e9, flops / 1e9))
    assert row.dtype == dtype


def test_times_are_medians_of_runs(tiny_model_files):
    class Subject:
        kv_dtype = "float32"

        def work(self, case: Case, num_runs: int):
            return bench_engine.Work(flops=10.0, read_bytes=40.0), case.batch

    runs = [
        Run(num_steps=2, num_tokens=8, seconds=seconds, forward_s=forward_s)
        for seconds, forward_s in ((4.0, 3.5), (1.0, 0.9), (2.0, 1.0))
    ]
    row = make_row(TORCH, Case("decode", 4, 9), Subject(), runs, Limits(20.0, 100.0))
    assert (row.tokens_per_s, row.floor_tokens_per_s, row.fraction_of_floor) == (4.0, 2.0, 2.0)
    assert row.step_ms == pytest.approx(1000.0)
    assert row.overhead_ms == pytest.approx(250.0)


@pytest.mark.usefixtures("quick_meter")
def test_closing_it_ends_what_is_under_way(tiny_model_files):
    rows = measure(tiny_model_files, SETTINGS, TORCH, [Case("prefill", 1, 8), Case("prefill", 1, 9)], 1)
    assert next(rows).context == 8
    rows.close()
    assert list(rows) == []


def test_a_stopped_subject_runs_no_further_step(tiny_model_files):
    stop = bench_engine.threading.Event()
    settings = TORCH.settings(SETTINGS, 8, 1)
    threads = torch.get_num_threads()
    subject = bench_engine.Subject.load(tiny_model_files, settings, TORCH, stop)
    torch.set_num_threads(threads)
    stop.set()
    with pytest.raises(RequestCancelled):
        subject.run(Case("prefill", 1, 8))


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case("prefill", 1, 4096), "it takes 4,097 tokens, the model's limit is 4,096"),
        # 4 steps to get warm and 8 of the run; the token that comes with the KV, and one that is not the last.
        (Case("decode", 1, 4083), "it takes 4,097 tokens, the model's limit is 4,096"),
        (Case("decode", 1, 4082), None),
        (Case("decode", 33, 8), "engine.max_step_tokens is 32"),
    ],
)
def test_what_is_too_long_or_too_wide_is_skipped(tiny_model_files, case, reason):
    assert why_not(TORCH, case, tiny_model_files.config, SETTINGS, 1) == reason


def test_what_does_not_fit_memory_is_skipped(tiny_model_files, monkeypatch):
    memory = namedtuple("memory", "available")
    # KV: 2 sequences of 40 + 14 tokens take 5 blocks each, of 16 tokens, 512 bytes a token: 81,920. Weights: 107,008 of
    # 4 bytes, twice: 856,064. And a GiB is left to others.
    needed = 10 * 16 * 512 + 2 * 4 * 107_008 + (1 << 30)
    case = Case("decode", 2, 40)
    for available, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(bench_engine.psutil, "virtual_memory", lambda n=available: memory(n))
        found = why_not(TORCH, case, tiny_model_files.config, SETTINGS, 1)
        assert (found is None) == fits
        assert fits or "GB of memory are free" in found


@pytest.mark.parametrize(
    ("variant", "possible", "quantization"),
    [
        (Variant("torch", "float32", 1), True, "none"),
        (Variant("torch", "int8", 1), False, "int8"),
        (Variant("torch", "stored", 1), False, "auto"),
        (Variant("cpu", "int4", 1), True, "int4"),
        (Variant("cpu", "stored", 1), True, "auto"),
    ],
)
def test_torch_is_not_asked_for_quantized_weights(variant, possible, quantization):
    assert variant.is_possible == possible
    assert variant.quantization == quantization


def test_more_sequences_than_the_settings_allow_are_measured_all_the_same():
    assert TORCH.settings(SETTINGS, 8, 100).max_sequences == 100
    assert TORCH.settings(SETTINGS, 8, 1).max_sequences == SETTINGS.engine.max_sequences
