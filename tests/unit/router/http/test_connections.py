"""Clients that leave, that are slow, and that send too much."""

import asyncio
import json
import re
from contextlib import asynccontextmanager

import pytest

from headrace.config import HttpSettings
from headrace.errors import RequestCancelled, Unavailable
from router.http.generate import _run
from router.http.server import HttpServer
from tests.support.web import END, web
from tests.unit.router.test_service import until

BODY = json.dumps({"prompt": "x"}).encode()
LARGE = 8 << 20


def head(length=None, path="/v1/completions", extra=b"") -> bytes:
    size = (
        f"content-length: {length}\r\n".encode() if length is not None else b"transfer-encoding: chunked\r\n"
    )
    return b"POST %s HTTP/1.1\r\nhost: x\r\n%s%s\r\n" % (path.encode(), size, extra)


@asynccontextmanager
async def connection(w, limit=2**16):
    host, port = re.fullmatch(r"http://(.*):(\d+)", w.url).groups()
    reader, writer = await asyncio.open_connection(host, int(port), limit=limit)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def read_all(reader) -> bytes:
    async with asyncio.timeout(15):
        try:
            return await reader.read(-1)
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("with_token", [False, True])
async def test_ab06_a_client_that_leaves_stops_the_work(tiny_model_files, stream, with_token):
    async with web(tiny_model_files) as w:
        body = json.dumps({"prompt": "x", "stream": stream}).encode()
        async with connection(w) as (reader, writer):
            writer.write(head(len(body)) + body)
            asked = await w.asked()
            if with_token:
                w.worker.send(asked.request_id, [65])
                await until(
                    lambda: list(w.front.dispatcher.ledger.active_tokens.values()) == [2]
                )  # and the prompt's
            if with_token and stream:
                assert b"200 OK" in await reader.readline()
        async with asyncio.timeout(10):
            abort = (await w.worker.received.get()).abort
        assert abort.request_id == asked.request_id
        await until(lambda: w.front.door.tally.requests["cancelled"] == 1)
        assert w.front.door.tally.output_tokens["cancelled"] == (1 if with_token else 0)
        assert w.front.dispatcher.admission.num_running == 0
        assert w.front.dispatcher.ledger.active_tokens == {}


@pytest.mark.parametrize("stream", [False, True])
async def test_ab01_a_client_that_leaves_the_queue(tiny_model_files, stream):
    async with web(tiny_model_files, max_inflight_requests=1, max_queued_requests=4) as w:
        running = asyncio.create_task(w.post("/v1/completions", prompt="x"))
        asked = await w.asked()
        body = json.dumps({"prompt": "y", "stream": stream}).encode()
        admission = w.front.dispatcher.admission
        async with connection(w) as (_, writer):
            writer.write(head(len(body)) + body)
            await until(lambda: admission.num_queued == 1)
        await until(lambda: admission.num_queued == 0)
        w.worker.send(asked.request_id, [65], end=END, finish_reason="stop")
        assert (await running).json()["choices"][0]["text"] == "A"
        assert w.worker.received.empty()


async def test_a_client_that_leaves_while_its_body_is_on_the_way(tiny_model_files):
    async with web(tiny_model_files) as w:
        async with connection(w) as (_, writer):
            writer.write(head(100) + BODY)
            await writer.drain()
        assert (await w.http.get("/health")).status_code == 200
        await until(lambda: not w.server._server.server_state.tasks)
        assert w.worker.received.empty()


async def test_a_body_over_the_limit_is_refused_unread(tiny_model_files):
    async with web(tiny_model_files, http={"max_body_bytes": 1000}) as w:
        async with connection(w) as (reader, writer):
            writer.write(head(1 << 40))  # and not a byte of it
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), 15)
            assert b" 413 " in answer
        async with connection(w) as (reader, writer):
            writer.write(head())
            for _ in range(200):
                writer.write(b"a\r\n0123456789\r\n")
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), 15)
            assert b" 413 " in answer
        response = await w.http.post("/v1/completions", content=b"x" * 2000)
        assert response.status_code == 413
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert w.worker.received.empty()


async def test_a_head_that_does_not_come_to_its_end_is_cut_off(tiny_model_files):
    async with web(tiny_model_files, http={"read_timeout_s": 0.3}) as w:
        for start in (b"", b"GET /health HTTP/1.1\r\nx-a: "):
            async with connection(w) as (reader, writer):
                writer.write(start)
                dripping = asyncio.create_task(drip(writer))
                assert await read_all(reader) == b""
                dripping.cancel()


async def drip(writer, data=b"x"):
    while not writer.is_closing():
        writer.write(data)
        await asyncio.sleep(0.02)


async def test_a_body_that_drips_is_answered_408(tiny_model_files):
    async with web(tiny_model_files, http={"read_timeout_s": 0.3}) as w:
        async with connection(w) as (reader, writer):
            writer.write(head(10_000))
            dripping = asyncio.create_task(drip(writer))
            answer = await read_all(reader)
            dripping.cancel()
            assert b" 408 " in answer
            assert b"timeout_error" in answer
        assert w.worker.received.empty()


