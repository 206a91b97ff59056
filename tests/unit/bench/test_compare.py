"""The comparison of engines: what peers print is read right, rounds alternate, a missing peer is told how to build."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from bench.compare import engine
from bench.compare.engine import Point, Results
from headrace.engine.native import library

PREFILL, SINGLE, BATCHED = Point("prefill", 1, 512), Point("decode", 1, 256), Point("decode", 4, 256)

# In the form of `llama-bench -o json` and `llama-batched-bench --output-format jsonl`, with some of the fields.
LLAMA_BENCH = json.dumps(
    [
        {"n_prompt": 512, "n_gen": 0, "n_depth": 0, "avg_ns": 1000, "avg_ts": 451.5, "samples_ts": [451.5]},
        {"n_prompt": 0, "n_gen": 32, "n_depth": 256, "avg_ns": 1000, "avg_ts": 54.25, "samples_ts": [54.25]},
    ]
)
BATCHED_BENCH = (
    "\nload: some log\n"
    '{"n_kv_max": 388, "pp": 256, "tg": 32, "pl": 4, "n_kv": 384, "speed_pp": 99.0, "speed_tg": 86.5}\n'
)


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_rates_of_llama_cpp_are_read():
    assert engine.parse_llama_bench(LLAMA_BENCH) == {PREFILL: 451.5, SINGLE: 54.25}
    assert engine.parse_batched_bench(BATCHED_BENCH) == {BATCHED: 86.5}


def test_llama_cpp_is_asked_for_each_point(tmp_path):
    log = tmp_path / "log"
    bench = script(tmp_path / "llama-bench", f'echo "bench $@" >> {log}; echo "[]"')
    batched = script(tmp_path / "llama-batched-bench", f'echo "batched $@" >> {log}')
    engine.llama_cpp(bench, Path("m.gguf"), 2, [PREFILL, SINGLE, BATCHED])
    assert log.read_text().splitlines() == [
        "bench -m m.gguf -t 2 -r 1 -o json -p 512 -n 0",
        "bench -m m.gguf -t 2 -r 1 -o json -p 0 -n 32 -d 256",
        # Room for the prompt that all share, and for each sequence's own tokens.
        "batched -m m.gguf -t 2 -c 388 -kvu -pps --output-format jsonl -npp 256 -ntg 32 -npl 4",
    ]
    log.unlink()
    batched.unlink()
    engine.llama_cpp(bench, Path("m.gguf"), 2, [BATCHED])
    assert not log.exists()


def test_a_process_that_fails_says_why(tmp_path):
    broken = script(tmp_path / "llama-bench", "echo no such model >&2; exit 3")
    with pytest.raises(RuntimeError, match="llama-bench ended with status 3: no such model"):
        engine.llama_cpp(broken, Path("m.gguf"), 1, [PREFILL])


@pytest.mark.skipif(library.load() is None, reason="no kernels")
def test_headrace_is_measured_by_its_own_command(tiny_model_files):
    points = [Point("prefill", 1, 20), Point("decode", 1, 30), Point("decode", 2, 30)]
    floors = {points[0]: 1e15}
    rates = engine.headrace(str(tiny_model_files.path), "float32", 1, points, floors)
    assert list(rates) == points
    assert min(rates.values()) > 0
    assert floors[points[0]] == 1e15  # the highest of all runs
    assert floors[points[1]] > 0


def test_points_become_options():
    assert engine.headrace_points([PREFILL, SINGLE, BATCHED]) == [
        *("--prompt", "512", "--batch", "1,4", "--context", "256")
    ]
    assert engine.headrace_points([PREFILL]) == ["--prompt", "512", "--batch", "0"]
    assert engine.headrace_points([SINGLE]) == ["--prompt", "0", "--batch", "1", "--context", "256"]


def test_rounds_alternate_and_the_median_counts():
    order: list[str] = []
    rates = {"a": iter([1.0, 9.0, 2.0]), "b": iter([5.0, 6.0, 7.0])}

    def contender(name: str):
        def run(points):
            order.append(name)
            return {SINGLE: next(rates[name]), Point("decode", 9, 9): 1.0}

        return run

    results = Results(["a", "b"], [SINGLE, PREFILL])
    engine.run_rounds({name: contender(name) for name in "ab"}, results, [SINGLE], 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    results.floors[SINGLE] = 20.0
    row = {"phase": "decode", "batch": 1, "context": 256, "floor_tokens_per_s": 20.0}
    assert results.rows() == [
        {"engine": "a", **row, "tokens_per_s": 2.0, "samples": [1.0, 9.0, 2.0]},
        {"engine": "b", **row, "tokens_per_s": 6.0, "samples": [5.0, 6.0, 7.0]},
    ]
    assert len(results.table().splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--runs", "0"], "--runs: 0 is not allowed; it must be at least 1"),
        (["--cores", "100000"], "--cores: [100000] is not allowed; this process may use"),
        (["--engines", "headrace,vllm"], "--engines: there is no vllm"),
        (["--llama-bench", "nowhere/llama-bench"], "--target llama-bench"),
    ],
)
def test_wrong_options_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit):
        engine._arguments(arguments)
    assert message in capsys.readouterr().err


def test_without_llama_bench_the_others_run(tiny_model_files, tmp_path, capsys):
    arguments = engine._arguments([])
    results = Results(arguments.engines.split(","), [])
    contenders = engine._contenders(arguments, tiny_model_files, results, tmp_path)
    assert list(contenders) == ["headrace", "transformers"]
    assert "cmake --build BUILD -j 1 --target llama-bench" in capsys.readouterr().err
    arguments = engine._arguments(["--dtype", "stored"])
    assert list(engine._contenders(arguments, tiny_model_files, results, tmp_path)) == ["headrace"]
