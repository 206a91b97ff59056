"""Rules of the repository that no linter knows."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tools.generate_protos import GENERATED_DIRS

ROOT = Path(__file__).parents[2]
PACKAGES = ["bench", "headrace", "kv_transfer", "prefill_worker", "decode_worker", "router", "tools"]

# Names that say nothing about what is inside.
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}

# What is true on one machine only, or names a place from which packages come.
LOCAL_DETAILS = re.compile(
    r"(?<![\w.~$}])/(home|root|Users|work|tmp)/\w|--(extra-)?index-url|--find-links|pypi\.org/simple|file:///"
)


def modules() -> list[Path]:
    found = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return sorted(path for path in found if path.parent not in GENERATED_DIRS)


def repository_files() -> list[Path]:
    """Tracked files, and new ones that are not ignored."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and path != Path(__file__)]


def test_no_module_has_an_empty_name():
    tests = sorted((ROOT / "tests").rglob("*.py"))
    assert [
        str(path.relative_to(ROOT))
        for path in [*modules(), *tests]
        if EMPTY_NAMES & {path.stem, path.parent.name}
    ] == []


def test_every_module_has_a_docstring():
    sources = {path: path.read_text() for path in modules()}
    missing = [
        path for path, text in sources.items() if text.strip() and ast.get_docstring(ast.parse(text)) is None
    ]
    assert [str(path.relative_to(ROOT)) for path in missing] == []


@pytest.mark.parametrize(
    "text", ["open('/home/me/x')", "pip install --index-url x", "see file:///a", "cd /work/headrace"]
)
def test_local_details_are_recognised(text):
    assert LOCAL_DETAILS.search(text)


@pytest.mark.parametrize("text", ["docs/work/items", "/var/lib/headrace", "https://example.org/home/page"])
def test_other_paths_are_left_alone(text):
    assert LOCAL_DETAILS.search(text) is None


def test_no_file_holds_local_details():
    found = []
    for path in repository_files():
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue  # not text
        found += [
            f"{path.relative_to(ROOT)}:{n}"
            for n, line in enumerate(lines, start=1)
            if LOCAL_DETAILS.search(line)
        ]
    assert found == []
