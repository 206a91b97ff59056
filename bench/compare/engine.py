"""Headrace's engine beside llama.cpp and transformers: the same weights on the same cores, in alternating runs.

python bench/compare/engine.py --llama-bench BUILD/bin/llama-bench --json compare.json

Each run is a process of its own, which loads the model, gets warm and measures all points once; the order changes from
round to round, and medians over the rounds count. README.md says what is measured, and how to build llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from headrace.bench.report import machine_facts
from headrace.config import DEFAULT_CACHE_DIR, DEFAULT_MODEL
from headrace.model_config import ModelFiles
from headrace.model_store import resolve

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_PROCESS_TIMEOUT_S = 3600.0
_NUM_GENERATED = 32  # tokens of which decoding is timed
_LLAMA_TYPES = {"float32": "F32", "bfloat16": "BF16"}
HOW_TO_BUILD = f"""llama.cpp is left out: say --llama-bench PATH. To build it, see {_HERE.name}/README.md; in short
  cmake -S LLAMA_CPP -B BUILD -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DBUILD_SHARED_LIBS=OFF
  cmake --build BUILD -j 1 --target llama-bench llama-batched-bench llama-quantize llama-perplexity"""


@dataclass(frozen=True, slots=True)
class Point:
    phase: Literal["prefill", "decode"]
    batch: int
    context: int  # tokens: of the prompt, or before decoding starts


Rates = dict[Point, float]  # tokens per second
Contender = Callable[[Sequence[Point]], Rates]


# --- contenders -------------------------------------------------------------------------------------------------------


def headrace(model: str, dtype: str, threads: int, points: Sequence[Point], floors: Rates) -> Rates:
    """One run of `headrace bench engine`. `floors` takes the floor it measured, the highest of all runs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, "-c", "from headrace.cli import main; main()", "bench", "engine"]
        command += ["--model", model, "--backend", "cpu", "--dtype", dtype, "--threads", str(threads)]
        command += ["--runs", "1", "--json", str(path), *headrace_points(points)]
        _output_of(command)
        rows = json.loads(path.read_text())["rows"]
    rates: Rates = {}
    for row in rows:
        point = Point(row["phase"], row["batch"], row["context"])
        rates[point] = row["tokens_per_s"]
        floors[point] = max(floors.get(point, 0.0), row["floor_tokens_per_s"])
    return rates


def headrace_points(points: Sequence[Point]) -> list[str]:
    def listed(values: Sequence[int]) -> str:
        return ",".join(map(str, dict.fromkeys(values))) or "0"

    decodes = [point for point in points if point.phase == "decode"]
    prompts = [point.context for point in points if point.phase == "prefill"]
    context = ["--context", listed([point.context for point in decodes])] if decodes else []
    return ["--prompt", listed(prompts), "--batch", listed([point.batch for point in decodes]), *context]


def llama_cpp(llama_bench: Path, gguf: Path, threads: int, points: Sequence[Point]) -> Rates:
    """llama-bench for prefill and one sequence, llama-batched-bench beside it, if it is there, for more."""
    common = ["-m", str(gguf), "-t", str(threads)]
    rates: Rates = {}
    prompts = [point.context for point in points if point.phase == "prefill"]
    singles = [point.context for point in points if point.phase == "decode" and point.batch == 1]
    bench = [str(llama_bench), *common, "-r", "1", "-o", "json"]
    if prompts:
        rates |= parse_llama_bench(_output_of([*bench, "-p", ",".join(map(str, prompts)), "-n", "0"]))
    if singles:
        depths = ",".join(map(str, singles))
        rates |= parse_llama_bench(_output_of([*bench, "-p", "0", "-n", str(_NUM_GENERATED), "-d", depths]))
    batched = llama_bench.with_name("llama-batched-bench")
    for point in points:
        if point.phase == "decode" and point.batch > 1 and batched.exists():
            context = point.context + point.batch * (_NUM_GENERATED + 1)
            command = [str(batched), *common, "-c", str(context), "-kvu", "-pps", "--output-format", "jsonl"]
            command += ["-npp", str(point.context), "-ntg", str(_NUM_GENERATED), "-npl", str(point.batch)]
            rates |= parse_batched_bench(_output_of(command))
    return rates


