"""Generates headrace/rpc/v1 from proto/headrace/v1. Run by `make protos`; `--check` (in `make check`) only compares.

The protobuf package is headrace.v1, the Python package headrace.rpc.v1: `headrace` itself must stay importable without
gRPC, and a package called `proto` would collide with proto-plus. protoc derives imports from the protobuf package, so
they are rewritten here.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import sysconfig
import tempfile
from importlib import resources
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO_DIR = ROOT / "proto"
GENERATED_DIR = ROOT / "headrace" / "rpc" / "v1"

_SCRIPTS_DIR = Path(sysconfig.get_path("scripts"))
_PACKAGE_INIT = '"""Generated from proto/headrace/v1 by `make protos`. Do not edit."""\n'
_IMPORT = re.compile(r"^from headrace\.v1 import ", re.MULTILINE)


def generate() -> dict[str, str]:
    """File name in GENERATED_DIR to its text. Raises RuntimeError when protoc refuses; it has printed why."""
    sources = sorted(PROTO_DIR.rglob("*.proto"))
    with (
        tempfile.TemporaryDirectory() as folder,
        resources.as_file(resources.files("grpc_tools")) as grpc_tools,
    ):
        # In a process of its own: protoc's library can not share one with NIXL's, and tests have both.
        protoc = subprocess.run(
            [
                *(sys.executable, "-m", "grpc_tools.protoc"),
                f"--proto_path={PROTO_DIR}",
                f"--proto_path={grpc_tools / '_proto'}",
                f"--python_out={folder}",
                f"--pyi_out={folder}",
                f"--grpc_python_out={folder}",
                # Types for the service stubs; grpcio-tools gives them for messages only.
                f"--plugin=protoc-gen-mypy_grpc={_SCRIPTS_DIR / 'protoc-gen-mypy_grpc'}",
                f"--mypy_grpc_out=only_async,quiet:{folder}",
                *(str(source) for source in sources),
            ],
            check=False,
        )
        if protoc.returncode != 0:
            raise RuntimeError(f"protoc failed with status {protoc.returncode}")
        produced = sorted((Path(folder) / "headrace" / "v1").iterdir())
        files = {
            path.name: _IMPORT.sub("from headrace.rpc.v1 import ", path.read_text()) for path in produced
        }
    return {"__init__.py": _PACKAGE_INIT, **files}


def committed() -> dict[str, str]:
    """The same mapping for what is in the repository now."""
    return {path.name: path.read_text() for path in sorted(GENERATED_DIR.glob("*.py*")) if path.is_file()}


def stale_files() -> list[str]:
    """Names that are missing, outdated, or left over from a proto file that is gone."""
    wanted, present = generate(), committed()
    return sorted(name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name))


def write() -> None:
    wanted = generate()
    GENERATED_DIR.mkdir(parents=True, exist_ok=True)
    for name in committed().keys() - wanted.keys():
        (GENERATED_DIR / name).unlink()
    for name, text in wanted.items():
        (GENERATED_DIR / name).write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail when the generated code is outdated"
    )
    if not parser.parse_args().check:
        write()
        return 0
    stale = stale_files()
    if stale:
        print(f"generated code is outdated ({', '.join(stale)}): run `make protos`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
