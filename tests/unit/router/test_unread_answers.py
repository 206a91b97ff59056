"""What is kept for a client that grants the widest HTTP/2 window and reads nothing. No gRPC client does that, so it
speaks the protocol itself: preface, SETTINGS, WINDOW_UPDATE, one call.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from headrace.config import RpcSettings
from tests.unit.router.test_service import front, ids, until

WIDEST = (1 << 31) - 1
SOCKET_BYTES = int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text().split()[2])  # the largest send buffer
BYTES_PER_TOKEN = 5  # two of the id, three of the U+FFFD that is its text
DELTA = [200] * 1000
DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def opening(address, message, window=WIDEST):
    """The frames of a client that calls Generate. Header fields are literals that enter no table."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/headrace.v1.Inference/Generate",
        ":authority": address,
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(
        b"\0" + b"".join(bytes((len(text),)) + text.encode() for text in field) for field in fields.items()
    )
    data = message.SerializeToString()
    return b"".join(
        (
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            frame(SETTINGS, 0, 0, struct.pack(">HI", 4, window)),  # of each stream
            frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", WIDEST - 65535)),  # of the connection
            frame(HEADERS, END_HEADERS, 1, block),
            frame(DATA, END_STREAM, 1, b"\0" + struct.pack(">I", len(data)) + data),
        )
    )


@contextmanager
def call_without_reading(address):
    host, port = address.rsplit(":", 1)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(opening(address, ids(1, 2)))
        yield client


@contextmanager
def narrow_call(address):
    """One that grants 64 KiB, once."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as client:
        client.sendall(opening(address, ids(1, 2), window=65535))
        yield client


async def test_gr01_the_widest_window_lets_no_more_than_the_sockets_buffer_be_kept(
    tiny_model_files, monkeypatch
):
    """With a keepalive that does not end the connection meanwhile."""
    patient = RpcSettings(keepalive_s=60.0, keepalive_timeout_s=60.0)
    monkeypatch.setattr("tests.unit.router.test_service.RPC", patient)
    async with front(tiny_model_files, max_unread_tokens=10_000) as f:
        with call_without_reading(f.address) as client:
            asked = (await f.worker.received.get()).start
            client.sendall(frame(SETTINGS, ACK, 0))
            num_sent = 0
            while f.worker.received.empty():
                f.worker.send(asked.request_id, DELTA)
                num_sent += len(DELTA)
                assert num_sent * BYTES_PER_TOKEN < 2 * SOCKET_BYTES
                await asyncio.sleep(0.001)  # room for the transport
            assert (await f.worker.received.get()).abort.request_id == asked.request_id
            assert num_sent > 10_000
        await until(lambda: f.dispatcher.admission.num_running == 0)
        assert f.dispatcher.ledger.accounts == {}


class Pings:
    """Answers every ping of a connection, reads all it is sent, and opens no window any further."""

    def __init__(self, client: socket.socket) -> None:
        self._client = client
        self.num_answered = 0

    def run(self) -> None:
        stream = self._client.makefile("rb")
        with suppress(ConnectionError):
            while head := stream.read(9):
                payload = stream.read(int.from_bytes(head[:3], "big"))
                kind, flags = head[3], head[4]
                if kind == PING and not flags & ACK:
                    self.num_answered += 1
                    self._client.sendall(frame(PING, ACK, 0, payload))


@pytest.mark.parametrize("ended_by", ["max_unread_tokens", "deadline"])
async def test_gr01_a_client_that_answers_pings_and_reads_nothing_is_cut_off(
    tiny_model_files, monkeypatch, ended_by
):
    """HTTP/2's window of 64 KiB is all that it takes. Its connection is there to the end."""
    lively = RpcSettings(keepalive_s=0.1, keepalive_timeout_s=30.0)
    monkeypatch.setattr("tests.unit.router.test_service.RPC", lively)
    monkeypatch.setattr("router.sessions.READING_GRACE_S", 0.2)
    limit = {"max_unread_tokens": 10_000 if ended_by == "max_unread_tokens" else 10**9}
    timeout_s = 60.0 if ended_by == "max_unread_tokens" else 2.0
    async with front(tiny_model_files, default_timeout_s=timeout_s, **limit) as f:
        with narrow_call(f.address) as client:
            asked = (await f.worker.received.get()).start
            client.sendall(frame(SETTINGS, ACK, 0))
            pings = Pings(client)
            answering = asyncio.create_task(asyncio.to_thread(pings.run))
            while f.worker.received.empty():
                f.worker.send(asked.request_id, DELTA)
                await asyncio.sleep(0.001)
            assert (await f.worker.received.get()).abort.request_id == asked.request_id
            await until(lambda: f.dispatcher.admission.num_running == 0)
            assert f.dispatcher.ledger.accounts == {}
            assert not answering.done()
            await until(lambda: pings.num_answered > 0)
            client.shutdown(socket.SHUT_RDWR)
            await answering


@pytest.mark.parametrize("num_deltas", [1, 1000])
async def test_gr01_the_keepalive_ends_a_client_that_does_not_read(tiny_model_files, num_deltas):
    """Whether or not the answer has filled the way to it: it answers no ping."""
    async with front(tiny_model_files) as f:
        with call_without_reading(f.address) as client:
            asked = (await f.worker.received.get()).start
            client.sendall(frame(SETTINGS, ACK, 0))
            for _ in range(num_deltas):
                f.worker.send(asked.request_id, DELTA)
            assert (await f.worker.received.get()).abort.request_id == asked.request_id
            await until(lambda: f.dispatcher.admission.num_running == 0)
            assert f.dispatcher.ledger.accounts == {}
            assert sum(f.door.tally.requests.values()) == 1
