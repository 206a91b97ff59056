from __future__ import annotations

import pytest
import torch

from headrace.engine.logprobs import logprobs


def test_logprobs_are_those_of_the_softmax():
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)) * 5
    expected = logits.log_softmax(-1)
    found = logprobs(logits, [3, 0, 39], [0, 5, 2])
    for row, (token_id, number) in enumerate(((3, 0), (0, 5), (39, 2))):
        assert found[row].token_id == token_id
        assert found[row].logprob == pytest.approx(float(expected[row, token_id]), abs=1e-5)
        ids = [i for i, _ in found[row].top]
        assert ids == expected[row].topk(number).indices.tolist()
        assert [v for _, v in found[row].top] == pytest.approx(expected[row, ids].tolist(), abs=1e-5)


def test_more_than_the_vocabulary():
    assert len(logprobs(torch.zeros(1, 4), [0], [20])[0].top) == 4
