"""The router's side of a session, against a worker that is driven by hand."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from headrace.config import RpcSettings
from headrace.errors import Code, PeerError, WorkerGone
from headrace.rpc.server import RpcServer
from headrace.rpc.v1 import worker_pb2, worker_pb2_grpc
from headrace.sampling_params import FinishReason
from router.sessions import ChoiceDelta, Sessions

END = worker_pb2.SequenceEnd(cached_tokens=4)
RPC = RpcSettings(keepalive_s=1.0, keepalive_timeout_s=1.0)


class ManualWorker(worker_pb2_grpc.WorkerServicer):
    """Frames put into `frames` go out; messages from the router arrive in `received`."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.frames: asyncio.Queue[worker_pb2.StepFrame | None] = asyncio.Queue()
        self.received: asyncio.Queue[worker_pb2.SessionRequest] = asyncio.Queue()
        self.sessions = 0

    async def Session(self, request, context):
        self.sessions += 1
        reader = asyncio.create_task(self._read(request))
        try:
            yield worker_pb2.StepFrame(incarnation=self.incarnation)
            while (frame := await self.frames.get()) is not None:
                yield frame
        finally:
            reader.cancel()

    async def _read(self, requests):
        async for message in requests:
            self.received.put_nowait(message)

    def step(self, token_ids_by_request):
        """One frame for several requests."""
        deltas = [
            worker_pb2.SequenceDelta(request_id=r, token_ids=t) for r, t in token_ids_by_request.items()
        ]
        self.frames.put_nowait(worker_pb2.StepFrame(incarnation=self.incarnation, deltas=deltas))

    def send(self, request_id, token_ids=(), end=None, **choice):
        delta = worker_pb2.SequenceDelta(request_id=request_id, token_ids=token_ids, end=end, **choice)
        self.frames.put_nowait(worker_pb2.StepFrame(incarnation=self.incarnation, deltas=[delta]))


@asynccontextmanager
async def connected(incarnation="i1", max_unread=4096):
    """A served ManualWorker, the router's sessions, its address and the list of lost workers."""
    worker, server = ManualWorker(incarnation), RpcServer(RPC, [])
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server.grpc_server)
    address = await server.start()
    lost = []
    sessions = Sessions(RPC, lambda worker_id, incarnation: lost.append((worker_id, incarnation)), max_unread)
    try:
        yield worker, sessions, address, lost
    finally:
        await sessions.close()
        worker.frames.put_nowait(None)
        await server.stop(0)


def start(request_id):
    return worker_pb2.StartRequest(request_id=request_id)


async def test_requests_share_one_session_and_each_gets_its_own_tokens():
    async with connected() as (worker, sessions, address, _):
        first, second = await asyncio.gather(*(sessions.get("d0", "i1", address) for _ in range(2)))
        assert first is second
        a, b = first.start(start("a")), first.start(start("b"))
        assert {(await worker.received.get()).start.request_id for _ in range(2)} == {"a", "b"}
        worker.send("b", [7])
        worker.send("a", [1, 2])
        assert (await a.next()).choices[0].token_ids == [1, 2]
        assert (await b.next()).choices[0].token_ids == [7]
        assert worker.sessions == 1


async def test_gr02_a_frame_above_grpcs_own_limit_arrives():
    """4 MiB: many answers with log-probabilities, or one whose router was slow."""
    async with connected(max_unread=1 << 21) as (worker, sessions, address, _):
        stream = (await sessions.get("d0", "i1", address)).start(start("a"))
        worker.send("a", [100_000] * 1_500_000, worker_pb2.SequenceEnd(), finish_reason="length")
        delta = await stream.next()
        assert len(delta.choices[0].token_ids) == 1_500_000
        assert delta.end is not None


async def test_a_slow_consumer_gets_merged_deltas_and_the_end():
    async with connected() as (worker, sessions, address, _):
        stream = (await sessions.get("d0", "i1", address)).start(start("a"))
        other = (await sessions.get("d0", "i1", address)).start(start("b"))
        worker.send("a", [1])
        worker.send("a", [5], choice=2, finish_reason="length")
        worker.send("a", [2], worker_pb2.SequenceEnd(cached_tokens=4), finish_reason="stop")
        worker.send("b", [9])
        await other.next()  # everything before it has arrived
        delta = await stream.next()
        assert delta.choices == {
            0: ChoiceDelta([1, 2], [], FinishReason.STOP),
            2: ChoiceDelta([5], [], FinishReason.LENGTH),
        }
        assert delta.end.cached_tokens == 4


