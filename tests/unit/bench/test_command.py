"""`headrace bench engine` as a user types it, on the tiny Llama."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from headrace.bench import engine as bench_engine
from headrace.bench.engine import Row
from headrace.cli.app import app
from headrace.errors import InvalidRequest

QUICK = ("--backend", "torch", "--dtype", "float32", "--threads", "1", "--runs", "1")
SMALL = ("--prompt", "20", "--batch", "1,2", "--context", "30")


@pytest.fixture
def bench(tiny_model_files):
    """Runs the command; raises what it raises."""

    def run(*arguments: str):
        threads = torch.get_num_threads()
        command = ["bench", "engine", "--model", str(tiny_model_files.path), *arguments]
        try:
            return CliRunner().invoke(app, command, catch_exceptions=False)
        finally:
            torch.set_num_threads(threads)

    return run


def test_rows_and_machine_are_written(bench, tmp_path, tiny_model_files):
    path = tmp_path / "rows.json"
    result = bench(*QUICK, *SMALL, "--json", str(path))
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert report["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert report["machine"]["memory_bytes"] > 0
    assert report["model"]["fingerprint"] == tiny_model_files.fingerprint
    assert report["skipped"] == []
    cases = [(row["phase"], row["batch"], row["context"]) for row in report["rows"]]
    assert cases == [("prefill", 1, 20), ("decode", 1, 30), ("decode", 2, 30)]
    for row in report["rows"]:
        assert set(row) == set(Row.__dataclass_fields__)
        assert row["floor_tokens_per_s"] > 0
        assert f"{row['tokens_per_s']:,.1f}" in result.stdout
    assert list(tmp_path.iterdir()) == [path]


def test_skipped_cases_are_named_with_their_reason(bench, tmp_path):
    path = tmp_path / "rows.json"
    result = bench(*QUICK, "--prompt", "20,5000", "--batch", "0", "--json", str(path))
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert [row["context"] for row in report["rows"]] == [20]
    [skipped] = report["skipped"]
    assert (skipped["phase"], skipped["context"], skipped["backend"]) == ("prefill", 5000, "torch")
    assert skipped["reason"] == "it takes 5,001 tokens, the model's limit is 4,096"
    assert f"prefill 5,000: {skipped['reason']}" in result.stderr


def test_ctrl_c_leaves_the_rows_so_far(bench, tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    begin = bench_engine.Subject.begin

    def interrupted(self, case, num_runs):
        if case.batch == 2:
            raise KeyboardInterrupt
        begin(self, case, num_runs)

    monkeypatch.setattr(bench_engine.Subject, "begin", interrupted)
    result = bench(*QUICK, *SMALL, "--json", str(path))
    assert result.exit_code == 130
    assert len(json.loads(path.read_text())["rows"]) == 2
    assert "decode" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch", "1,x"), "--batch: 'x' is not allowed; it must be a whole number from 0 to 4096"),
        (("--batch", ""), "--batch: '' is not allowed"),
        (("--batch", "4097"), "--batch: 4097 is not allowed; it must be from 0 to 4096"),
        (("--context", "0"), "--context: 0 is not allowed; it must be from 1 to"),
        (("--prompt", "-1"), "--prompt: -1 is not allowed; it must be from 0 to"),
        (("--prompt", "0", "--batch", "0"), "--prompt and --batch: 0 is not allowed"),
        (("--threads", "100000"), "--threads: 100000 is not allowed; it must be from 1 to"),
        (("--threads", "0"), "--threads: 0 is not allowed; it must be from 1 to"),
        (("--runs", "0"), "--runs: 0 is not allowed; it must be from 1 to 1000"),
        (("--backend", "gpu"), "--backend: 'gpu' is not allowed; it must be of cpu, torch"),
        (
            ("--dtype", "float8"),
            "--dtype: 'float8' is not allowed; it must be of float32, bfloat16, int8, int4",
        ),
        (
            ("--dtype", "int8"),
            "--dtype: 'int8' is not allowed; backend torch computes with float32 and bfloat16",
        ),
    ],
)
def test_wrong_options_name_option_value_and_limit(bench, arguments, message):
    with pytest.raises(InvalidRequest) as caught:
        bench(*QUICK, *arguments)
    assert str(caught.value).startswith(message)


def test_a_file_that_can_not_be_written_is_told_before_measuring(bench, tmp_path: Path):
    path = tmp_path / "missing" / "rows.json"
    with pytest.raises(InvalidRequest, match=r"--json: .*is not allowed; it can not be written: No such"):
        bench(*QUICK, *SMALL, "--json", str(path))


def test_without_kernels_torch_is_measured_and_cpu_refused(bench, tmp_path, monkeypatch):
    from headrace.engine.native import library

    path = tmp_path / "rows.json"
    monkeypatch.setattr(library, "load", lambda: None)
    arguments = ("--threads", "1", "--runs", "1", "--prompt", "8", "--batch", "0", "--dtype", "float32,int8")
    assert bench(*arguments, "--json", str(path)).exit_code == 0
    assert [(row["backend"], row["dtype"]) for row in json.loads(path.read_text())["rows"]] == [
        ("torch", "float32")
    ]
    with pytest.raises(InvalidRequest, match="--backend: 'cpu' is not allowed; it needs the native kernels"):
        bench(*arguments, "--backend", "cpu")
