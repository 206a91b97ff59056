"""Blocks that the device evicted come back from below: the same tokens, less to compute, nothing overwritten."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from headrace.block_hash import extend
from headrace.clock import VirtualClock
from headrace.config import EngineSettings, ModelSettings
from headrace.engine.block_pool import BlockPool, BlockState, Hold
from headrace.engine.disk_tier import BlockLayout, DiskTier
from headrace.engine.engine import Engine
from headrace.engine.kv_memory import KvMemory
from headrace.engine.load import load_runner
from headrace.engine.scripted_runner import continuation
from headrace.engine.sequence import NewToken, Reserved, Started
from headrace.model_config import ModelFiles
from headrace.model_reader import read_folder
from headrace.tier import Tier
from tests.support.audit import assert_idle_pool, assert_sound
from tests.support.engine_driver import ROOT, EngineDriver, make_sequence
from tests.support.tiered import DictFiles
from tests.support.tiny_llama import write_tiny_llama

B = 4
CLOSE_S = 30.0


def prompt(num_tokens: int, seed: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(256) for i in range(num_tokens)]


def serve(driver: EngineDriver, name: str, tokens: list[int]) -> int:
    """How many of its tokens were cached."""
    driver.submit(name, tokens, max_tokens=2)
    driver.run()
    assert driver.tokens(name) == continuation(tokens, 2)
    return driver.cached_tokens(name)


def evicted(driver: EngineDriver) -> list[int]:
    """A prompt of 4 blocks and a bit whose blocks all had to leave the device."""
    tokens = prompt(4 * B + 1, seed=1)
    serve(driver, "first", tokens)
    for number in range(4):
        serve(driver, f"other {number}", prompt(6 * B, seed=10 + number))
    assert all(driver.tiers.get(digest) is not Tier.DEVICE for digest in extend(ROOT, tokens, B))
    return tokens


@pytest.mark.parametrize(("num_host_blocks", "num_files"), [(64, 0), (0, 64), (3, 64)])
def test_an_evicted_prefix_comes_back(num_host_blocks, num_files):
    driver = EngineDriver(7, B, num_host_blocks=num_host_blocks, files=DictFiles(num_files))
    tokens = evicted(driver)
    assert driver.engine.num_cached_blocks(extend(ROOT, tokens, B)) == 4
    assert serve(driver, "again", tokens) == 4 * B
    assert driver.computed_positions("again")[0] == 4 * B
    assert [driver.tiers[digest] for digest in extend(ROOT, tokens, B)] == [Tier.DEVICE] * 4
    assert_idle_pool(driver.engine.audit())


def test_without_lower_tiers_it_is_computed_anew():
    driver = EngineDriver(7, B)
    assert serve(driver, "again", evicted(driver)) == 0


def test_a_reserved_sequence_gets_what_lies_below_as_cached_blocks():
    driver = EngineDriver(7, B, num_host_blocks=64)
    tokens = evicted(driver)
    driver.reserve("reserved", tokens)
    driver.step()
    [reserved] = [event for event in driver.events if isinstance(event, Reserved)]
    assert reserved.num_cached_blocks == 4
    states = [driver.pool.state(block_id) for block_id in reserved.block_ids]
    assert states == [BlockState.ACTIVE] * 4 + [BlockState.FILLING]
    driver.engine.abort("reserved")
    assert driver.pool.state(reserved.block_ids[4]) is BlockState.QUARANTINED
    assert driver.pool.state(reserved.block_ids[0]) is BlockState.CACHED
    driver.engine.settle("reserved")
    assert_idle_pool(driver.engine.audit())


def test_a_damaged_block_ends_what_comes_back():
    files = DictFiles(64)
    driver = EngineDriver(7, B, files=files)
    tokens = evicted(driver)
    hashes = extend(ROOT, tokens, B)
    files.damaged.add(hashes[2])
    assert serve(driver, "again", tokens) == 2 * B
    assert_idle_pool(driver.engine.audit())


def test_a_step_reads_so_much_from_disk(monkeypatch):
    monkeypatch.setattr("headrace.engine.block_pool._MAX_STEP_READ_BYTES", 3 * 8 * B)
    driver = EngineDriver(7, B, files=DictFiles(64))
    assert serve(driver, "again", evicted(driver)) == 3 * B


def test_a_slot_that_is_read_elsewhere_is_not_overwritten():
    driver = EngineDriver(7, B, num_host_blocks=6)
    tokens = prompt(4 * B + 1, seed=1)
    serve(driver, "first", tokens)
    serve(driver, "other", prompt(6 * B, seed=2))
    slots = driver.pool.find_for_reader(extend(ROOT, tokens, B))
    assert len(slots) == 4
    assert min(slots) >= 7
    driver.pool.share(slots)
    driver.pool.hold(Hold("reader", "test", list(slots), 5.0, 5.0))
    driver.pool.release(slots)
    content = [list(driver.runner._kv[slot]) for slot in slots]
    generations = [driver.pool.generation(slot) for slot in slots]
    for number in range(6):
        serve(driver, f"more {number}", prompt(6 * B, seed=50 + number))
    assert driver.engine.audit().host_held == len(slots)
    assert_sound(driver.engine.audit())
    assert [driver.runner._kv[slot] for slot in slots] == content
    assert [driver.pool.generation(slot) for slot in slots] == generations
    driver.clock.advance(5.0)
    driver.step()
    for number in range(6):
        serve(driver, f"later {number}", prompt(6 * B, seed=70 + number))
    assert all(driver.pool.generation(slot) > before for slot, before in zip(slots, generations, strict=True))
    assert_idle_pool(driver.engine.audit())


def test_reset_forgets_every_tier():
    files = DictFiles(64)
    driver = EngineDriver(7, B, num_host_blocks=3, files=files)
    tokens = evicted(driver)
    driver.engine.reset_cache()
    driver.step()
    assert driver.tiers == {}
    assert not files.data
    assert serve(driver, "again", tokens) == 0


def test_what_was_on_disk_at_the_start_is_reported():
    files = DictFiles(64)
    evicted(EngineDriver(7, B, files=files))
    driver = EngineDriver(7, B, files=files)
    driver.step()
    assert driver.tiers == dict.fromkeys(files.data, Tier.DISK)


def test_counters():
    driver = EngineDriver(7, B, num_host_blocks=64)
    tokens = evicted(driver)
    serve(driver, "again", tokens)
    [device, host] = driver.engine.load().tiers
    assert (device.tier, host.tier) == (Tier.DEVICE, Tier.HOST)
    assert (host.hits, host.evictions, host.dropped) == (4, 0, 0)
    assert host.blocks == host.stores == driver.engine.audit().host_cached
    assert host.bytes == host.blocks * 8 * B
    assert device.evictions >= host.stores


# --- a real model ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ModelFiles:
    return read_folder(write_tiny_llama(tmp_path_factory.mktemp("tiny")), "tiny")


def real_engine(files: ModelFiles, num_blocks: int, host_blocks: int = 0, disk: Path | None = None):
    """With an engine's tiers as the worker process builds them; the disk tier is to be closed."""
    settings = EngineSettings(num_blocks=num_blocks, block_size_tokens=B, num_threads=1, max_step_tokens=16)
    runner, cache = load_runner(files, ModelSettings(dtype="float32"), settings)
    memory = KvMemory(cache, host_blocks * cache.block_bytes)
    tier = None
    if disk is not None:
        tier = DiskTier(disk, BlockLayout(files.fingerprint, "float32", B, cache.block_bytes), 1 << 30)
    pool = BlockPool(num_blocks, B, memory, tier)
    return Engine(runner, pool, settings, frozenset(), VirtualClock()), tier


