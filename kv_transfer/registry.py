"""Transports by name; one line each."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from kv_transfer.transport import BlockRegion, Transport

TRANSPORTS = {
    "nixl": ("kv_transfer.nixl_transport", "NixlTransport"),
    "local": ("kv_transfer.local_transport", "LocalTransport"),
}


def create_transport(name: str, incarnation: str, regions: Sequence[BlockRegion]) -> Transport:
    """A transport around `regions`, to be used by the thread that calls this. `incarnation` names it to its peers;
    one rank of several is called incarnation/rank.
    """
    module, attribute = TRANSPORTS[name]
    return getattr(import_module(module), attribute)(incarnation, regions)
