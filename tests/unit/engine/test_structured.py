"""Grammars keep answers in their form, in real vocabularies and small ones, and fail alone and in time."""

import json
import random
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine import structured
from headrace.engine.structured import Constraint, GrammarCompiler
from headrace.errors import InternalError, InvalidRequest, ModelError, Overloaded
from headrace.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from headrace.tokenizer import load_tokenizer

EOS, OTHER_EOS, CONTROL, QUOTED = 256, 258, 257, 259
WORDS = {QUOTED: b'{"', 260: b'":', 261: b'"}', 262: b"ab"}
VOCAB_SIZE = 300  # 37 more rows of logits than tokens, and no multiple of 32
LONG_S = 60.0  # longer than any compilation here
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["α", "b\n", 'c"']}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                "up": {"$ref": "#/$defs/place"},
            },
            "required": ["zip"],
            "additionalProperties": False,
        }
    },
}


class ByteTokens:
    """Every byte, a few words, two ends of text and a control token."""

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return WORDS.get(token_id, b"")


def compiler(tokenizer=None, made=GrammarCompiler, **options) -> GrammarCompiler:
    eos = frozenset({EOS, OTHER_EOS})
    return made(tokenizer or ByteTokens(), vocab_size=VOCAB_SIZE, eos_token_ids=eos, **options)


@pytest.fixture(scope="module")
def small():
    return compiler()


def json_schema(value) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def choice(*texts: str) -> Grammar:
    return Grammar(GrammarKind.CHOICE, json.dumps(texts))


def lark(text: str) -> Grammar:
    return Grammar(GrammarKind.LARK, text)


ANY_OBJECT = Grammar(GrammarKind.JSON_OBJECT, "")
ENDS = {EOS, OTHER_EOS}


def bits(row: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def words(vocab_size: int = VOCAB_SIZE) -> int:
    return -(-vocab_size // 32)


def allowed(constraint: Constraint, vocab_size: int = VOCAB_SIZE) -> list[int]:
    row = np.full(words(vocab_size), 0xFFFFFFFF, dtype=np.uint32)
    constraint.fill_mask(row)
    return bits(row)


def spell(constraint: Constraint, text: str) -> Constraint:
    for byte in text.encode():
        constraint.accept(byte)
    return constraint


def takes(constraint: Constraint, text: str) -> bool:
    """Whether the text, byte by byte, is a whole answer."""
    constraint = constraint.fresh()
    for byte in text.encode():
        if byte not in allowed(constraint):
            return False
        constraint.accept(byte)
    ends = ENDS & set(allowed(constraint))
    assert ends in (set(), ENDS)
    return bool(ends)


# --- what each kind allows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (json_schema({"type": "integer"}), ["0", "-12"], ["", "1.5", "01", "a", '"1"']),
        (json_schema(True), ["null", "[1,\n2]", '"x"', "{}"], ["", "nul", "[1,]"]),
        (json_schema({"enum": ["a", 1, None]}), ['"a"', "1", "null"], ["a", "2"]),
        (json_schema(PERSON),
         ['{"name":"é","age":3,"home":null}', '{ "name": "x", "age": 0, "home": {"zip": "01234"} }'],
         ['{"name":"","age":3,"home":null}', '{"name":"x","age":151,"home":null}', '{"name":"x","age":1}']),
        (ANY_OBJECT, ["{}", '{"a":[{"b":1e5}],"c":"\\n\\u0001"}'], ["[]", "1", '{"a"}', "{'a':1}"]),
        (regex("ab?(c|d)*"), ["a", "ab", "abcdc", "ad"], ["", "b", "abb"]),
        (regex('a/b"\\d\n'), ['a/b"7\n'], ['a/b"7', "a"]),
        (regex("<x>é"), ["<x>é"], ["<x>e"]),
        (regex("^a$"), ["a"], ["", "aa"]),
        (choice("yes", "no", "yes please"), ["yes", "no", "yes please"], ["", "y", "yes p", "maybe"]),
        (choice('q"\\/\n\x00\x7f<b>'), ['q"\\/\n\x00\x7f<b>'], ['q"']),
        (lark('start: "(" start ")" | /x+/'), ["x", "((xx))"], ["", "(x", "()"]),
        (lark('start: "a" %json {"type": "null"}'), ["anull"], ["a", "null"]),
    ],
)  # fmt: skip
def test_answers_of_each_kind(small, grammar, good, bad):
    constraint = small.compile(grammar)
    assert [text for text in good if not takes(constraint, text)] == []
    assert [text for text in bad if takes(constraint, text)] == []


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=6), other=TEXTS)
def test_any_choice_is_spelled_as_it_stands(small, texts, other):
    constraint = small.compile(choice(*texts))
    assert all(takes(constraint, text) for text in texts)
    assert takes(constraint, other) == (other in texts)


