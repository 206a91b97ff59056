"""`headrace bench soak` for some seconds: no error, and nothing in flight at the end."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app


@pytest.fixture(autouse=True)
def logging_as_before(monkeypatch):
    """Loggers that were used once keep their output, which here is a file of this test's."""
    monkeypatch.setattr("headrace.telemetry.configure_logging", lambda *_: None)


def test_a_hundred_streams_leave_nothing(tmp_path):
    path = tmp_path / "rows.json"
    arguments = ["bench", "soak", "--streams", "100", "--seconds", "8", "--json", str(path)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    *running, last = json.loads(path.read_text())["rows"]
    assert max(row["figures"]["gauges"]["streams"] for row in running) == 100
    assert set(last["figures"]["gauges"].values()) == {0}
    assert last["answers"] >= 100
    assert last["tokens"] >= 20 * last["answers"]
    assert "streams 0" in result.output
