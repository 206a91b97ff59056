"""Where the kernels were not compiled the engine computes with torch, and says so once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from structlog.testing import capture_logs

from headrace.config import EngineSettings
from headrace.engine.forward import EagerForward, load_forward
from headrace.engine.kv_cache import KvCache
from headrace.engine.native import library
from headrace.engine.weights.load import load_model
from headrace.errors import ModelError


@pytest.fixture
def _not_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(library, "EXTENSION_SUFFIXES", [".missing"])
    library.load.cache_clear()
    yield
    library.load.cache_clear()


def forward_of(files, backend):
    settings = EngineSettings(num_blocks=8, num_threads=1, backend=backend)
    model = load_model(files, torch.float32)
    return load_forward(model, KvCache.for_model(model.config, settings, torch.float32), settings)


@pytest.mark.usefixtures("_not_compiled")
def test_auto_falls_back_to_torch_with_one_line_that_names_the_remedy(tiny_model_files):
    with capture_logs() as logs:
        forwards = [forward_of(tiny_model_files, "auto") for _ in range(2)]
    assert [type(forward) for forward in forwards] == [EagerForward, EagerForward]
    [line] = logs
    assert line["log_level"] == "warning"
    assert "computing with torch" in line["event"]
    assert "C++ compiler" in line["remedy"]
    assert library.instruction_sets() == []


@pytest.mark.usefixtures("_not_compiled")
def test_cpu_is_refused(tiny_model_files):
    with pytest.raises(ModelError, match="'cpu', but the native kernels were not compiled"):
        forward_of(tiny_model_files, "cpu")


@pytest.mark.skipif(library.load() is None, reason="the kernels were not compiled")
def test_auto_takes_the_kernels_where_they_are(tiny_model_files):
    with capture_logs() as logs:
        assert not isinstance(forward_of(tiny_model_files, "auto"), EagerForward)
    assert logs == []


@pytest.mark.skipif(library.load() is None, reason="the kernels were not compiled")
def test_every_processor_has_the_base_and_no_unknown_set_is_taken():
    names = library.instruction_sets()
    assert names[-1] == "base"
    assert len(set(names)) == len(names)
    kernels = library.load()
    assert kernels.use(b"abacus") == -1
    assert kernels.use(names[0].encode()) == 0
