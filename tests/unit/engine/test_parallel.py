"""Links between ranks, who is blamed when one is lost, and what the settings refuse. Computing together is tested in
`tests/contract/test_tensor_parallel.py`.
"""

from __future__ import annotations

import socket
import threading
from dataclasses import replace

import pytest
import torch

from headrace.config import EngineSettings, ModelSettings
from headrace.engine.load import load_runner, load_shard
from headrace.engine.parallel import ranks as ranks_module
from headrace.engine.parallel.group import Group, GroupBroken, find_store, open_store
from headrace.engine.parallel.link import Failure, Link, LinkClosed, pack_reply, unpack_reply
from headrace.engine.parallel.ranks import Rank, Ranks
from headrace.engine.shard import Shard, check_divides
from headrace.errors import InvalidRequest, RankLost
from tests.support.engines import engine_for

SOON_S = 0.2


@pytest.fixture
def pair():
    ours, theirs = (Link(each) for each in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_arrive_whole_and_in_order(pair):
    ours, theirs = pair
    messages = [b"", b"x", bytes(range(256)) * 20_000]
    sending = threading.Thread(target=lambda: [ours.send(message, 10.0) for message in messages])
    sending.start()
    assert [theirs.receive(10.0) for _ in messages] == messages
    sending.join()
    assert (ours.num_sent, ours.sent_bytes) == (3, sum(map(len, messages)) + 3 * 4)


def test_a_link_that_ends_or_is_silent_says_so(pair):
    ours, theirs = pair
    with pytest.raises(TimeoutError):
        ours.receive(0.01)
    with pytest.raises(TimeoutError):
        ours.send(bytes(1 << 24), 0.05)  # nobody reads
    theirs.close()
    with pytest.raises(LinkClosed):
        ours.send(b"x", 1.0)


def test_replies_come_back():
    for reply in (b"", b"F", b"bytes", Failure("no memory", is_own=True)):
        assert unpack_reply(pack_reply(reply)) == reply


class Others:
    """Ranks 1, 2, … of a rank 0, by their ends of the links. `endings`: how their processes ended, by number."""

    def __init__(self, count: int) -> None:
        pairs = [socket.socketpair() for _ in range(count)]
        self.ours, self.links = [Link(ours) for ours, _ in pairs], [Link(theirs) for _, theirs in pairs]
        self.endings: dict[int, str] = {}
        self.lost: list[RankLost] = []
        each = [Rank(n, link, lambda _, n=n: self.endings.get(n)) for n, link in enumerate(self.ours, 1)]
        self.ranks = Ranks(each, Group.__new__(Group), 7.0, self.lost.append)

    def close(self) -> None:
        for link in (*self.ours, *self.links):
            link.close()

    def says(self, number: int, text: str, *, is_own: bool) -> None:
        self.links[number - 1].send(pack_reply(Failure(text, is_own)))

    def error_of(self, cause: Exception) -> str:
        with pytest.raises(RankLost) as caught, self.ranks.together(b"step"):
            raise cause
        assert self.lost == [caught.value]
        with pytest.raises(RankLost) as again, self.ranks.together(b"another"):
            pytest.fail("a step was tried after the loss")
        assert again.value is caught.value
        return str(caught.value)


@pytest.fixture
def others(monkeypatch):
    monkeypatch.setattr(ranks_module, "_REPORT_S", SOON_S)
    others = Others(3)
    yield others
    others.close()


def test_the_rank_that_is_silent_is_named(others):
    others.says(1, "timed out", is_own=False)
    others.says(3, "timed out", is_own=False)
    assert others.error_of(GroupBroken("timed out")) == "rank 2 did not answer within 7 s"


def test_the_rank_that_died_is_named_before_one_that_is_silent(others):
    others.links[1].close()
    others.endings[2] = "was killed by signal 9 (SIGKILL)"
    others.says(3, "connection closed", is_own=False)
    assert others.error_of(GroupBroken("closed")) == "rank 2 was killed by signal 9 (SIGKILL)"


def test_the_rank_that_failed_by_itself_is_named_before_all(others):
    others.says(1, "connection closed", is_own=False)
    others.says(3, "MemoryError()", is_own=True)
    others.links[1].close()
    assert others.error_of(GroupBroken("closed")) == "rank 3 failed: MemoryError()"


def test_rank_0_takes_the_blame_for_what_it_did(others):
    assert others.error_of(MemoryError("of rank 0")) == "rank 0 failed: MemoryError('of rank 0')"


def test_a_failure_in_place_of_a_reply_ends_it(others):
    others.says(1, "no such block", is_own=True)
    with pytest.raises(RankLost, match="rank 1 failed: no such block"), others.ranks.together(b"copy"):
        others.ranks.replies()


def test_a_rank_that_does_not_come_to_the_meeting_is_a_deadline():
    with pytest.raises(GroupBroken, match="did not meet"):
        Group(open_store(1.0), Shard(0, 2), 10, 0.5)
    closed = socket.create_server(("127.0.0.1", 0))
    port = closed.getsockname()[1]
    closed.close()
    with pytest.raises(GroupBroken, match="no rendezvous"):
        find_store(port, 0.5)


# --- what is refused


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (3, "3 is not allowed; must divide the model's num_heads, which is 4"),
        (5, "5 is not allowed; must divide the model's num_heads, which is 4"),
        (8, "8 is not allowed; must divide the model's num_heads, which is 4"),
    ],
)
def test_numbers_of_ranks_that_do_not_divide_are_refused(tiny_model_files, size, message):
    with pytest.raises(InvalidRequest, match=rf"engine\.tensor_parallel_size: {message}"):
        check_divides(tiny_model_files.config, size)


