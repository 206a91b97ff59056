"""Workers of several ranks among others: hand-offs between every pairing, and ranks that die or hang."""

from __future__ import annotations

import asyncio
import signal
from contextlib import asynccontextmanager

import psutil
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
    engine = Engine(runner, BlockPool(cache.num_blocks, BLOCK_SIZE), settings, frozenset(), VirtualClock())
    sampling = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0)
    engine.submit(Sequence("s", list(PROMPT), len(PROMPT), sampling, root=b"root"))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [event.token_id for event in engine.step().events if isinstance(event, NewToken)]
    return tokens


@asynccontextmanager
async def process_workers(settings_with, folder, *, engine=None, **num_ranks: int):
    """Started, by name: the role, and a number behind it."""
    workers: list[ProcessWorker] = []
    for name, size in num_ranks.items():
        settings = settings_with(
            engine={"tensor_parallel_size": size, "rank_timeout_s": 3.0, **(engine or {})},
            kv={"transport": "nixl"},
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


def ranks_of(worker: ProcessWorker) -> list[psutil.Process]:
    """The processes of its other ranks."""
    assert worker._popen is not None
    children = psutil.Process(worker._popen.pid).children(recursive=True)
    return [child for child in children if "headrace.cluster.rank_process" in child.cmdline()]


async def ended(process: psutil.Process | ProcessWorker, timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while process.is_alive if isinstance(process, ProcessWorker) else process.is_running():
            await asyncio.sleep(0.05)


@asynccontextmanager
async def busy_worker(settings_with, folder, num_ranks: int = 2):
    """A worker, its other ranks, and an answer that has begun and will not end by itself during the test."""
    async with (
        process_workers(settings_with, folder, engine={"num_blocks": 1000}, decode=num_ranks) as (worker,),
        session_with(worker) as session,
    ):
        answer = await session.start(PROMPT, max_tokens=3900, timeout_s=120)
        async with asyncio.timeout(60):
            await answer.started.wait()
        yield worker, ranks_of(worker), answer


@pytest.mark.parametrize(
    ("signum", "said"),
    [
        (signal.SIGKILL, "rank 1 was killed by signal 9"),
        (signal.SIGSTOP, "rank 1 did not answer within 3 s"),
    ],
)
async def test_a_rank_that_is_lost_in_a_step_ends_its_worker(settings_with, tmp_path, signum, said):
    async with busy_worker(settings_with, tmp_path) as (worker, [rank], answer):
        rank.send_signal(signum)
        async with asyncio.timeout(30):
            await answer.ended.wait()
        assert (answer.end.error_code, answer.finish_reasons) == ("UNAVAILABLE", {})
        assert said in answer.end.error_message
        await ended(worker)
        await ended(rank)
        assert worker.status_code == 1
        assert said in worker.log.read_text()


async def test_of_several_ranks_the_one_that_hangs_is_named(settings_with, tmp_path):
    async with busy_worker(settings_with, tmp_path, num_ranks=4) as (worker, ranks, answer):
        assert len(ranks) == 3
        ranks[1].suspend()
        async with asyncio.timeout(30):
            await answer.ended.wait()
        assert "rank 2 did not answer within 3 s" in answer.end.error_message
        await asyncio.gather(*(ended(process) for process in (worker, *ranks)))


async def test_a_rank_that_dies_while_nothing_runs_ends_its_worker(settings_with, tmp_path):
    async with process_workers(settings_with, tmp_path, decode=2) as (worker,):
        [rank] = ranks_of(worker)
        rank.kill()
        await ended(worker)
        assert worker.status_code == 1
        assert "rank 1 was killed by signal 9" in worker.log.read_text()


async def test_ranks_end_with_rank_0(settings_with, tmp_path):
    async with busy_worker(settings_with, tmp_path) as (worker, [rank], _):
        worker._popen.kill()
        await ended(rank)


async def test_a_drained_worker_leaves_no_rank(settings_with, tmp_path):
    async with process_workers(settings_with, tmp_path, decode=2) as (worker,):
        [rank] = ranks_of(worker)
        await asyncio.to_thread(worker.stop)
        await ended(rank, 1.0)
        assert worker.status_code == 0
