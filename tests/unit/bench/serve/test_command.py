"""`headrace bench serve` and `bench compare` as a person calls them, against a server in another process."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.errors import InvalidRequest

_SERVER = """
import asyncio
from tests.support.fake_llm import FakeLlm, serving

async def script(asked):
    for number in range(asked.max_tokens):
        yield [number]

async def main():
    async with serving(FakeLlm(script, cached_tokens=4)) as addresses:
        print(*addresses, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def addresses():
    """gRPC address and URL."""
    environment = {"PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", _SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            yield server.stdout.readline().split()
        finally:
            server.kill()


@pytest.fixture
def no_matplotlib(monkeypatch):
    monkeypatch.setattr("headrace.cli.bench_serve.find_spec", lambda _: None)


def bench(*arguments, code=0):
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def few(address, *arguments):
    return (
        "serve", "--address", address, "--rate", "200", "--requests", "10",
        "--input-tokens", "12", "--output-tokens", "4", "--warmup", "1", *arguments,
    )  # fmt: skip


def summary_in(folder):
    return json.loads((folder / "summary.json").read_text())


def test_a_run_leaves_summary_lines_and_report(addresses, tmp_path):
    out = tmp_path / "run"
    told = bench(
        *few(addresses[0], "--slo", "ttft:60000", "--gpu-price", "2", "--label", "mine", "--out", out)
    )
    for text in ("10 of 10", "mine, grpc", "Time to first token", "100.0%", "Cost of a million", "could be"):
        assert text in told
    summary = summary_in(out)
    assert summary["completed"] == 10
    assert summary["total_input_tokens"] == 120
    assert summary["total_output_tokens"] == 40
    assert summary["backend"] == "grpc"
    assert summary["cache"]["hit_rate_tokens"] == pytest.approx(4 / 12)
    records = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    assert len(records) == 10
    assert {record["status"] for record in records} == {"ok"}
    assert "<svg" in (out / "report.html").read_text()
    assert (out / "plots" / "latency.png").read_bytes().startswith(b"\x89PNG")
    bench("compare", out, out / "summary.json", "--out", tmp_path / "both.html")
    assert "<svg" in (tmp_path / "both.html").read_text()


@pytest.mark.parametrize(("chat", "backend"), [((), "completions"), (("--chat",), "chat")])
def test_over_http(addresses, tmp_path, no_matplotlib, chat, backend):
    told = bench(*few(addresses[1], *chat, "--out", tmp_path))
    assert f"fake, {backend}" in told
    assert summary_in(tmp_path)["completed"] == 10


def test_every_kind_of_load(addresses, tmp_path, no_matplotlib):
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 600, "output_length": 64, "hash_ids": [1, 2]}
    trace.write_text("".join(json.dumps({**row, "timestamp": 20 * number}) + "\n" for number in range(10)))
    loads = {
        "closed": ("--arrival", "closed", "--concurrency", "3"),
        "gamma": ("--arrival", "gamma", "--burstiness", "0.3", "--max-in-flight", "2"),
        "burst": ("--arrival", "burst", "--burst-size", "5"),
        "talks": ("--turns", "2", "--think", "0.01", "--prefix-tokens", "8", "--prefixes", "2"),
        "rag": ("--documents", "6", "--document-tokens", "5", "--retrieved", "2", "--shuffle-documents"),
        "trace": ("--trace", trace, "--length-scale", "1/16", "--time-scale", "2"),
    }
    for name, options in loads.items():
        bench(*few(addresses[0], *options, "--out", tmp_path / name))
    found = {name: summary_in(tmp_path / name) for name in loads}
    assert {name: one["completed"] for name, one in found.items()} == {
        **dict.fromkeys(loads, 10),
        "talks": 20,
    }
    assert found["closed"]["max_concurrency"] == 3
    assert found["gamma"]["max_concurrency"] == 2
    assert found["trace"]["total_input_tokens"] == 10 * 38
    assert found["trace"]["cache"]["bound_infinite"] == pytest.approx(0.9)
    assert found["rag"]["workload"]["shuffle_documents"] is True
    told = bench("compare", tmp_path / "closed", tmp_path / "gamma" / "summary.json")
    assert "they differ in their schedules" in told
    assert re.search(r"TTFT p50 ms .*× \d", told)


def test_a_sweep_leaves_each_run(addresses, tmp_path):
    told = bench(*few(addresses[0], "--sweep", "50:100", "--slo", "ttft:0.0001", "--out", tmp_path))
    assert "at none of these rates 90% of the answers are good" in told
    sweep = json.loads((tmp_path / "sweep.json").read_text())
    assert sweep["highest_rate"] is None
    assert [run["rate"] for run in sweep["runs"]] == [50.0]
    assert summary_in(tmp_path / "rate-50")["completed"] == 10
    assert "<svg" in (tmp_path / "report.html").read_text()


def test_without_matplotlib_all_but_the_report(addresses, tmp_path, no_matplotlib):
    told = bench(*few(addresses[0], "--out", tmp_path))
    assert "headrace[report]" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["requests.jsonl", "summary.json"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--arrival", "pareto"), "--arrival"),
        (("--rate", "0"), "--rate"),
        (("--input-tokens", "many"), "--input-tokens"),
        (("--input-tokens", "2000000"), "--input-tokens"),
        (("--slo", "speed:1"), "--slo"),
        (("--sweep", "5:1", "--slo", "ttft:1"), "--sweep"),
        (("--arrival", "closed", "--slo", "ttft:1", "--sweep", "1:5"), "closed loop"),
        (("--sweep", "1:5"), "needs --slo"),
        (("--trace", "/nowhere"), "trace"),
        (("--retrieved", "9", "--documents", "3"), "--retrieved"),
    ],
)
def test_what_makes_no_sense_is_refused(addresses, options, named):
    with pytest.raises(InvalidRequest, match=named):
        bench(*few(addresses[0]), *options)


def test_files_that_are_no_results(tmp_path):
    (tmp_path / "summary.json").write_text('{"schema": "other"}')
    with pytest.raises(InvalidRequest, match=r"summary\.json"):
        bench("compare", tmp_path, tmp_path)
    with pytest.raises(InvalidRequest, match="two or more"):
        bench("compare", tmp_path)
