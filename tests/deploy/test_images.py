"""The images and the compose file. There is no Docker where tests run: what can be known without one is checked."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose

from headrace import config
from headrace.cluster.process import ProcessSpec, check
from headrace.config import Settings
from tests.support.base_only import ROOT
from tests.support.command_line import assignments, parsed_arguments

DOCKER = ROOT / "deploy" / "docker"
DOCKERFILE = DOCKER / "Dockerfile"
TARGETS = ("router", "worker-cpu", "worker-cuda", "ray")


def instructions(target: str | None = None) -> list[tuple[str, str]]:
    """Instruction and the rest, of the file or of one stage with all that it is made from."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", DOCKERFILE.read_text()))
    lines = [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]
    if target is None:
        return lines
    stages: dict[str, list[tuple[str, str]]] = {}
    for name, rest in lines:
        if name == "FROM":
            base, _, stage = rest.partition(" AS ")
            stages[stage] = [*stages.get(base, []), (name, rest)]
        elif stages:
            stages[next(reversed(stages))].append((name, rest))
    return stages[target]


def test_hadolint_finds_nothing():
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_what_is_copied_is_there_and_nothing_is_forgotten():
    copied = {
        source
        for name, rest in instructions()
        if name == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    }
    assert all((ROOT / source).exists() for source in copied)
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    packages = {each for each in packages if any(fnmatch.fnmatch(each, p) for p in wanted["include"])}
    assert packages <= copied
    shown = {
        line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"
    }
    assert shown == copied


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_is_not_root_and_says_whether_it_is_well(target: str):
    stage = instructions(target)
    last = dict(stage)
    assert last["USER"] == "10001:10001"
    assert "/health" in last["HEALTHCHECK"]
    assert json.loads(last["ENTRYPOINT"]) == ["headrace"]
    settings = loaded(json.loads(last["CMD"]), {})
    assert f":{settings.telemetry.metrics_port}/health" in last["HEALTHCHECK"]
    exposed = " ".join(rest for name, rest in stage if name == "EXPOSE").split()
    assert str(settings.telemetry.metrics_port) in exposed
    assert str(settings.rpc.port or 8470) in exposed


def test_versions_are_pinned():
    image = re.search(r"PYTHON_IMAGE=python:(\S+)", DOCKERFILE.read_text())
    assert image and re.fullmatch(r"3\.11\.\d+-slim-[a-z]+", image[1])
    for name, rest in instructions():
        if name == "FROM":
            assert rest.startswith("${PYTHON_IMAGE} AS") or rest.split()[0] in (
                "runtime",
                "worker-cpu-packages",
            )
        for command in re.findall(r"pip (?:install|wheel) [^&]*", rest):
            assert "--constraint" in command or "--no-deps" in command, command


def compose() -> dict[str, Any]:
    """With the defaults of its variables."""
    text = (DOCKER / "compose.yaml").read_text()
    return yaml.safe_load(re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", text))


def loaded(command: list[str], environment: dict[str, str]) -> Settings:
    parsed = parsed_arguments(command)
    return config.load(parsed["config"], assignments(parsed), environment)


def service_settings(name: str) -> Settings:
    service = compose()["services"][name]
    return loaded(service["command"], service["environment"])


def test_the_compose_file_is_one():
    PyCompose.from_json(json.dumps(compose()))  # after YAML's merge keys, which it does not know
    with pytest.raises(ValueError, match="nonsense"):
        PyCompose.from_json(json.dumps({"services": {"router": {"nonsense": 1}}}))
    for name in compose()["services"]:
        build = compose()["services"][name].get("build")
        if build is not None:
            assert (DOCKER / build["context"] / build["dockerfile"]).resolve() == DOCKERFILE
            assert build["target"] in TARGETS


def test_services_find_one_another():
    services = compose()["services"]
    assert set(services) == {"redis", "router", "prefill", "decode"}
    for name in ("router", "prefill", "decode"):
        settings = service_settings(name)
        assert settings.directory.url == "redis://redis:6379/0"
        assert settings.rpc.advertise_host == name
        check(ProcessSpec(name, "router" if name == "router" else name, settings))
        drain, grace = settings.rpc.drain_timeout_s, services[name]["stop_grace_period"]
        assert int(grace.removesuffix("s")) > drain > settings.kv.lease_ttl_s
        probe = " ".join(services[name]["healthcheck"]["test"])
        assert f":{settings.telemetry.metrics_port}/ready" in probe
        assert f"{settings.model.cache_dir}" in services[name]["volumes"][0]
        assert services[name]["read_only"] is True


def test_published_ports_are_the_routers_and_for_this_machine_only():
    services = compose()["services"]
    settings = service_settings("router")
    assert {name for name, service in services.items() if "ports" in service} == {"router"}
    assert services["router"]["ports"] == [
        f"127.0.0.1:{port}:{port}" for port in (settings.rpc.port, settings.http.port or 8000)
    ]
