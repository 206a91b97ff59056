"""What is kept for a client that grants the widest HTTP/2 window and reads nothing. No gRPC client does that, so it
speaks the protocol itself: preface, SETTINGS, WINDOW_UPDATE, one call.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.config import RpcSettings
from tests.unit.router.test_service import front, ids, until

WIDEST = (1 << 31) - 1
SOCKET_BYTES = int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text().split()[2])  # the largest send buffer
BYTES_PER_TOKEN = 5  # two of the id, three of the U+FFFD that is its text
DELTA = [200] * 1000
DATA, HEADERS, SETTINGS, WINDOW_UPDATE = 0, 1, 4, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def opening(address, message):
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
            frame(SETTINGS, 0, 0, struct.pack(">HI", 4, WIDEST)),  # of each stream
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
