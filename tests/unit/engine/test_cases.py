"""Situations that broke other systems, named after their ids in the collection of cases. B = 4, C = 8, N = 32."""

from __future__ import annotations

import asyncio
import random
import re

import pytest

from headrace.block_hash import HashRoot, block_hashes
from headrace.engine.scripted_runner import continuation
from headrace.engine.sequence import Constraint, Event, NewToken, State
from headrace.engine_client import EngineClient
from headrace.errors import InvalidRequest
from headrace.grammar import Grammar
from headrace.model_config import ModelConfig
from headrace.sampling_params import FinishReason
from tests.support.audit import assert_idle_pool, assert_sound
from tests.support.engine_driver import VOCAB_SIZE, EngineDriver, make_sequence

B = 4
C = 8
N = 32


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


def assert_well(driver: EngineDriver) -> None:
    """POOL and ALIVE: everything was given back, and a fresh request is served."""
    driver.run()
    assert_idle_pool(driver.engine.audit())
    canary = prompt(5, seed=999)
    driver.submit("canary", canary, max_tokens=3)
    driver.run()
    assert driver.tokens("canary") == continuation(canary, 3)
    assert_idle_pool(driver.engine.audit())


def test_pc_01_prompt_of_exactly_k_blocks_twice():
    driver = EngineDriver(N, B, max_step_tokens=C)
    base = prompt(3 * B)
    longer = [*base, *prompt(B, seed=1)]
    differs = [*base[: 2 * B + 1], (base[2 * B + 1] + 1) % VOCAB_SIZE, *base[2 * B + 2 :]]
    for name, tokens in (("first", base), ("again", base), ("longer", longer), ("differs", differs)):
        driver.submit(name, tokens, max_tokens=2)
        driver.run()
        assert driver.tokens(name) == continuation(tokens, 2), name
    assert driver.cached_tokens("first") == 0
    assert driver.cached_tokens("again") == 2 * B
    assert driver.cached_tokens("longer") == 3 * B
    assert driver.cached_tokens("differs") == 2 * B
    assert_well(driver)


def salted_root(salt: str) -> HashRoot:
    return HashRoot("model", "tokenizer", B, "float32", salt=salt)


def submit_as(driver: EngineDriver, name: str, salt: str, tokens: list[int]) -> int:
    """Serve the prompt for the tenant with that salt; how many of its tokens were cached."""
    driver.engine.submit(make_sequence(name, tokens, max_tokens=2, root=salted_root(salt).digest()))
    driver.run()
    assert driver.tokens(name) == continuation(tokens, 2)
    return driver.cached_tokens(name)


@pytest.mark.parametrize("caching", [True, False])
def test_pc_03_tenants_share_no_blocks(caching: bool):
    driver = EngineDriver(N, B, max_step_tokens=C)
    tokens = prompt(3 * B + 1)
    found: dict[str, int] = {}
    for name, salt in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("none", ""), ("b2", "b"), ("a3", "a")):
        found[name] = submit_as(driver, name, salt, tokens)
        if not caching:
            driver.engine.reset_cache()
    hits = 3 * B if caching else 0
    assert found == {"a1": 0, "a2": hits, "b1": 0, "none": 0, "b2": hits, "a3": hits}
    assert_well(driver)


def test_pc_03_the_salt_of_one_tenant_is_nothing_in_the_prompt_of_another():
    """A tenant who writes another's salt, or his block hashes, into the prompt gets other hashes for it."""
    driver = EngineDriver(N, B, max_step_tokens=C)
    tokens = prompt(2 * B)
    submit_as(driver, "a", "a", tokens)
    names = driver.stored
    forged = [*b"salt:a", *salted_root("a").digest(), *tokens]
    assert submit_as(driver, "b", "b", forged) == 0
    assert names.isdisjoint(block_hashes(salted_root("b"), tokens))
    assert names.isdisjoint(block_hashes(salted_root("b"), forged))
    assert_well(driver)


def test_pc_05_engines_store_what_the_router_looks_for():
    tokens = prompt(3 * B + 1)
    expected = block_hashes(salted_root("x"), tokens)
    for _ in range(2):  # the second is a worker after a restart
        driver = EngineDriver(N, B, max_step_tokens=C)
        submit_as(driver, "a", "x", tokens)
        assert driver.stored == set(expected)
        assert driver.engine.num_cached_blocks(expected) == 3
        assert driver.engine.num_cached_blocks(block_hashes(salted_root("y"), tokens)) == 0
        assert_well(driver)


