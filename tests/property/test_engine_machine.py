"""Any order of commands, steps and time: tokens are right, blocks add up, nothing is lost, nobody reads recycled KV."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine import scheduler
from tests.property.engine_world import World
from tests.property.operations import MAX_NUMBER, Operation, run_seeds

NAMES = ["bring"] * 5 + ["step"] * 9 + ["fill_and_adopt"] * 3 + ["abort"] * 2 + ["settle"]
NAMES += ["settle_what_is_not_given_up", "renew_or_release", "reset_cache", "advance", "advance"]


@pytest.fixture(autouse=True)
def short_of_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real numbers a short sequence of operations would never reach the bounds."""
    monkeypatch.setattr(scheduler, "MAX_OVERTAKEN", 2)
    monkeypatch.setattr(scheduler, "LOOK_AHEAD", 3)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 10_000, 1_000))
def test_ten_thousand_sequences_of_operations(first: int):
    run_seeds(
        lambda operations: World(first // 1_000 % 3 * 5).run(operations),
        NAMES,
        40,
        range(first, first + 1_000),
    )


@given(
    st.integers(0, 8),
    st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, MAX_NUMBER - 1)), max_size=60),
)
@settings(max_examples=100, deadline=None)
def test_sequences_that_hypothesis_finds(num_host_blocks: int, operations: list[Operation]):
    World(num_host_blocks).run(operations)
