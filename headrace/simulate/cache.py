"""One worker's cached blocks by number: the device's, and below it a host tier. Least recently used out, in both.

A block that leaves the device goes to the host, and is found there until it is the oldest of it. A prompt's beginning
counts as used last, as in a tree whose leaves go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile


class BlockCache:
    """`came` and `went`: how what is here differs from what it was when they were last cleared."""

    def __init__(self, num_blocks: int | None, num_host_blocks: int = 0) -> None:
        """None: without a limit."""
        self._num_blocks = num_blocks
        self._num_host_blocks = num_host_blocks
        self._device: OrderedDict[int, None] = OrderedDict()
        self._host: OrderedDict[int, None] = OrderedDict()
        self.came: dict[int, None] = {}
        self.went: dict[int, None] = {}

    def __len__(self) -> int:
        """Different blocks."""
        return len(self._device) + sum(block not in self._device for block in self._host)

    def match(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks are here, in either tier, up to the first that is not."""
        device = self._device
        if not self._host:
            return sum(1 for _ in takewhile(device.__contains__, blocks))
        host = self._host
        return sum(1 for _ in takewhile(lambda block: block in device or block in host, blocks))

    def num_on_host(self, blocks: Sequence[int]) -> int:
        """Of blocks that are here: those that have to be copied up."""
        return sum(block not in self._device for block in blocks) if self._host else 0

    def keep(self, blocks: Sequence[int]) -> None:
        """They are on the device, used now."""
        device, came = self._device, self.came
        for block in reversed(blocks):
            if block in device:
                device.move_to_end(block)
            else:
                device[block] = None
                if block in self.went:
                    del self.went[block]
                elif block not in self._host:
                    came[block] = None
        if self._num_blocks is None:
            return
        while len(device) > self._num_blocks:
            self._demote(device.popitem(last=False)[0])

    def _demote(self, block: int) -> None:
        if not self._num_host_blocks:
            self._gone(block)
            return
        self._host[block] = None
        self._host.move_to_end(block)
        if len(self._host) > self._num_host_blocks:
            oldest = self._host.popitem(last=False)[0]
            if oldest not in self._device:
                self._gone(oldest)

    def _gone(self, block: int) -> None:
        if block in self.came:
            del self.came[block]
        else:
            self.went[block] = None

    def before(self) -> list[int]:
        """What was here when `came` and `went` were last cleared."""
        here = [*self._device, *(block for block in self._host if block not in self._device)]
        return [*(block for block in here if block not in self.came), *self.went]
