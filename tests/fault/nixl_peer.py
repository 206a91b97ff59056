"""A worker's transfer side as a process of its own, for tests that kill and stop it.

    nixl_peer.py NAME VALUE NUM_BLOCKS BLOCK_BYTES [READ_FROM]

All its blocks hold VALUE. It writes its metadata as a line of hex digits and takes that of a peer the same way, then
serves; with READ_FROM it reads everything from that peer over and over, until that fails. It answers "metadata" with
its metadata as they are then, and each other line with the same line and how many READs ended and failed. It ends with
its standard input.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter

import numpy as np
import structlog

from headrace.errors import TransferFailed
from kv_transfer.nixl_transport import NixlTransport
from kv_transfer.transfer_thread import TransferThread
from kv_transfer.transport import BlockRegion
from tests.support.parts import part

CONNECT_TIMEOUT_S = 20.0


async def line() -> str:
    return (await asyncio.to_thread(sys.stdin.readline)).strip()


async def read_everything(
    transfers: TransferThread, peer: str, num_blocks: int, counts: Counter[str]
) -> None:
    while not counts["failed"]:
        try:
            await transfers.read(peer, range(num_blocks), range(num_blocks)).done
        except TransferFailed:
            counts["failed"] += 1
        counts["reads"] += 1


async def main(name: str, value: str, num_blocks: int, block_bytes: int, read_from: str = "") -> None:
    blocks = np.full((num_blocks, block_bytes), int(value), np.uint8)
    region = BlockRegion(blocks.ctypes.data, num_blocks, block_bytes)
    transfers = TransferThread(lambda: NixlTransport(name, [region]))
    await transfers.start()
    print((await transfers.metadata()).hex(), flush=True)
    theirs = part(bytes.fromhex(await line()), block_bytes)
    await transfers.connect(read_from or "reader", [theirs], CONNECT_TIMEOUT_S)
    counts: Counter[str] = Counter()
    reading = read_from and asyncio.create_task(read_everything(transfers, read_from, num_blocks, counts))
    while request := await line():
        if request == "metadata":
            print((await transfers.metadata()).hex(), flush=True)
            continue
        print(request, counts["reads"], counts["failed"], flush=True)
    if reading:
        reading.cancel()
    await transfers.close()


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:]))
