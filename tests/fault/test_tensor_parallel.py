"""Workers of several ranks among others: hand-offs between every pairing, and ranks that die or hang."""

from __future__ import annotations

import asyncio
import signal
from contextlib import asynccontextmanager

import grpc
import psutil
import pytest

from headrace.engine.sequence import NewToken, Sequence
from headrace.rpc.v1 import inference_pb2_grpc
from headrace.sampling_params import SamplingParams
from router.app import Router
from tests.support.engines import engine_for
from tests.support.fleet import BLOCK_SIZE, session_with
from tests.support.process_fleet import ProcessWorker
from tests.support.processes import request, tokens

PROMPT = [(7 * i + 3) % 250 for i in range(57)]
NUM_OUTPUT = 12
NUM_STREAMED = 300  # so many that an answer is not over when the last one begins
RANK_TIMEOUT_S = 3.0
END_TIMEOUT_S = 40.0  # for a worker that is ended by the loss of a rank, on a machine that is busy


@pytest.fixture(scope="module")
def expected(tiny_model_files):
    """`expected(prompt)`: the greedy tokens of one engine with the whole model."""
    engine = engine_for(tiny_model_files, num_blocks=1000, block_size_tokens=BLOCK_SIZE)

    def tokens(prompt: list[int], num_tokens: int = NUM_OUTPUT) -> list[int]:
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
        engine.submit(Sequence("s", list(prompt), len(prompt), sampling, root=b"root"))
        found: list[int] = []
        while engine.has_work:
            found += [event.token_id for event in engine.step().events if isinstance(event, NewToken)]
        return found

    return tokens


@asynccontextmanager
async def process_workers(settings_with, folder, *, engine=None, **num_ranks: int):
    """Started workers of so many ranks. Names are the role, and perhaps a number behind it."""
    workers: list[ProcessWorker] = []
    for name, size in num_ranks.items():
        settings = settings_with(
            engine={"tensor_parallel_size": size, "rank_timeout_s": RANK_TIMEOUT_S, **(engine or {})},
            kv={"transport": "nixl", "lease_ttl_s": 10.0},
        )
        workers.append(ProcessWorker(settings, name.rstrip("0123456789"), name, folder))
    try:
        await asyncio.gather(*(worker.start() for worker in workers))
        yield workers
    finally:
        await asyncio.gather(*(asyncio.to_thread(worker.stop) for worker in workers))


def ranks_of(worker: ProcessWorker) -> list[psutil.Process]:
    """The processes of its other ranks."""
    assert worker._popen is not None
    children = psutil.Process(worker._popen.pid).children(recursive=True)
    return [child for child in children if "headrace.cluster.rank_process" in child.cmdline()]


async def ended(process: psutil.Process | ProcessWorker) -> None:
    async with asyncio.timeout(END_TIMEOUT_S):
        while process.is_alive if isinstance(process, ProcessWorker) else process.is_running():
            await asyncio.sleep(0.05)


async def test_hand_offs_between_any_numbers_of_ranks(settings_with, tmp_path, expected):
    """The same tokens, all blocks checked by their checksums, every block accounted for. Then ranks end with rank 0:
    drained, and killed.
    """
    names = {"prefill1": 1, "prefill2": 2, "decode1": 1, "decode2": 2}
    async with process_workers(settings_with, tmp_path, **names) as (p1, p2, d1, d2):
        for number, (prefill, decode) in enumerate([(p1, d2), (p2, d1), (p2, d2)]):
            async with session_with(decode) as session:
                # What a worker has cached it would not ask for.
                prompt = PROMPT if number == 0 else [*PROMPT, number]
                answer = await session.answer(
                    prompt, prefill=[prefill], max_tokens=NUM_OUTPUT, salt=str(number), timeout_s=60
                )
            assert (answer.end.prefill_worker, answer.end.failed_attempts) == (prefill.worker_id, 0)
            assert answer.end.blocks_moved == -(-len(prompt) // BLOCK_SIZE)
            assert answer.token_ids == expected(prompt)
        for worker in (p1, p2, d1, d2):
            await worker.assert_idle()
        [rank_of_p2], [rank_of_d2] = ranks_of(p2), ranks_of(d2)
        await asyncio.to_thread(d2.stop)
        assert d2.status_code == 0
        assert not rank_of_d2.is_running()
        p2._popen.kill()
        await ended(rank_of_p2)


@pytest.mark.parametrize(
    ("signum", "said"),
    [
        (signal.SIGKILL, "rank 1 was killed by signal 9"),
        (signal.SIGSTOP, f"rank 1 did not answer within {RANK_TIMEOUT_S:g} s"),
    ],
)
async def test_a_rank_that_is_lost_in_a_step_ends_its_worker(settings_with, tmp_path, signum, said):
    async with (
        process_workers(settings_with, tmp_path, engine={"num_blocks": 1000}, decode=2) as (worker,),
        session_with(worker) as session,
    ):
        # It has begun, and will not end by itself while the test looks.
        answer = await session.start(PROMPT, max_tokens=3900, timeout_s=120)
        async with asyncio.timeout(60):
            await answer.started.wait()
        [rank] = ranks_of(worker)
        rank.send_signal(signum)
        async with asyncio.timeout(END_TIMEOUT_S):
            await answer.ended.wait()
        assert (answer.end.error_code, answer.finish_reasons) == ("UNAVAILABLE", {})
        assert said in answer.end.error_message
        await ended(worker)
        await ended(rank)
        assert worker.status_code == 1
        assert said in worker.log.read_text()


async def test_clients_of_a_router_do_not_notice_a_lost_rank(settings_with, tmp_path, expected):
    """Their answers go on at another worker, with the same tokens."""
    prompts = [[*PROMPT, number] for number in range(6)]
    engine = {"num_blocks": 1000}
    async with process_workers(settings_with, tmp_path, engine=engine, decode1=1, decode2=2) as (d1, d2):
        router = Router(settings_with(engine=engine, kv={"transport": "nixl"}))
        address = await router.start()
        try:
            async with asyncio.timeout(60):
                while not router.ready or not {d1.worker_id, d2.worker_id} <= set(router.view.workers):
                    await asyncio.sleep(0.05)
            [rank] = ranks_of(d2)
            async with grpc.aio.insecure_channel(address) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                calls = [
                    stub.Generate(request(p, max_tokens=NUM_STREAMED, ignore_eos=True), timeout=90)
                    for p in prompts
                ]
                first = [await call.read() for call in calls]
                assert (await d2.status()).running > 0
                rank.kill()
                rest = await asyncio.gather(*(collected(call) for call in calls))
            for prompt, head, tail in zip(prompts, first, rest, strict=True):
                assert tokens([head, *tail]) == expected(prompt, NUM_STREAMED)
            assert router.tally.requests == {"ok": len(prompts)}
        finally:
            await router.stop()
        await ended(d2)
        await d1.assert_idle()


async def collected(call) -> list:
    found = []
    while (message := await call.read()) is not grpc.aio.EOF:
        found.append(message)
    return found


async def test_a_rank_that_dies_while_nothing_runs_ends_its_worker(settings_with, tmp_path):
    async with process_workers(settings_with, tmp_path, decode=2) as (worker,):
        [rank] = ranks_of(worker)
        rank.kill()
        await ended(worker)
        assert worker.status_code == 1
        assert "rank 1 was killed by signal 9" in worker.log.read_text()
