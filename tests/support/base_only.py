"""What pip installs for Headrace without extras, and a Python that can import nothing else."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]

# Before anything else is imported: whatever is installed beyond the base can not be found.
PROGRAM = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
sys.argv = ["headrace", *sys.argv[1:]]
from headrace.cli import main
main()
"""


def project() -> dict[str, list[str]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def closure(requirements: list[str]) -> set[str]:
    """Names of the distributions that come along, as they are installed here."""
    found: dict[str, set[str]] = {}
    todo = [Requirement(each) for each in requirements]
    while todo:
        wanted = todo.pop()
        name, extras = normal(wanted.name), set(wanted.extras)
        if name in found and extras <= found[name]:
            continue
        found[name] = found.get(name, set()) | extras
        for text in metadata.requires(wanted.name) or []:
            part = Requirement(text)
            if part.marker is None or any(part.marker.evaluate({"extra": e}) for e in {"", *found[name]}):
                todo.append(part)
    return set(found)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def blocked_modules() -> set[str]:
    """Top-level modules of what is installed here and does not belong to the base."""
    base = closure(project()["dependencies"]) | {"headrace"}
    modules = metadata.packages_distributions()
    return {name for name, of in modules.items() if not {normal(each) for each in of} & base}


def program() -> str:
    """Runs `headrace` with the arguments that follow `-c program`."""
    return PROGRAM.format(blocked=blocked_modules())
