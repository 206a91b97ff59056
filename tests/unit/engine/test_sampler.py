from __future__ import annotations

import pytest
import torch

from headrace.engine import sampler
from headrace.engine.sampler import Draw, sample, uniform
from headrace.sampling_params import MIN_TEMPERATURE, SamplingParams

VOCAB_SIZE = 50
MASK = 2**64 - 1
LAST_UNIFORM = 1 - 2.0**-53


def draw(position: int = 0, **sampling) -> Draw:
    return Draw(SamplingParams(max_tokens=1, **{"seed": 0, **sampling}), position)


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def tokens_drawn(logits_V: torch.Tensor, num_draws: int = 4000, **sampling) -> torch.Tensor:
    """Tokens of one row at many positions."""
    draws = [draw(position, **sampling) for position in range(num_draws)]
    return torch.tensor(sample(logits_V.expand(num_draws, -1), draws))


@pytest.fixture(params=[0.0, 0.5, LAST_UNIFORM])
def fixed_uniform(request, monkeypatch) -> float:
    real = uniform
    monkeypatch.setattr(sampler, "uniform", lambda draws: real(draws) * 0 + request.param)
    return request.param


def plain_uniform(seed: int, choice: int, position: int) -> float:
    """The same function, in plain integers."""
    state = 0
    for number in (seed, choice, position):
        state = ((state ^ number) + 0x9E3779B97F4A7C15) & MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
        state ^= state >> 31
    return (state >> 11) / 2**53


def test_uniform_numbers_are_what_they_have_always_been():
    """A sequence that moves to another version of a worker goes on as it began: these numbers never change."""
    cases = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (MASK, 0, 7), (2**63, 3, 100_000)]
    draws = [
        Draw(SamplingParams(max_tokens=1, seed=seed), position, choice) for seed, choice, position in cases
    ]
    numbers = uniform(draws).tolist()
    assert numbers == [plain_uniform(*case) for case in cases]
    assert numbers[0] == pytest.approx(0.13870941014555427, abs=1e-15)


def test_uniform_numbers_are_spread_evenly():
    numbers = uniform([draw(position, seed=seed) for seed in range(50) for position in range(200)])
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts = torch.histc(torch.from_numpy(numbers), bins=10, min=0, max=1)
    assert (counts - 1000).abs().max() < 120  # four standard deviations


def test_greedy_takes_the_first_of_the_largest():
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[0, [7, 30]] = 5.0
    logits[1, 49] = 0.5
    assert sample(logits, [draw(temperature=0.0)] * 2) == [7, 49]


def test_token_does_not_depend_on_the_batch():
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.3},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 2.0, "top_p": 0.8},
        {"top_k": 20, "top_p": 0.5},
        {"min_p": 0.1, "temperature": 1.5},
        {"min_p": 0.02, "top_p": 0.9},
    ]
    draws = [draw(row, seed=row * 7919, **kinds[row % len(kinds)]) for row in range(40)]
    logits = random_logits(40)
    alone = [sample(logits[row : row + 1], draws[row : row + 1])[0] for row in range(40)]
    assert sample(logits, draws) == alone
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
    assert sample(logits[order], [draws[row] for row in order]) == [alone[row] for row in order]


def test_seed_choice_and_position_each_change_the_draws():
    logits = torch.zeros(64, VOCAB_SIZE)
    base = sample(logits, [draw(position) for position in range(64)])
    assert base == sample(logits, [draw(position) for position in range(64)])
    assert base != sample(logits, [draw(position + 1) for position in range(64)])
    assert base != sample(logits, [draw(position, seed=1) for position in range(64)])
    assert base != sample(logits, [Draw(draw().sampling, position, choice=1) for position in range(64)])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_frequencies_follow_the_softmax(temperature):
    logits_V = random_logits(1)[0]
    expected = (logits_V / temperature).softmax(0)
    found = tokens_drawn(logits_V, temperature=temperature).bincount(minlength=VOCAB_SIZE) / 4000
    assert (found - expected).abs().max() < 4 * 0.5 / 4000**0.5


@pytest.mark.parametrize("k", [1, 2, 7, VOCAB_SIZE - 1])
def test_top_k_keeps_exactly_the_k_largest(k):
    logits_V = torch.linspace(1.0, 0.0, VOCAB_SIZE)[
        torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    ]
    assert set(tokens_drawn(logits_V, top_k=k).tolist()) == set(logits_V.topk(k).indices.tolist())


