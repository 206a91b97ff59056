"""The transport over NIXL with UCX underneath: NVLink, RDMA, shared memory (CMA) or TCP, whatever both ends have.

What NIXL does and does not do, as measured with 1.5.1:
- Its progress thread spins; without it both ends have to call in regularly, or nothing moves.
- `transfer` copies inside the call when UCX takes CMA; with TCP, polling does the work.
- It has no deadlines of its own, and releasing a handle does not cancel a READ. Removing the remote agent does.
- A peer that dies makes `transfer` or the state check raise, it is not a state.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from headrace.errors import TransferFailed
from kv_transfer.transport import BlockRegion, Read

_METADATA = struct.Struct(
    "<4sQQQ"
)  # magic, base address, number of blocks, bytes of a block; then the agent's own
_MAGIC = b"hrx1"


def ucx_environment() -> dict[str, str]:
    """What UCX reads from the environment when the agent is made; set by composition roots, where not set already."""
    return {
        "UCX_TCP_USER_TIMEOUT": "2s",  # else a partitioned network never becomes an error
        "UCX_LOG_LEVEL": "error",
    }


@dataclass(slots=True)
class _Peer:
    descriptors: Any  # NIXL's prepared list: one entry per block
    num_blocks: int


class NixlTransport:
    name = "nixl"

    def __init__(self, incarnation: str, region: BlockRegion) -> None:
        from nixl._api import nixl_agent, nixl_agent_config  # imports torch

        self._region = region
        self._device, self._device_id = _device(region.device)
        self._agent: Any = nixl_agent(
            incarnation, nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        )
        self._registered = self._agent.register_memory(
            [(region.address, region.nbytes, self._device_id, "kv")], self._device
        )
        self._local = self._agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT", self._blocks_at(region.address, region.num_blocks), self._device
        )
        self._peers: dict[str, _Peer] = {}

    def metadata(self) -> bytes:
        head = _METADATA.pack(_MAGIC, self._region.address, self._region.num_blocks, self._region.block_bytes)
        return head + self._agent.get_agent_metadata()

    def connect(self, peer: str, metadata: bytes) -> None:
        address, num_blocks = self._parse(peer, metadata)
        self.disconnect(peer)
        try:
            name = self._agent.add_remote_agent(metadata[_METADATA.size :])
            if _text(name) != peer:
                self._agent.remove_remote_agent(name)
                raise TransferFailed(f"peer {peer} sent the metadata of {_text(name)}")
            descriptors = self._agent.prep_xfer_dlist(
                peer, self._blocks_at(address, num_blocks), self._device
            )
        except _nixl_errors() as error:
            raise TransferFailed(f"peer {peer} can not be connected: {error}") from error
        self._peers[peer] = _Peer(descriptors, num_blocks)

    def read(self, peer: str, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> Read:
        known = self._peers.get(peer)
        if known is None:
            raise TransferFailed(f"peer {peer} is not connected")
        remote = _indices("remote", remote_block_ids, known.num_blocks)
        local = _indices("local", local_block_ids, self._region.num_blocks)
        try:
            handle = self._agent.make_prepped_xfer("READ", self._local, local, known.descriptors, remote)
            return _NixlRead(self._agent, handle, peer)
        except _nixl_errors() as error:
            raise TransferFailed(f"READ from {peer} could not be posted: {error}") from error

    def progress(self) -> None:
        self._agent.get_new_notifs()

    def disconnect(self, peer: str) -> None:
        known = self._peers.pop(peer, None)
        if known is None:
            return
        with suppress(*_nixl_errors()):  # it is gone already, which is what was wanted
            self._agent.remove_remote_agent(peer)
        with suppress(*_nixl_errors()):
            known.descriptors.release()

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        self._local.release()
        self._agent.deregister_memory(self._registered)
        del self._agent

    def _parse(self, peer: str, metadata: bytes) -> tuple[int, int]:
        if len(metadata) <= _METADATA.size or metadata[:4] != _MAGIC:
            raise TransferFailed(f"peer {peer} sent metadata that is not of this transport")
        _, address, num_blocks, block_bytes = _METADATA.unpack_from(metadata)
        if block_bytes != self._region.block_bytes:
            raise TransferFailed(
                f"peer {peer} has blocks of {block_bytes} bytes, ours have {self._region.block_bytes}"
            )
        return address, num_blocks

    def _blocks_at(self, address: int, num_blocks: int) -> np.ndarray:
        """One descriptor per block: address, length, device."""
        rows = np.empty((num_blocks, 3), dtype=np.uint64)
        rows[:, 0] = address + np.arange(num_blocks, dtype=np.uint64) * np.uint64(self._region.block_bytes)
        rows[:, 1] = self._region.block_bytes
        rows[:, 2] = self._device_id
        return rows


class _NixlRead:
    def __init__(self, agent: Any, handle: Any, peer: str) -> None:
        self._agent = agent
        self._handle = handle
        self._peer = peer
        try:
            self._state: str = self._agent.transfer(handle)
        except Exception:
            self.release()
            raise

    def poll(self) -> bool:
        try:
            if self._state != "DONE":
                self._state = self._agent.check_xfer_state(self._handle)
        except _nixl_errors() as error:
            raise TransferFailed(f"READ from {self._peer} failed: {error}") from error
        if self._state == "ERR":
            raise TransferFailed(f"READ from {self._peer} failed")
        return self._state == "DONE"

    def release(self) -> None:
        with suppress(*_nixl_errors()):  # the peer is gone, and the handle with it
            self._handle.release()


@cache
def _nixl_errors() -> tuple[type[Exception], ...]:
    """NIXL's own exceptions. They have no common base class."""
    from nixl import _bindings

    return tuple(
        error
        for error in vars(_bindings).values()
        if isinstance(error, type) and issubclass(error, Exception)
    )


def _indices(side: str, block_ids: Sequence[int], num_blocks: int) -> np.ndarray:
    indices = np.asarray(block_ids, dtype=np.int64)
    if indices.size and not (indices.min() >= 0 and indices.max() < num_blocks):
        raise TransferFailed(f"{side} block {indices.max()} does not exist; there are {num_blocks}")
    return indices.astype(np.int32)


def _device(device: str) -> tuple[str, int]:
    kind, _, number = device.partition(":")
    return ("VRAM", int(number)) if kind == "cuda" else ("DRAM", 0)


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