@pytest.mark.parametrize(
    ("field", "size", "value"), [("num_kv_heads", 4, 6), ("intermediate_size", 4, 130), ("num_heads", 4, 6)]
)
def test_the_field_that_does_not_divide_is_named(tiny_model_files, field, size, value):
    config = replace(tiny_model_files.config, **{"num_heads": 12, field: value})
    with pytest.raises(InvalidRequest, match=f"{field}.*{value}"):
        check_divides(config, size)


def test_kv_heads_are_split_or_copied(tiny_model_files):
    for size in (1, 2, 4):
        check_divides(tiny_model_files.config, size)
    held = [Shard(rank, 4).kv_heads(2) for rank in range(4)]
    assert held == [range(0, 1), range(0, 1), range(1, 2), range(1, 2)]
    assert [Shard(rank, 4).holds_copies(2) for rank in range(4)] == [False, True, False, True]


def test_the_native_kernels_are_refused(tiny_model_files):
    settings = EngineSettings(tensor_parallel_size=2, backend="cpu", num_blocks=4)
    with pytest.raises(
        InvalidRequest, match=r"engine\.backend: 'cpu'.*tensor_parallel_size 2.*torch or reference"
    ):
        load_shard(tiny_model_files, ModelSettings(dtype="float32"), settings, Shard(0, 2))


def test_a_model_as_a_whole_has_one_rank(tiny_model_files):
    with pytest.raises(InvalidRequest, match=r"engine\.tensor_parallel_size: 2"):
        load_runner(tiny_model_files, ModelSettings(), EngineSettings(tensor_parallel_size=2))


def test_memory_is_that_of_all_ranks_together(tiny_model_files):
    """As many blocks as one rank would have; with copies of heads, fewer."""
    whole = engine_for(tiny_model_files, num_blocks=0, kv_memory_bytes=1 << 22, backend="torch")
    for size, share in ((2, 1), (4, 2)):
        settings = EngineSettings(tensor_parallel_size=size, kv_memory_bytes=1 << 22, num_threads=1)
        shard = load_shard(tiny_model_files, ModelSettings(dtype="float32"), settings, Shard(1, size))
        assert shard.cache.num_blocks == whole._runner._cache.num_blocks // share
        assert shard.cache.dtype == torch.float32
