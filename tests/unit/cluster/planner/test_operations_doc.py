"""What docs/operations.md tells to type and to set."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.config import Settings

ROOT = Path(__file__).parents[4]
TEXT = (ROOT / "docs" / "operations.md").read_text()


def test_the_plan_with_given_costs_runs():
    [line] = [line for line in TEXT.splitlines() if line.startswith("headrace plan") and "--json" in line]
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    data = json.loads(result.output)
    assert (data["prefill"]["workers"], data["decode"]["workers"]) == (3, 2)


def test_the_settings_exist():
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)]
    [ours] = [block for block in blocks if "apiVersion" not in block]
    Settings.model_validate(ours)
    known = Settings().model_dump()
    for section, field in re.findall(r"`(planner|router|rpc|kv|engine|directory|telemetry)\.(\w+)", TEXT):
        assert field in known[section], f"{section}.{field}"


@pytest.mark.parametrize("alert", sorted(set(re.findall(r"`(Headrace[A-Z]\w+)`", TEXT))))
def test_the_alerts_exist(alert):
    assert f"alert: {alert}\n" in (ROOT / "deploy" / "grafana" / "alerts.yaml").read_text()
