"""Text deltas and stop strings."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.tokenizer import IncrementalDetokenizer


class ByteTokens:
    """Token i is the byte i; 256 and up are control tokens."""

    def __init__(self, strips_leading_space: bool = False) -> None:
        self.strips_leading_space = strips_leading_space

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def shown_bytes(self, token_id: int) -> bytes:
        return self.token_bytes(token_id) or f"<{token_id}>".encode()


class ListedTokens:
    """Token i is the i-th of the given texts."""

    strips_leading_space = False

    def __init__(self, *texts: str) -> None:
        self._texts = texts

    def token_bytes(self, token_id: int) -> bytes:
        return self._texts[token_id].encode()

    shown_bytes = token_bytes


def run(tokens, chunks, stops=()):
    """All deltas, the last of them from `finish`, and whether a stop string was met."""
    text = IncrementalDetokenizer(tokens, stops)
    deltas = [text.push(chunk) for chunk in chunks]
    return [*deltas, text.finish()], text.stopped


def one_by_one(text: str | bytes) -> list[list[int]]:
    return [[byte] for byte in (text.encode() if isinstance(text, str) else text)]


def test_a_control_token_shows_where_it_is_asked_for():
    text = IncrementalDetokenizer(ByteTokens(), ["b<257>"], shown={257})
    assert text.push([97, 256, 257, 98]) == "a<257>"
    assert text.push([256, 257]) == ""
    assert text.stopped


LETTERS = "ABCDEFGHIJKL"


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (["DEFGHIJ"], "ABC"),
        (["FGX", "GH"], "ABCDEF"),
        ([LETTERS], ""),
        ([LETTERS + "M"], LETTERS),
        (["A"], ""),
        (["L"], "ABCDEFGHIJK"),
        (["DEF", "CDEF"], "AB"),  # they end together: the longer one
        (["CDEFG", "DE"], "ABC"),  # DE ends first
        (["B", "BC"], "A"),
        ([], LETTERS),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 5, len(LETTERS)])
def test_st_01_text_ends_before_the_stop_string(stops, expected, size):
    data = list(LETTERS.encode())
    chunks = [data[i : i + size] for i in range(0, len(data), size)]
    deltas, stopped = run(ByteTokens(), chunks, stops)
    assert "".join(deltas) == expected
    assert stopped == any(stop in LETTERS for stop in stops)


def test_st_01_only_what_may_become_a_stop_string_is_held_back():
    deltas, _ = run(ByteTokens(), one_by_one("ABDEDEFX"), ["DEFG"])
    assert deltas == ["A", "B", "", "", "DE", "", "", "DEFX", ""]


def test_st_01_what_was_held_back_comes_when_the_answer_ends():
    deltas, stopped = run(ByteTokens(), one_by_one("ABCDEF"), ["DEFG"])
    assert deltas[-1] == "DEF"
    assert not stopped


def test_st_01_a_stop_string_that_restarts_within_itself_is_found():
    deltas, stopped = run(ByteTokens(), one_by_one("xababac!"), ["abac"])
    assert ("".join(deltas), stopped) == ("xab", True)


def test_st_01_nothing_comes_after_the_stop():
    deltas, _ = run(ListedTokens("one STOP two", " three"), [[0], [1]], ["STOP"])
    assert deltas == ["one ", "", ""]


@pytest.mark.parametrize("text", ["é", "삼겹살", "🙂", "👩‍👩‍👧‍👦"])
def test_st_03_a_character_over_several_tokens_comes_whole(text):
    deltas, _ = run(ByteTokens(), one_by_one(text))
    assert "".join(deltas) == text
    assert all(len(delta) <= 1 for delta in deltas)
    assert "\ufffd" not in "".join(deltas)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_st_03_a_character_cut_by_the_end_is_one_replacement_at_the_end(kept):
    deltas, _ = run(ByteTokens(), one_by_one(b"a" + "🙂".encode()[:kept]))
    assert deltas == ["a", *[""] * kept, "\ufffd"]


def test_st_03_a_lone_bad_byte_is_one_replacement_and_does_not_stall():
    deltas, _ = run(ByteTokens(), one_by_one(b"a\xffb\xc3("))
    assert deltas == ["a", "\ufffd", "b", "", "\ufffd(", ""]


def test_st_03_a_stop_string_with_an_emoji_matches():
    deltas, stopped = run(ByteTokens(), one_by_one("so 👩‍👧 it is"), ["👩‍👧 i"])
    assert ("".join(deltas), stopped) == ("so ", True)


def test_control_tokens_give_no_text_and_break_nothing():
    first, second = "é".encode()
    deltas, _ = run(ByteTokens(), [[300], [first], [300], [second, 300], [65]])
    assert deltas == ["", "", "", "é", "A", ""]


@pytest.mark.parametrize(
    ("data", "expected"), [(b" Hi", "Hi"), (b"  Hi", " Hi"), (b"Hi you", "Hi you"), (b" ", ""), (b"", "")]
)
def test_the_space_that_sentence_piece_puts_in_front_goes_once(data, expected):
    for chunks in (one_by_one(data), [list(data)], [[300], *one_by_one(data)]):
        deltas, _ = run(ByteTokens(strips_leading_space=True), chunks)
        assert "".join(deltas) == expected


def chunked(data: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(edges)]


BYTES = st.one_of(
    st.lists(st.integers(0, 260)),
    st.text(st.sampled_from("ab é🙂\ufffd")).map(lambda text: list(text.encode())),
)
CUTS = st.lists(st.integers(0, 1000), max_size=8)


@given(data=BYTES, cuts=CUTS, strips=st.booleans())
def test_deltas_add_up_to_the_whole_text_for_any_chunks(data, cuts, strips):
    whole = bytes(byte for byte in data if byte < 256)
    whole = whole.removeprefix(b" ") if strips else whole
    deltas, _ = run(ByteTokens(strips), chunked(data, cuts))
    assert "".join(deltas) == whole.decode("utf-8", "replace")
    assert all(delta == delta.encode().decode() for delta in deltas)


def cut_before_first_stop(text: str, stops: list[str]) -> str:
    """The definition, tried at each length of the text."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


STOPS = st.lists(st.text(st.sampled_from("abé🙂"), min_size=1, max_size=4), max_size=3)


@given(text=st.text(st.sampled_from("abé🙂"), max_size=30), cuts=CUTS, stops=STOPS)
def test_stop_strings_cut_at_the_same_place_for_any_chunks(text, cuts, stops):
    deltas, stopped = run(ByteTokens(), chunked(list(text.encode()), cuts), stops)
    assert "".join(deltas) == cut_before_first_stop(text, stops)
    assert stopped == any(stop in text for stop in stops)


@given(text=st.text(st.sampled_from("abé🙂"), max_size=30), stops=STOPS)
def test_no_more_is_held_back_than_may_become_a_stop_string(text, stops):
    answer = IncrementalDetokenizer(ByteTokens(), stops)
    sent = ""
    for end in range(1, len(text) + 1):
        sent += answer.push(list(text[end - 1].encode()))
        if answer.stopped:
            return
        held = text[len(sent) : end]
        assert not held or any(stop.startswith(held) for stop in stops)
