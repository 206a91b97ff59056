"""`headrace restart` under load: every worker gets a new life, and no client notices."""

from __future__ import annotations

import subprocess
import time

import pytest

from tests.support.load import load_on
from tests.support.processes import HEADRACE, eventually
from tests.support.ray_machines import ENVIRONMENT, Launcher
from tests.support.tiny_llama import write_tiny_llama

LEAST_REQUESTS = 100


def restarts_without_a_loss(folder, num_prefill: int, num_decode: int) -> None:
    model = write_tiny_llama(folder / "model")
    settings = [f"model.cache_dir={folder}", "engine.num_threads=1", "engine.num_blocks=256"]
    options = [part for setting in settings for part in ("--set", setting)]
    more = ["--model", str(model), "--set", "model.dtype=float32", "--set", "engine.block_size_tokens=16"]
    sizes = ["--prefill", str(num_prefill), "--decode", str(num_decode)]
    with Launcher(folder, *options, *more, *sizes) as up:
        with load_on(up.wait_until_serving()) as load:
            before, started_at = load.num_right, time.monotonic()
            restart = subprocess.run(
                [str(HEADRACE), "restart", *options],
                env=ENVIRONMENT,
                capture_output=True,
                text=True,
                timeout=200,
            )
            took_s = time.monotonic() - started_at
            during = load.num_right - before
            eventually(
                lambda: load.num_right >= LEAST_REQUESTS or load.errors or load.wrong, "enough requests"
            )
            assert restart.returncode == 0, restart.stderr
            shown = restart.stderr.splitlines()
            print(
                f"\n{num_prefill} + {num_decode} workers restarted in {took_s:.1f} s, {during} answers meanwhile;"
            )
            print(load.figures(), *shown, sep="\n")
            assert len([line for line in shown if "serves anew" in line]) == num_prefill + num_decode
            load.assert_nothing_lost(LEAST_REQUESTS)
            assert during > 0
        assert up.end() == 0


@pytest.mark.timeout(400)
def test_a_rolling_restart_loses_nothing_even_with_one_decode_worker(tmp_path):
    restarts_without_a_loss(tmp_path, 1, 1)


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_rolling_restart_of_two_and_two(tmp_path):
    restarts_without_a_loss(tmp_path, 2, 2)