async def test_one_connection_too_many(tiny_model_files):
    async with (
        web(tiny_model_files, http={"max_connections": 2}) as w,
        connection(w) as (_, one),
        connection(w) as (_, two),
    ):
        connections = w.server._server.server_state.connections
        await until(lambda: len(connections) == 2)
        async with connection(w) as (reader, _):
            answer = await read_all(reader)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "UNAVAILABLE"
        one.close()
        await until(lambda: len(connections) < 2)
        assert (await w.http.get("/health")).status_code == 200
        two.close()


async def test_a_client_that_does_not_read_is_cut_off_and_its_work_stopped(tiny_model_files):
    async with web(tiny_model_files, http={"write_timeout_s": 0.3}, max_unread_tokens=1 << 20) as w:
        body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 200}).encode()
        async with connection(w, limit=1) as (_, writer):
            writer.write(head(len(body)) + body)
            asked = await w.asked()
            sending = asyncio.create_task(flood(w, asked.request_id))
            async with asyncio.timeout(30):
                abort = (await w.worker.received.get()).abort
            sending.cancel()
            assert abort.request_id == asked.request_id
        await until(lambda: w.front.door.tally.requests["cancelled"] == 1)


async def flood(w, request_id):
    while True:
        w.worker.send(request_id, [65] * 20_000)
        await asyncio.sleep(0.01)


async def test_health_answers_while_a_long_prompt_is_tokenized(model_files):
    """By order, not by the clock: probes that are asked one after the other end while the prompt is still worked on."""
    async with web(model_files, max_prompt_bytes=LARGE + 1000) as w:
        text = "All work and no play makes Jack a dull boy. " * (LARGE // 44)
        body = json.dumps({"prompt": text}).encode()
        call = asyncio.create_task(w.http.post("/v1/completions", content=body, timeout=100))
        tasks = w.server._server.server_state.tasks
        await until(lambda: tasks)
        probes = 0
        while not call.done():
            assert (await w.http.get("/health")).status_code == 200
            probes += 1
        assert "the model takes 8192 tokens" in call.result().json()["error"]["message"]
        assert probes >= 10


async def test_the_drain_lets_running_answers_end_and_takes_no_new_ones(tiny_model_files):
    async with web(tiny_model_files) as w:
        call = asyncio.create_task(w.post("/v1/completions", prompt="x", stream=True))
        asked = await w.asked()
        stopping = asyncio.create_task(w.server.stop())
        await until(lambda: not w.server._server.servers[0].is_serving())
        with pytest.raises(ConnectionRefusedError):
            async with connection(w):
                pass
        w.worker.send(asked.request_id, [65], end=END, finish_reason="stop")
        assert (await call).text.endswith("data: [DONE]\n\n")
        async with asyncio.timeout(10):
            await stopping


@pytest.mark.parametrize("stream", [False, True])
async def test_one_prompt_of_a_list_that_fails_ends_the_others(tiny_model_files, stream):
    async with web(tiny_model_files) as w:
        call = asyncio.create_task(w.post("/v1/completions", prompt=["x", "y"], stream=stream))
        one, other = await w.asked(), await w.asked()
        end = type(END)(error_code="INTERNAL", error_message="it broke")
        w.worker.send(one.request_id, end=end)
        response = await call
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "it broke"
        async with asyncio.timeout(10):
            while (message := await w.worker.received.get()).abort.request_id != other.request_id:
                pass
        assert message.HasField("abort")


class Answering:
    """One prompt's generation; `cut_off`: as `AnswerStream.give_up` does it to one that hangs in a write."""

    def __init__(self, *, cut_off):
        self.cut_off = cut_off

    async def updates(self):
        if self.cut_off:
            asyncio.current_task().cancel()
        await asyncio.sleep(0)
        yield "news"


async def test_a_list_of_which_one_answer_was_cut_off_is_not_whole():
    found = []

    async def on_update(number, update):
        found.append((number, update))

    with pytest.raises(RequestCancelled):
        await _run([Answering(cut_off=False), Answering(cut_off=True)], on_update)
    assert found == [(0, "news")]


async def test_a_client_that_leaves_a_list_stops_all_of_it(tiny_model_files):
    async with web(tiny_model_files) as w:
        body = json.dumps({"prompt": ["x", "y", "z"]}).encode()
        async with connection(w) as (_, writer):
            writer.write(head(len(body)) + body)
            asked = {(await w.asked()).request_id for _ in range(3)}
        async with asyncio.timeout(10):
            assert {(await w.worker.received.get()).abort.request_id for _ in range(3)} == asked


async def test_a_port_that_is_taken(tiny_model_files):
    async with web(tiny_model_files) as w:
        port = int(w.url.rpartition(":")[2])
        other = HttpServer(lambda *_: None, HttpSettings(), 1.0)
        with pytest.raises(Unavailable, match=f"127.0.0.1:{port}"):
            await other.start("127.0.0.1", port)


async def test_what_the_drain_cuts_off_is_cancelled_at_its_worker(tiny_model_files):
    async with web(tiny_model_files) as w:
        w.server._server.config.timeout_graceful_shutdown = 0.2
        call = asyncio.create_task(w.post("/v1/completions", prompt="x"))
        asked = await w.asked()
        await w.server.stop()
        async with asyncio.timeout(10):
            assert (await w.worker.received.get()).abort.request_id == asked.request_id
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
