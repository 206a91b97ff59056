"""`headrace simulate` as a user types it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.errors import InvalidRequest

ROW = {"trace", "policy", "hit_rate_tokens", "ttft_mean_s", "ttft_p95_s", "ttft_p99_s", "busy_max_over_mean"}
ROOT = Path(__file__).parents[3]
RUN = "import sys; from headrace.cli import main; main(); sys.exit('torch' in sys.modules)"


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "made.jsonl"
    rows = [
        {
            "timestamp": 3000 * (n // 5),
            "input_length": 2000,
            "output_length": 20,
            "hash_ids": [0, n % 7, n, -1],
        }
        for n in range(1, 60)
    ]
    for row in rows:
        row["hash_ids"] = row["hash_ids"][:3]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def simulate(*arguments: object):
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)], catch_exceptions=False)


def test_rows_and_what_they_were_made_of_are_written(trace, tmp_path):
    path = tmp_path / "rows.json"
    options = ("--rate-scale", 3, "--workers", 2, "--blocks-per-worker", 50, "--seed", 4)
    result = simulate("--trace", trace, *options, "--policy", "random,predicted_time", "--json", path)
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert [row["policy"] for row in report["rows"]] == ["random", "predicted_time"]
    for row in report["rows"]:
        assert set(row) > ROW
        assert (row["trace"], row["requests"], row["seed"], row["rate_scale"]) == ("made", 59, 4, 3.0)
        assert row["prompt_tokens"] == 59 * 2000
        assert f"{row['ttft_mean_s']:.3f}" in result.stdout
    assert len(report["trace"]["sha256"]) == 64
    assert report["fleet"]["num_prefill"] == 2


def test_all_means_all(trace, tmp_path):
    path = tmp_path / "rows.json"
    assert simulate("--trace", trace, "--workers", 2, "--policy", "all", "--json", path).exit_code == 0
    names = [row["policy"] for row in json.loads(path.read_text())["rows"]]
    assert len(names) == len(set(names)) > 15
    assert {"predicted_time", "random", "oracle_one_cache"} < set(names)


def test_the_same_seed_writes_the_same_bytes_and_needs_no_torch(trace, tmp_path):
    contents = []
    for hash_seed in ("1", "2"):
        path = tmp_path / f"rows-{hash_seed}.json"
        command = [sys.executable, "-c", RUN, "simulate", "--trace", str(trace), "--workers", "3"]
        command += ["--policy", "predicted_time,bounded_hash,random", "--noise", "0.2", "--json", str(path)]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]


def test_other_seeds_write_other_rows(trace, tmp_path):
    rows = []
    for seed in (1, 2):
        path = tmp_path / f"{seed}.json"
        assert simulate("--trace", trace, "--policy", "random", "--seed", seed, "--json", path).exit_code == 0
        rows.append(json.loads(path.read_text())["rows"][0]["ttft_mean_s"])
    assert rows[0] != rows[1]


def test_bad_files_are_refused_with_line_and_field(trace):
    trace.write_text(trace.read_text() + '{"timestamp": 1, "input_length": 5, "output_length": "x"}\n')
    with pytest.raises(InvalidRequest, match=r"made.jsonl, line 60, output_length: 'x' is not allowed"):
        simulate("--trace", trace)


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--policy", "fastest", "policy: 'fastest'"),
        ("--machine", "abacus", "machine: 'abacus'"),
        ("--max-input", "7", "no prompt of the trace is that short"),
        ("--json", "/nowhere/rows.json", "it can not be written"),
    ],
)
def test_bad_options_are_refused_by_name(trace, option, value, says):
    with pytest.raises(InvalidRequest, match=says):
        simulate("--trace", trace, option, value)
    assert simulate("--trace", trace, "--workers", "0").exit_code == 2


def test_copies_and_sessions(trace, tmp_path):
    path = tmp_path / "rows.json"
    assert simulate("--trace", trace, "--copies", 2, "--json", path).exit_code == 0
    assert json.loads(path.read_text())["rows"][0]["requests"] == 118
