"""Messages between rank 0 and one other rank, over a socket: each with its length before it.

rank 0 ── what to do (`messages.py`) ──▶ rank n
       ◀── Reply: done, or what failed ──
"""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import dataclass

_LENGTH = struct.Struct("<I")
_RECEIVE_BYTES = 1 << 20


class LinkClosed(Exception):
    """The other side is gone."""


class Link:
    """Used by one thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.num_sent = 0  # messages …
        self.sent_bytes = 0  # … and their bytes

    def send(self, message: bytes, timeout_s: float | None = None) -> None:
        """Raises LinkClosed, or TimeoutError; the link is of no use after either."""
        self._connection.settimeout(timeout_s)
        try:
            self._connection.sendall(_LENGTH.pack(len(message)) + message)
        except TimeoutError:
            raise
        except OSError as error:
            raise LinkClosed(str(error)) from None
        self.num_sent += 1
        self.sent_bytes += _LENGTH.size + len(message)

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next message. Raises as `send`."""
        self._connection.settimeout(timeout_s)
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return self._exactly(length)

    def close(self) -> None:
        self._connection.close()

    def _exactly(self, length: int) -> bytes:
        received = bytearray()
        while len(received) < length:
            try:
                some = self._connection.recv(min(length - len(received), _RECEIVE_BYTES))
            except TimeoutError:
                raise
            except OSError as error:
                raise LinkClosed(str(error)) from None
            if not some:
                raise LinkClosed("the other side is gone")
            received += some
        return bytes(received)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank gives up. `is_own`: it was not another rank that failed it."""

    text: str
    is_own: bool


def pack_reply(reply: bytes | Failure = b"") -> bytes:
    if isinstance(reply, Failure):
        return b"F" + json.dumps([reply.text, reply.is_own]).encode()
    return b"D" + reply


def unpack_reply(message: bytes) -> bytes | Failure:
    if message[:1] == b"F":
        return Failure(*json.loads(message[1:]))
    return message[1:]