def test_any_tokens_that_spell_the_text_are_allowed(small):
    constraint = small.compile(json_schema({"const": {"ab": 1}}))
    assert {ord("{"), QUOTED} <= set(allowed(constraint))
    spell(constraint, '{"')
    assert allowed(constraint) == [ord("a"), 262]


def test_blanks_between_json_tokens_are_bounded(small):
    constraint = spell(small.compile(ANY_OBJECT), "{" + "\n" * 40)
    assert ord("\n") not in allowed(constraint)
    assert takes(constraint, "{" + "\n" * 40 + "}")


def test_a_schema_can_forbid_blanks_and_not_ask_to_be_ignored(small):
    compact = {"type": "object", "x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None}}
    assert ord("\n") not in allowed(spell(small.compile(json_schema(compact)), "{"))
    ignored = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        small.compile(json_schema(ignored))


# --- ends of text and ids without a text -----------------------------------------------------------------------------


def test_ends_of_text_are_allowed_exactly_where_the_answer_is_complete(small):
    constraint = small.compile(regex("ab?"))
    assert allowed(constraint) == [ord("a"), 262]
    constraint.accept(ord("a"))
    assert allowed(constraint) == [ord("b"), EOS, OTHER_EOS]
    assert not constraint.is_finished
    constraint.accept(ord("b"))
    assert allowed(constraint) == [EOS, OTHER_EOS]
    assert constraint.is_finished


@pytest.mark.parametrize("end", sorted(ENDS))
@pytest.mark.parametrize("text", ["a", "ab"])
def test_every_end_of_text_ends_the_answer(small, end, text):
    constraint = spell(small.compile(regex("ab?")), text)
    constraint.accept(end)
    assert constraint.is_finished
    assert set(allowed(constraint)) == ENDS
    with pytest.raises(InternalError):
        constraint.accept(ord("b"))


@pytest.mark.parametrize("token_id", [EOS, OTHER_EOS, CONTROL, 299, ord("b"), -1, VOCAB_SIZE, 2**40])
def test_a_token_that_is_not_allowed_is_an_error_and_stays_one(small, token_id):
    constraint = small.compile(regex("ab?"))
    with pytest.raises(InternalError):
        constraint.accept(token_id)
    assert not constraint.is_finished
    if 0 <= token_id < VOCAB_SIZE:
        row = np.full(words(), 0xFFFFFFFF, dtype=np.uint32)
        with pytest.raises(InternalError):
            constraint.fill_mask(row)
        assert bits(row) == []


@pytest.mark.parametrize(
    "grammar", [json_schema({"type": "string"}), regex("(?s:.)*"), lark("start: /(.|\\n)+/")]
)
def test_ids_without_a_text_are_never_allowed(small, grammar):
    constraint = small.compile(grammar)
    for text in ("", '"a'):
        found = allowed(spell(constraint.fresh(), text))
        assert len(found) > 1
        assert CONTROL not in found
        assert max(found) <= max(WORDS)


def test_an_end_of_text_that_has_a_text_is_no_text():
    class Marked(ByteTokens):
        def token_bytes(self, token_id):
            return b"<end>" if token_id == EOS else super().token_bytes(token_id)

    constraint = compiler(Marked()).compile(json_schema({"type": "string"}))
    assert EOS not in allowed(spell(constraint, '"x'))


def test_a_model_without_an_end_of_text_is_refused():
    with pytest.raises(ModelError, match="end-of-text"):
        GrammarCompiler(ByteTokens(), vocab_size=VOCAB_SIZE, eos_token_ids=frozenset())


def test_rows_of_another_form_are_refused(small):
    constraint = small.compile(ANY_OBJECT)
    with pytest.raises(ValueError, match="size"):
        constraint.fill_mask(np.zeros(words() + 1, dtype=np.uint32))
    for wrong in (np.zeros(words(), np.int64), np.zeros(words() * 2, np.uint32)[::2]):
        with pytest.raises(AssertionError):
            constraint.fill_mask(wrong)


# --- random answers in real vocabularies -----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["model_files", "tiny_model_files"])
def model(request):
    """A GGUF file, and a folder with tokenizer.json."""
    files = request.getfixturevalue(request.param)
    tokenizer = load_tokenizer(files)
    vocab_size = files.config.vocab_size + 50
    made = GrammarCompiler(tokenizer, vocab_size=vocab_size, eos_token_ids=files.eos_token_ids)
    return made, tokenizer, vocab_size, files.eos_token_ids


def random_answer(model, grammar: Grammar, seed: int) -> str:
    """Prefers to end, and what closes JSON, so that an end comes."""
    made, tokenizer, vocab_size, eos_token_ids = model
    rng = random.Random(seed)
    constraint, data = made.compile(grammar), b""
    for length in range(3000):
        candidates = allowed(constraint, vocab_size)
        assert candidates
        ending = eos_token_ids.intersection(candidates)
        if ending and (constraint.is_finished or rng.random() < 0.2):
            constraint.accept(min(ending))
            assert constraint.is_finished
            return data.decode()
        texts = {t: tokenizer.token_bytes(t) for t in candidates if t not in ending}
        closing = [t for t, text in texts.items() if text in (b'"', b"}", b"]")]
        token_id = rng.choice(closing if closing and rng.random() < length / 100 else list(texts))
        assert texts[token_id]
        constraint.accept(token_id)
        data += texts[token_id]
    raise AssertionError(f"no end: {data!r}")


@pytest.mark.parametrize("seed", range(8))
def test_random_answers_match_their_schema(model, seed):
    answer = json.loads(random_answer(model, json_schema(PERSON), seed))
    jsonschema.validate(answer, PERSON)


@pytest.mark.parametrize("seed", range(4))
def test_random_answers_are_json_objects(model, seed):
    assert isinstance(json.loads(random_answer(model, ANY_OBJECT, seed)), dict)


@pytest.mark.parametrize("seed", range(4))
def test_random_answers_match_their_expression(model, seed):
    expression = r"[a-z]{2,8}(-[0-9]+){1,3}( ünï| 漢字)?"
    assert re.fullmatch(expression, random_answer(model, regex(expression), seed))


@pytest.mark.parametrize("seed", range(4))
def test_random_answers_are_one_of_the_choices(model, seed):
    texts = ["yes", "no", "not sure", "naïve 🙂"]
    assert random_answer(model, choice(*texts), seed) in texts


@pytest.mark.parametrize("seed", range(4))
def test_random_answers_match_their_lark_grammar(model, seed):
    grammar = lark('start: sum\nsum: NUMBER ("+" sum)?\nNUMBER: /[1-9][0-9]{0,3}/')
    assert re.fullmatch(r"[1-9][0-9]{0,3}(\+[1-9][0-9]{0,3})*", random_answer(model, grammar, seed))


# --- sequences -------------------------------------------------------------------------------------------------------

HALF = '{"name":"ab","age":3,"tags":["'


def test_children_go_their_own_way(small):
    first = spell(small.compile(regex("(abc|xyz)")), "ab")
    second = spell(first.fresh(), "x")
    assert allowed(first) == [ord("c")]
    assert allowed(second) == [ord("y")]


# --- SO-01: grammars that are bad, late or too much ------------------------------------------------------------------


def refused(made: GrammarCompiler, grammar: Grammar, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        made.compile_within(grammar, LONG_S)
    assert caught.value.field == "grammar"
    assert "\n" not in caught.value.requirement


def test_so_01_a_bad_properties(small):
    refused(small, json_schema({"properties": {"foo": "bar"}}), "must be an object or boolean")


@pytest.mark.parametrize(
    "target", ["#/$defs/none", "#/properties/x", "https://example.org/schema", "other.json"]
)
def test_so_01_b_unresolved_reference(small, target):
    refused(small, json_schema({"properties": {"a": {"$ref": target}}}), "can not be compiled")


@pytest.mark.parametrize("pattern", ["\\y", "(", "[a", "a{2,1}", "(?=a)b", "(a)\\1", "\\bfoo"])
def test_so_01_c_bad_pattern(small, pattern):
    refused(small, regex(pattern), "can not be compiled")
    refused(small, json_schema({"type": "string", "pattern": pattern}), "can not be compiled")


@pytest.mark.parametrize(
    "value",
    [
        {"type": "strang"},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"not": {"type": "string"}},
        {"$ref": "#"},
        {"x-guidance": 3},
    ],
)
def test_schemas_that_nothing_could_keep_are_refused(small, value):
    refused(small, json_schema(value), "can not be compiled")


@pytest.mark.parametrize(
    "text", ["start", "start: x", 'begin: "a"', "start: start", "start: @answer", 'start: "a" & "b"']
)
def test_bad_lark_is_refused(small, text):
    refused(small, lark(text), "can not be compiled")


def chain(line: str, last: str) -> str:
    """As many rules that each need the next as a grammar has room for."""
    lines, room = ["start: R0"], MAX_GRAMMAR_BYTES[GrammarKind.LARK] - 100
    while room > 0:
        number = len(lines)
        lines.append(line.replace("<", f"R{number - 1}").replace(">", f"R{number}"))
        room -= len(lines[-1]) + 1
    return "\n".join([*lines, f"R{len(lines) - 1}: {last}"])


TOO_MUCH = {
    "deep schema": json_schema(json.loads('{"items":' * 200 + "{}" + "}" * 200)),
    "product of alternatives": json_schema(
        {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {"type": "null"}}} for j in range(4)]} for i in range(12)]}
    ),
    "nested expression": regex("(" * 5000 + "a" + ")" * 5000),
    "optional repeated": regex("(a|b?)" * 2000),
    "doubling": lark("start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(40)) + '\nR40: "a"'),
    "nested lark": lark("start: " + "(" * 8000 + '"a"' + ")" * 8000),
}  # fmt: skip

