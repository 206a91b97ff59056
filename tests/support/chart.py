"""The Helm chart, rendered by the real `helm`, and what Kubernetes would make of it."""

from __future__ import annotations

import functools
import json
import math
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from kubernetes_validate import utils as validator

from headrace import config
from headrace.config import Settings
from tests.support.command_line import assignments, parsed_arguments
from tests.support.custom_kinds import SPECS, check_custom
from tools.fetch_helm import helm_binary

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "headrace"
KUBERNETES_VERSIONS = ("1.31", "1.37")
SETTINGS_FOLDER = "/etc/headrace/settings"

# What any rendering needs: without it the chart refuses, as the processes would.
OPEN: dict[str, Any] = {"settings": {"security": {"allow_insecure": True}}}

Object = dict[str, Any]

# It parses 2 MB of definitions for each object otherwise.
validator.schema_contents = functools.cache(validator.schema_contents)


class Refused(Exception):
    """`helm` rendered nothing and said why."""


@dataclass(frozen=True, slots=True)
class Chart:
    """`folder` is for files of values."""

    helm: Path
    folder: Path

    def render(
        self, *values: Mapping[str, Any] | Path, release: str = "trial", sets: Sequence[str] = ()
    ) -> list[Object]:
        """Objects, in the order that Helm installs them. Later values win. Raises Refused."""
        done = self._run("template", release, *self._arguments(values, sets), "--namespace", "serving")
        if done.returncode:
            raise Refused(done.stderr)
        return [each for each in yaml.safe_load_all(done.stdout) if each]

    def notes(self, *values: Mapping[str, Any] | Path, release: str = "trial") -> str:
        """What a user reads after the installation."""
        done = self._run("install", release, *self._arguments(values, ()), "--dry-run=client")
        if done.returncode:
            raise Refused(done.stderr)
        return done.stdout.partition("NOTES:")[2]

    def lint(self, *values: Mapping[str, Any] | Path) -> str:
        """What it printed. Raises Refused."""
        done = self._run("lint", "--strict", *self._arguments(values, ()))
        if done.returncode:
            raise Refused(done.stdout + done.stderr)
        return done.stdout

    def _arguments(self, values: Sequence[Mapping[str, Any] | Path], sets: Sequence[str]) -> list[str]:
        files: list[Path] = []
        for number, each in enumerate(values):
            if isinstance(each, Path):
                files.append(each)
                continue
            path = self.folder / f"values-{number}.yaml"
            path.write_text(json.dumps(each))
            files.append(path)
        return [*(f"--values={path}" for path in files), *(f"--set={each}" for each in sets)]

    def _run(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        # The chart comes after the release's name where there is one, and all else can follow.
        names = [each for each in arguments[:1] if not each.startswith("-")]
        rest = arguments[len(names) :]
        return subprocess.run(
            [self.helm, command, *names, CHART, *rest],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


def fetched_helm() -> Path:
    return helm_binary()


def of_kind(objects: Sequence[Object], kind: str, ending: str = "") -> Object:
    """The one of this kind whose name ends so."""
    (found,) = [
        each for each in objects if each["kind"] == kind and each["metadata"]["name"].endswith(ending)
    ]
    return found


def pods(objects: Sequence[Object]) -> dict[str, Object]:
    """Pod templates by the value of their component label, as Pods."""
    found: dict[str, Object] = {}
    for each in objects:
        for template in _templates(each):
            name = template["metadata"]["labels"]["app.kubernetes.io/component"]
            found[name] = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {**template["metadata"], "name": name},
                "spec": template["spec"],
            }
    return found


def _templates(of: Object) -> list[Object]:
    if of["kind"] in ("Deployment", "StatefulSet"):
        return [of["spec"]["template"]]
    if of["kind"] == "RayCluster":
        return [
            of["spec"]["headGroupSpec"]["template"],
            *(g["template"] for g in of["spec"]["workerGroupSpecs"]),
        ]
    return []


def check_valid(objects: Sequence[Object]) -> None:
    """Against the schemas of Kubernetes, unknown fields refused. Raises ValidationError."""
    for each in [*objects, *pods(objects).values()]:
        if (each["apiVersion"], each["kind"]) in SPECS:
            check_custom(each)
            continue
        for version in KUBERNETES_VERSIONS:
            kubernetes_validate.validate(each, version, strict=True)
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names), names
    assert all(len(name) <= 63 for _, name in names), names


def settings_of(objects: Sequence[Object], component: str, folder: Path) -> Settings:
    """As the container's own command reads them: its arguments through the command line, its environment, its file.
    Raises what `headrace` would say.
    """
    container = pods(objects)[component]["spec"]["containers"][0]
    assert container["command"] == ["headrace"]
    parsed = parsed_arguments(container["args"])
    assert str(parsed["config"]).startswith(f"{SETTINGS_FOLDER}/")
    volumes = {each["name"]: each for each in pods(objects)[component]["spec"]["volumes"]}
    source = of_kind(objects, "ConfigMap", volumes["settings"]["configMap"]["name"])
    path = folder / f"{component}.yaml"
    path.write_text(source["data"][parsed["config"].name])
    environment = {each["name"]: _value(each, container) for each in container["env"]}
    return config.load(path, assignments(parsed), environment)


def _value(variable: Object, container: Object) -> str:
    """What Kubernetes would put in."""
    source = variable.get("valueFrom", {})
    if "resourceFieldRef" in source:
        section, _, resource = source["resourceFieldRef"]["resource"].partition(".")
        amount = str(container["resources"].get(section, {}).get(resource, "0"))
        return str(math.ceil(float(amount[:-1]) / 1000 if amount.endswith("m") else float(amount)))
    return variable.get("value", "10.0.0.1")
