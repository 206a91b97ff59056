"""The commands as a user types them, on the default model."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cluster.running import find_running
from headrace.config import DEFAULT_CACHE_DIR
from tests.support.processes import HEADRACE, eventually, free_port


def headrace(*arguments: str, stdin: str = "", timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(HEADRACE), *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.fixture(scope="module")
def cluster(model_files, tmp_path_factory):
    """`headrace up` on a free port, under a name of its own."""
    name = ("--set", f"directory.cluster=test-{free_port()}")
    log = tmp_path_factory.mktemp("up") / "up.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(HEADRACE), "up", "--port", "0", "--http-port", "0", *name],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        eventually(lambda: "headrace chat" in log.read_text() or process.poll() is not None, f"up: {log}")
        assert process.poll() is None, log.read_text()
        yield name
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(240)
def test_generate_chat_and_status_find_the_running_cluster(cluster):
    answer = headrace("generate", "What is the capital of France?", "--max-tokens", "20", *cluster)
    assert answer.returncode == 0, answer.stderr
    assert "Paris" in answer.stdout

    raw = headrace("generate", "The capital of France is", "--raw", "--max-tokens", "8", *cluster)
    assert "Paris" in raw.stdout

    chat = headrace(
        "chat", "--max-tokens", "20", *cluster, stdin="What is the capital of France?\nAnd of Italy?\n\n"
    )
    assert chat.returncode == 0, chat.stderr
    assert "Paris" in chat.stdout
    assert "cached" in chat.stderr

    status = headrace("status", *cluster)
    assert status.returncode == 0, status.stderr
    for word in ("prefill-0", "decode-0", "serving", "/v1"):
        assert word in status.stdout

    again = headrace("up", "--port", "0", *cluster)
    assert again.returncode == 2
    assert "runs already" in again.stderr

    bad = headrace("generate", "x", "--max-tokens", "100000", *cluster)
    assert bad.returncode == 2
    assert "max_tokens" in bad.stderr
    assert "8192" in bad.stderr


@pytest.mark.timeout(120)
def test_the_client_of_the_readme_works(cluster):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (program,) = re.findall(r"```python\n(import grpc.*?)```", readme, re.DOTALL)
    name = cluster[1].removeprefix("directory.cluster=")
    running = find_running(DEFAULT_CACHE_DIR, name)
    assert running is not None
    program = program.replace("127.0.0.1:8470", running.router)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    assert "INVALID_ARGUMENT: temperature: -1.0 is not allowed" in result.stdout
    assert "reason INVALID_REQUEST, field temperature" in result.stdout


def test_the_curl_commands_of_the_readme_work(cluster):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    blocks = re.findall(r"```sh\n(curl .*?)```", readme, re.DOTALL)
    running = find_running(DEFAULT_CACHE_DIR, cluster[1].removeprefix("directory.cluster="))
    assert running is not None
    outputs = []
    for block in blocks:
        script = "set -e\n" + block.replace("http://127.0.0.1:8000", running.http)
        result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 0, (block, result.stderr)
        outputs.append(result.stdout)
    answer, stream, structured, others = outputs
    assert "Paris" in json.loads(answer)["choices"][0]["message"]["content"]
    assert json.loads(answer)["usage"]["completion_tokens"] > 0
    *chunks, usage, done = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    assert "Paris" in "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)
    assert json.loads(usage)["id"] == "cmpl-mine"
    assert json.loads(usage)["usage"]["completion_tokens"] == 8
    assert done == "[DONE]"
    assert "country" in json.loads(json.loads(structured)["choices"][0]["message"]["content"])
    assert json.loads(others[: others.index("}") + 1])["count"] > 3
    assert "smollm2-135m-instruct" in others


@pytest.mark.timeout(240)
def test_demo_streams_and_shows_what_moved(model_files):
    result = headrace("demo", timeout_s=200)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) > 100
    for words in ("time to first token", "inter-token p50 / p95", "prefill-0 → decode-0", "nixl", "MB/s"):
        assert words in result.stderr


def test_models_are_listed_and_shown(model_files):
    assert "smollm2-135m-instruct" in headrace("model", "list").stdout
    shown = headrace("model", "show", "smollm2-135m-instruct").stdout
    assert "num_layers" in shown
    assert headrace("model", "pull", "smollm2-135m-instruct").stdout.strip().endswith(".gguf")
    missing = headrace("model", "show", "/nowhere")
    assert missing.returncode == 1
    assert "/nowhere" in missing.stderr


def test_nobody_is_there():
    result = headrace("generate", "x", "--address", "127.0.0.1:1")
    assert result.returncode == 1
    assert "headrace up" in result.stderr


def test_help_and_version():
    assert "prefill" in headrace("--help").stdout
    assert headrace("--version").stdout.strip() == "0.1.0"
    wrong = headrace("generate", "x", "--set", "router.polcy=x")
    assert wrong.returncode == 2
    assert "router.polcy" in wrong.stderr
