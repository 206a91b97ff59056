"""Wraps a transport and makes it fail the way networks do. For tests, switched while it runs."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.errors import TransferFailed
from kv_transfer.transport import Part, Read, Transport


class Fault(StrEnum):
    """What can happen to one READ."""

    STALL = "stall"  # it never begins
    DELAY = "delay"  # it begins later
    FAIL = "fail"  # it can not be posted
    CORRUPT = "corrupt"  # a byte of a block that arrives is wrong
    DROP = "drop"  # it says that it is done, and no byte arrived
    DUPLICATE = "duplicate"  # its bytes arrive once more after it was over, while the connection lives
    KILL = "kill"  # the link breaks in the middle: half of the blocks arrive


@dataclass(slots=True)
class Chaos:
    """Draws at most one fault for each READ. The same `random` and READs give the same faults."""

    random: random.Random
    probabilities: dict[Fault, float]  # their sum is at most 1
    max_delay_s: float = 0.01

    def draw(self) -> Fault | None:
        point = self.random.random()
        for fault, probability in self.probabilities.items():
            if point < probability:
                return fault
            point -= probability
        return None


@dataclass(slots=True)
class Faults:
    """Set by a test, read by the transport's thread at each call. READs into scratch blocks are spared unless asked."""

    stall: bool = False  # READs do not begin while this is set; their bytes arrive when it ends
    delay_s: float = 0.0  # READs begin only so long after they were asked for
    fail_next: int = 0  # so many READs fail from now on
    corrupt: bool = False  # a byte of each block that arrives is wrong
    drop: bool = False
    duplicate: bool = False
    duplicate_after_s: float = 0.0  # beside what makes it happen
    kill_next: int = 0  # so many READs break their link
    chaos: Chaos | None = None  # beside the above
    include_probes: bool = False
    by_peer: dict[str, Faults] = field(default_factory=dict[str, "Faults"])  # in place of these

    def of(self, peer: str) -> Faults:
        return self.by_peer.get(peer, self)

    def fate(self) -> set[Fault]:
        """What happens to the READ that is being posted, beyond what is switched while it is under way."""
        drawn = self.chaos.draw() if self.chaos is not None else None
        fate = set() if drawn is None else {drawn}
        if self.fail_next > 0:
            self.fail_next -= 1
            fate.add(Fault.FAIL)
        elif self.kill_next > 0:
            self.kill_next -= 1
            fate.add(Fault.KILL)
        return fate


_NONE = Faults()


class FaultyTransport:
    def __init__(self, inner: Transport, faults: Faults) -> None:
        self.name = inner.name
        self.regions = inner.regions
        self._inner = inner
        self._faults = faults
        self._reads: list[_FaultyRead] = []  # not over
        self._again: list[_Arrival] = []  # duplicates to come

    def metadata(self) -> bytes:
        return self._inner.metadata()

    def connect(self, peer: str, parts: Sequence[Part]) -> None:
        self._inner.connect(peer, parts)

    def read(self, peer: str, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> Read:
        faults = self._faults.of(peer)
        if not faults.include_probes and any(i >= self.regions[0].num_blocks for i in local_block_ids):
            faults = _NONE
        fate = faults.fate()
        if Fault.FAIL in fate:
            raise TransferFailed(f"injected: READ from {peer} failed")
        half = len(remote_block_ids) // 2 if Fault.KILL in fate else len(remote_block_ids)

        def post() -> Read:
            return self._inner.read(peer, remote_block_ids[:half], local_block_ids[:half])

        read = _FaultyRead(self, peer, post, faults, fate, [self._address(i) for i in local_block_ids])
        read.begin_unless_held_up()
        self._reads = [other for other in self._reads if not other.over] + [read]
        return read

    def progress(self) -> None:
        self._inner.progress()
        now = time.monotonic()
        for arrival in self._again:
            if arrival.due_at <= now:
                arrival.happen()
        self._again = [arrival for arrival in self._again if arrival.due_at > now]

    def disconnect(self, peer: str) -> None:
        self._inner.disconnect(peer)
        self._again = [arrival for arrival in self._again if arrival.peer != peer]
        for read in self._reads:
            if read.peer == peer:
                read.give_up(f"peer {peer} was disconnected")

    def close(self) -> None:
        self._inner.close()
        self._again.clear()
        for read in self._reads:
            read.give_up("the transport is closed")

    def arrive_again(self, peer: str, addresses: list[int]) -> None:
        nbytes = self.regions[0].block_bytes
        due_at = time.monotonic() + self._faults.of(peer).duplicate_after_s
        self._again += [
            _Arrival(peer, due_at, address, ctypes.string_at(address, nbytes)) for address in addresses
        ]

    def _address(self, block_id: int) -> int:
        return self.regions[0].address + block_id * self.regions[0].block_bytes


@dataclass(frozen=True, slots=True)
class _Arrival:
    """Bytes of a block that come a second time."""

    peer: str
    due_at: float
    address: int
    content: bytes

    def happen(self) -> None:
        ctypes.memmove(self.address, self.content, len(self.content))


class _FaultyRead:
    """Posted only once nothing holds it up, so that its bytes really come late."""

    def __init__(
        self,
        transport: FaultyTransport,
        peer: str,
        post: Callable[[], Read],
        faults: Faults,
        fate: set[Fault],
        addresses: list[int],
    ) -> None:
        self.peer = peer
        self.over = False
        self._transport = transport
        self._post = post
        self._faults = faults
        self._fate = fate
        self._addresses = addresses
        self._drops = faults.drop or Fault.DROP in fate
        chaos = faults.chaos
        self._delay_s = chaos.random.uniform(0.0, chaos.max_delay_s) if chaos and Fault.DELAY in fate else 0.0
        self._asked_at = time.monotonic()
        self._inner: Read | None = None
        self._given_up: str | None = None

    def begin_unless_held_up(self) -> None:
        if self._inner is None and not self._is_held_up() and not self._drops:
            self._inner = self._post()

    def poll(self) -> bool:
        if self.over:
            return True
        if self._given_up is not None and (self._inner is None or Fault.KILL in self._fate):
            raise TransferFailed(self._given_up)
        self.begin_unless_held_up()
        if self._is_held_up() or not (self._drops or (self._inner is not None and self._inner.poll())):
            return False
        if Fault.KILL in self._fate:
            self._transport.disconnect(self.peer)
            raise TransferFailed(f"injected: the link to {self.peer} broke")
        self.over = True
        if not self._drops:
            self._spoil()
        return True

    def give_up(self, reason: str) -> None:
        self._given_up = reason

    def release(self) -> None:
        self.over = True
        if self._inner is not None:
            self._inner.release()

    def _is_held_up(self) -> bool:
        if self._faults.stall or Fault.STALL in self._fate:
            return True
        delay_s = max(self._faults.delay_s, self._delay_s)
        return self._inner is None and time.monotonic() - self._asked_at < delay_s

    def _spoil(self) -> None:
        if self._faults.duplicate or Fault.DUPLICATE in self._fate:
            self._transport.arrive_again(self.peer, self._addresses)
        spoiled = self._addresses if self._faults.corrupt else []
        chaos = self._faults.chaos
        if chaos is not None and Fault.CORRUPT in self._fate:
            offset = chaos.random.randrange(self._transport.regions[0].block_bytes)
            spoiled = [chaos.random.choice(self._addresses) + offset]
        for address in spoiled:
            ctypes.c_uint8.from_address(address).value ^= 0xFF
