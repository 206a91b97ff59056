"""Greedy tokens are those of Hugging Face transformers on the same weights, whatever the path: the correctness promise.

one engine · chunk sizes · warm and cold cache · alone and in a batch · split over two processes by NIXL
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.cluster.local_cluster import LocalCluster
from headrace.config import Settings
from tests.e2e.conftest import NUM_NEW_TOKENS, Reference, answers_of
from tests.support.engines import BLOCK_SIZE, engine_for
from tests.support.processes import ask, assert_idle, tokens


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("max_step_tokens", "batch"), [(16, 4), (64, 4), (512, 1)])
def test_chunk_sizes(model_files, reference: Reference, max_step_tokens, batch):
    engine = engine_for(model_files, max_step_tokens=max_step_tokens)
    reference.check(answers_of(engine, reference.prompts, batch))


@pytest.mark.timeout(600)
def test_batch_of_eight_cold_and_warm(model_files, reference: Reference):
    engine = engine_for(model_files, num_blocks=600)  # room for all prompts
    reference.check(answers_of(engine, reference.prompts, batch=8))
    computed = engine.load().prefill_tokens
    reference.check(answers_of(engine, reference.prompts, batch=8))
    recomputed = engine.load().prefill_tokens - computed
    assert recomputed <= BLOCK_SIZE * len(reference.prompts) + NUM_NEW_TOKENS * len(reference.prompts)


@pytest.mark.timeout(600)
def test_reference_attention(model_files, reference: Reference):
    part = reference.some(every=5)
    part.check(answers_of(engine_for(model_files, backend="reference"), part.prompts, batch=8))


@pytest.mark.timeout(900)
def test_split_over_processes_by_nixl(reference: Reference):
    """Router, prefill and decode worker as real processes under Ray: cold alone, warm alone, and eight at once."""
    settings = Settings.model_validate(
        {
            "model": {"dtype": "float32", "quantization": "none"},
            "engine": {"num_blocks": 600, "block_size_tokens": BLOCK_SIZE},
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
        part = reference.some(every=4)
        part.check([tokens(answer(prompt)) for prompt in part.prompts])
        with ThreadPoolExecutor(8) as threads:
            reference.check([tokens(messages) for messages in threads.map(answer, reference.prompts)])
        assert_idle(*cluster.worker_addresses.values())
