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
    gauges = [row["figures"]["gauges"] for row in running]
    assert max(moment["streams"] for moment in gauges) == 100
    assert max(moment["at_worker"] for moment in gauges) > 0
    assert 100 <= max(moment["objects"] for moment in gauges) <= 5 * 150  # five of each request
    assert last["figures"]["gauges"] == dict.fromkeys(
        ("running", "queued", "charged", "streams", "objects", "at_worker"), 0
    )
    assert last["answers"] >= 100
    assert last["tokens"] >= 20 * last["answers"]
    assert "streams 0" in result.output
