"""The engine has no roles: it does not know why a sequence leaves early or where its KV goes."""

import re
from pathlib import Path

import pytest

ENGINE_DIR = Path(__file__).parents[2] / "headrace" / "engine"

_ROLE_WORD = re.compile(
    r"(?<![a-z])(prefill[ _-]?workers?|decode[ _-]?workers?|leases?|transports?)(?![a-z])", re.IGNORECASE
)
_CAMEL_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")


def role_words(text: str) -> list[str]:
    return _ROLE_WORD.findall(_CAMEL_HUMP.sub(" ", text))


@pytest.mark.parametrize(
    "text", ["a prefill worker", "decode_worker", "DecodeWorker", "ReaderLease", "lease_id", "Transports"]
)
def test_role_words_are_recognised(text):
    assert role_words(text)


@pytest.mark.parametrize(
    "text", ["release(sequence)", "prefill", "the worker's decode batch", "num_decode", "Released"]
)
def test_other_words_are_left_alone(text):
    assert role_words(text) == []


def test_engine_has_no_role_words():
    sources = sorted(ENGINE_DIR.rglob("*.py"))
    assert sources
    found = [
        f"{path.relative_to(ENGINE_DIR)}:{number}: {', '.join(words)}"
        for path in sources
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if (words := role_words(line))
    ]
    assert found == []
