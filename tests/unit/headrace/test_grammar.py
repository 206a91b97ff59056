"""What a grammar is refused for before any compiler sees it."""

import json

import pytest

from headrace.errors import InvalidRequest
from headrace.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind, check, choices, schema

SCHEMA, OBJECT, REGEX, CHOICE, LARK = (
    GrammarKind.JSON_SCHEMA,
    GrammarKind.JSON_OBJECT,
    GrammarKind.REGEX,
    GrammarKind.CHOICE,
    GrammarKind.LARK,
)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (SCHEMA, '{"type": "object"}'),
        (SCHEMA, "true"),
        (SCHEMA, ' {"const": "NaN", "minimum": -1.5e300} '),
        (OBJECT, ""),
        (REGEX, "a|b"),
        (REGEX, "<x>"),
        (CHOICE, '["yes", "no", "\\u00e9", "\\ud83d\\ude00", "<b>"]'),
        (LARK, 'start: "a" /b+/'),
        (LARK, 'start: "<[2]> \\" <" /<\\/b>/ // <[2]>\n# <|x|>\n'),
    ],
)
def test_what_is_taken(kind, text):
    grammar = Grammar(kind, text)
    assert check(grammar) is grammar


@pytest.mark.parametrize(
    ("kind", "text", "requirement"),
    [
        (SCHEMA, "", "every other kind has one"),
        (SCHEMA, "{", "must be valid JSON"),
        (SCHEMA, "{'a': 1}", "must be valid JSON"),
        (SCHEMA, '[{"type": "object"}]', "an object or a boolean"),
        (SCHEMA, '"object"', "an object or a boolean"),
        (SCHEMA, "1", "an object or a boolean"),
        (SCHEMA, "null", "an object or a boolean"),
        (SCHEMA, "false", "nothing matches"),
        (SCHEMA, '{"minimum": NaN}', "NaN is not a number of JSON"),
        (SCHEMA, '{"maximum": -Infinity}', "-Infinity is not a number of JSON"),
        (SCHEMA, '{"maximum": 1e999}', "1e999 is not a number of JSON"),
        (SCHEMA, '{"maximum": ' + "9" * 5000 + "}", "must be valid JSON"),
        (SCHEMA, '{"items":' * 5000 + "{}" + "}" * 5000, "nested too deeply"),
        (OBJECT, "{}", "json_object has no text"),
        (REGEX, "", "every other kind has one"),
        (REGEX, "a\ud800", "valid Unicode"),
        (CHOICE, "", "every other kind has one"),
        (CHOICE, "[]", "at least one string"),
        (CHOICE, "yes", "must be valid JSON"),
        (CHOICE, '"yes"', "at least one string"),
        (CHOICE, '["yes", ""]', "none of them empty"),
        (CHOICE, '["yes", 1]', "at least one string"),
        (CHOICE, '["yes", null]', "at least one string"),
        (CHOICE, "[NaN]", "NaN is not a number of JSON"),
        (CHOICE, '["\\ud800"]', "valid Unicode"),
        (LARK, "", "every other kind has one"),
        (LARK, "start: <[2]>", "tokens by id or name"),
        (LARK, 'start: "a" // "\n <|im_end|> // "', "tokens by id or name"),
        (LARK, 'start: /"/ <[0-9]> /"/', "tokens by id or name"),
    ],
)
def test_what_is_refused_names_the_field_and_says_why(kind, text, requirement):
    with pytest.raises(InvalidRequest, match=requirement) as caught:
        check(Grammar(kind, text))
    assert caught.value.field == "grammar"
    str(caught.value).encode()  # and the message can be sent


@pytest.mark.parametrize(
    ("kind", "around"),
    [(REGEX, "{}"), (SCHEMA, '{{"const": "{}"}}'), (CHOICE, '["{}"]'), (LARK, 'start: "{}"')],
)
def test_the_limit_counts_bytes(kind, around):
    limit = MAX_GRAMMAR_BYTES[kind]
    room = limit - len(around.format(""))
    check(Grammar(kind, around.format("a" * room)))
    with pytest.raises(InvalidRequest, match=f"{limit + 1} bytes.*at most {limit} bytes"):
        check(Grammar(kind, around.format("a" * (room - 1) + "é")))


def test_every_kind_has_a_limit():
    assert set(MAX_GRAMMAR_BYTES) == set(GrammarKind)


def test_readers_give_what_the_text_says():
    assert schema(Grammar(SCHEMA, '{"type": "integer"}')) == {"type": "integer"}
    assert schema(Grammar(SCHEMA, "true")) is True
    texts = ["a", 'b"\\\n', "😀"]
    assert choices(Grammar(CHOICE, json.dumps(texts))) == texts
