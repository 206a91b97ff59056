"""Lower tiers for a scripted runner, whose blocks are lists of numbers."""

from __future__ import annotations

from headrace.engine.scripted_runner import ScriptedRunner
from headrace.engine.tiers import TierStats
from headrace.tier import Tier


class ScriptedMemory:
    """Implements `BlockMemory`: host slots behind the runner's own blocks. Only full blocks get here."""

    def __init__(self, runner: ScriptedRunner, num_host_blocks: int) -> None:
        self.num_host_blocks = num_host_blocks
        self.block_bytes = 8 * len(runner._kv[0])
        self._kv = runner._kv
        self._kv += [[None] * len(runner._kv[0]) for _ in range(num_host_blocks)]

    def copy(self, source_id: int, target_id: int) -> None:
        self._kv[target_id] = list(self._kv[source_id])

    def read(self, block_id: int) -> bytes:
        return b"".join(number.to_bytes(8, "little") for number in self._kv[block_id] if number is not None)

    def write(self, block_id: int, data: bytearray) -> None:
        assert len(data) == self.block_bytes
        self._kv[block_id] = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]


class DictFiles:
    """Implements `BlockFiles` in a dictionary: room for so many blocks, the least recently used goes first.

    `lose` and `damage` do what disks do.
    """

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.data: dict[bytes, bytes] = {}
        self.damaged: set[bytes] = set()
        self._lost: list[bytes] = []
        self.num_taken = 0

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.data

    def digests(self) -> list[bytes]:
        return list(self.data)

    def put(self, digest: bytes, data: bytes) -> None:
        assert digest not in self.data
        if not self.max_blocks:
            return
        if len(self.data) == self.max_blocks:
            self.lose(next(iter(self.data)))
        self.data[digest] = data

    def take(self, digest: bytes) -> bytearray | None:
        if digest in self.damaged:
            self.lose(digest)
        if digest not in self.data:
            return None
        self.num_taken += 1
        self.touch(digest)
        return bytearray(self.data[digest])

    def touch(self, digest: bytes) -> None:
        self.data[digest] = self.data.pop(digest)

    def clear(self) -> None:
        self.data.clear()
        self.damaged.clear()

    def drain_lost(self) -> list[bytes]:
        lost, self._lost = self._lost, []
        return lost

    def stats(self) -> TierStats:
        return TierStats(Tier.DISK, len(self.data), 0, 0, 0, 0)

    def lose(self, digest: bytes) -> None:
        del self.data[digest]
        self.damaged.discard(digest)
        self._lost.append(digest)
