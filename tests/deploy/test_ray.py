"""deploy/ray: what an operator gets is valid for Ray, and its parts fit each other."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import jsonschema
import pytest
import ray
import yaml

from headrace import config
from headrace.cluster.placement import check_feasible
from headrace.cluster.process import fleet
from headrace.errors import Unavailable

FOLDER = Path(__file__).parents[2] / "deploy" / "ray"
SCHEMA = Path(ray.__file__).parent / "autoscaler" / "ray-schema.json"


@pytest.fixture
def cluster():
    return yaml.safe_load((FOLDER / "cluster.yaml").read_text())


def machines(cluster):
    """What they offer when all are up."""
    kinds = cluster["available_node_types"]
    return [
        kind["resources"]
        for name, kind in kinds.items()
        for _ in range(1 if name == cluster["head_node_type"] else kind["min_workers"])
    ]


def processes(num_prefill, num_decode):
    return fleet(config.load(FOLDER / "etc" / "headrace.yaml", environment={}), num_prefill, num_decode, 0, 0)


def test_the_cluster_file_is_valid_by_rays_own_schema(cluster):
    schema = json.loads(SCHEMA.read_text())
    jsonschema.validate(cluster, schema)
    with pytest.raises(jsonschema.ValidationError, match="max_wrokers"):
        jsonschema.validate({**cluster, "max_wrokers": 1}, schema)


def test_all_machines_are_up_from_the_start(cluster):
    """`headrace up` refuses what is not there, so none may wait for the autoscaler."""
    workers = {n: k for n, k in cluster["available_node_types"].items() if n != cluster["head_node_type"]}
    assert all(kind["min_workers"] == kind["max_workers"] > 0 for kind in workers.values())
    assert sum(kind["min_workers"] for kind in workers.values()) == cluster["max_workers"]


def test_the_fleet_of_the_readme_has_its_places_and_no_more(cluster):
    check_feasible(processes(2, 4), machines(cluster))
    for sizes, words in (((3, 4), "3 prefill, the cluster has 2"), ((2, 5), "5 decode, the cluster has 4")):
        with pytest.raises(Unavailable, match=words):
            check_feasible(processes(*sizes), machines(cluster))


def test_nothing_of_ours_fits_on_the_head(cluster):
    head = cluster["available_node_types"][cluster["head_node_type"]]["resources"]
    for spec in processes(1, 1):
        with pytest.raises(Unavailable):
            check_feasible([spec], [head])


def test_every_machine_serves_with_a_token(cluster):
    for commands in (cluster["head_start_ray_commands"], cluster["worker_start_ray_commands"]):
        (start,) = [command for command in commands if "ray start" in command]
        assert "RAY_AUTH_MODE=token" in start
    assert "~/.ray/auth_token" in cluster["file_mounts"]


def test_what_is_mounted_is_there_or_made_by_the_readme(cluster):
    readme = (FOLDER / "README.md").read_text()
    for source in cluster["file_mounts"].values():
        if source.startswith("./"):
            assert (FOLDER / source).exists() or f"--wheel-dir deploy/ray/{source[2:]} " in readme


def test_the_settings_protect_what_listens_beyond_loopback():
    settings = processes(1, 1)[0].settings
    assert settings.rpc.tls.enabled
    assert settings.security.asks_for_credentials
    assert not settings.security.allow_insecure


def test_the_job_runs_headrace_up_on_the_head(tmp_path):
    """With a `ray` that notes what it is told."""
    fake = tmp_path / "ray"
    fake.write_text('#!/bin/sh\necho "$RAY_AUTH_MODE"\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RAY_API_SERVER_ADDRESS": "http://head:8265"}
    command = [str(FOLDER / "submit.sh"), "--prefill", "2", "--decode", "4", "--set", "log_level=debug"]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=20)
    mode, *arguments = told.stdout.splitlines()
    submit, _, entry = " ".join(arguments).partition(" -- ")
    assert mode == "token"
    submit, _, runtime = submit.partition(" --runtime-env-json ")
    assert submit == "job submit --address http://head:8265 --submission-id headrace --no-wait"
    stop_wait_s = float(json.loads(runtime)["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"])
    assert stop_wait_s > processes(1, 1)[0].settings.rpc.drain_timeout_s + 30  # else Ray kills what drains
    assert entry == (
        "/opt/headrace/venv/bin/headrace up --address auto --config /opt/headrace/etc/headrace.yaml"
        " --prefill 2 --decode 4 --set log_level=debug"
    )
