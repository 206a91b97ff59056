"""What two workers must have in common to exchange KV blocks. Compared at the handshake, field by field."""

from __future__ import annotations

from dataclasses import dataclass, fields

from headrace.errors import LayoutMismatch
from headrace.rpc.v1 import kv_pb2

_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Equal layouts: the bytes of a block mean the same on both sides. The fields are those of the message `Layout`."""

    schema_version: int = _SCHEMA_VERSION
    model_fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size_tokens: int
    tp_size: int
    transport: str

    def check(self, theirs: KvLayout) -> None:
        """Raise LayoutMismatch naming the first field that differs."""
        for field in fields(self):
            ours, other = getattr(self, field.name), getattr(theirs, field.name)
            if ours != other:
                raise LayoutMismatch(field.name, ours, other)

    def to_proto(self) -> kv_pb2.Layout:
        return kv_pb2.Layout(**{field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def from_proto(cls, message: kv_pb2.Layout) -> KvLayout:
        return cls(**{field.name: getattr(message, field.name) for field in fields(cls)})
