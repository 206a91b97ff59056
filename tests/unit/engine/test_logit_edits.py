from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from headrace.engine.logit_edits import LogitEdits
from headrace.engine.sequence import Sequence
from headrace.errors import InternalError, InvalidRequest
from headrace.sampling_params import SamplingParams

VOCAB_SIZE = 50  # not a multiple of the words of a mask
EOS = frozenset({1, 2})
NEVER = float("-inf")


class Alternating:
    """Allows even tokens, then odd ones, and so on."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def fresh(self) -> Alternating:
        return Alternating()

    def fill_mask(self, words: np.ndarray) -> None:
        words[:] = 0xAAAAAAAA if len(self.accepted) % 2 else 0x55555555

    def accept(self, token_id: int) -> None:
        if token_id % 2 != len(self.accepted) % 2:
            raise InternalError(f"token {token_id} is not allowed")
        self.accepted.append(token_id)


class Broken(Alternating):
    def fresh(self) -> Broken:
        return Broken()

    def fill_mask(self, words: np.ndarray) -> None:
        raise ValueError("no luck")


def sequence(prompt=(5,), output=(), constraint=None, **sampling) -> Sequence:
    return Sequence(
        "s",
        [*prompt, *output],
        len(prompt),
        SamplingParams(max_tokens=20, temperature=0.0, **sampling),
        root=b"",
        constraint=constraint,
    )


def random_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3


def edited(logits_NV: torch.Tensor, *sequences: Sequence, edits: LogitEdits | None = None) -> torch.Tensor:
    """What is left of the logits; no sequence has an error."""
    out = logits_NV.clone()
    assert (edits or LogitEdits(VOCAB_SIZE, EOS)).apply(out, sequences) == {}
    return out


def test_settings_that_are_off_change_nothing():
    logits = random_logits(2)
    assert torch.equal(edited(logits, sequence(output=(7, 7)), sequence()), logits)


def plain_penalties(logits_V: torch.Tensor, seq: Sequence) -> torch.Tensor:
    """One token after the other, as the settings are described."""
    out, sampling = logits_V.clone(), seq.sampling
    answer = seq.token_ids[seq.num_prompt_tokens :]
    for token in set(seq.token_ids):
        value = float(out[token])
        out[token] = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
    for token in set(answer):
        out[token] -= sampling.presence_penalty + sampling.frequency_penalty * answer.count(token)
    return out


def test_penalties_are_as_described_while_the_answer_grows():
    logits = random_logits(4)
    sequences = [
        sequence((3, 4, 4), repetition_penalty=1.5),
        sequence((3, 4), presence_penalty=0.7, frequency_penalty=-0.3),
        sequence((9,)),
        sequence((8, 8, 9), repetition_penalty=0.8, presence_penalty=-2.0, frequency_penalty=2.0),
    ]
    edits = LogitEdits(VOCAB_SIZE, EOS)
    for step in range(6):
        expected = torch.stack([plain_penalties(row, s) for row, s in zip(logits, sequences, strict=True)])
        assert torch.allclose(edited(logits, *sequences, edits=edits), expected, atol=1e-6)
        for number, seq in enumerate(sequences):
            seq.token_ids += [(number + step // 2) % VOCAB_SIZE, 4][: 1 + step % 2]


def test_nothing_is_kept_of_a_sequence_that_is_gone():
    edits = LogitEdits(VOCAB_SIZE, EOS)
    seq = sequence(presence_penalty=1.0, constraint=Alternating())
    edited(random_logits(1), seq, edits=edits)
    assert (len(edits._histories), len(edits._constraints)) == (1, 1)
    del seq
    gc.collect()
    assert (len(edits._histories), len(edits._constraints)) == (0, 0)


def test_bias_is_added_and_decides():
    logits = random_logits(2)
    out = edited(logits, sequence(logit_bias=((VOCAB_SIZE - 1, 100.0), (3, -1.5))), sequence())
    assert out[0].argmax() == VOCAB_SIZE - 1
    assert out[0, 3] == logits[0, 3] - 1.5
    assert torch.equal(out[1], logits[1])


def test_allowed_and_banned_tokens():
    logits = random_logits(2)
    out = edited(
        logits,
        sequence(allowed_token_ids=(4, 9, 30), banned_token_ids=(9,)),
        sequence(banned_token_ids=(0, 49), logit_bias=((49, 100.0),)),
    )
    assert out[0].isfinite().nonzero().flatten().tolist() == [4, 30]
    assert out[0, 4] == logits[0, 4]
    assert (~out[1].isfinite()).nonzero().flatten().tolist() == [0, 49]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_answer_does_not_end_before_min_tokens(ignore_eos):
    settings = {"min_tokens": 2, "stop_token_ids": (7,), "ignore_eos": ignore_eos}
    logits = random_logits(3)
    out = edited(logits, *(sequence(output=(5,) * n, **settings) for n in range(3)))
    for row in (0, 1):
        assert (out[row] == NEVER).nonzero().flatten().tolist() == [1, 2, 7]
    assert torch.equal(out[2], logits[2])


def test_constraint_sees_each_token_of_the_answer_once_and_no_token_of_the_prompt():
    edits, seq = LogitEdits(VOCAB_SIZE, EOS), sequence((1, 3), constraint=Alternating())
    for step, token in enumerate((4, 7, 20, 9)):
        out = edited(random_logits(1), seq, edits=edits)
        assert out[0].isfinite().nonzero().flatten().tolist() == list(range(step % 2, VOCAB_SIZE, 2))
        seq.token_ids.append(token)


def test_a_sequence_that_goes_on_after_an_earlier_attempt_is_where_that_was():
    seq = sequence((1,), output=(4, 7, 20), constraint=Alternating())
    assert edited(random_logits(1), seq)[0].isfinite().nonzero().flatten().tolist() == list(
        range(1, VOCAB_SIZE, 2)
    )


def test_a_constraint_that_fails_fails_its_own_sequence():
    logits = random_logits(3)
    wrong = sequence(output=(5,), constraint=Alternating())
    errors = LogitEdits(VOCAB_SIZE, EOS).apply(
        logits, [sequence(constraint=Broken()), wrong, sequence(constraint=Alternating())]
    )
    assert sorted(errors) == [0, 1]
    assert all(isinstance(error, InternalError) for error in errors.values())
    assert "no luck" in str(errors[0])
    assert "token 5 is not allowed" in str(errors[1])
    assert logits[2].isfinite().nonzero().flatten().tolist() == list(range(0, VOCAB_SIZE, 2))
    assert not logits[:2].isfinite().any()  # never unconstrained


def test_a_sequence_with_nothing_left_to_draw_fails_and_is_told_why():
    logits = random_logits(2)
    nothing = sequence(allowed_token_ids=(1, 2), min_tokens=3)
    errors = LogitEdits(VOCAB_SIZE, EOS).apply(logits, [nothing, sequence(banned_token_ids=(3,))])
    assert list(errors) == [0]
    assert isinstance(errors[0], InvalidRequest)
    assert "allowed_token_ids and min_tokens leave no token" in str(errors[0])
