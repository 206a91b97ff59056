"""Generates the packages in headrace/rpc from proto. Run by `make protos`; `--check` (in `make check`) only compares.

The protobuf package is headrace.v1, the Python package headrace.rpc.v1: `headrace` itself must stay importable without
gRPC, and a package called `proto` would collide with proto-plus; `vllm` is vLLM's. protoc derives imports from the
protobuf package, so they are rewritten here.
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
# Python package by folder of proto files.
PACKAGES = {"headrace/v1": "headrace.rpc.v1", "vllm/grpc/engine": "headrace.rpc.vllm"}
GENERATED_DIRS = [ROOT.joinpath(*package.split(".")) for package in PACKAGES.values()]

_SCRIPTS_DIR = Path(sysconfig.get_path("scripts"))


def generate() -> dict[str, str]:
    """Path from ROOT to its text. Raises RuntimeError when protoc refuses; it has printed why."""
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
        return {
            name: text
            for protos, package in PACKAGES.items()
            for name, text in _package(Path(folder), protos, package).items()
        }


def _package(folder: Path, protos: str, package: str) -> dict[str, str]:
    """Its modules, as protoc left them in `folder`, with imports of ours."""
    imports = re.compile(rf"^from {re.escape(protos.replace('/', '.'))} import ", re.MULTILINE)
    target = package.replace(".", "/")
    files = {
        f"{target}/{path.name}": imports.sub(f"from {package} import ", path.read_text())
        for path in sorted((folder / protos).iterdir())
    }
    marker = f'"""Generated from proto/{protos} by `make protos`. Do not edit."""\n'
    return {f"{target}/__init__.py": marker, **files}


def committed() -> dict[str, str]:
    """The same mapping for what is in the repository now."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for folder in GENERATED_DIRS
        for path in sorted(folder.glob("*.py*"))
        if path.is_file()
    }


def stale_files() -> list[str]:
    """Names that are missing, outdated, or left over from a proto file that is gone."""
    wanted, present = generate(), committed()
    return sorted(name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name))


def write() -> None:
    wanted = generate()
    for folder in GENERATED_DIRS:
        folder.mkdir(parents=True, exist_ok=True)
    for name in committed().keys() - wanted.keys():
        (ROOT / name).unlink()
    for name, text in wanted.items():
        (ROOT / name).write_text(text)


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
