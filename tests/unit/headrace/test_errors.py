import inspect
import json
import pickle

import grpc
import pytest

from headrace import errors
from headrace.errors import (
    Code,
    HeadraceError,
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    ModelError,
    Overloaded,
    PeerError,
    RankLost,
    TransferFailed,
    Unavailable,
    WorkerGone,
)

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, HeadraceError)]
INSTANCES = [
    InvalidRequest("top_p", 2.0, "must be at most 1"),
    LayoutMismatch("dtype", "float32", "bfloat16"),
    Overloaded("full", 2.5),
    ModelError("no such file"),
    PeerError(Code.NOT_FOUND, "gone"),
    InternalError(),
]


def test_the_tree_is_drawn_in_the_docstring():
    drawn = inspect.getdoc(errors) or ""
    assert [kind.__name__ for kind in CLASSES if kind.__name__ not in drawn] == []


@pytest.mark.parametrize("kind", CLASSES)
def test_every_code_is_one_of_grpc(kind):
    assert kind.code.value in grpc.StatusCode.__members__


def test_only_what_time_or_another_place_can_heal_is_retryable():
    assert {kind for kind in CLASSES if kind.retryable} == {
        Overloaded,
        Unavailable,
        WorkerGone,
        RankLost,
        TransferFailed,
    }


def test_an_input_error_names_field_value_and_limit():
    error = InvalidRequest("top_k", -3, "must be positive")
    assert (error.field, error.value, error.requirement) == ("top_k", -3, "must be positive")
    assert str(error) == "top_k: -3 is not allowed; must be positive"


def test_a_huge_value_is_shown_in_part():
    assert str(InvalidRequest("stop", "x" * 10**6, "shorter")) == (
        f"stop: '{'x' * 79}… (1000002 characters) is not allowed; shorter"
    )


@pytest.mark.parametrize("value", ["\ud800", float("nan"), "\x00\n", b"\xff"])
def test_pa_01_the_message_can_be_sent_whatever_the_value(value):
    message = str(InvalidRequest("prompt", value, "must be text"))
    assert json.loads(json.dumps(message).encode()) == message
    assert message.encode().decode() == message


def test_an_overload_says_when_to_come_back():
    assert str(Overloaded("full", 2.5)) == "full; retry after 2.5 s"


def test_a_layout_mismatch_names_the_field():
    assert str(LayoutMismatch("dtype", "float32", "bfloat16")) == (
        "KV layout mismatch in dtype: ours is 'float32', the peer's is 'bfloat16'"
    )


def test_a_peers_error_keeps_its_code_and_changes_no_other():
    assert PeerError(Code.NOT_FOUND, "gone").code is Code.NOT_FOUND
    assert PeerError(Code.UNAVAILABLE, "down").code is Code.UNAVAILABLE
    assert HeadraceError.code is Code.INTERNAL


@pytest.mark.parametrize("error", INSTANCES, ids=lambda error: type(error).__name__)
def test_errors_cross_process_borders_whole(error):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.code, copy.__dict__) == (
        type(error),
        str(error),
        error.code,
        error.__dict__,
    )
