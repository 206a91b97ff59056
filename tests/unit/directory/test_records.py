"""Records and events: there and back, and nothing that is garbled gets through or raises."""

import json

import pytest
from structlog.testing import capture_logs

from headrace.directory.records import (
    DirectoryEvent,
    EventKind,
    Role,
    RouterShare,
    event_from_fields,
    event_to_fields,
    record_from_json,
    record_to_json,
)
from headrace.tier import Tier
from tests.support.directory_samples import RECORD, digest, record


def changed(**changes):
    """The sample's JSON with some fields changed; None takes a field away."""
    data = json.loads(record_to_json(RECORD)) | changes
    return json.dumps({name: value for name, value in data.items() if value is not None}).encode()


def stored_fields():
    event = DirectoryEvent("w", "i", 7, {digest(1): Tier.HOST}, (digest(2),))
    return {name.encode(): value for name, value in event_to_fields(event).items()}


@pytest.mark.parametrize("role", list(Role))
def test_record_survives(role):
    original = record(role=role, draining=True)
    assert record_from_json(record_to_json(original), "decode-0", "first") == original


def test_fields_of_a_newer_version_are_passed_over():
    assert record_from_json(changed(topology="rack-7"), "decode-0", "first") == RECORD


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "record"),
        (b"\xff\x00", "record"),
        (b"[]", "record"),
        (changed(address=None), "address"),
        (changed(address=""), "address"),
        (changed(role="trainer"), "role"),
        (changed(block_size_tokens=0), "block_size_tokens"),
        (changed(num_blocks="many"), "num_blocks"),
        (changed(load={"running": 1}), "load.waiting"),
        (changed(worker_id="decode-1"), "worker_id"),
        (changed(incarnation="second"), "incarnation"),
    ],
)
def test_unreadable_record_is_ignored_and_named(data, named):
    with capture_logs() as logs:
        assert record_from_json(data, "decode-0", "first") is None
    assert [line["worker"] for line in logs] == ["decode-0"]
    assert named in logs[0]["unreadable"]


@pytest.mark.parametrize(
    "event",
    [
        DirectoryEvent("decode-0", "first", 1, {digest(1): Tier.DEVICE, digest(2): Tier.DISK}, (digest(3),)),
        DirectoryEvent("decode-0", "first", 2),
        DirectoryEvent("decode-0", "first", 4, shares=()),
        DirectoryEvent("decode-0", "first", 5, shares=(RouterShare("r", 1, 2, 3), RouterShare("", 4, 5, 0))),
        DirectoryEvent("decode-0", "first", 3, kind=EventKind.RELOAD),
        DirectoryEvent("décode-0", "first", 0, kind=EventKind.LEFT),
    ],
)
def test_event_survives(event):
    fields = {name.encode(): value for name, value in event_to_fields(event).items()}
    assert event_from_fields(fields) == event


def test_reload_carries_no_hashes():
    fields = event_to_fields(DirectoryEvent("w", "i", 1, {digest(1): Tier.HOST}, kind=EventKind.RELOAD))
    assert digest(1) not in b"".join(fields.values())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {b"w": b"someone else's stream"},
        stored_fields() | {b"n": b"seven"},
        stored_fields() | {b"k": b"exploded"},
        stored_fields() | {b"w": b"\xff"},
        stored_fields() | {b"s": digest(1)},
        stored_fields() | {b"s": digest(1) + b"\x09"},
        stored_fields() | {b"r": digest(1)[:-1]},
        stored_fields() | {b"l": b"[7]"},
    ],
)
def test_unreadable_event_is_ignored(fields):
    assert event_from_fields(stored_fields()) is not None
    with capture_logs() as logs:
        assert event_from_fields(fields) is None
    assert [line["event"] for line in logs] == ["directory event ignored"]
