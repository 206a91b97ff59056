"""Greedy tokens are those of Hugging Face transformers on the same weights, whatever the path: the correctness promise.

one engine · chunk sizes · warm and cold cache · alone and in a batch · split over two processes by NIXL
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from headrace.clock import SystemClock
from headrace.cluster.local_cluster import LocalCluster
from headrace.config import EngineSettings, Settings
from headrace.engine.block_pool import BlockPool
from headrace.engine.engine import Engine
from headrace.engine.forward import load_forward
from headrace.engine.kv_cache import KvCache
from headrace.engine.sequence import NewToken, Sequence
from headrace.engine.torch_runner import TorchRunner
from headrace.engine.weights.load import load_model
from headrace.model_config import ModelFiles
from headrace.sampling_params import SamplingParams
from tests.e2e.conftest import NUM_NEW_TOKENS, Reference
from tests.support.audit import assert_idle_pool
from tests.support.processes import ask, assert_idle, tokens

BLOCK_SIZE = 32


def engine_for(files: ModelFiles, dtype: torch.dtype = torch.float32, **engine: Any) -> Engine:
    # One thread: tests share their cores with others, and threads that wait for each other suffer from that.
    settings = EngineSettings(num_blocks=300, block_size_tokens=BLOCK_SIZE, num_threads=1, **engine)
    cache = KvCache.for_model(files.config, settings, dtype)
    runner = TorchRunner(load_forward(load_model(files, dtype), cache, settings), cache)
    return Engine(runner, BlockPool(cache.num_blocks, BLOCK_SIZE), settings, frozenset(), SystemClock())


def answers_of(engine: Engine, prompts: list[list[int]], batch: int) -> list[list[int]]:
    """Answers, with up to `batch` sequences in the engine at once. The pool is clean afterwards."""
    answers: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    waiting, running = list(enumerate(prompts)), 0
    while waiting or running:
        while waiting and running < batch:
            number, prompt = waiting.pop(0)
            sampling = SamplingParams(max_tokens=NUM_NEW_TOKENS, temperature=0.0)
            engine.submit(Sequence(str(number), list(prompt), len(prompt), sampling, root=b"root"))
            running += 1
        for event in engine.step().events:
            if isinstance(event, NewToken):
                answers[event.sequence_id].append(event.token_id)
                running -= event.finish_reason is not None
    assert_idle_pool(engine.audit())
    return list(answers.values())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("max_step_tokens", [16, 64, 512])
def test_chunk_sizes(model_files, reference: Reference, max_step_tokens):
    engine = engine_for(model_files, max_step_tokens=max_step_tokens)
    reference.check(answers_of(engine, reference.prompts, batch=1))


@pytest.mark.timeout(600)
def test_batch_of_eight_cold_and_warm(model_files, reference: Reference):
    engine = engine_for(model_files)
    reference.check(answers_of(engine, reference.prompts, batch=8))
    computed = engine.load().prefill_tokens
    reference.check(answers_of(engine, reference.prompts, batch=8))
    recomputed = engine.load().prefill_tokens - computed
    assert recomputed <= BLOCK_SIZE * len(reference.prompts) + NUM_NEW_TOKENS * len(reference.prompts)


@pytest.mark.timeout(600)
def test_reference_attention(model_files, reference: Reference):
    short = [number for number, prompt in enumerate(reference.prompts) if len(prompt) <= 600]
    part = Reference(
        *([values[n] for n in short] for values in (reference.prompts, reference.answers, reference.gaps))
    )
    part.check(answers_of(engine_for(model_files, backend="reference"), part.prompts, batch=1))


@pytest.mark.timeout(900)
def test_split_over_processes_by_nixl(reference: Reference):
    """Router, prefill and decode worker as real processes under Ray: cold alone, warm alone, and eight at once."""
    settings = Settings.model_validate(
        {
            "model": {"dtype": "float32"},
            "engine": {"num_blocks": 300, "block_size_tokens": BLOCK_SIZE},
            "kv": {"min_remote_tokens": 1, "checksum": True},
        }
    )
    with LocalCluster(settings, num_prefill=1, num_decode=1) as cluster:

        def answer(prompt):
            return ask(
                cluster.router_address, prompt, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, timeout_s=120
            )

        cold = [answer(prompt) for prompt in reference.prompts]
        reference.check([tokens(messages) for messages in cold])
        for prompt, messages in zip(reference.prompts, cold, strict=True):
            hand_off = messages[-1].hand_off
            assert hand_off.prefill_worker == "prefill-0"
            assert hand_off.decode_worker == "decode-0"
            assert hand_off.transport == "nixl"
            assert hand_off.failed_attempts == 0
            assert hand_off.blocks_moved == -(-len(prompt) // BLOCK_SIZE)
        reference.check([tokens(answer(prompt)) for prompt in reference.prompts])
        with ThreadPoolExecutor(8) as threads:
            reference.check([tokens(messages) for messages in threads.map(answer, reference.prompts)])
        assert_idle(*cluster.worker_addresses.values())
