"""`headrace bench router` as a user types it, with few of everything."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from headrace.bench import router as router_bench
from headrace.cli.app import app
from headrace.errors import InvalidRequest

KEYS = {
    *("workers", "indexed_blocks", "prompt_tokens", "decision_us_p50", "decision_us_p99"),
    *("bytes_per_entry", "added_latency_ms_p50", "relayed_tokens_per_s"),
}


@pytest.fixture(autouse=True)
def logging_as_before(monkeypatch):
    """Loggers that were used once keep their output, which here is a file of this test's."""
    monkeypatch.setattr("headrace.telemetry.configure_logging", lambda *_: None)


def bench(*arguments: str):
    return CliRunner().invoke(app, ["bench", "router", "--quick", *arguments], catch_exceptions=False)


def test_rows_for_each_case_and_for_the_path(tmp_path):
    path = tmp_path / "rows.json"
    result = bench("--workers", "2,5", "--blocks", "3000", "--prompt", "640,6400", "--json", str(path))
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert report["machine"]["python"]
    path_rows, rows = report["rows"][:4], report["rows"][4:]
    assert [row["streams"] for row in path_rows] == [1, 16, 64, 256]
    for row in path_rows:
        assert set(row) >= KEYS
        assert row["added_latency_ms_p50"] is not None
        assert row["relayed_tokens_per_s"] > 0
        assert row["router_cpu_us_per_token"] > 0
        assert row["decision_us_p50"] is row["bytes_per_entry"] is None
    assert [(row["workers"], row["prompt_tokens"]) for row in rows] == [
        (2, 640),
        (2, 6400),
        (5, 640),
        (5, 6400),
    ]
    for row in rows:
        assert row["indexed_blocks"] == 3000 + 32
        assert 0 < row["match_us_p50"] <= row["match_us_p99"]
        assert 0 < row["decision_us_p50"] <= row["decision_us_p99"]
        assert row["decisions_per_s"] > 0
        assert row["hash_ms_p50"] > 0
        assert 0 < row["bytes_per_entry"] < 80
        assert row["added_latency_ms_p50"] is row["relayed_tokens_per_s"] is None


def test_what_does_not_fit_into_memory_is_skipped_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(router_bench, "_BYTES_PER_BLOCK", 1 << 50)
    path = tmp_path / "rows.json"
    result = bench("--workers", "2", "--blocks", "1000", "--json", str(path))
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert all(row["streams"] for row in report["rows"])
    assert report["skipped"][0]["indexed_blocks"] == 1000
    assert "of memory are free" in report["skipped"][0]["reason"]


def test_numbers_out_of_range_are_named():
    with pytest.raises(InvalidRequest, match="--workers"):
        bench("--workers", "0")


def test_overhead_of_metrics_traces_and_tls(tmp_path):
    path = tmp_path / "rows.json"
    result = bench("--overhead", "1", "--json", str(path))
    assert result.exit_code == 0, result.output
    rows = {row["extra"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["none", "metrics", "traces", "tls"]
    assert {rows["none"][key] for key in ("tokens_ratio", "cpu_ratio", "latency_ratio")} == {1.0}
    assert all(
        row["relayed_tokens_per_s"] > 0 and row["router_cpu_us_per_token"] > 0 for row in rows.values()
    )