MUCH = {
    "repetition": regex("a{1000000}"),
    "nested repetition": regex("((a{1000}){1000}){1000}"),
    "nested quantifiers": regex("(((a*)*)*b?)*"),
    "long string": json_schema({"type": "string", "maxLength": 10**9}),
    "long array": json_schema({"type": "array", "minItems": 10**6, "items": {"type": "array", "minItems": 10**6}}),
    "reference tree": json_schema(
        {
            "$defs": {f"d{i}": {"properties": {k: {"$ref": f"#/$defs/d{i + 1}"} for k in "xy"}} for i in range(30)}
            | {"d30": {"type": "integer"}},
            "$ref": "#/$defs/d0",
        }
    ),
    "many tools": json_schema(
        {"anyOf": [{"properties": {f"k{i}": {"type": "integer"} for i in range(12)}, "required": [f"k{i % 12}"]}
                   for i in range(120)]}
    ),
    "long chain": lark(chain("<: >", '"a"')),
    "long chain of groups": lark(chain('<: (((((((((((("b" >))))))))))))', '"a"')),
    "long chain of references": json_schema(
        {"$defs": {**{f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1700)}, "d1700": {"type": "null"}},
         "$ref": "#/$defs/d0"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_MUCH)
def test_so_01_d_explosions_are_refused_in_time(small, name):
    refused(small, TOO_MUCH[name], "can not be compiled|nested too deeply")


@pytest.mark.parametrize(
    "divisors", [[7, 11, 13, 17, 19, 23], [200_001], [0.0000007, 0.3], [0.01, 0.07, 0.11, 130, 17]]
)
def test_so_01_d_divisors_that_no_limit_of_the_compiler_bounds_are_refused(small, divisors):
    refused(small, json_schema({"allOf": [{"multipleOf": divisor} for divisor in divisors]}), "least common")


def test_divisors_that_are_usual_are_served(small):
    schema = {"type": "number", "allOf": [{"multipleOf": 0.05}, {"multipleOf": 1.5}, {"multipleOf": 2}]}
    constraint = small.compile_within(json_schema(schema), LONG_S)
    assert takes(constraint, "6")
    assert not takes(constraint, "3")


@pytest.mark.parametrize("name", MUCH)
def test_so_01_d_what_only_looks_like_an_explosion_is_served(small, name):
    """In particular it neither overflows a stack, nor does a step need to know the whole."""
    constraint = small.compile_within(MUCH[name], LONG_S)
    for _ in range(20):
        constraint.accept(allowed(constraint)[-1])
        if constraint.is_finished:
            break


def test_so_01_d_an_ambiguous_grammar_ends_when_its_steps_get_too_large(small):
    constraint = small.compile(lark('start: x\nx: x x | "a" | x "a" x | ""'))
    with pytest.raises(InternalError, match="items"):
        for _ in range(1000):
            constraint.accept(ord("a"))


class Panic(BaseException):
    """What PyO3 makes of a panic in Rust is no Exception either."""


@pytest.mark.parametrize("error", [Panic("boom"), RuntimeError("boom")])
def test_so_01_e_a_compiler_that_breaks_fails_the_one_request(small, monkeypatch, error):
    def broken(*args, **options):
        raise error

    grammar, waiting = choice("broken", type(error).__name__), spell(small.compile(regex("ab")), "a")
    with monkeypatch.context() as patched:
        patched.setattr(llguidance, "LLMatcher", broken)
        with pytest.raises(InternalError, match="boom"):
            small.compile_within(grammar, LONG_S)
        assert allowed(waiting) == [ord("b")]
    assert takes(small.compile_within(grammar, LONG_S), "broken")


HEAVY = regex("(.*x.{12}){3}")


@pytest.fixture
def weak(monkeypatch):
    """Gives up after few states of the lexer, which sequences of one grammar share."""
    monkeypatch.setitem(structured._LIMITS, "max_lexer_states", 200)
    return compiler()


def exhaust(constraint: Constraint) -> None:
    rng = random.Random(1)
    for _ in range(5000):
        constraint.accept(rng.choice([t for t in allowed(constraint) if t not in ENDS]))


def test_so_01_e_a_matcher_that_fails_later_fails_its_own_sequence_only(weak):
    doomed, waiting = weak.compile(HEAVY), spell(weak.compile(HEAVY), "ax")
    expected = allowed(waiting)
    with pytest.raises(InternalError, match="too many states"):
        exhaust(doomed)
    row = np.full(words(), 0xFFFFFFFF, dtype=np.uint32)
    with pytest.raises(InternalError):
        doomed.fill_mask(row)
    assert bits(row) == []
    assert not doomed.is_finished
    assert allowed(waiting) == expected
    waiting.accept(ord("b"))
    assert allowed(weak.compile(HEAVY)) == allowed(doomed.fresh()) == expected


# --- compiling in time -----------------------------------------------------------------------------------------------


class Gated(GrammarCompiler):
    """Compiles when the gate is open, and counts."""

    def __init__(self, *args, **options):
        self.gate = threading.Event()
        self.begun = threading.Semaphore(0)
        self.num_builds = 0
        super().__init__(*args, **options)

    def _matcher(self, definition):
        self.num_builds += 1
        self.begun.release()
        assert self.gate.wait(LONG_S)
        return super()._matcher(definition)


def compiling_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "grammar-compiler"]


