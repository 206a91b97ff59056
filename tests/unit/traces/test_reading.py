"""Trace files as people have them, good and bad."""

import gzip
import json
from pathlib import Path

import pytest

from headrace.errors import InvalidRequest
from headrace.traces.reading import read_trace
from headrace.traces.trace import TraceRequest

GOOD = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}


@pytest.fixture
def written(tmp_path: Path):
    def write(*rows, name="trace.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write


def test_mooncake(written):
    trace = read_trace(written(GOOD, {**GOOD, "timestamp": 3500, "hash_ids": [0, 2]}))
    assert (trace.name, trace.format, trace.block_tokens) == ("trace", "mooncake", 512)
    assert trace.requests == (TraceRequest(0.0, 600, 5, (0, 1)), TraceRequest(3.5, 600, 5, (0, 2)))


def test_compressed_or_not_it_is_the_same_trace(written):
    plain = written(GOOD)
    packed = plain.with_name("trace.jsonl.gz")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(packed) == read_trace(plain)


def test_mooncake_without_blocks(written):
    row = {name: value for name, value in GOOD.items() if name != "hash_ids"}
    assert not read_trace(written(row)).has_blocks


def test_sessions_of_mooncake_rows_wait_for_the_previous_answer(written):
    first = {**GOOD, "session_id": "a", "turn": 1, "delay_ms": 0}
    trace = read_trace(written(first, {**first, "turn": 2, "timestamp": 9000, "delay_ms": 4000}))
    assert [request.think_s for request in trace.requests] == [None, 4.0]
    assert trace.relative


def test_bailian(written):
    first = {"chat_id": 7, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 20, "output_length": 3}
    first |= {"type": "text", "turn": 1, "hash_ids": [4, 5]}
    following = {**first, "chat_id": 9, "parent_chat_id": 7, "timestamp": 8.25, "turn": 2}
    trace = read_trace(written(first, following, {**first, "chat_id": 8}))
    assert (trace.format, trace.block_tokens, trace.relative) == ("bailian", 16, False)
    assert [request.at_s for request in trace.requests] == [1.5, 8.25, 1.5]
    assert [request.session for request in trace.requests] == ["7", "7", "8"]


def entry(at_s, ids, **more):
    return {"t": at_s, "in": 64 * len(ids), "out": 3, "hash_ids": ids, "think_time": 2.5, **more}


def test_agentic(written):
    helper = {"t": 5.0, "type": "subagent", "requests": [entry(0.0, [1, 2]), entry(3.0, [1, 2, 5])]}
    session = {"id": "s", "block_size": 64, "requests": [entry(0.0, [1, 2]), helper, entry(9.0, [1, 2, 3])]}
    trace = read_trace(written(session, {**session, "id": "t", "requests": [entry(0.0, [1, 2])]}))
    assert (trace.format, trace.block_tokens, trace.relative) == ("agentic", 64, True)
    assert [request.at_s for request in trace.requests] == [0.0, 5.0, 8.0, 9.0, 0.0]
    assert [request.think_s for request in trace.requests] == [None, None, 2.5, 2.5, None]
    one, helps, goes_on, last, other = (request.blocks for request in trace.requests)
    assert one == helps == goes_on[:2] == last[:2]
    assert goes_on[2] != last[2]
    assert not set(one) & set(other), "ids are good within their session"


def test_agentic_ids_stand_for_what_is_before_them_too(written):
    trace = read_trace(written({"id": "s", "requests": [entry(0.0, [1, 2]), entry(1.0, [3, 2])]}))
    first, second = trace.requests
    assert first.blocks[1] != second.blocks[1]


def test_azure(written):
    lines = ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,374,44")
    trace = read_trace(written(*lines, "2023-11-16 18:15:50.9951690,396,109", name="trace.csv"))
    assert trace.requests == (TraceRequest(0.0, 374, 44), TraceRequest(pytest.approx(4.314579), 396, 109))


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"input_length": 0}, "input_length"),
        ({"input_length": "600"}, "input_length"),
        ({"input_length": True}, "input_length"),
        ({"output_length": -1}, "output_length"),
        ({"output_length": 1.5}, "output_length"),
        ({"timestamp": -1}, "timestamp"),
        ({"timestamp": None}, "timestamp"),
        ({"timestamp": float("nan")}, "timestamp"),
        ({"hash_ids": "0,1"}, "hash_ids"),
        ({"hash_ids": [0, -1]}, "hash_ids"),
        ({"hash_ids": [0, 1, 2]}, "hash_ids"),
    ],
)
def test_errors_name_line_and_field(written, bad, field):
    with pytest.raises(InvalidRequest, match=rf"trace.jsonl, line 3, {field}: "):
        read_trace(written(GOOD, "", {**GOOD, **bad}))


@pytest.mark.parametrize("field", ["timestamp", "input_length", "output_length"])
def test_a_missing_field_is_named(written, field):
    row = {name: value for name, value in GOOD.items() if name != field}
    with pytest.raises(InvalidRequest, match=rf"line 2, {field}: None is not allowed; it is missing"):
        read_trace(written(GOOD, row))


@pytest.mark.parametrize("line", ["{", "[1]", "7", '{"a":' * 50_000])
def test_what_is_no_object_is_named(written, line):
    with pytest.raises(InvalidRequest, match=r"line 2: .* it must be a JSON object"):
        read_trace(written(GOOD, line))


def test_a_bad_row_of_azure_is_named(written):
    header = "TIMESTAMP,ContextTokens,GeneratedTokens"
    for row in (
        "yesterday,1,2",
        "2023-11-16 18:15:46,1",
        "2023-11-16 18:15:46,0,2",
        "2023-11-16 18:15:46,x,2",
    ):
        with pytest.raises(InvalidRequest, match="line 2, "):
            read_trace(written(header, row))


def test_bad_sessions_are_named(written):
    for session in ({"requests": 3}, {"requests": [3]}, {"requests": [entry(0.0, [1], out="x")]}):
        with pytest.raises(InvalidRequest, match=r"line 1, (requests|out)"):
            read_trace(written(session))


def test_files_that_can_not_be_read(written, tmp_path):
    with pytest.raises(InvalidRequest, match="no requests"):
        read_trace(written(""))
    with pytest.raises(InvalidRequest, match="can not be read"):
        read_trace(tmp_path / "missing")
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(b"{}" * 1000)[:30])
    with pytest.raises(InvalidRequest, match="can not be read"):
        read_trace(cut)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequest, match="UTF-8"):
        read_trace(binary)
