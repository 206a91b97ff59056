"""Which part of a model one rank of a worker holds, where several compute it together (tensor parallelism).

    q k v, gate up     rows of the weight: heads and features of its own
    output, down       the columns that belong to these; what the ranks compute with them is summed
    embedding, head    rows: some tokens of the vocabulary each
    norms              all

With more ranks than KV heads, several hold the same head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.errors import InvalidRequest
from headrace.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """That of `rank`, out of `size`."""

    rank: int = 0
    size: int = 1

    def part(self, length: int) -> range:
        """Of `length` things that are shared out in order. Where they do not divide, the last ranks have fewer."""
        each = -(-length // self.size)
        return range(min(length, self.rank * each), min(length, (self.rank + 1) * each))

    def kv_heads(self, num_kv_heads: int) -> range:
        """Those that this rank's query heads read."""
        if num_kv_heads >= self.size:
            return self.part(num_kv_heads)
        head = self.rank * num_kv_heads // self.size
        return range(head, head + 1)

    def holds_copies(self, num_kv_heads: int) -> bool:
        """Whether a rank before this one has the same KV heads."""
        return self.rank > 0 and Shard(self.rank - 1, self.size).kv_heads(num_kv_heads) == self.kv_heads(
            num_kv_heads
        )

    def config(self, config: ModelConfig) -> ModelConfig:
        """The shape of what this rank computes. The vocabulary and the hidden size stay as they are."""
        return replace(
            config,
            num_heads=len(self.part(config.num_heads)),
            num_kv_heads=len(self.kv_heads(config.num_kv_heads)),
            intermediate_size=len(self.part(config.intermediate_size)),
        )


WHOLE = Shard()


def check_divides(config: ModelConfig, size: int) -> None:
    """Raises InvalidRequest for a number of ranks that the model's shape does not allow."""
    for field in ("num_heads", "intermediate_size"):
        length = getattr(config, field)
        if length % size:
            raise _refused(size, f"must divide the model's {field}, which is {length}")
    if config.num_kv_heads % size and size % config.num_kv_heads:
        raise _refused(
            size, f"must divide the model's num_kv_heads or be a multiple of it; it is {config.num_kv_heads}"
        )


def _refused(size: int, requirement: str) -> InvalidRequest:
    return InvalidRequest("engine.tensor_parallel_size", size, requirement)
