"""Where a cached block lies. Workers publish it with the block's hash, and routers tell the tiers apart."""

from __future__ import annotations

from enum import IntEnum


class Tier(IntEnum):
    """Nearest first. A block that lies in several counts as in the nearest. The numbers are part of the directory."""

    DEVICE = 0  # the pool that attention reads
    HOST = 1  # memory of the host: comes back by copy
    DISK = 2