def parse_llama_bench(text: str) -> Rates:
    rates: Rates = {}
    for run in json.loads(text):
        is_prefill = run["n_prompt"] > 0
        context = run["n_prompt"] if is_prefill else run["n_depth"]
        rates[Point("prefill" if is_prefill else "decode", 1, context)] = run["avg_ts"]
    return rates


def parse_batched_bench(text: str) -> Rates:
    rates: Rates = {}
    for line in text.splitlines():
        if line.startswith("{"):
            run = json.loads(line)
            rates[Point("decode", run["pl"], run["pp"])] = run["speed_tg"]
    return rates


def transformers(files: ModelFiles, dtype: str, threads: int, points: Sequence[Point]) -> Rates:
    """`transformers_run.py`, which prints one JSON object for each point."""
    command = [
        sys.executable,
        str(_HERE / "transformers_run.py"),
        "--model",
        str(files.path),
        "--dtype",
        dtype,
    ]
    command += ["--threads", str(threads), "--generated", str(_NUM_GENERATED)]
    command += [f"{point.phase}:{point.batch}:{point.context}" for point in points]
    rates: Rates = {}
    for line in _output_of(command).splitlines():
        if line.startswith("{"):
            run = json.loads(line)
            rates[Point(run["phase"], run["batch"], run["context"])] = run["tokens_per_s"]
    return rates


def _output_of(command: Sequence[str]) -> str:
    """Standard output. Raises RuntimeError with what the process said when it fails."""
    environment = os.environ | {"PYTHONPATH": str(_ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_PROCESS_TIMEOUT_S, env=environment, check=False
    )
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip())[-1000:]
        raise RuntimeError(f"{Path(command[0]).name} ended with status {done.returncode}: {said}")
    return done.stdout


# --- rounds -----------------------------------------------------------------------------------------------------------


class Results:
    """Rates of all rounds so far, as rows for people and for programs."""

    def __init__(self, names: Sequence[str], points: Sequence[Point]) -> None:
        self.floors: Rates = {}
        self._points = points
        self._samples: dict[str, dict[Point, list[float]]] = {name: {} for name in names}

    def add(self, name: str, rates: Rates) -> None:
        for point, rate in rates.items():
            if point in self._points:
                self._samples[name].setdefault(point, []).append(rate)

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "engine": name,
                **asdict(point),
                "tokens_per_s": statistics.median(samples[point]),
                "floor_tokens_per_s": self.floors.get(point),
                "samples": samples[point],
            }
            for point in self._points
            for name, samples in self._samples.items()
            if point in samples
        ]

    def table(self) -> str:
        head = f"{'phase':<8} {'batch':>5} {'context':>7} {'engine':<13} {'tokens/s':>9} {'floor':>9} {'runs':>4}"
        lines = [head]
        for row in self.rows():
            floor = f"{row['floor_tokens_per_s']:9.1f}" if row["floor_tokens_per_s"] else f"{'':>9}"
            lines.append(
                f"{row['phase']:<8} {row['batch']:>5} {row['context']:>7} {row['engine']:<13}"
                f" {row['tokens_per_s']:9.1f} {floor} {len(row['samples']):>4}"
            )
        return "\n".join(lines)


