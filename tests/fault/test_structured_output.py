"""Structured output through whole workers: a grammar holds from the first token on, or the request fails."""

from __future__ import annotations

import asyncio
import json

import pytest

from headrace.directory.records import Role
from headrace.engine import structured
from headrace.errors import InternalError
from headrace.grammar import Grammar, GrammarKind
from tests.support.fleet import STEP_TOKENS, session_with, workers

P, D = Role.PREFILL, Role.DECODE
PROMPT = [3 + (7 * i) % 200 for i in range(2 * STEP_TOKENS + 3)]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "number": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["name", "number"],
    "additionalProperties": False,
}
BAD = {
    "a": Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"properties": {"foo": "bar"}})),
    "b": Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"$ref": "#/$defs/nowhere"})),
    "c": Grammar(GrammarKind.REGEX, r"\p{NoSuchClass}"),
    "d": Grammar(
        GrammarKind.LARK,
        "\n".join(["start: R0", *(f"R{i}: R{i + 1} R{i + 1}" for i in range(40)), 'R40: "a"']),
    ),
}


def text(answer) -> str:
    """The tiny model's tokens are bytes."""
    return bytes(token for token in answer.token_ids if token < 256).decode()


@pytest.mark.parametrize("is_split", [False, True])
async def test_answers_are_of_their_grammar_whatever_the_way(settings, is_split):
    grammars = {
        "schema": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
        "regex": Grammar(GrammarKind.REGEX, "[a-f]{3}-[0-9]{2}"),
        "choice": Grammar(GrammarKind.CHOICE, json.dumps(["left", "right"])),
        "lark": Grammar(GrammarKind.LARK, 'start: "<" /[x-z]{2,4}/ ">"'),
    }
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        prefill = [p] if is_split else []
        answers = await asyncio.gather(
            *(
                session.answer(
                    PROMPT,
                    prefill=prefill,
                    request_id=name,
                    grammar=grammar,
                    max_tokens=200,
                    temperature=1.0,
                    seed=3,
                )
                for name, grammar in grammars.items()
            )
        )
    found = dict(zip(grammars, answers, strict=True))
    assert {answer.finish_reasons[0] for answer in answers} == {"stop"}
    assert {answer.end.prefill_worker for answer in answers} == ({p.worker_id} if is_split else {""})
    value = json.loads(text(found["schema"]))
    assert set(value) == {"name", "number"}
    assert 0 <= value["number"] <= 99
    assert text(found["choice"]) in ("left", "right")
    assert text(found["lark"])[0] + text(found["lark"])[-1] == "<>"
    assert len(text(found["regex"])) == 6


@pytest.mark.parametrize("is_split", [False, True])
async def test_so_01_a_bad_grammar_is_refused_and_others_do_not_notice(settings, is_split):
    others = [PROMPT[n:] for n in range(3)]
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        prefill = [p] if is_split else []
        expected = [
            (await session.answer(prompt, max_tokens=24, ignore_eos=True)).token_ids for prompt in others
        ]
        running = [
            await session.start(prompt, request_id=f"other {n}", max_tokens=24, ignore_eos=True)
            for n, prompt in enumerate(others)
        ]
        for case, grammar in BAD.items():
            refused = await session.answer(PROMPT, prefill=prefill, request_id=f"bad {case}", grammar=grammar)
            assert refused.end.error_code == "INVALID_ARGUMENT", case
            assert "grammar" in refused.end.error_message
            assert refused.token_ids == []
        for answer, tokens in zip(running, expected, strict=True):
            async with asyncio.timeout(30):
                await answer.ended.wait()
            assert answer.token_ids == tokens


async def test_so_01_e_a_grammar_that_fails_after_admission_ends_its_own_request(settings, monkeypatch):
    def fails(self, row):
        raise InternalError("no mask")

    async with workers(settings, D) as [d], session_with(d) as session:
        expected = (await session.answer(PROMPT)).token_ids
        monkeypatch.setattr(structured.Constraint, "fill_mask", fails)
        other = await session.start(PROMPT, request_id="other")
        failed = await session.answer(PROMPT, request_id="failed", grammar=Grammar(GrammarKind.REGEX, "a+"))
        assert failed.end.error_code == "INTERNAL"
        assert "no mask" in failed.end.error_message
        assert failed.token_ids == []
        async with asyncio.timeout(30):
            await other.ended.wait()
        assert other.token_ids == expected


async def test_log_probabilities_are_the_same_whatever_the_way(settings):
    sampling = {"logprobs": 3, "temperature": 0.8, "seed": 5, "max_tokens": 6, "ignore_eos": True}
    async with workers(settings, P, D) as [p, d], session_with(d) as session:
        split = await session.answer(PROMPT, prefill=[p], **sampling)
        assert split.end.prefill_worker == p.worker_id
        alone = await session.answer(PROMPT, request_id="alone", **sampling)
        assert split.token_ids == alone.token_ids
        assert len(split.logprobs[0]) == 6
        assert split.logprobs[0] == pytest.approx(alone.logprobs[0], abs=1e-4)
