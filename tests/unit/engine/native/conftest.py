"""The kernels' tests run for every instruction set that the processor has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.engine.native import library

INSTRUCTION_SETS = library.instruction_sets()


@pytest.fixture(params=INSTRUCTION_SETS or ["none"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Forced while the test runs."""
    if not INSTRUCTION_SETS:
        pytest.skip("the kernels were not compiled")
    kernels: Any = library.load()
    assert kernels.use(request.param.encode()) == 0
    yield request.param
    assert kernels.use(INSTRUCTION_SETS[0].encode()) == 0
