"""Several answers to one prompt: it is computed once, and its blocks are shared."""

from __future__ import annotations

import pytest

from headrace.engine.scripted_runner import continuation
from headrace.engine.sequence import BlocksReady, Failed, NewToken, Reserved, Sequence
from headrace.errors import InternalError
from headrace.sampling_params import SamplingParams
from tests.support.audit import assert_idle_pool, assert_sound
from tests.support.engine_driver import ROOT, EngineDriver

B = 4


def submit(driver: EngineDriver, prompt: list[int], n: int = 3, max_tokens: int = 6, **more) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, n=n)
    sequence = Sequence("a", list(prompt), len(prompt), sampling, ROOT, **more)
    driver.engine.submit(sequence)
    return sequence


def tokens_by_choice(driver: EngineDriver, n: int) -> list[list[int]]:
    events = [event for event in driver.events_of("a") if isinstance(event, NewToken)]
    return [[event.token_id for event in events if event.choice == choice] for choice in range(n)]


@pytest.mark.parametrize("num_prompt_tokens", [1, B - 1, B, 2 * B, 2 * B + 1, 5 * B - 1])
def test_each_choice_answers_and_the_prompt_is_computed_once(num_prompt_tokens):
    driver = EngineDriver(block_size_tokens=B)
    prompt = list(range(10, 10 + num_prompt_tokens))
    submit(driver, prompt)
    driver.run()
    assert tokens_by_choice(driver, 3) == [continuation(prompt, 6)] * 3
    positions = driver.computed_positions("a")
    assert [positions.count(position) for position in range(num_prompt_tokens)] == [1] * num_prompt_tokens
    assert_idle_pool(driver.engine.audit())


def test_choices_share_the_full_blocks_of_the_prompt():
    driver = EngineDriver(block_size_tokens=B)
    submit(driver, list(range(2 * B + 1)), n=4)
    while len(tokens_by_choice(driver, 4)[0]) < 1:
        driver.step()
    audit = driver.engine.audit()
    assert_sound(audit)
    assert audit.active == 2 + 4  # and a block of its own for each
    assert driver.engine.load().running == 4
    driver.run()
    assert_idle_pool(driver.engine.audit())


@pytest.mark.parametrize("limit", [{"max_sequences": 2}, {"num_blocks": 5}])
def test_choices_without_room_wait_and_answer_the_same(limit):
    driver = EngineDriver(**{"num_blocks": 32, "block_size_tokens": B, **limit})
    prompt = list(range(2 * B + 1))
    submit(driver, prompt, n=5)
    driver.run()
    assert tokens_by_choice(driver, 5) == [continuation(prompt, 6)] * 5
    assert_idle_pool(driver.engine.audit())


def test_choices_that_end_with_their_first_token():
    driver = EngineDriver(block_size_tokens=B)
    submit(driver, [1, 2, 3], n=3, max_tokens=1)
    driver.run()
    assert tokens_by_choice(driver, 3) == [continuation([1, 2, 3], 1)] * 3
    assert_idle_pool(driver.engine.audit())


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_an_abort_ends_all_choices(num_steps):
    driver = EngineDriver(block_size_tokens=B, max_step_tokens=8)
    submit(driver, list(range(11)), n=4)
    for _ in range(num_steps):
        driver.step()
    driver.engine.abort("a")
    driver.run()
    assert driver.engine.load().running == driver.engine.load().waiting == 0
    assert_idle_pool(driver.engine.audit())
    submit(driver, [7], n=1)  # the id is free again
    driver.run()


def test_a_choice_that_fails_ends_the_others_with_one_error():
    error = InternalError("no luck")
    driver = EngineDriver(block_size_tokens=B, forced={"a": [5, 6, error]})
    submit(driver, [1, 2, 3])
    driver.run()
    assert tokens_by_choice(driver, 3) == [[5, 6]] * 3
    assert [event.error for event in driver.events_of("a") if isinstance(event, Failed)] == [error]
    assert_idle_pool(driver.engine.audit())


def test_a_held_prompt_gives_the_first_token_of_each_choice():
    driver = EngineDriver(block_size_tokens=B)
    submit(driver, list(range(9)), hold_ttl_s=5.0)
    driver.run()
    assert tokens_by_choice(driver, 3) == [continuation(list(range(9)), 1)] * 3
    assert driver.engine.audit().held == 3
    driver.engine.release_hold("a")
    assert_idle_pool(driver.engine.audit())


@pytest.mark.parametrize("num_prompt_tokens", [B - 1, B, 2 * B + 1])
@pytest.mark.parametrize("going_on", [[0, 1, 2], [1, 2], [0, 2], [2]])
def test_choices_of_a_prompt_from_outside(num_prompt_tokens, going_on):
    prompt = list(range(10, 10 + num_prompt_tokens))
    owner, reader = EngineDriver(block_size_tokens=B), EngineDriver(block_size_tokens=B)
    submit(owner, prompt, hold_ttl_s=5.0)
    owner.run()
    held = [block for e in owner.events_of("a") if isinstance(e, BlocksReady) for block in e.block_ids]
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, n=3)
    reader.engine.reserve(Sequence("a", list(prompt), len(prompt), sampling, ROOT))
    reader.step()
    [reserved] = [event for event in reader.events_of("a") if isinstance(event, Reserved)]
    for source, target in zip(held, reserved.block_ids, strict=True):
        reader.runner.copy_block(owner.runner, source, target)
    first, *rest = continuation(prompt, 6)
    reader.engine.adopt("a", dict.fromkeys(going_on, first))
    reader.run()
    assert tokens_by_choice(reader, 3) == [rest if choice in going_on else [] for choice in range(3)]
    assert num_prompt_tokens - 1 not in reader.computed_positions("a")
    assert_idle_pool(reader.engine.audit())


def test_an_abort_of_one_choice_leaves_the_others():
    driver = EngineDriver(block_size_tokens=B)
    submit(driver, list(range(9)))
    driver.engine.abort("a", 1)  # not split yet: nothing
    while not tokens_by_choice(driver, 3)[1]:
        driver.step()
    driver.engine.abort("a", 1)
    driver.run()
    first, second, third = tokens_by_choice(driver, 3)
    assert first == third == continuation(list(range(9)), 6)
    assert 0 < len(second) < 6
    assert_idle_pool(driver.engine.audit())


def test_random_mixes_of_choices_and_others_in_a_small_pool():
    for seed in range(30):
        driver = EngineDriver(num_blocks=9, block_size_tokens=B, max_step_tokens=7, max_sequences=5)
        prompt = list(range(seed % 11 + 1))
        submit(driver, prompt, n=1 + seed % 4, max_tokens=9)
        driver.submit("b", list(range(100, 100 + seed % 7 + 1)), max_tokens=12)
        for _ in range(200):
            if not driver.engine.has_work:
                break
            driver.step()
            assert_sound(driver.engine.audit())
        assert tokens_by_choice(driver, 1 + seed % 4) == [continuation(prompt, 9)] * (1 + seed % 4)
        assert len(driver.tokens("b")) == 12
        assert_idle_pool(driver.engine.audit())
