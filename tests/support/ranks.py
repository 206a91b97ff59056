"""All ranks of a worker in one process, a thread for each: the same code, sockets and gloo as between processes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from headrace.clock import VirtualClock
from headrace.config import EngineSettings, ModelSettings
from headrace.engine.block_pool import BlockPool
from headrace.engine.engine import Engine
from headrace.engine.kv_memory import KvMemory
from headrace.engine.load import LoadedShard, load_shard
from headrace.engine.parallel.follower import Follower
from headrace.engine.parallel.group import Group, find_store, open_store
from headrace.engine.parallel.link import Link
from headrace.engine.parallel.ranks import ParallelMemory, ParallelRunner, Rank, Ranks
from headrace.engine.shard import Shard
from headrace.engine.tiers import BlockFiles
from headrace.errors import RankLost
from headrace.model_config import ModelFiles

_TIMEOUT_S = 20.0


@dataclass
class RankThreads:
    files: ModelFiles
    settings: EngineSettings
    shards: list[LoadedShard]
    ranks: Ranks
    runner: ParallelRunner
    memories: list[KvMemory]
    links: list[Link]  # rank 0's
    lost: list[RankLost] = field(default_factory=list)

    def engine(self, files: BlockFiles | None = None) -> Engine:
        memory = ParallelMemory(self.ranks, self.memories[0])
        pool = BlockPool(self.shards[0].cache.num_blocks, self.settings.block_size_tokens, memory, files)
        return Engine(self.runner, pool, self.settings, frozenset(), VirtualClock())


@contextmanager
def rank_threads(
    files: ModelFiles, size: int, *, dtype: str = "float32", timeout_s: float = _TIMEOUT_S, **engine: Any
) -> Iterator[RankThreads]:
    settings = EngineSettings.model_validate(
        {
            "num_blocks": 64,
            "block_size_tokens": 4,
            "num_threads": 1,
            "tensor_parallel_size": size,
            "backend": "torch",
            **engine,
        }
    )
    model = ModelSettings.model_validate({"dtype": dtype, "quantization": engine.pop("quantization", "none")})
    shards = [load_shard(files, model, settings, Shard(rank, size)) for rank in range(size)]
    memories = [KvMemory(shard.cache, settings.host_memory_bytes // size) for shard in shards]
    store = open_store(timeout_s)
    pairs = [socket.socketpair() for _ in range(1, size)]

    def follow(rank: int) -> None:
        group = Group(
            find_store(store.port, timeout_s), Shard(rank, size), files.config.vocab_size, timeout_s
        )
        link = Link(pairs[rank - 1][1])
        Follower(link, shards[rank].forward(group), memories[rank], group).run()

    threads = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    group = Group(store, Shard(0, size), files.config.vocab_size, timeout_s)
    links = [Link(pair[0]) for pair in pairs]
    others = [Rank(number, link, lambda _: None) for number, link in enumerate(links, start=1)]
    lost: list[RankLost] = []
    ranks = Ranks(others, group, timeout_s, lost.append)
    made = RankThreads(files, settings, shards, ranks, shards[0].runner(files, ranks), memories, links, lost)
    try:
        yield made
    finally:
        for link in links:
            link.close()
        for thread in threads:
            thread.join(_TIMEOUT_S)
        for _, theirs in pairs:
            theirs.close()
        assert not any(thread.is_alive() for thread in threads)
