"""Workers of several ranks among others: hand-offs between every pairing, and ranks that die or hang."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from headrace.clock import VirtualClock
from headrace.config import EngineSettings, ModelSettings
from headrace.engine.block_pool import BlockPool
from headrace.engine.engine import Engine
from headrace.engine.load import load_runner
from headrace.engine.sequence import NewToken, Sequence
from headrace.sampling_params import SamplingParams
from tests.support.fleet import BLOCK_SIZE, NUM_BLOCKS, session_with
from tests.support.process_fleet import ProcessWorker

PROMPT = [(7 * i + 3) % 250 for i in range(57)]
NUM_OUTPUT = 12
PAIRINGS = [(1, 2), (2, 1), (2, 2)]


@pytest.fixture(scope="module")
def expected(tiny_model_files):
    """Greedy tokens of one engine with the whole model."""
    settings = EngineSettings(num_blocks=NUM_BLOCKS, block_size_tokens=BLOCK_SIZE, num_threads=1)
    runner, cache = load_runner(tiny_model_files, ModelSettings(dtype="float32"), settings)
    engine = Engine(
        runner, BlockPool(cache.num_blocks, BLOCK_SIZE), settings, frozenset(), VirtualClock()
    )
    sampling = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0)
    engine.submit(Sequence("s", list(PROMPT), len(PROMPT), sampling, root=b"root"))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [event.token_id for event in engine.step().events if isinstance(event, NewToken)]
    return tokens


@asynccontextmanager
async def process_workers(settings_with, folder, **num_ranks: int):
    """Started, by name: the role, and a number behind it."""
    workers: list[ProcessWorker] = []
    for name, size in num_ranks.items():
        settings = settings_with(
            engine={"tensor_parallel_size": size, "rank_timeout_s": 5.0}, kv={"transport": "nixl"}
        )
        workers.append(ProcessWorker(settings, name.rstrip("0123456789"), name, folder))
    try:
        await asyncio.gather(*(worker.start() for worker in workers))
        yield workers
    finally:
        await asyncio.gather(*(asyncio.to_thread(worker.stop) for worker in workers))


@pytest.mark.parametrize(("prefill", "decode"), PAIRINGS)
async def test_a_hand_off_between_ranks_gives_the_same_tokens(
    settings_with, tmp_path, expected, prefill, decode
):
    async with (
        process_workers(settings_with, tmp_path, prefill=prefill, decode=decode) as (p, d),
        session_with(d) as session,
    ):
        answer = await session.answer(PROMPT, prefill=[p], max_tokens=NUM_OUTPUT)
        assert answer.token_ids == expected
        assert answer.end.prefill_worker == p.worker_id and answer.end.failed_attempts == 0
        await p.assert_idle()
        await d.assert_idle()