@pytest.fixture
def gated():
    made: list[Gated] = []

    def make(**options):
        made.append(compiler(made=Gated, **options))
        return made[-1]

    yield make
    for one in made:
        one.gate.set()
    for thread in compiling_threads():
        thread.join(LONG_S)


def test_a_compilation_past_its_time_is_refused_and_its_result_kept(gated):
    made = gated()
    with pytest.raises(InvalidRequest, match="takes too long to compile"):
        made.compile_within(regex("a"), 0.01)
    with pytest.raises(InvalidRequest, match="takes too long to compile"):
        made.compile_within(regex("a"), LONG_S * 1000)  # known to be late: nobody waits for it again
    made.gate.set()
    for thread in compiling_threads():
        thread.join(LONG_S)
    assert takes(made.compile_within(regex("a"), 0.0), "a")
    assert made.num_builds == 1


def test_stuck_compilers_do_not_pile_up(gated):
    made = gated(num_compilers=2)
    for text in "ab":
        with pytest.raises(InvalidRequest):
            made.compile_within(regex(text), 0.01)
    for text in "cdef":
        with pytest.raises(Overloaded):
            made.compile_within(regex(text), LONG_S * 1000)  # at once
    assert len(compiling_threads()) == 2
    made.gate.set()
    for thread in compiling_threads():
        thread.join(LONG_S)
    assert takes(made.compile_within(regex("c"), LONG_S), "c")


