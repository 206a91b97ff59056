"""What the ranks of one worker compute together: sums and gathers of tensors, by torch.distributed over loopback."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch._C._distributed_c10d import TCPStore, Work
from torch.distributed import distributed_c10d

from headrace.engine.shard import Shard

_HOST = "127.0.0.1"

# The group itself, and not what `init_process_group` makes of it: that is one of a whole process, and listens on
# whatever address the host's name leads to. Its type says nothing of what is used here.
_Gloo: Any = distributed_c10d.ProcessGroupGloo


class GroupBroken(Exception):
    """Another rank is gone, or did not come in time. Nothing can be computed together any more."""


def open_store(timeout_s: float) -> TCPStore:
    """Where the ranks find each other, at rank 0, on a free port of loopback: `port`."""
    return TCPStore(
        _HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s), use_libuv=True
    )


def find_store(port: int, timeout_s: float) -> TCPStore:
    """Rank 0's. Raises GroupBroken when it can not be reached in time."""
    try:
        return TCPStore(_HOST, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise GroupBroken(f"no rendezvous with rank 0: {error}") from None


class Group:
    """Every rank makes one, and calls the same methods in the same order, with tensors of the same shape."""

    def __init__(self, store: TCPStore, shard: Shard, vocab_size: int, timeout_s: float) -> None:
        """Waits for the others. `timeout_s` is for that, and for each call. Raises GroupBroken."""
        self.shard = shard
        self._vocab_size = vocab_size
        options = _Gloo._Options()
        options._devices = [_Gloo.create_device(hostname=_HOST)]
        options._timeout = timedelta(seconds=timeout_s)
        try:
            self._gloo = _Gloo(store, shard.rank, shard.size, options)
        except RuntimeError as error:
            raise GroupBroken(f"the ranks did not meet: {error}") from None

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, which are contiguous.

        Added in the order of the ranks: it has the same bits at each of them and in every batch, which an all-reduce of
        gloo does not promise.
        """
        parts = x.new_empty((self.shard.size * len(x), *x.shape[1:]))
        self._wait(lambda: self._gloo._allgather_base(parts, x))
        total, *others = parts.chunk(self.shard.size)
        for other in others:
            total += other
        return total

    def gather_logits(self, own_NV: torch.Tensor) -> torch.Tensor:
        """[N, tokens of this rank] -> [N, vocabulary] at rank 0; elsewhere nothing, [0]."""
        width = -(-self._vocab_size // self.shard.size)  # all send as much as the largest
        sent = F.pad(own_NV, (0, width - own_NV.shape[1]))
        parts = [torch.empty_like(sent) for _ in range(self.shard.size)] if self.shard.rank == 0 else []
        options = distributed_c10d.GatherOptions()
        options.rootRank = 0
        self._wait(lambda: self._gloo.gather([parts] if parts else [], [sent], options))
        return torch.cat(parts, dim=1)[:, : self._vocab_size] if parts else torch.empty(0)

    def _wait(self, start: Callable[[], Work]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise GroupBroken(str(error)) from None
