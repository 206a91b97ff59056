"""The commands of docs/security.md, run as they stand there."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
import yaml

from headrace.bench.certificates import Files
from headrace.cluster.exposure import check_exposure
from headrace.config import Settings
from headrace.rpc.tls import Part
from tests.security.test_tls import channel_of, outcomes, worker_at

TEXT = (Path(__file__).parents[2] / "docs" / "security.md").read_text()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl on this machine")
async def test_certificates_made_with_openssl_are_good(tmp_path, monkeypatch):
    commands = re.search(r"```bash\n(CLUSTER=.*?)```", TEXT, re.DOTALL).group(1)
    run = partial(subprocess.run, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    await asyncio.to_thread(run, ["bash", "-euc", commands])

    def files(name: str) -> Files:
        return Files(tmp_path / "ca.pem", tmp_path / f"{name}.crt", tmp_path / f"{name}.key")

    async with worker_at(files("decode-0")) as address:
        for name, allowed in (
            ("router", {"Session", "Status"}),
            ("operator", {"Status"}),
            ("decode-0", {"Renew"}),
        ):
            async with channel_of(address, files(name)) as channel:
                found = await outcomes(channel)
            assert {call for call, status in found.items() if status == "OK"} == allowed | {"health"}
    monkeypatch.chdir(tmp_path)
    settings = Settings.model_validate(
        yaml.safe_load(re.search(r"```yaml\n(rpc:.*?)```", TEXT, re.DOTALL).group(1))
    )
    assert check_exposure(settings, Part.ROUTER, "router") == []


def test_the_other_settings_exist():
    for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL):
        Settings.model_validate(yaml.safe_load(block))