def test_pc_06_recycled_block_does_not_keep_its_old_name():
    driver = EngineDriver(6, B, max_step_tokens=C)
    a, b = prompt(4 * B - 1, seed=1), prompt(4 * B - 1, seed=2)
    for name, tokens in (("a", a), ("b", b), ("a again", a)):
        driver.submit(name, tokens, max_tokens=2)
        driver.run()
        assert driver.tokens(name) == continuation(tokens, 2)
    assert_well(driver)


def test_pc_06_many_prompts_in_a_small_pool():
    driver = EngineDriver(6, B, max_step_tokens=C, max_sequences=3)
    source = random.Random(6)
    prompts = [prompt(n, seed=n) for n in (B - 1, B, B + 1, 3 * B, 3 * B + 1)]
    expected: dict[str, list[int]] = {}
    for number in range(200):
        tokens = source.choice(prompts)
        num_tokens = source.randrange(1, B + 2)
        expected[str(number)] = continuation(tokens, num_tokens)
        driver.submit(str(number), tokens, num_tokens)
        for _ in range(source.randrange(8)):
            driver.step()
            assert_sound(driver.engine.audit())
    driver.run()
    assert {name: driver.tokens(name) for name in expected} == expected
    audit = driver.engine.audit()
    assert_idle_pool(audit)
    assert len(driver.stored) == audit.cached
    assert_well(driver)


EDGES = [1, B - 1, B, B + 1, C - 1, C, C + 1, 2 * C - 1, 2 * C, 2 * C + 1, 3 * C + B]


@pytest.mark.parametrize("num_tokens", EDGES)
@pytest.mark.parametrize("others", [0, 2])
def test_sc_01_lengths_around_chunk_and_block_edges(num_tokens: int, others: int):
    driver = EngineDriver(64, B, max_step_tokens=C)
    tokens = prompt(num_tokens, seed=num_tokens)
    for number in range(others):
        driver.submit(f"other {number}", prompt(3, seed=100 + number), max_tokens=20)
        driver.step()
    # A common prefix of one block is cached, where the prompt has one.
    driver.submit("warm", tokens[:B], max_tokens=1)
    driver.step()
    driver.step()
    before = driver.engine.load().prefill_tokens
    driver.submit("x", tokens, max_tokens=3)
    while not driver.tokens("x"):
        driver.step()
        computed = driver.computed_positions("x")
        assert bool(driver.tokens("x")) == (computed[-1] == num_tokens - 1)
    cached = driver.cached_tokens("x")
    assert cached == (B if num_tokens > B else 0)
    assert driver.computed_positions("x") == list(range(cached, num_tokens))
    assert driver.engine.load().prefill_tokens - before == num_tokens - cached
    driver.run()
    assert driver.tokens("x") == continuation(tokens, 3)
    for number in range(others):
        assert driver.tokens(f"other {number}") == continuation(prompt(3, seed=100 + number), 20)
    assert_well(driver)


def test_sc_02_prompt_that_fits_the_length_limit_but_not_the_pool():
    driver = EngineDriver(N, B, max_step_tokens=C)
    with pytest.raises(InvalidRequest, match=r"^prompt: .* KV pool holds 128 tokens") as refused:
        driver.submit("large", prompt(N * B + B))
    assert refused.value.field == "prompt"
    for number in range(3):
        driver.submit(f"short {number}", prompt(5, seed=number))
    driver.run()
    for number in range(3):
        assert driver.tokens(f"short {number}") == continuation(prompt(5, seed=number), 4)
    assert_well(driver)


LIMIT = 40
MODEL = ModelConfig(
    architecture="llama",
    num_layers=1,
    hidden_size=4,
    intermediate_size=4,
    num_heads=1,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=VOCAB_SIZE,
    max_model_tokens=LIMIT,
    rope_theta=1e4,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)


def no_grammars(grammar: Grammar) -> Constraint:
    raise AssertionError("there is none")


