"""The transport over NIXL with UCX underneath: NVLink, RDMA, shared memory (CMA) or TCP, whatever both ends have.

One worker has several NIXL agents around its region:

    serving agent     peers read through it; its metadata is what they get
    one per link      our READs from one peer; made at the first READ, destroyed when one fails or at a disconnect

because, as measured with 1.5.1 (`tests/fault/test_nixl_peer_loss.py` watches over the last three):
- The progress thread spins; without it both ends have to call in regularly, or nothing moves.
- `transfer` copies inside the call when UCX takes CMA; with TCP, polling does the work.
- A peer that dies makes `transfer` or the state check raise; that is an exception, not a state.
- A READ has no deadline. Neither releasing its handle nor removing the remote agent cancels it: a peer that wakes up
  later still overwrites our blocks. Only an agent that is gone writes nothing.
- Over TCP, a process that is asked for bytes by somebody who is gone by then is ended by UCX ("Fatal: unexpected
  error: Endpoint timeout"). Nothing here can prevent that; an own agent per link confines it to the peer given up on.
"""

from __future__ import annotations

import logging
import struct
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from headrace.errors import TransferFailed
from kv_transfer.transport import BlockRegion, Read

# Version, base address, number of blocks, bytes of a block, kind of memory, device; then the agent's own.
_HEAD = struct.Struct("<4sQQQ4sI")
_VERSION = b"hrx1"


def ucx_environment() -> dict[str, str]:
    """What UCX and NIXL read from the environment once, when loaded; for composition roots to set where unset."""
    return {
        "UCX_CMA_SEG_SIZE": "4m",  # of one copy by the kernel; by default a block of 4 MiB takes eight
        "UCX_TCP_USER_TIMEOUT": "2s",  # else a partitioned network never becomes an error
        "UCX_LOG_LEVEL": "fatal",  # a lost peer is an error of ours, which we report ourselves
        "NIXL_LOG_LEVEL": "FATAL",
    }