def test_top_k_among_equals_keeps_the_lower_ids():
    logits_V = torch.zeros(VOCAB_SIZE)
    logits_V[[9, 40]] = 1.0
    assert set(tokens_drawn(logits_V, top_k=4).tolist()) == {9, 40, 0, 1}
    assert set(tokens_drawn(torch.zeros(VOCAB_SIZE), top_k=1).tolist()) == {0}


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    weights = torch.full((VOCAB_SIZE,), 1e-9)
    weights[[5, 11, 2, 33]] = torch.tensor([0.4, 0.3, 0.2, 0.1])
    logits_V = weights.log()
    for top_p, expected in ((0.05, {5}), (0.39, {5}), (0.41, {5, 11}), (0.69, {5, 11}), (0.75, {5, 11, 2})):
        assert set(tokens_drawn(logits_V, top_p=top_p).tolist()) == expected, top_p


def test_top_p_counts_within_top_k():
    weights = torch.full((VOCAB_SIZE,), 1e-9)
    weights[[5, 11, 2, 33]] = torch.tensor([0.4, 0.3, 0.2, 0.1])
    # Of the two that top_k leaves, the first has 0.57.
    assert set(tokens_drawn(weights.log(), top_k=2, top_p=0.5).tolist()) == {5}
    assert set(tokens_drawn(weights.log(), top_k=2, top_p=0.6).tolist()) == {5, 11}


def test_min_p_keeps_what_is_likely_beside_the_likeliest():
    weights = torch.full((VOCAB_SIZE,), 1e-9)
    weights[[5, 11, 2, 33]] = torch.tensor([0.4, 0.3, 0.2, 0.1])
    for min_p, expected in ((0.2, {5, 11, 2, 33}), (0.3, {5, 11, 2}), (0.7, {5, 11}), (1.0, {5})):
        assert set(tokens_drawn(weights.log(), min_p=min_p).tolist()) == expected, min_p
    # At a temperature of 0.5 the probabilities are in the ratio of their squares.
    assert set(tokens_drawn(weights.log(), min_p=0.3, temperature=0.5).tolist()) == {5, 11}


def test_top_p_counts_within_min_p():
    weights = torch.full((VOCAB_SIZE,), 1e-9)
    weights[[5, 11, 2, 33]] = torch.tensor([0.4, 0.3, 0.2, 0.1])
    # Of the two that min_p leaves, the first has 0.57.
    assert set(tokens_drawn(weights.log(), min_p=0.6, top_p=0.5).tolist()) == {5}
    assert set(tokens_drawn(weights.log(), min_p=0.6, top_p=0.6).tolist()) == {5, 11}


def test_top_p_of_a_vocabulary_longer_than_the_candidates():
    """A peaked row, which a few candidates decide, beside a flat one, for which all tokens must be looked at."""
    vocab_size = 3000
    logits = torch.zeros(2, vocab_size)
    logits[0, :100] = 20.0
    draws = [
        draw(position, **kind)
        for position in range(1500)
        for kind in ({"top_p": 0.495}, {"top_p": 0.75, "seed": 1})
    ]
    tokens = sample(logits.repeat(1500, 1), draws)
    kept = [set(tokens[0::2]), set(tokens[1::2])]
    assert kept[0] == set(range(50))
    assert max(kept[1]) < vocab_size * 0.75  # among equals the lower ids stay
    assert max(kept[1]) > vocab_size * 0.74


def test_filtered_row_does_not_depend_on_how_its_neighbours_are_sorted():
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(4))
    logits[0] *= 4
    for position in range(60):
        peaked, flat = draw(position, top_p=0.9, seed=2), draw(position, top_p=0.999, seed=3)
        assert sample(logits, [peaked, flat])[0] == sample(logits[:1], [peaked])[0]


def test_what_remains_keeps_its_proportions():
    logits_V = torch.log(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    found = tokens_drawn(logits_V, top_k=2).bincount(minlength=4) / 4000
    assert found.tolist() == pytest.approx([0.0, 0.0, 3 / 7, 4 / 7], abs=0.035)


def test_ends_of_the_uniform_range_find_tokens_that_have_a_weight(fixed_uniform):
    logits = torch.full((3, VOCAB_SIZE), -1e30)
    logits[:, 20:30] = 0.0
    rows = [draw(), draw(top_k=5), draw(top_p=0.5)]
    lengths = [10, 5, 5]
    expected = [20 + min(int(fixed_uniform * length), length - 1) for length in lengths]
    assert sample(logits, rows) == expected


@pytest.mark.parametrize("sampling", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_lowest_temperature_of_huge_logits_is_greedy(sampling):
    logits = random_logits(8) * 1e33
    drawn = sample(logits, [draw(row, temperature=MIN_TEMPERATURE, **sampling) for row in range(8)])
    assert drawn == logits.argmax(-1).tolist()


def test_smallest_top_p_is_greedy():
    logits = random_logits(8)
    drawn = sample(logits, [draw(row, top_p=1e-300) for row in range(8)])
    assert drawn == logits.argmax(-1).tolist()