def answers(engine: Engine, prompts: list[list[int]], together: int) -> tuple[list[list[int]], int]:
    """The tokens of each, `together` at a time, and how many prompt tokens were cached."""
    tokens: dict[str, list[int]] = {}
    num_cached = 0
    for first in range(0, len(prompts), together):
        for number in range(first, min(first + together, len(prompts))):
            tokens[str(number)] = []
            engine.submit(make_sequence(str(number), prompts[number], max_tokens=4))
        while engine.has_work:
            for event in engine.step().events:
                if isinstance(event, NewToken):
                    tokens[event.sequence_id].append(event.token_id)
                num_cached += event.num_cached_tokens if isinstance(event, Started) else 0
    assert_idle_pool(engine.audit())
    return list(tokens.values()), num_cached


def interleaved(model: ModelFiles) -> list[list[int]]:
    """200 prompts out of a set of 5, with lengths around multiples of the block size."""
    source = random.Random(6)
    vocab = model.config.vocab_size
    bases = [[source.randrange(3, vocab) for _ in range(5 * B)] for _ in range(5)]
    lengths = [k * B + d for k in (2, 3, 4) for d in (-1, 0, 1)]
    return [source.choice(bases)[: source.choice(lengths)] for _ in range(200)]


@pytest.mark.parametrize(("host_blocks", "on_disk"), [(40, False), (5, True), (0, True)])
def test_pc06_same_tokens_when_prefixes_come_back_from_below(model, tmp_path, host_blocks, on_disk):
    prompts = interleaved(model)
    plain, _ = real_engine(model, num_blocks=14)
    expected, cached_without = answers(plain, prompts, together=2)
    engine, tier = real_engine(model, 14, host_blocks, tmp_path if on_disk else None)
    found, cached = answers(engine, prompts, together=2)
    assert found == expected
    assert cached > cached_without
    lower = engine.load().tiers[1:]
    assert all(stats.hits > 0 for stats in lower)
    if tier is None:
        return
    tier.close(CLOSE_S)
    again, tier = real_engine(model, 14, disk=tmp_path)
    assert tier is not None
    assert answers(again, prompts[:5], together=1)[0] == expected[:5]
    assert tier.stats().hits > 0
    tier.close(CLOSE_S)
