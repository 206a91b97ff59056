from __future__ import annotations

from dataclasses import fields, replace

import pytest

from headrace.errors import LayoutMismatch
from headrace.rpc.v1 import kv_pb2
from kv_transfer.layout import KvLayout

LAYOUT = KvLayout(
    model_fingerprint="abc",
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    dtype="float32",
    row_bytes=256,
    block_size_tokens=16,
    tp_size=1,
    transport="nixl",
)
OTHER = {
    field.name: f"{value}x" if isinstance(value, str) else value + 1
    for field in fields(LAYOUT)
    for value in [getattr(LAYOUT, field.name)]
    if field.name != "tp_rank"
}


def test_equal_layouts_pass():
    LAYOUT.check(replace(LAYOUT))


@pytest.mark.parametrize("name", OTHER)
def test_each_field_that_differs_is_named(name):
    with pytest.raises(LayoutMismatch) as caught:
        LAYOUT.check(replace(LAYOUT, **{name: OTHER[name]}))
    assert caught.value.field == name
    assert (caught.value.ours, caught.value.theirs) == (getattr(LAYOUT, name), OTHER[name])


def test_the_schema_comes_first_and_the_model_second():
    everything = KvLayout(**OTHER)
    with pytest.raises(LayoutMismatch, match="schema_version"):
        LAYOUT.check(everything)
    with pytest.raises(LayoutMismatch, match="model_fingerprint"):
        LAYOUT.check(replace(everything, schema_version=LAYOUT.schema_version))


def test_the_message_has_the_same_fields_and_values():
    assert {field.name for field in fields(LAYOUT)} == set(kv_pb2.Layout.DESCRIPTOR.fields_by_name)
    message = kv_pb2.Layout.FromString(LAYOUT.to_proto().SerializeToString())
    assert KvLayout.from_proto(message) == LAYOUT


def test_a_message_of_an_unknown_sender_fails_at_the_schema():
    with pytest.raises(LayoutMismatch, match="schema_version"):
        LAYOUT.check(KvLayout.from_proto(kv_pb2.Layout()))
