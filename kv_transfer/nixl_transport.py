"""The transport over NIXL with UCX underneath: NVLink, RDMA, shared memory (CMA) or TCP, whatever both ends have.

One worker has several NIXL agents around its regions:

    serving agent     peers read through it; its metadata is what they get
    one per link      our READs from one peer; made at the first READ, destroyed when one fails or at a disconnect

because, as measured with 1.5.1 (`tests/fault/test_nixl_peer_loss.py` watches over the last four):
- The progress thread spins; without it both ends have to call in regularly, or nothing moves.
- `transfer` copies inside the call when UCX takes CMA; with TCP, polling does the work.
- A peer that dies makes `transfer` or the state check raise; that is an exception, not a state.
- A READ has no deadline. Neither releasing its handle nor removing the remote agent cancels it: a peer that wakes up
  later still overwrites our blocks. Only an agent that is gone writes nothing.
- UCX ends a process that destroys an agent right after one of its READs failed, with CMA: an agent is driven on for a
  moment before.
- Over TCP, a process that is asked for bytes by somebody who is gone by then is ended by UCX ("Fatal: unexpected
  error: Endpoint timeout"). An own agent per link confines it to the peer given up on; an agent that was not looked
  after for a while, which is when requests pile up, is thrown away unread. What is left is a reader that vanishes
  within the few ms between two looks.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import structlog

from headrace.errors import TransferFailed
from kv_transfer.metadata import Metadata, RemotePart, understood
from kv_transfer.transport import BlockRegion, Part, Read, check_ids, num_local_blocks

log = structlog.get_logger()

# One was enough in every measurement, for 32 READs in the queue and for 1,024.
_NUM_LAST_LOOKS = 8
_MAX_STALL_S = (
    4.0  # readers that are alive wait for longer: `kv.connect_timeout_s` in a handshake, else for a lease
)


def ucx_environment() -> dict[str, str]:
    """What UCX and NIXL read from the environment once, when loaded; for composition roots to set where unset."""
    return {
        "UCX_CMA_SEG_SIZE": "4m",  # of one copy by the kernel; by default a block of 4 MiB takes eight
        "UCX_TCP_USER_TIMEOUT": "2s",  # else a partitioned network never becomes an error
        "UCX_TCP_KEEPIDLE": "1s",  # the same for a reader that waits and has sent nothing
        "UCX_TCP_KEEPINTVL": "1s",
        "UCX_LOG_LEVEL": "fatal",  # a lost peer is an error of ours, which we report ourselves
        "NIXL_LOG_LEVEL": "FATAL",
    }


class NixlTransport:
    name = "nixl"

    def __init__(self, incarnation: str, regions: Sequence[BlockRegion]) -> None:
        self.regions = regions
        self._incarnation = incarnation
        self._serving = _Agent(incarnation, regions)
        self._looked_at = time.monotonic()
        self._links: dict[str, _Link] = {}

    def metadata(self) -> bytes:
        self._serve_anew_after_a_stall()
        own = self._serving.call("get_agent_metadata")
        return Metadata(self.name, self._incarnation, tuple(self.regions), own).pack()

    def connect(self, peer: str, parts: Sequence[Part]) -> None:
        """Sends nothing: a worker that only serves opens no connection back."""
        known = self._links.get(peer)
        if known is not None and known.parts == list(parts):
            return  # a handshake in the other direction; READs under way go on
        link = _Link(self._incarnation, self.regions[0], peer, parts)
        self.disconnect(peer)
        self._links[peer] = link

    def read(self, peer: str, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> Read:
        link = self._links.get(peer)
        if link is None:
            raise TransferFailed(f"peer {peer} is not connected")
        check_ids("remote", remote_block_ids, link.num_blocks)
        check_ids("local", local_block_ids, num_local_blocks(self.regions[0]))
        return link.read(np.asarray(remote_block_ids, np.int32), np.asarray(local_block_ids, np.int32))

    def progress(self) -> None:
        self._serve_anew_after_a_stall()
        self._serving.call("get_new_notifs")

    def _serve_anew_after_a_stall(self) -> None:
        """Who asked us for bytes meanwhile may have given us up: not one of these requests may be looked at. Readers
        that are still there see their READs fail, and shake hands again.
        """
        now = time.monotonic()
        stalled_s, self._looked_at = now - self._looked_at, now
        if stalled_s > _MAX_STALL_S:
            log.warning(
                "nobody was looked after for a while, readers have to connect anew", seconds=stalled_s
            )
            self._serving.destroy()
            self._serving = _Agent(self._incarnation, self.regions)

    def disconnect(self, peer: str) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            link.tear(f"peer {peer} was disconnected")

    def close(self) -> None:
        while self._links:
            self._links.popitem()[1].tear("the transport is closed")
        self._serving.destroy()


class _Link:
    """A peer we read from, all of its ranks, and the agent for it."""

    def __init__(self, incarnation: str, region: BlockRegion, peer: str, parts: Sequence[Part]) -> None:
        self._remote = understood(NixlTransport.name, peer, parts, region)
        self.parts = list(parts)
        self.num_blocks = self._remote[0].num_blocks
        # Region r of the peer begins at block _first_blocks[r].
        sizes = [each.num_blocks for each in self._remote[0].regions]
        self._first_blocks = np.cumsum([0, *sizes[:-1]])
        self._peer = peer
        self._own_name = f"{incarnation} reading {peer}"
        self._region = region
        self._agent: _Agent | None = None
        self._under_way: set[_NixlRead] = set()

    def read(self, remote: np.ndarray, local: np.ndarray) -> Read:
        """Raises TransferFailed."""
        if self._agent is None:
            self._agent = self._open()
        read = _NixlRead(self)
        self._under_way.add(read)
        failure = self._post(read, self._agent, remote, local)
        if failure is not None:
            self.tear(f"READ from {self._peer} could not be posted: {failure}")
            read.poll()  # raises
        return read

    def check(self, read: _NixlRead) -> None:
        """Look after a READ under way; it may be over afterwards."""
        assert self._agent is not None
        failure = self._look_at(read, self._agent)
        if failure is not None:
            self.tear(f"READ from {self._peer} failed: {failure}")

    def tear(self, reason: str) -> None:
        """End all READs; no byte arrives after this. The next READ connects anew."""
        for read in self._under_way:
            read.failure = reason
            read.release()
        self._under_way.clear()
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.let_go()
            agent.destroy()

    # These two return what failed in place of raising it: a traceback keeps handles, and so the agent, alive.

    def _look_at(self, read: _NixlRead, agent: _Agent) -> str | None:
        try:
            for handle in list(read.handles):
                self._note(read, handle, agent.call("check_xfer_state", handle))
        except TransferFailed as error:
            return str(error)
        self._end_if_done(read)
        return None

    def _post(self, read: _NixlRead, agent: _Agent, remote: np.ndarray, local: np.ndarray) -> str | None:
        """One transfer for each rank of the peer and each of its regions that is touched."""
        try:
            self._post_all(read, agent, remote, local)
        except TransferFailed as error:
            return str(error)
        self._end_if_done(read)
        return None

    def _post_all(self, read: _NixlRead, agent: _Agent, remote: np.ndarray, local: np.ndarray) -> None:
        of_region = np.searchsorted(self._first_blocks, remote, side="right") - 1
        for region in np.unique(of_region):
            chosen = of_region == region
            for rank in range(len(self._remote)):
                handle = agent.make_read(
                    rank, int(region), remote[chosen] - self._first_blocks[region], local[chosen]
                )
                read.handles.append(handle)
                self._note(read, handle, agent.call("transfer", handle))

    def _open(self) -> _Agent:
        agent = _Agent(self._own_name, [self._region])
        try:
            for part in self._remote:
                agent.link(part)
        except TransferFailed as error:
            agent.destroy()
            raise TransferFailed(f"peer {self._peer} can not be connected: {error}") from None
        return agent

    def _note(self, read: _NixlRead, handle: Any, state: str) -> None:
        if state == "ERR":
            raise TransferFailed("state ERR")
        if state == "DONE":
            read.handles.remove(handle)
            _quietly(handle.release)

    def _end_if_done(self, read: _NixlRead) -> None:
        if not read.handles:
            read.done = True
            self._under_way.discard(read)


class _NixlRead:
    def __init__(self, link: _Link) -> None:
        self._link = link
        self.handles: list[Any] = []  # NIXL's, of transfers under way
        self.done = False
        self.failure: str | None = None

    def poll(self) -> bool:
        if not self.done and self.failure is None:
            self._link.check(self)
        if self.failure is not None:
            raise TransferFailed(self.failure)
        return self.done

    def release(self) -> None:
        while self.handles:
            _quietly(self.handles.pop().release)


class _Agent:
    """A NIXL agent with regions registered, in a box that can be emptied."""

    def __init__(self, name: str, regions: Sequence[BlockRegion]) -> None:
        """Raises TransferFailed."""
        from nixl._api import nixl_agent, nixl_agent_config  # imports torch

        logging.getLogger("nixl").setLevel(logging.WARNING)  # it greets on standard output
        self._region = regions[0]
        self._prepared: list[_Prepared] = []  # by rank of the peer
        self._nixl: Any = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self._registered: list[Any] = []
        for region in regions:
            memory, device = _memory(region.device)
            rows = [(region.address, region.nbytes, device, "kv")]
            self._registered.append(self.call("register_memory", rows, memory))

    def call(self, method: str, *arguments: Any) -> Any:
        """A method of the agent. Raises TransferFailed for whatever NIXL raises."""
        try:
            return getattr(self._nixl, method)(*arguments)
        except _nixl_errors() as error:
            reason = f"{error} in {method}"
        del arguments  # the traceback shall not keep handles alive
        raise TransferFailed(reason)

    def link(self, part: RemotePart) -> None:
        """Prepare READs from one rank of a peer."""
        name = self.call("add_remote_agent", part.own)
        name = name.decode() if isinstance(name, bytes) else name
        if name != part.name:
            raise TransferFailed(f"it sent the metadata of {name}")
        piece, own = part.slice, self._region
        prepared = _Prepared(piece.count)
        self._prepared.append(prepared)
        runs = piece.local_offset + piece.local_stride * np.arange(piece.count, dtype=np.uint64)
        prepared.local = self._prepare("NIXL_INIT_AGENT", own, num_local_blocks(own), runs, piece.nbytes)
        runs = piece.remote_offset + piece.remote_stride * np.arange(piece.count, dtype=np.uint64)
        for region in part.regions:
            prepared.remote.append(self._prepare(name, region, region.num_blocks, runs, piece.nbytes))

    def make_read(self, rank: int, region: int, remote: np.ndarray, local: np.ndarray) -> Any:
        """A handle to be given to `transfer`, for blocks by index within the region."""
        lists = self._prepared[rank]
        ours, theirs = _runs_of(local, lists.count), _runs_of(remote, lists.count)
        return self.call("make_prepped_xfer", "READ", lists.local, ours, lists.remote[region], theirs)

    def let_go(self) -> None:
        """Let UCX end what waits in its queues: it takes copies that still wait there, when it is taken down, for a
        mistake of its own, and ends the process ("Assertion `ucs_arbiter_group_is_empty(group)' failed").
        """
        with suppress(TransferFailed):
            for _ in range(_NUM_LAST_LOOKS):
                self.call("get_new_notifs")

    def destroy(self) -> None:
        """After this, nothing is read, written or served by the agent. Handles must have been released."""
        if self._nixl is None:
            return
        destroyed = weakref.ref(self._nixl.agent)
        for lists in self._prepared:
            lists.release()
        self._prepared.clear()
        while self._registered:
            _quietly(lambda: self._nixl.deregister_memory(self._registered.pop()))
        self._nixl = None
        assert destroyed() is None, "somebody still refers to the agent: it may write into our blocks"

    def _prepare(
        self, agent: str, region: BlockRegion, num_blocks: int, runs: np.ndarray, nbytes: int
    ) -> Any:
        """NIXL's descriptors, in the order of blocks and then of runs: address, length, device."""
        memory, device = _memory(region.device)
        blocks = np.uint64(region.address) + np.uint64(region.block_bytes) * np.arange(
            num_blocks, dtype=np.uint64
        )
        rows = np.empty((num_blocks * len(runs), 3), dtype=np.uint64)
        rows[:, 0] = (blocks[:, None] + runs.astype(np.uint64)).ravel()
        rows[:, 1] = nbytes
        rows[:, 2] = device
        return self.call("prep_xfer_dlist", agent, rows, memory)