class NixlTransport:
    name = "nixl"

    def __init__(self, incarnation: str, region: BlockRegion) -> None:
        self._incarnation = incarnation
        self._region = region
        self._serving = _Agent(incarnation, region)
        self._links: dict[str, _Link] = {}

    def metadata(self) -> bytes:
        region = self._region
        memory, device = _memory(region.device)
        head = _HEAD.pack(
            _VERSION, region.address, region.num_blocks, region.block_bytes, memory.encode(), device
        )
        return head + self._serving.call("get_agent_metadata")

    def connect(self, peer: str, metadata: bytes) -> None:
        """Sends nothing: a worker that only serves opens no connection back."""
        known = self._links.get(peer)
        if known is not None and known.metadata == metadata:
            return  # a handshake in the other direction; READs under way go on
        link = _Link(self._incarnation, self._region, peer, metadata)
        self.disconnect(peer)
        self._links[peer] = link

    def read(self, peer: str, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> Read:
        link = self._links.get(peer)
        if link is None:
            raise TransferFailed(f"peer {peer} is not connected")
        remote = _indices("remote", remote_block_ids, link.num_blocks)
        local = _indices("local", local_block_ids, self._region.num_blocks)
        return link.read(remote, local)

    def progress(self) -> None:
        self._serving.call("get_new_notifs")

    def disconnect(self, peer: str) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            link.tear(f"peer {peer} was disconnected")

    def close(self) -> None:
        while self._links:
            self._links.popitem()[1].tear("the transport is closed")
        self._serving.destroy()


class _Link:
    """A peer we read from, and the agent for it."""

    def __init__(self, incarnation: str, region: BlockRegion, peer: str, metadata: bytes) -> None:
        if len(metadata) <= _HEAD.size or metadata[: len(_VERSION)] != _VERSION:
            raise TransferFailed(f"peer {peer} sent metadata that is not of this transport or version")
        _, address, num_blocks, block_bytes, memory, device = _HEAD.unpack_from(metadata)
        if block_bytes != region.block_bytes:
            raise TransferFailed(
                f"peer {peer} has blocks of {block_bytes} bytes, ours have {region.block_bytes}"
            )
        self.metadata = metadata
        self.num_blocks: int = num_blocks
        self._peer = peer
        self._own_name = f"{incarnation} reading {peer}"
        self._region = region
        self._remote_memory: str = memory.decode(errors="replace")
        self._remote_rows = _rows(address, num_blocks, block_bytes, device)
        self._agent: _Agent | None = None
        self._under_way: set[_NixlRead] = set()

    def read(self, remote: np.ndarray, local: np.ndarray) -> Read:
        """Raises TransferFailed."""
        if self._agent is None:
            self._agent = self._open()
        read = _NixlRead(self)
        self._under_way.add(read)
        try:
            read.handle = self._agent.make_read(local, remote)
            self._note(read, self._agent.call("transfer", read.handle))
        except TransferFailed as error:
            self.tear(f"READ from {self._peer} could not be posted: {error}")
            read.poll()  # raises
        return read

    def check(self, read: _NixlRead) -> None:
        """Look after a READ under way; it may be over afterwards."""
        assert self._agent is not None
        try:
            self._note(read, self._agent.call("check_xfer_state", read.handle))
        except TransferFailed as error:
            self.tear(f"READ from {self._peer} failed: {error}")

    def tear(self, reason: str) -> None:
        """End all READs; no byte arrives after this. The next READ connects anew."""
        for read in self._under_way:
            read.failure = reason
            read.release()
        self._under_way.clear()
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.destroy()

    def _open(self) -> _Agent:
        agent = _Agent(self._own_name, self._region)
        try:
            agent.link(self._peer, self.metadata[_HEAD.size :], self._remote_rows, self._remote_memory)
        except TransferFailed as error:
            agent.destroy()
            raise TransferFailed(f"peer {self._peer} can not be connected: {error}") from None
        return agent

    def _note(self, read: _NixlRead, state: str) -> None:
        if state == "ERR":
            raise TransferFailed("state ERR")
        if state == "DONE":
            read.done = True
            read.release()
            self._under_way.discard(read)


class _NixlRead:
    def __init__(self, link: _Link) -> None:
        self._link = link
        self.handle: Any = None  # NIXL's
        self.done = False
        self.failure: str | None = None

    def poll(self) -> bool:
        if not self.done and self.failure is None:
            self._link.check(self)
        if self.failure is not None:
            raise TransferFailed(self.failure)
        return self.done

    def release(self) -> None:
        handle, self.handle = self.handle, None
        if handle is not None:
            _quietly(handle.release)


class _Agent:
    """A NIXL agent with the region registered, in a box that can be emptied.

    NIXL destroys an agent when nothing refers to it any more. So it stays in here, with its prepared lists, and no
    exception leaves that carries frames of NIXL.
    """

    def __init__(self, name: str, region: BlockRegion) -> None:
        from nixl._api import nixl_agent, nixl_agent_config  # imports torch

        logging.getLogger("nixl").setLevel(logging.WARNING)  # it greets on standard output
        self._region = region
        self._memory, self._device = _memory(region.device)
        self._local_blocks: Any = None
        self._remote_blocks: Any = None
        self._nixl: Any = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self._registered: Any = self.call(
            "register_memory", [(region.address, region.nbytes, self._device, "kv")], self._memory
        )

    def call(self, method: str, *arguments: Any) -> Any:
        """A method of the agent. Raises TransferFailed for whatever NIXL raises."""
        try:
            return getattr(self._nixl, method)(*arguments)
        except _nixl_errors() as error:
            reason = f"{error} in {method}"
        del arguments  # the traceback shall not keep handles alive
        raise TransferFailed(reason)

    def link(self, peer: str, metadata: bytes, rows: np.ndarray, memory: str) -> None:
        """Prepare READs from the peer's blocks, `rows` (as of `_rows`) of that kind of memory."""
        name = self.call("add_remote_agent", metadata)
        name = name.decode() if isinstance(name, bytes) else name
        if name != peer:
            raise TransferFailed(f"it sent the metadata of {name}")
        region = self._region
        own_rows = _rows(region.address, region.num_blocks, region.block_bytes, self._device)
        self._local_blocks = self.call("prep_xfer_dlist", "NIXL_INIT_AGENT", own_rows, self._memory)
        self._remote_blocks = self.call("prep_xfer_dlist", peer, rows, memory)

    def make_read(self, local: np.ndarray, remote: np.ndarray) -> Any:
        """A handle to be given to `transfer`, for blocks by index."""
        return self.call("make_prepped_xfer", "READ", self._local_blocks, local, self._remote_blocks, remote)

    def destroy(self) -> None:
        """After this, nothing is read, written or served by the agent. Handles must have been released."""
        if self._nixl is None:
            return
        destroyed = weakref.ref(self._nixl.agent)
        for blocks in (self._local_blocks, self._remote_blocks):
            if blocks is not None:
                _quietly(blocks.release)
        blocks = self._local_blocks = self._remote_blocks = None
        _quietly(lambda: self._nixl.deregister_memory(self._registered))
        self._nixl = self._registered = None
        assert destroyed() is None, "somebody still refers to the agent: it may write into our blocks"


def _rows(address: int, num_blocks: int, block_bytes: int, device: int) -> np.ndarray:
    """NIXL's descriptors, one per block: address, length, device."""
    rows = np.empty((num_blocks, 3), dtype=np.uint64)
    rows[:, 0] = np.uint64(address) + np.arange(num_blocks, dtype=np.uint64) * np.uint64(block_bytes)
    rows[:, 1] = block_bytes
    rows[:, 2] = device
    return rows


def _indices(side: str, block_ids: Sequence[int], num_blocks: int) -> np.ndarray:
    for block_id in block_ids:
        if not 0 <= block_id < num_blocks:
            raise TransferFailed(f"{side} block {block_id} does not exist; there are {num_blocks}")
    return np.asarray(block_ids, dtype=np.int32)


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
