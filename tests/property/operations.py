"""Many short sequences of random operations, each from a seed; one that fails is named and made as small as it gets.

An operation is a name and a number. Whoever runs it takes its choices from the number, so an operation means something
after any others, and leaving some out of a sequence gives another sequence.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

Operation = tuple[str, int]
Run = Callable[[list[Operation]], None]

MAX_NUMBER = 1 << 48


class Choices:
    """Takes one number apart into choices."""

    def __init__(self, number: int) -> None:
        self._number = number

    def below(self, count: int) -> int:
        self._number, choice = divmod(self._number, count)
        return choice

    def of(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]


def operations(seed: int, names: Sequence[str], max_length: int) -> list[Operation]:
    """A sequence of operations; names that are to be frequent stand in `names` several times."""
    source = random.Random(seed)
    length = source.randrange(max_length // 2, max_length + 1)
    return [(source.choice(names), source.randrange(MAX_NUMBER)) for _ in range(length)]


def run_seeds(run: Run, names: Sequence[str], max_length: int, seeds: Iterable[int]) -> None:
    """Run the sequence of each seed. The first that fails is raised with its seed and the part that still fails."""
    for seed in seeds:
        drawn = operations(seed, names, max_length)
        if _failure(run, drawn) is not None:
            smallest = _without_what_is_not_needed(run, drawn)
            error = _failure(run, smallest)
            raise AssertionError(f"seed {seed}, as small as it gets: {smallest!r}") from error


def _failure(run: Run, drawn: list[Operation]) -> Exception | None:
    try:
        run(drawn)
    except (AssertionError, LookupError, StopIteration, TypeError, ValueError) as error:
        return error
    return None


def _without_what_is_not_needed(run: Run, drawn: list[Operation]) -> list[Operation]:
    """Leave out one operation after the other, as long as what is left fails."""
    index = len(drawn)
    while index:
        index -= 1
        fewer = drawn[:index] + drawn[index + 1 :]
        if _failure(run, fewer) is not None:
            drawn = fewer
    return drawn