def run_rounds(
    contenders: Mapping[str, Contender], results: Results, points: Sequence[Point], num_rounds: int
) -> None:
    """Whoever was first in a round is last in the next, so that nobody always runs on the warmest machine."""
    names = list(contenders)
    for number in range(num_rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            print(f"round {number + 1} of {num_rounds}: {name}", file=sys.stderr, flush=True)
            results.add(name, contenders[name](points))


def requantized(llama_bench: Path, files: ModelFiles, dtype: str, folder: Path) -> Path:
    """The model's GGUF file with matrices in `dtype`; itself for "stored". Raises RuntimeError."""
    if dtype == "stored":
        return files.path
    path = folder / f"{files.path.stem}-{_LLAMA_TYPES[dtype]}.gguf"
    quantize = llama_bench.with_name("llama-quantize")
    _output_of([str(quantize), "--allow-requantize", str(files.path), str(path), _LLAMA_TYPES[dtype]])
    return path


# --- command line -----------------------------------------------------------------------------------------------------


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="of which there has to be a GGUF file")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "stored"), default="bfloat16")
    parser.add_argument("--engines", default="headrace,llama.cpp,transformers", help="with commas between")
    parser.add_argument("--llama-bench", type=Path, help="path of the binary; llama-quantize lies beside it")
    parser.add_argument("--cores", type=_numbers, help="default: all of this process")
    parser.add_argument("--prompt", type=_numbers, default=[512])
    parser.add_argument("--batch", type=_numbers, default=[1, 4, 16])
    parser.add_argument("--context", type=_numbers, default=[256])
    parser.add_argument("--runs", type=int, default=5, help="rounds; fewer than 5 give no figure to rely on")
    parser.add_argument("--json", type=Path)
    found = parser.parse_args(arguments)
    allowed = sorted(os.sched_getaffinity(0))
    found.cores = found.cores or allowed
    if not set(found.cores) <= set(allowed):
        parser.error(f"--cores: {found.cores} is not allowed; this process may use {allowed}")
    if found.runs < 1:
        parser.error(f"--runs: {found.runs} is not allowed; it must be at least 1")
    unknown = set(found.engines.split(",")) - {"headrace", "llama.cpp", "transformers"}
    if unknown:
        parser.error(f"--engines: there is no {', '.join(sorted(unknown))}")
    if found.llama_bench and not found.llama_bench.exists():
        parser.error(f"--llama-bench: there is no file {found.llama_bench}\n{HOW_TO_BUILD}")
    return found


def _contenders(
    arguments: argparse.Namespace, files: ModelFiles, results: Results, folder: Path
) -> dict[str, Contender]:
    threads, dtype, wanted = len(arguments.cores), arguments.dtype, arguments.engines.split(",")
    contenders: dict[str, Contender] = {}
    if "headrace" in wanted:
        contenders["headrace"] = lambda points: headrace(
            str(files.path), dtype, threads, points, results.floors
        )
    if "llama.cpp" in wanted and arguments.llama_bench is None:
        print(HOW_TO_BUILD, file=sys.stderr)
    elif "llama.cpp" in wanted:
        gguf = requantized(arguments.llama_bench, files, dtype, folder)
        contenders["llama.cpp"] = lambda points: llama_cpp(arguments.llama_bench, gguf, threads, points)
    if "transformers" in wanted and dtype == "stored":
        print("transformers is left out: it does not compute with stored weights", file=sys.stderr)
    elif "transformers" in wanted:
        contenders["transformers"] = lambda points: transformers(files, dtype, threads, points)
    return contenders


def main() -> None:
    arguments = _arguments()
    files = resolve(arguments.model, cache_dir=DEFAULT_CACHE_DIR)
    if files.format != "gguf":
        raise SystemExit(f"--model: {arguments.model} is a folder; all engines have to read one GGUF file")
    os.sched_setaffinity(0, arguments.cores)  # of all that is started from here
    points = [Point("prefill", 1, context) for context in arguments.prompt]
    points += [Point("decode", batch, context) for context in arguments.context for batch in arguments.batch]
    results = Results(arguments.engines.split(","), points)
    try:
        with tempfile.TemporaryDirectory() as folder:
            contenders = _contenders(arguments, files, results, Path(folder))
            run_rounds(contenders, results, points, arguments.runs)
    finally:
        print(results.table())
        if arguments.json:
            facts = {"model": files.name, "dtype": arguments.dtype, "threads": len(arguments.cores)}
            report = {"machine": machine_facts(), **facts, "rows": results.rows()}
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