async def serve(driver: EngineDriver, num_prompt_tokens: int, max_tokens: int) -> list[NewToken]:
    """All tokens of one request that comes to an engine directly, past the front door."""
    client = EngineClient(driver.engine, MODEL, no_grammars, lambda stored, removed: None)
    events: asyncio.Queue[Event] = asyncio.Queue()
    client.thread.start()
    try:
        with client.subscribed("x", events.put_nowait):
            await client.submit(make_sequence("x", prompt(num_prompt_tokens), max_tokens))
            tokens: list[NewToken] = []
            while not tokens or tokens[-1].finish_reason is None:
                event = await asyncio.wait_for(events.get(), timeout=20.0)
                tokens += [event] if isinstance(event, NewToken) else []
            return tokens
    finally:
        await asyncio.to_thread(client.thread.stop, 20.0)


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(LIMIT - 1, 1), (8, LIMIT - 8)])
async def test_sc_04_up_to_the_limit_it_is_served_and_ends_by_length(num_prompt_tokens: int, max_tokens: int):
    driver = EngineDriver(N, B, max_step_tokens=C)
    tokens = await serve(driver, num_prompt_tokens, max_tokens)
    assert [token.token_id for token in tokens] == continuation(prompt(num_prompt_tokens), max_tokens)
    assert tokens[-1].finish_reason is FinishReason.LENGTH
    assert_well(driver)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "field"),
    [(LIMIT, 1, "prompt"), (LIMIT + 1, 1, "prompt"), (8, LIMIT - 7, "max_tokens"), (8, 0, "max_tokens")],
)
async def test_sc_04_over_the_limit_it_is_refused_with_the_numbers(
    num_prompt_tokens: int, max_tokens: int, field: str
):
    driver = EngineDriver(N, B, max_step_tokens=C)
    with pytest.raises(InvalidRequest) as refused:
        await serve(driver, num_prompt_tokens, max_tokens)
    assert refused.value.field == field
    numbers = {str(max_tokens)} if max_tokens == 0 else {str(LIMIT), str(num_prompt_tokens), str(max_tokens)}
    assert numbers <= set(re.findall(r"\d+", str(refused.value)))
    assert driver.engine.load().queries == 0
    assert_well(driver)


def test_ab01_abort_while_queued():
    driver = EngineDriver(N, B, max_step_tokens=C, max_sequences=2)
    for number in range(2):
        driver.submit(f"long {number}", prompt(6, seed=number), max_tokens=30)
    driver.step()
    audit = driver.engine.audit()
    for number in range(10):
        driver.submit(f"queued {number}", prompt(9, seed=50 + number))
    driver.step()
    assert driver.engine.load().waiting == 10
    for number in range(10):
        driver.engine.abort(f"queued {number}")
    assert driver.engine.load().waiting == 0
    assert driver.engine.load().waiting_tokens == 2  # one token each of the two that run
    assert driver.engine.audit() == audit
    driver.run()
    for number in range(10):
        assert driver.events_of(f"queued {number}") == []
        assert driver.computed_positions(f"queued {number}") == []
    assert_well(driver)


def test_ab02_abort_in_the_middle_of_a_chunked_prefill():
    driver = EngineDriver(N * 4, B, max_step_tokens=C)
    long = driver.submit("long", prompt(40 * C))
    driver.step()
    driver.step()
    driver.engine.abort("long")
    driver.submit("next", prompt(C, seed=1), max_tokens=2)
    driver.step()
    assert len(driver.tokens("next")) == 1, "the first token comes within its own prefill"
    assert long.state is State.FINISHED
    assert driver.computed_positions("long") == list(range(2 * C))
    assert not any(isinstance(event, NewToken) for event in driver.events_of("long"))
    assert_well(driver)


def test_me01_hit_rate_under_preemption():
    driver = EngineDriver(16, B, max_step_tokens=C, max_sequences=4)
    lengths = [B + number % 7 for number in range(24)]
    for number, length in enumerate(lengths):
        driver.submit(str(number), prompt(length, seed=1000 + number), max_tokens=3 * B)
    driver.run()
    for number, length in enumerate(lengths):
        assert driver.tokens(str(number)) == continuation(prompt(length, seed=1000 + number), 3 * B)
    load = driver.engine.load()
    assert load.preemptions > 0
    assert load.queries == sum(lengths)
    assert load.cached_tokens == 0
    assert_well(driver)


def test_me01_hit_rate_of_equal_prompts():
    driver = EngineDriver(N, B, max_step_tokens=C)
    tokens = prompt(4 * B + 1)
    for number in range(10):
        driver.submit(str(number), tokens, max_tokens=1)
        driver.run()
    load = driver.engine.load()
    assert load.cached_tokens == 9 * 4 * B
    assert load.queries == 10 * len(tokens)
    assert_well(driver)