def test_a_busy_compiler_is_waited_for(gated):
    made = gated(num_compilers=1)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(made.compile_within, regex("a"), LONG_S)
        assert made.begun.acquire(timeout=LONG_S)
        with pytest.raises(Overloaded):
            made.compile_within(regex("b"), 0.01)
        second = pool.submit(made.compile_within, regex("b"), LONG_S)
        assert not second.done()
        made.gate.set()
        assert takes(first.result(LONG_S), "a")
        assert takes(second.result(LONG_S), "b")


def test_the_same_grammar_is_compiled_once(gated):
    made = gated()
    with ThreadPoolExecutor(4) as pool:
        requests = [pool.submit(made.compile_within, regex("a"), LONG_S) for _ in range(4)]
        made.gate.set()
        assert all(takes(request.result(LONG_S), "a") for request in requests)
    assert made.num_builds == 1


def test_refused_grammars_leave_no_compiler_busy():
    made = compiler(num_compilers=1)
    for _ in range(3):
        refused(made, regex("("), "can not be compiled")
    assert takes(made.compile_within(regex("a"), LONG_S), "a")


def test_the_least_recently_used_grammar_is_forgotten(gated):
    made = gated(max_cached=2)
    made.gate.set()
    for text in "abac":
        made.compile(regex(text))
    assert made.num_builds == 3
    made.compile(regex("a"))
    assert made.num_builds == 3
    made.compile(regex("b"))
    assert made.num_builds == 4


def test_other_threads_run_while_a_grammar_compiles():
    """Threads switch here only where one lets the interpreter go by itself."""

    class Watched(GrammarCompiler):
        inside = False

        def _matcher(self, definition):
            begun.set()
            self.inside = True
            matcher = super()._matcher(definition)
            self.inside = False
            return matcher

    begun = threading.Event()
    made = compiler(made=Watched)
    large = json_schema({"properties": {f"k{i}": {"enum": [f"a{i}", f"b{i}"]} for i in range(500)}})
    interval = sys.getswitchinterval()
    with ThreadPoolExecutor() as pool:
        sys.setswitchinterval(LONG_S)
        try:
            request = pool.submit(made.compile_within, large, LONG_S)
            assert begun.wait(LONG_S)
            seen_inside = made.inside
            request.result(LONG_S)
        finally:
            sys.setswitchinterval(interval)
    assert seen_inside
    assert not made.inside
