"""What two workers must have in common to exchange KV blocks. Compared at the handshake, field by field."""

from __future__ import annotations

from dataclasses import dataclass, fields

from headrace.engine.shard import Shard
from headrace.errors import LayoutMismatch
from headrace.rpc.v1 import kv_pb2

_SCHEMA_VERSION = 3
_SUPPORTED_TP = (
    "one side's ranks must be a multiple of the other's,"
    " and both must divide num_kv_heads or be a multiple of it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Equal layouts: the bytes of a block mean the same on both sides. The fields are those of the message `Layout`.

    `num_kv_heads` is the model's total, shared out as `Shard` says; `row_bytes` is one head's key or value of one
    token; `tp_rank` is the speaker's own and not compared.
    """

    schema_version: int = _SCHEMA_VERSION
    model_fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    row_bytes: int
    block_size_tokens: int
    tp_size: int = 1
    tp_rank: int = 0
    transport: str

    @property
    def heads(self) -> range:
        """The KV heads of `tp_rank`."""
        return Shard(self.tp_rank, self.tp_size).kv_heads(self.num_kv_heads)

    @property
    def block_bytes(self) -> int:
        """Of one rank."""
        return self.num_layers * 2 * len(self.heads) * self.block_size_tokens * self.row_bytes

    def check(self, theirs: KvLayout) -> None:
        """Raise LayoutMismatch naming the first field that keeps the two apart."""
        for field in fields(self):
            ours, other = getattr(self, field.name), getattr(theirs, field.name)
            if field.name == "tp_size":
                self._check_tp(theirs)
            elif field.name != "tp_rank" and ours != other:
                raise LayoutMismatch(field.name, ours, other)

    def to_proto(self) -> kv_pb2.Layout:
        return kv_pb2.Layout(**{field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def from_proto(cls, message: kv_pb2.Layout) -> KvLayout:
        return cls(**{field.name: getattr(message, field.name) for field in fields(cls)})

    def _check_tp(self, theirs: KvLayout) -> None:
        sizes = (self.tp_size, theirs.tp_size)
        if self.tp_size == theirs.tp_size > 0:
            return  # whole blocks move, whatever is in them
        heads = self.num_kv_heads
        if min(sizes) < 1 or max(sizes) % min(sizes) or any(heads % size and size % heads for size in sizes):
            requirement = f"{_SUPPORTED_TP}; it is {heads}"
            raise LayoutMismatch("tp_size", self.tp_size, theirs.tp_size, requirement)
