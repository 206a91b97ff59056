"""`headrace bench kv`: two real processes over NIXL, small pools."""

from __future__ import annotations

import json
import os

import psutil
import pytest
from typer.testing import CliRunner

from headrace.bench import kv
from headrace.bench.kv import QUICK, Effort, Round, Subject, make_row, measure
from headrace.cli.app import app
from headrace.errors import InvalidRequest, TransferFailed

SMALL = "smollm2-135m"
BLOCK_BYTES = 737_280


def bench(*arguments: str):
    return CliRunner().invoke(app, ["bench", "kv", "--quick", *arguments], catch_exceptions=False)


def workers() -> list[psutil.Process]:
    """Processes of the benchmark. multiprocessing's resource tracker stays for the life of this process."""
    children = psutil.Process(os.getpid()).children(recursive=True)
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


def test_rows_of_a_real_pair_of_processes(tmp_path):
    path = tmp_path / "rows.json"
    result = bench("--model", SMALL, "--blocks", "1,100", "--runs", "2", "--json", str(path))
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert report["machine"]["nixl"]
    cases = [(row["blocks"], row["order"]) for row in report["rows"]]
    assert cases == [(1, "contiguous"), (1, "scattered"), (100, "contiguous"), (100, "scattered")]
    for row in report["rows"]:
        assert (row["model"], row["transport"], row["block_bytes"]) == (SMALL, "nixl", BLOCK_BYTES)
        assert row["rounds"] >= 2
        assert row["gb_per_s"] == pytest.approx(row["blocks"] * BLOCK_BYTES / row["read_us"] / 1e3)
        assert row["of_memcpy"] == pytest.approx(row["gb_per_s"] / row["memcpy_gb_per_s"])
        assert row["of_scatter"] == pytest.approx(row["gb_per_s"] / row["scatter_gb_per_s"])
        assert row["serving_cpu"] is not None
        # 100 blocks are more than the pool of a trial has.
        assert row["times_each_block"] == row["blocks"] / row["pool_blocks"]
        assert f"{row['gb_per_s']:.2f}" in result.stdout
    assert report["rows"][-1]["times_each_block"] > 1
    assert workers() == []


def test_local_is_measured_in_one_process():
    rows = list(measure(Subject(SMALL, "local"), [3], 1, QUICK))
    assert [(row.blocks, row.transport, row.serving_cpu) for row in rows] == 2 * [(3, "local", None)]
    assert workers() == []


def test_processes_end_when_measuring_is_interrupted():
    rows = measure(Subject(SMALL, "nixl"), [1], 1, QUICK)
    next(rows)
    assert len(workers()) == 2
    with pytest.raises(KeyboardInterrupt):
        rows.throw(KeyboardInterrupt)
    assert workers() == []


def test_a_process_that_dies_is_an_error():
    rows = measure(Subject(SMALL, "nixl"), [1], 1, QUICK)
    next(rows)
    for worker in workers():
        worker.kill()
    with pytest.raises(TransferFailed, match="ended by itself"):
        next(rows)
    assert workers() == []


def test_a_row_is_the_medians_of_rounds():
    class Pair:
        pool_blocks = 2

    rounds = [Round(4.0, 1.0, 2.0), Round(2.0, 3.0, 2.0), Round(3.0, 3.0, 6.0)]
    row = make_row(
        Subject(SMALL, "nixl"),
        Pair(),
        (4, "scattered"),
        rounds,
        first_read_us=1.0,
        owner_idle_cpu=0.0,
        reader_idle_cpu=0.0,
        serving_cpu=None,
    )
    assert (row.read_us, row.latency_us, row.times_each_block) == (3e6, 0.75e6, 2.0)
    assert (row.of_memcpy, row.of_scatter) == (1.0, pytest.approx(2 / 3))
    assert row.gb_per_s == pytest.approx(4 * BLOCK_BYTES / 3e9)


def test_a_pool_is_as_large_as_memory_allows():
    subject = Subject("llama-3.1-8b", "nixl")
    assert subject.block_bytes == 4 << 20
    assert subject.pool_blocks(4, Effort()) == 4
    assert subject.pool_blocks(4096, Effort(max_pool_bytes=64 << 20)) == 16


def test_a_read_that_brings_no_bytes_is_noticed():
    worker = kv._Worker.__new__(kv._Worker)
    worker._numbers = kv.np.array([[0], [7], [2]], dtype=kv.np.int16)
    worker.check_first_bytes([7, 2], [1, 2])
    with pytest.raises(TransferFailed, match="without the bytes of block 6"):
        worker.check_first_bytes([6], [1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--transport", "rdma"), "--transport: 'rdma' is not allowed; it must be of nixl, local"),
        (("--model", "gpt"), "--model: 'gpt' is not allowed; it must be of smollm2-135m, llama-3.1-8b"),
        (("--blocks", "0"), "--blocks: 0 is not allowed; it must be from 1 to 65536"),
        (("--transport", "local", "--tls", "tcp"), "--tls: 'tcp' is not allowed"),
        (("--runs", "0"), "--runs: 0 is not allowed"),
    ],
)
def test_wrong_options_name_option_value_and_limit(arguments, message):
    with pytest.raises(InvalidRequest) as caught:
        bench(*arguments)
    assert str(caught.value).startswith(message)


def test_tls_always_has_the_loopback():
    assert [kv.ucx_tls(names) for names in ("", "tcp", "self,cma")] == ["", "tcp,self", "self,cma"]
