"""Heads of GGUF files, sound and damaged, against the format's own library."""

import random
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from headrace import gguf_metadata
from headrace.errors import ModelError
from tests.unit.tokenizer.small_gguf import HIDDEN, byte_level, write_gguf

VECTOR = np.arange(6, dtype=np.float32)
TENSORS = {
    "token_embd.weight": np.zeros((257, HIDDEN), np.float32),
    "half": np.ones((2, 4), np.float16),
    "vector": VECTOR,
}


@pytest.fixture
def path(tmp_path):
    return write_gguf(tmp_path / "small.gguf", byte_level(), TENSORS)


def head(num_tensors: int = 0, num_fields: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def field(key: str, kind: int, data: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + data


def refused(folder: Path, data: bytes) -> str:
    path = folder / "damaged.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError) as caught:
        gguf_metadata.read(path)
    assert "damaged.gguf" in str(caught.value)
    return str(caught.value)


def test_fields_and_tensors_are_those_of_the_library(model_files):
    ours, theirs = gguf_metadata.read(model_files.path), gguf.GGUFReader(model_files.path)
    fields = {key: value.contents() for key, value in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.fields == fields
    assert [(t.name, t.shape, t.type_id, t.offset, t.num_bytes) for t in ours.tensors.values()] == [
        (t.name, tuple(t.shape.tolist()), int(t.tensor_type), t.data_offset, int(t.n_bytes))
        for t in theirs.tensors
    ]


def test_sizes_of_tensor_types_are_those_of_the_library():
    types = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {kind: types[kind] for kind in gguf_metadata._BLOCKS} == gguf_metadata._BLOCKS


def test_every_type_of_field_is_read(tmp_path):
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = {
        "uint8": 200,
        "int8": -5,
        "uint16": 60000,
        "int16": -300,
        "uint32": 2**32 - 1,
        "int32": -(2**31),
        "float32": 0.5,
        "bool": True,
        "string": "é🙂",
        "uint64": 2**64 - 1,
        "int64": -(2**63),
        "float64": 0.1,
    }
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"a.{kind}", value)
    writer.add_array("a.texts", ["", "b", "é"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = gguf_metadata.read(path)
    assert {kind: metadata.fields[f"a.{kind}"] for kind in values} == values
    assert metadata.get_list("a.texts", str) == ["", "b", "é"]
    assert metadata.get_list("a.numbers", int) == [1, -2, 3]


def test_a_small_tensor_is_read_from_its_place(path):
    metadata = gguf_metadata.read(path)
    assert metadata.read_f32("vector").tolist() == VECTOR.tolist()
    with pytest.raises(ModelError, match="'half' is not a vector of fp32"):
        metadata.read_f32("half")


def test_fields_are_asked_for_with_their_type(path):
    metadata = gguf_metadata.read(path)
    assert metadata.find("absent", int) is None
    assert metadata.get("llama.block_count", float) == 1.0  # an integer will do for a number
    with pytest.raises(ModelError, match="the file has no field 'absent'"):
        metadata.get("absent", int)
    with pytest.raises(ModelError, match=r"'general\.architecture' is a str, not a int"):
        metadata.get("general.architecture", int)
    with pytest.raises(ModelError, match=r"'tokenizer\.ggml\.tokens' is no array of int"):
        metadata.get_list("tokenizer.ggml.tokens", int)


def test_a_file_cut_anywhere_is_refused(path, tmp_path):
    whole = path.read_bytes()
    last = max(gguf_metadata.read(path).tensors.values(), key=lambda tensor: tensor.offset)
    end = last.offset + last.num_bytes
    lengths = [*range(0, 400), *range(400, end, 97), *range(end - 40, end)]
    for length in lengths:
        refused(tmp_path, whole[:length])
    (tmp_path / "whole.gguf").write_bytes(whole[:end])
    gguf_metadata.read(tmp_path / "whole.gguf")


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "not a GGUF file"),
        (b"GGU", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
        (head(version=1), "version 1 is not supported"),
        (head(version=99), "version 99 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "not supported"),  # big-endian
        (head(num_fields=2**63), "cut short"),
        (head(num_tensors=2**63), "cut short"),
        (head(num_fields=2**63) + bytes(10_000), "field '' occurs twice"),
        (head(num_tensors=2**63) + bytes(10_000), "0 dimensions"),
        (head(num_fields=1) + struct.pack("<Q", 2**63), f"a string claims {2**63} bytes"),
        (head(num_fields=1) + field("k", 8, struct.pack("<Q", 2**40)), f"a string claims {2**40} bytes"),
        (
            head(num_fields=1) + field("k", 9, struct.pack("<IQ", 4, 2**60)),
            f"an array claims {2**60} entries",
        ),
        (
            head(num_fields=1) + field("k", 9, struct.pack("<IQ", 8, 2**60)),
            f"an array claims {2**60} entries",
        ),
        (head(num_fields=1) + field("k", 9, struct.pack("<IQ", 4, 2**20)), "cut short"),
        (head(num_fields=1) + field("k", 9, struct.pack("<IQ", 8, 2**20)), "cut short"),
        (head(num_fields=1) + field("k", 9, struct.pack("<IQ", 9, 1) * 5000), "array type 9 is unknown"),
        (head(num_fields=1) + field("k", 77, b""), "field type 77 is unknown"),
        (head(num_fields=1) + field("k", 8, struct.pack("<Q", 2) + b"\xff\xff"), "can't decode"),
        (head(num_fields=2) + field("k", 0, b"1") * 2, "field 'k' occurs twice"),
        (head(num_fields=1) + field("general.alignment", 4, bytes(4)), "alignment 0"),
        (head(num_fields=1) + field("general.alignment", 8, text("x")), "alignment 'x'"),
        (head(num_tensors=1) + text("t") + struct.pack("<I", 2**31), "dimensions"),
        (head(1) + text("t") + struct.pack("<IQIQ", 1, 2**62, 0, 0) + bytes(64), "'t' ends behind the end"),
        (head(1) + text("t") + struct.pack("<IQIQ", 1, 1, 0, 2**62) + bytes(64), "'t' ends behind the end"),
        (head(1) + text("t") + struct.pack("<IQIQ", 1, 1, 999, 2**62) + bytes(64), "'t' ends behind the end"),
        (head(2) + (text("t") + struct.pack("<IQIQ", 1, 1, 0, 0)) * 2 + bytes(64), "tensor 't' occurs twice"),
    ],
)
def test_damage_is_named(tmp_path, data, complaint):
    assert complaint in refused(tmp_path, data)


def test_no_file_and_no_regular_file(tmp_path):
    with pytest.raises(ModelError, match="there is no such file"):
        gguf_metadata.read(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match="not a GGUF file"):
        gguf_metadata.read(tmp_path)


def test_flipped_bytes_are_refused_or_read_but_never_crash(path, tmp_path):
    whole, flipped, rng = path.read_bytes(), tmp_path / "flipped.gguf", random.Random(0)
    num_refused = 0
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data) // 2)] = rng.choice([0, 1, 0x7F, 0xFF])
        flipped.write_bytes(data)
        try:
            gguf_metadata.read(flipped)
        except ModelError:
            num_refused += 1
    assert 0 < num_refused < 500


IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from headrace import gguf_metadata
from headrace.errors import ModelError
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
try:
    gguf_metadata.read(Path(sys.argv[1]))
except ModelError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("kind", "count", "complaint"),
    [
        (9, struct.pack("<IQ", 0, 2**28), f"an array claims {2**28} entries"),
        (9, struct.pack("<IQ", 4, 2**28), f"an array claims {2**28} entries"),
        (9, struct.pack("<IQ", 8, 2**28), f"an array claims {2**28} entries"),
        (8, struct.pack("<Q", 2**31), f"a string claims {2**31} bytes"),
    ],
)
def test_a_count_that_reaches_into_the_weights_takes_no_memory(tmp_path, kind, count, complaint):
    """The file is as big as the count claims, so only a limit of its own stops it before it fills 4 GiB of memory."""
    path = tmp_path / "large.gguf"
    path.write_bytes(head(num_fields=1) + field("k", kind, count))
    with path.open("r+b") as file:
        file.truncate(2**32)  # a hole: takes no disk
    fresh = subprocess.run(
        [sys.executable, "-c", IN_LITTLE_MEMORY, str(path)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert complaint in fresh.stdout