async def test_news_of_many_streams_come_at_the_routers_pace():
    """The first and the last at once; what comes between, merged, as soon as the stream is due."""
    async with connected() as (worker, sessions, address, _):
        session = await sessions.get("d0", "i1", address)
        first, other = session.start(start("a")), session.start(start("b"))
        assert sessions.num_streams == 2
        sessions._pace.num_streams = 5000  # a message each half a second for each
        worker.send("a", [1])
        assert (await first.next()).choices[0].token_ids == [1]
        worker.send("a", [2])
        worker.send("a", [3])
        worker.send("b", [9])
        await other.next()  # everything before it has arrived
        async with asyncio.timeout(10):
            assert (await first.next()).choices[0].token_ids == [2, 3]
        sessions._pace.num_streams = 1_000_000  # a message each 100 s
        worker.send("a", [4], END, finish_reason="stop")
        worker.send("b", [8], END, finish_reason="stop")
        async with asyncio.timeout(10):
            assert (await first.next()).choices[0].token_ids == [4]
            assert (await other.next()).end is not None
        sessions._pace.num_streams = 2
        for stream in (first, other):
            session.forget(stream.request_id)
        assert sessions.num_streams == 0


async def test_a_failed_sequence_gives_its_tokens_and_then_its_error():
    async with connected() as (worker, sessions, address, _):
        stream = (await sessions.get("d0", "i1", address)).start(start("a"))
        worker.send("a", [1], worker_pb2.SequenceEnd(error_code="RESOURCE_EXHAUSTED", error_message="full"))
        assert (await stream.next()).choices[0].token_ids == [1]
        with pytest.raises(PeerError, match="full") as failure:
            await stream.next()
        assert failure.value.code == Code.RESOURCE_EXHAUSTED


async def test_a_session_that_ends_fails_its_requests_and_reports_the_worker():
    async with connected() as (worker, sessions, address, lost):
        session = await sessions.get("d0", "i1", address)
        stream = session.start(start("a"))
        worker.send("a", [1])
        worker.frames.put_nowait(None)
        assert (await stream.next()).choices[0].token_ids == [1]
        with pytest.raises(WorkerGone, match="d0"):
            await stream.next()
        assert lost == [("d0", "i1")]
        with pytest.raises(WorkerGone):
            session.start(start("b"))


async def test_a_worker_that_restarted_is_not_mistaken_for_the_old_one():
    async with connected(incarnation="i2") as (_, sessions, address, lost):
        with pytest.raises(WorkerGone, match="no longer incarnation i1"):
            await sessions.get("d0", "i1", address)
        assert lost == [("d0", "i1")]
        assert (await sessions.get("d0", "i2", address)).incarnation == "i2"


async def test_an_address_where_nobody_listens():
    async with connected() as (_, sessions, _, lost):
        with pytest.raises(WorkerGone, match="no session with d9"):
            await sessions.get("d9", "i1", "127.0.0.1:1")
        assert lost == [("d9", "i1")]


async def test_an_abort_reaches_the_worker():
    async with connected() as (worker, sessions, address, _):
        session = await sessions.get("d0", "i1", address)
        session.start(start("a"))
        session.abort("a")
        session.abort("a", 2)
        assert (await worker.received.get()).WhichOneof("action") == "start"
        whole, one = [(await worker.received.get()).abort for _ in range(2)]
        assert whole.request_id == one.request_id == "a"
        assert not whole.HasField("choice")
        assert one.choice == 2


async def test_what_a_worker_measured_of_its_links_is_handed_on():
    async with connected() as (worker, sessions, address, _):
        told = asyncio.Queue()
        sessions.on_link = lambda worker_id, link: told.put_nowait((worker_id, link))
        await sessions.get("d0", "i1", address)
        link = worker_pb2.Link(worker_id="p0", bytes=1000, seconds=0.5)
        worker.frames.put_nowait(worker_pb2.StepFrame(incarnation="i1", links=[link]))
        async with asyncio.timeout(10):
            assert await told.get() == ("d0", link)
