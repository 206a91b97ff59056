"""The disk tier: what comes back is what went in, or nothing; a restart keeps it, trouble switches it off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from headrace.engine.disk_tier import BlockLayout, DiskTier

LAYOUT = BlockLayout("model", "float32", 4, 1000)
FILE_BYTES = 1056
CLOSE_S = 30.0


def digest(number: int) -> bytes:
    return bytes([number]) * 16


def data(number: int) -> bytes:
    return bytes((number + i) % 256 for i in range(LAYOUT.block_bytes))


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[list[DiskTier]]:
    """Tiers that a test has opened."""
    opened: list[DiskTier] = []
    yield opened
    for tier in opened:
        tier.close(CLOSE_S)


def opened(tiers: list[DiskTier], root: Path, layout: BlockLayout = LAYOUT, max_blocks: int = 10) -> DiskTier:
    tiers.append(DiskTier(root, layout, max_blocks * FILE_BYTES))
    return tiers[-1]


def closed_with(tiers: list[DiskTier], root: Path, *numbers: int) -> None:
    """A process that stored these blocks and has ended."""
    tier = opened(tiers, root)
    for number in numbers:
        tier.put(digest(number), data(number))
    tiers.pop().close(CLOSE_S)


def file_of(root: Path, number: int) -> Path:
    [path] = root.glob(f"*/*/{digest(number).hex()}.kv")
    return path


def test_what_waits_to_be_written_can_be_taken(tiers, tmp_path):
    tier = opened(tiers, tmp_path)
    tier.put(digest(1), data(1))
    assert tier.take(digest(1)) == data(1)
    assert tier.take(digest(2)) is None


def test_survives_a_restart(tiers, tmp_path):
    closed_with(tiers, tmp_path, 1, 2)
    again = opened(tiers, tmp_path)
    assert set(again.digests()) == {digest(1), digest(2)}
    assert again.take(digest(2)) == data(2)
    stats = again.stats()
    assert (stats.blocks, stats.bytes, stats.hits) == (2, 2 * FILE_BYTES, 1)
    assert again.drain_lost() == []


def test_the_least_recently_used_goes_first_and_a_restart_keeps_to_its_bound(tiers, tmp_path):
    tier = opened(tiers, tmp_path, max_blocks=2)
    tier.put(digest(1), data(1))
    tier.put(digest(2), data(2))
    tier.touch(digest(1))
    tier.put(digest(3), data(3))
    assert tier.drain_lost() == [digest(2)]
    assert set(tier.digests()) == {digest(1), digest(3)}
    tiers.pop().close(CLOSE_S)
    assert len(list(tmp_path.glob("*/*/*.kv"))) == 2
    smaller = opened(tiers, tmp_path, max_blocks=1)
    assert len(smaller.digests()) == 1
    tiers.pop().close(CLOSE_S)
    assert len(list(tmp_path.glob("*/*/*.kv"))) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda found: found[:-1],
        lambda found: found + b"x",
        lambda found: b"",
        lambda found: found[:20],
        lambda found: found[:-500] + bytes([found[-500] ^ 1]) + found[-499:],
        lambda found: bytes([found[0] ^ 1]) + found[1:],
        lambda found: found[:12] + bytes([found[12] ^ 1]) + found[13:],  # another layout
        lambda found: found[:30] + bytes([found[30] ^ 1]) + found[31:],  # another block
    ],
)
def test_a_damaged_file_is_deleted_counted_and_never_used(tiers, tmp_path, damage):
    closed_with(tiers, tmp_path, 1, 2)
    path = file_of(tmp_path, 1)
    path.write_bytes(damage(path.read_bytes()))
    tier = opened(tiers, tmp_path)
    with capture_logs() as logs:
        assert tier.take(digest(1)) is None
    assert [line["log_level"] for line in logs] == ["error"]
    assert tier.stats().checksum_failures == 1
    assert tier.drain_lost() == [digest(1)]
    assert tier.take(digest(2)) == data(2)
    tiers.pop().close(CLOSE_S)
    assert not path.exists()


def test_a_file_under_another_name_is_not_used(tiers, tmp_path):
    closed_with(tiers, tmp_path, 1, 2)
    file_of(tmp_path, 1).write_bytes(file_of(tmp_path, 2).read_bytes())
    tier = opened(tiers, tmp_path)
    assert tier.take(digest(1)) is None
    assert tier.take(digest(2)) == data(2)


def test_a_file_that_vanished_is_a_loss(tiers, tmp_path):
    closed_with(tiers, tmp_path, 1)
    tier = opened(tiers, tmp_path)
    file_of(tmp_path, 1).unlink()
    assert tier.take(digest(1)) is None
    assert tier.drain_lost() == [digest(1)]


def test_other_layouts_are_not_seen(tiers, tmp_path):
    closed_with(tiers, tmp_path, 1)
    other = opened(tiers, tmp_path, BlockLayout("another model", "float32", 4, 1000))
    assert other.digests() == []
    assert opened(tiers, tmp_path).digests() == [digest(1)]


def test_strange_and_half_written_files_are_passed_over(tiers, tmp_path):
    closed_with(tiers, tmp_path, 1)
    folder = file_of(tmp_path, 1).parent
    half = folder / f"{digest(2).hex()}.tmp"
    half.write_bytes(b"half")
    (folder / "no-block.kv").write_bytes(b"?")
    assert opened(tiers, tmp_path).digests() == [digest(1)]
    assert not half.exists()


def test_a_full_queue_drops(tiers, tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.engine.disk_tier._MAX_QUEUED_BYTES", 2 * LAYOUT.block_bytes)
    tier = opened(tiers, tmp_path)
    monkeypatch.setattr(tier, "_collect", lambda: None)  # nothing is known to be written yet
    for number in range(5):
        tier.put(digest(number), data(number))
    assert tier.stats().dropped == 3
    assert tier.digests() == [digest(0), digest(1)]


def test_where_writing_fails_the_tier_switches_itself_off(tiers, tmp_path):
    closed_with(tiers, tmp_path, 1)
    tier = opened(tiers, tmp_path)
    (file_of(tmp_path, 1).parent.parent / digest(2).hex()[:2]).write_bytes(b"in the way of a folder")
    tier.put(digest(2), data(2))
    tier.put(digest(3), data(3))
    with capture_logs() as logs:
        tiers.pop().close(CLOSE_S)
        assert sorted(tier.drain_lost()) == [digest(1), digest(2), digest(3)]
    assert [line["event"] for line in logs] == ["disk tier switched off"]
    tier.put(digest(4), data(4))
    assert (tier.digests(), tier.take(digest(1)), tier.stats().stores) == ([], None, 0)


def test_an_unusable_directory_switches_the_tier_off(tiers, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with capture_logs() as logs:
        tier = opened(tiers, tmp_path / "file")
    assert [line["log_level"] for line in logs] == ["error"]
    tier.put(digest(1), data(1))
    assert tier.digests() == []


def test_a_directory_has_one_owner_at_a_time(tiers, tmp_path):
    first = opened(tiers, tmp_path)
    first.put(digest(1), data(1))
    with capture_logs() as logs:
        second = opened(tiers, tmp_path)
    assert [line["log_level"] for line in logs] == ["error"]
    second.put(digest(2), data(2))
    assert second.digests() == []


def test_cleared(tiers, tmp_path):
    tier = opened(tiers, tmp_path)
    tier.put(digest(1), data(1))
    tier.clear()
    assert tier.take(digest(1)) is None
    tier.put(digest(1), data(1))
    assert tier.take(digest(1)) == data(1)
    tiers.pop().close(CLOSE_S)
    assert len(list(tmp_path.glob("*/*/*.kv"))) == 1
