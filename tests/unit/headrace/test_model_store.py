"""What a user may call a model."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace import model_catalogue, model_store
from headrace.config import DEFAULT_CACHE_DIR, DEFAULT_MODEL
from headrace.errors import ModelError
from headrace.model_catalogue import CATALOGUE
from headrace.model_store import list_models, resolve
from tests.unit.tokenizer.small_gguf import byte_level, write_gguf

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "vocab_size": 10,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def gguf(tmp_path) -> Path:
    return write_gguf(tmp_path / "small.gguf", byte_level())


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "my-model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer.json").write_text("{}")
    save_file({"weight": np.zeros(4, np.float32)}, path / "model.safetensors")
    return path


@pytest.fixture
def hub(monkeypatch):
    """Stands in for the hub: `answer` is what it gives or raises; remembers what it was asked."""

    class Hub:
        answer: Path | Exception = Path()
        asked: list[str] = []  # noqa: RUF012

        def __call__(self, name, **patterns):
            self.asked = [*self.asked, name]
            if isinstance(self.answer, Exception):
                raise self.answer
            return str(self.answer)

    stand_in = Hub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", stand_in)
    return stand_in


def test_the_default_model_is_in_the_catalogue_and_found_again(model_files, monkeypatch):
    monkeypatch.setattr(model_catalogue, "pip_download", None)  # would be called
    again = resolve(DEFAULT_MODEL, cache_dir=DEFAULT_CACHE_DIR)
    assert again == model_files
    assert again.name == DEFAULT_MODEL
    assert again.path == CATALOGUE[DEFAULT_MODEL].path_in(DEFAULT_CACHE_DIR.expanduser())


def test_the_home_folder_is_found(model_files, tmp_path, monkeypatch):
    model = CATALOGUE[DEFAULT_MODEL]
    source, home = model_files.path.parent, tmp_path / "home"
    target = home / "cache" / "models" / model.name
    target.mkdir(parents=True)
    for name in (model.file_name, f"{model.file_name}.json"):
        (target / name).symlink_to(source / name)
    monkeypatch.setenv("HOME", str(home))
    assert resolve(DEFAULT_MODEL, cache_dir=Path("~/cache")).path == target / model.file_name
    assert [listed.name for listed in list_models(Path("~/cache")) if listed.cached] == [DEFAULT_MODEL]


def test_progress_is_handed_on(tmp_path, monkeypatch):
    told = []

    def ensure(model, cache_dir, progress):
        progress("downloading", 1, 2)
        raise ModelError("enough")

    monkeypatch.setattr(model_store, "ensure", ensure)
    with pytest.raises(ModelError, match="enough"):
        resolve(DEFAULT_MODEL, cache_dir=tmp_path, progress=lambda *news: told.append(news))
    assert told == [("downloading", 1, 2)]


def test_a_gguf_file(gguf, tmp_path, monkeypatch):
    files = resolve(str(gguf), cache_dir=tmp_path)
    assert (files.name, files.path, files.format) == ("small", gguf, "gguf")
    monkeypatch.chdir(gguf.parent)
    monkeypatch.setenv("HOME", str(gguf.parent))
    assert resolve("small.gguf", cache_dir=tmp_path) == files
    assert resolve("~/small.gguf", cache_dir=tmp_path) == files


def test_a_folder(folder, tmp_path, monkeypatch):
    files = resolve(str(folder), cache_dir=tmp_path)
    assert (files.name, files.path, files.format) == ("my-model", folder, "safetensors")
    monkeypatch.chdir(folder)
    assert resolve(".", cache_dir=tmp_path) == files


def test_a_hub_name(folder, tmp_path, hub):
    hub.answer = folder
    files = resolve("some-org/some.model_1", cache_dir=tmp_path)
    assert (files.name, files.path) == ("some-org/some.model_1", folder)
    assert hub.asked == ["some-org/some.model_1"]


def test_a_folder_of_a_hub_names_form_is_a_folder(folder, tmp_path, monkeypatch, hub):
    (tmp_path / "some-org").mkdir()
    shutil.move(folder, tmp_path / "some-org" / "model")
    monkeypatch.chdir(tmp_path)
    assert resolve("some-org/model", cache_dir=tmp_path).name == "model"
    assert hub.asked == []


@pytest.mark.parametrize("failure", [OSError("no route to host"), ValueError("gated")])
def test_a_hub_that_does_not_give_it_says_what_to_do(tmp_path, hub, failure):
    hub.answer = failure
    with pytest.raises(ModelError) as caught:
        resolve("some-org/model", cache_dir=tmp_path)
    message = str(caught.value)
    for words in (
        "some-org/model",
        type(failure).__name__,
        str(failure),
        "pass the path of a folder or a GGUF file",
    ):
        assert words in message


@pytest.mark.parametrize(
    "ref", ["no-such-model", "/no/such/file.gguf", "a/b.gguf", "a/b/c", "a b/c", "./a/b"]
)
def test_what_is_nothing_is_refused_with_what_there_is(tmp_path, hub, ref):
    with pytest.raises(ModelError) as caught:
        resolve(ref, cache_dir=tmp_path)
    assert f"model {ref!r}: no such file or folder" in str(caught.value)
    assert DEFAULT_MODEL in str(caught.value)
    assert hub.asked == []


def test_a_file_that_is_no_model_is_named(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match=r"notes\.txt: not a GGUF file"):
        resolve(str(tmp_path / "notes.txt"), cache_dir=tmp_path)


def test_the_list_says_what_is_here(model_files, tmp_path):
    listed = {model.name: model for model in list_models(DEFAULT_CACHE_DIR)}
    assert list(listed) == list(CATALOGUE)
    default = listed[DEFAULT_MODEL]
    assert (default.path, default.cached) == (model_files.path, True)
    assert default.license == "Apache-2.0"
    assert default.size_bytes == model_files.path.stat().st_size
    assert not any(model.cached for model in list_models(tmp_path))
