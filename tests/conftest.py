"""Models that tests share. Both fixtures give `ModelFiles`, as `headrace.model_store` resolves them for any user."""

from __future__ import annotations

import pytest

from headrace.config import DEFAULT_CACHE_DIR, DEFAULT_MODEL
from headrace.model_config import ModelFiles
from headrace.model_store import resolve


@pytest.fixture(scope="session")
def model_files() -> ModelFiles:
    """The default model, in the user's own cache: the first run ever fetches it, later ones find it there."""
    return resolve(DEFAULT_MODEL, cache_dir=DEFAULT_CACHE_DIR)


@pytest.fixture(scope="session")
def tiny_model_files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A Llama of a few thousand random weights in Hugging Face layout, for tests whose text need not make sense."""
    from tests.support.tiny_llama import write_tiny_llama  # imports torch, which few tests need

    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))
    return resolve(str(folder), cache_dir=DEFAULT_CACHE_DIR)