@dataclass(slots=True)
class _Prepared:
    """NIXL's prepared descriptors for the READs from one rank, `count` of them per block."""

    count: int
    local: Any = None
    remote: list[Any] = field(default_factory=list[Any])  # by region

    def release(self) -> None:
        for descriptors in (self.local, *self.remote):
            if descriptors is not None:
                _quietly(descriptors.release)
        self.local = None  # it refers to the agent
        self.remote.clear()


def _runs_of(blocks: np.ndarray, count: int) -> np.ndarray:
    """Indices of all runs of the blocks."""
    if count == 1:
        return blocks.astype(np.int32)
    return (blocks[:, None] * count + np.arange(count)).ravel().astype(np.int32)


def _memory(device: str) -> tuple[str, int]:
    """NIXL's kind of memory and number of the device."""
    kind, _, number = device.partition(":")
    return ("VRAM", int(number)) if kind == "cuda" else ("DRAM", 0)


@cache
def _nixl_errors() -> tuple[type[Exception], ...]:
    """NIXL's own exceptions. They have no common base class."""
    return tuple(
        error
        for error in vars(import_module("nixl._bindings")).values()
        if isinstance(error, type) and issubclass(error, Exception)
    )


def _quietly(give_back: Callable[[], Any]) -> None:
    """What NIXL says to this about a lost peer is known already."""
    with suppress(*_nixl_errors()):
        give_back()
