"""The committed stubs are what the proto files give."""

from tools.generate_protos import stale_files


def test_generated_code_is_up_to_date():
    assert stale_files() == [], "run `make protos`"
