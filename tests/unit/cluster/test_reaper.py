import subprocess
import sys

from headrace.cluster.reaper import Reaper


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_only_what_was_started_since_is_ended(tmp_path):
    """A program that keeps a cluster may have children of its own."""
    before = sleeper()
    reaper = Reaper(str(tmp_path / "cluster"))
    after = sleeper()
    try:
        reaper.watch_children()
        reaper.close()
        assert after.wait(10) != 0
        assert before.poll() is None
    finally:
        for process in (before, after):
            process.kill()
            process.wait()
