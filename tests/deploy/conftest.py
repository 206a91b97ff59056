from pathlib import Path

import pytest

from tests.support.chart import Chart, fetched_helm


@pytest.fixture(scope="session")
def helm() -> Path:
    return fetched_helm()


@pytest.fixture
def chart(helm: Path, tmp_path: Path) -> Chart:
    return Chart(helm, tmp_path)
