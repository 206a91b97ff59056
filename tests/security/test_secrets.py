"""Nothing secret in arguments of processes, nor in logs, of a whole local cluster."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from headrace.bench.certificates import Authority
from headrace.cluster.local_cluster import LocalCluster
from headrace.cluster.running import RunningCluster, announce
from headrace.config import Settings
from tests.security.test_credentials import new_key
from tests.support.processes import children_of
from tests.support.tiny_llama import write_tiny_llama


@pytest.mark.timeout(240)
def test_a_local_clusters_secrets_are_in_no_argument_and_no_log(tmp_path):
    model = write_tiny_llama(tmp_path)
    authority = Authority(tmp_path)
    both = authority.issue(
        "both",
        names=["worker.default.headrace.internal"],
        uris=["spiffe://headrace/default/worker", "spiffe://headrace/default/router"],
    )
    key = new_key(tmp_path / "keys.yaml", "a")
    (tmp_path / "secret").write_text("the-secret-of-the-cache-" * 2)
    settings = Settings.model_validate(
        {
            "model": {"ref": str(model)},
            "engine": {"num_blocks": 64},
            "rpc": {"drain_timeout_s": 5.0, "tls": both.tls()},
            "security": {
                "api_keys_file": tmp_path / "keys.yaml",
                "cache_secret_file": tmp_path / "secret",
            },
            "log_level": "debug",
        }
    )
    with LocalCluster(settings, num_prefill=1, num_decode=1) as cluster:
        password = re.fullmatch(r"redis://:(.{20,})@.*", cluster.directory_url).group(1)
        secrets = [password, key.split("_", 2)[2], "the-secret-of-the-cache", _body(both.key)]
        arguments = [_arguments(process.pid) for process in children_of(os.getpid())]
        assert any("redis" in line or "valkey" in line for line in arguments)
        assert any("ray" in line for line in arguments)
        # Ray's own logs are the session's, our processes' lie beside them.
        logs = [path for path in cluster.folder.rglob("*") if path.is_file() and path.suffix in _LOGS]
        assert {"router.log", "prefill-0.log", "decode-0.log"} <= {path.name for path in logs}
        texts = {path.name: path.read_text(errors="replace") for path in logs}
        assert "settings in force" in texts["router.log"]
        for secret in secrets:
            assert not [line for line in arguments if secret in line]
            assert not [name for name, text in texts.items() if secret in text]


_LOGS = (".log", ".out", ".err", ".txt")


def _arguments(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:  # it has ended
        return ""


def _body(key: Path) -> str:
    """A line of the key itself."""
    return key.read_text().splitlines()[1]


def test_where_a_cluster_runs_is_for_its_owner_only(tmp_path):
    running = RunningCluster("127.0.0.1:1", "redis://:secret@127.0.0.1:2/0", os.getpid())
    assert announce(running, tmp_path, "c").stat().st_mode & 0o777 == 0o600
