"""Writes values.yaml, values.schema.json and the README's table of the Helm chart from `tools/chart_values.py`.

Run by `make chart`, for instance after a setting was added; `--check` (in `make check`) only compares.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.chart_values import POOL, ROUTER, SHARED, Values, settings_schema  # noqa: E402

CHART = ROOT / "deploy" / "helm" / "headrace"
_SCOPES = {"shared": SHARED, "router": ROUTER, "pool": POOL}
_TABLE = ("<!-- values: begin (tools/generate_chart.py) -->\n", "<!-- values: end -->\n")
_WIDTH = 110


def files() -> dict[Path, str]:
    """What the files have to hold."""
    readme = CHART / "README.md"
    head, _, rest = readme.read_text().partition(_TABLE[0])
    tail = rest.partition(_TABLE[1])[2]
    return {
        CHART / "values.yaml": _values_yaml(),
        CHART / "values.schema.json": json.dumps(schema(), indent=1) + "\n",
        readme: head + _TABLE[0] + _table() + _TABLE[1] + tail,
    }


def schema() -> dict[str, Any]:
    """Unknown keys are refused everywhere but in what is Kubernetes' own (tolerations, affinity, …)."""
    whole = Values.model_json_schema(by_alias=True)
    pools = whole["properties"]["pools"]
    (name,) = pools.pop("patternProperties")
    # A pool says only what differs from poolDefaults; `_clean` leaves no field that has to be there.
    pools |= {"patternProperties": {name: {"$ref": "#/$defs/Pool"}}, "additionalProperties": False}
    whole["properties"]["global"] = {"type": "object"}  # Helm's own, for charts that include this one
    _patch_scopes(whole)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_clean(whole)}


def _patch_scopes(part: Any) -> None:
    if isinstance(part, dict):
        for value in part.values():
            _patch_scopes(value)
        if isinstance(scope := part.pop("scope", None), str):
            text = part["description"]
            part.clear()
            part |= {"description": text, **settings_schema(_SCOPES[scope])}
    elif isinstance(part, list):
        for value in part:
            _patch_scopes(value)


def _clean(part: Any) -> Any:
    """Defaults stand in values.yaml; titles say nothing."""
    if isinstance(part, list):
        return [_clean(each) for each in part]
    if not isinstance(part, dict):
        return part
    dropped = {"default", "required"} | ({"title"} if isinstance(part.get("title"), str) else set())
    return {
        key: _clean(value) for key, value in part.items() if key not in dropped or isinstance(value, dict)
    }


def _values_yaml() -> str:
    lines = ["# Generated from tools/chart_values.py; README.md has the same as a table.", ""]
    return "\n".join([*lines, *_yaml_of(Values(), 0)]) + "\n"


def _yaml_of(values: BaseModel, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, field in type(values).model_fields.items():
        key, value = field.alias or name, getattr(values, name)
        text = _description(field)
        if depth == 0 and isinstance(value, BaseModel):
            yield ""
        if text:
            yield f"{indent}# {text}"
        if isinstance(value, BaseModel):
            yield f"{indent}{key}:"
            yield from _yaml_of(value, depth + 1)
        else:
            dumped = yaml.safe_dump({key: _plain(value)}, sort_keys=False, width=_WIDTH)
            yield from (indent + line for line in dumped.splitlines())


def _description(field: FieldInfo) -> str:
    if field.description:
        return field.description
    model = _model_of(field)
    return " ".join((model.__doc__ or "").split()) if model is not None and model.__doc__ else ""


def _model_of(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    candidates = (kind, *get_args(kind))
    models = [each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel)]
    return models[0] if models else None


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value


def _table() -> str:
    rows = ["| value | default | |", "| --- | --- | --- |"]
    rows += [f"| `{key}` | {default} | {text} |" for key, default, text in _rows(Values(), "")]
    return "\n".join(rows) + "\n"


def _rows(values: BaseModel, prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in type(values).model_fields.items():
        key, value = prefix + (field.alias or name), getattr(values, name)
        if isinstance(value, BaseModel):
            if text := _description(field):
                yield key, "", text
            yield from _rows(value, f"{key}.")
        else:
            dumped = json.dumps(_plain(value)).replace("|", "\\|")
            yield key, f"`{dumped}`", _description(field).replace("|", "\\|")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail when a file is not as it should be"
    )
    only_check = parser.parse_args().check
    stale = [path for path, text in files().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{'differs' if only_check else 'wrote'} {path.relative_to(ROOT)}")
        if not only_check:
            path.write_text(files()[path])
    return int(only_check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
