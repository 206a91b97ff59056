"""`headrace bench engine`: whole steps of a worker's engine - scheduler, model, sampler - beside their physical floor.

    prefill   a prompt of `context` tokens that nothing is cached of, from submit to its first token
    decode    `batch` sequences of `context` tokens each, whose KV is there as after a hand-off; one token a step

Each variant (backend, dtype, threads) has a thread of its own, which may run on as many cores as the variant has
compute threads, and a second one to measure the machine: the kernels pin the thread that calls them. The two take
turns, so that whatever slows the machine slows a run and its floor alike.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import psutil
import torch

from headrace.bench.floors import Limits, ModelSize, Work, num_weights
from headrace.bench.meter import Meter
from headrace.clock import SystemClock
from headrace.config import EngineSettings, Settings
from headrace.engine import sequence as engine_sequence
from headrace.engine.block_pool import BlockPool
from headrace.engine.engine import Engine
from headrace.engine.forward import ForwardPass, load_forward
from headrace.engine.kv_cache import KvCache
from headrace.engine.load import choose_dtype
from headrace.engine.sequence import Failed, NewToken, StepPlan
from headrace.engine.torch_runner import TorchRunner
from headrace.engine.weights.load import load_model
from headrace.engine.weights.source import Quantization
from headrace.errors import RequestCancelled
from headrace.model_config import ModelConfig, ModelFiles
from headrace.sampling_params import SamplingParams

Phase = Literal["prefill", "decode"]
Backend = Literal["cpu", "torch"]
# What weights are. "stored": quantized where the model's files have them so. What is not quantized, and activations,
# are then in the dtype that the engine chooses by itself.
Dtype = Literal["float32", "bfloat16", "int8", "int4", "stored"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
DTYPES: tuple[Dtype, ...] = get_args(Dtype)

_STEPS_PER_RUN = 8  # of decoding
_WARM_UP_STEPS = 4
_FREE_MEMORY_BYTES = 1 << 30  # left to others


@dataclass(frozen=True, slots=True)
class Variant:
    """One engine to be measured."""

    backend: Backend
    dtype: Dtype
    num_threads: int

    @property
    def is_possible(self) -> bool:
        """torch would dequantize all weights in each step, which nobody runs."""
        return self.backend == "cpu" or self.dtype in ("float32", "bfloat16")

    @property
    def compute_dtype(self) -> torch.dtype:
        return choose_dtype(self.dtype if self.dtype in ("float32", "bfloat16") else "auto", self.backend)

    @property
    def quantization(self) -> Quantization:
        if self.dtype in ("int8", "int4"):
            return self.dtype
        return "auto" if self.dtype == "stored" else "none"

    def settings(self, settings: Settings, num_blocks: int, max_sequences: int) -> EngineSettings:
        changes = {
            "backend": self.backend,
            "num_threads": self.num_threads,
            "num_blocks": num_blocks,
            "max_sequences": max(max_sequences, settings.engine.max_sequences),
        }
        return settings.engine.model_copy(update=changes)


@dataclass(frozen=True, slots=True)
class Case:
    phase: Phase
    batch: int
    context: int

    def num_tokens(self, num_runs: int) -> int:
        """Of each sequence, by the end."""
        return self.context + (
            _WARM_UP_STEPS + num_runs * _STEPS_PER_RUN + 2 if self.phase == "decode" else 1
        )

    def num_blocks(self, block_size_tokens: int, num_runs: int) -> int:
        return self.batch * (-(-self.num_tokens(num_runs) // block_size_tokens) + 1)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the report. `threads`, `batch` and `context` as asked for; times are medians over the runs."""

    phase: Phase
    backend: Backend
    dtype: Dtype
    compute_dtype: str
    kv_dtype: str
    threads: int
    batch: int
    context: int
    runs: int
    tokens_per_s: float
    floor_tokens_per_s: float
    fraction_of_floor: float
    step_ms: float
    overhead_ms: float  # of a step: what is not the model's forward pass
    read_gb_per_s: float  # the machine, the best that was measured between the runs
    gemm_gflops: float


@dataclass(frozen=True, slots=True)
class Run:
    """Some steps of an engine."""

    num_steps: int
    num_tokens: int  # computed (prefill) or drawn (decode)
    seconds: float
    forward_s: float  # of `seconds`, in the model's forward pass


def why_not(
    variant: Variant, case: Case, config: ModelConfig, settings: Settings, num_runs: int
) -> str | None:
    """Why the case can not be measured here and now; None if it can."""
    num_tokens = case.num_tokens(num_runs)
    if num_tokens > config.max_model_tokens:
        return f"it takes {num_tokens:,} tokens, the model's limit is {config.max_model_tokens:,}"
    if case.phase == "decode" and case.batch > settings.engine.max_step_tokens:
        return f"engine.max_step_tokens is {settings.engine.max_step_tokens:,}"
    dtype = variant.compute_dtype
    block_bytes = KvCache.for_model(config, variant.settings(settings, 2, 1), dtype).block_bytes
    kv_bytes = case.num_blocks(settings.engine.block_size_tokens, num_runs) * block_bytes
    # Once for the engine and once for what the meter reads: at most, since quantized weights are smaller.
    weight_bytes = 2 * num_weights(config) * dtype.itemsize
    free = psutil.virtual_memory().available - _FREE_MEMORY_BYTES
    if kv_bytes + weight_bytes <= free:
        return None
    return (
        f"it takes {kv_bytes / 1e9:.1f} GB for KV and {weight_bytes / 1e9:.1f} GB for weights,"
        f" {max(free, 0) / 1e9:.1f} GB of memory are free"
    )


def measure(
    files: ModelFiles, settings: Settings, variant: Variant, cases: Sequence[Case], num_runs: int
) -> Generator[Row]:
    """One row per case, as they come. All cases must be possible (`why_not`). Raises HeadraceError.

    Closing it, or an exception, ends what is under way at its next step.
    """
    stop = threading.Event()
    size = settings.engine.block_size_tokens
    num_blocks = max(case.num_blocks(size, num_runs) for case in cases)
    engine_settings = variant.settings(settings, num_blocks, max(case.batch for case in cases))
    with _pinned_thread(variant) as own, _pinned_thread(variant) as beside:
        try:
            subject = own.submit(Subject.load, files, engine_settings, variant, stop).result()
            meter_arguments = (subject.size.weight_bytes, variant.compute_dtype, variant.num_threads)
            meter = beside.submit(Meter, *meter_arguments).result()
            for case in cases:
                own.submit(subject.begin, case, num_runs).result()
                limits = beside.submit(meter.measure).result()
                runs: list[Run] = []
                for _ in range(num_runs):
                    runs.append(own.submit(subject.run, case).result())
                    limits = limits.best(beside.submit(meter.measure).result())
                own.submit(subject.end).result()
                yield make_row(variant, case, subject, runs, limits)
        finally:
            stop.set()


def make_row(variant: Variant, case: Case, subject: Subject, runs: Sequence[Run], limits: Limits) -> Row:
    work, num_tokens = subject.work(case, len(runs))
    tokens_per_s = statistics.median(run.num_tokens / run.seconds for run in runs)
    floor_tokens_per_s = num_tokens / work.seconds(limits)
    return Row(
        phase=case.phase,
        backend=variant.backend,
        dtype=variant.dtype,
        compute_dtype=str(variant.compute_dtype).removeprefix("torch."),
        kv_dtype=subject.kv_dtype,
        threads=variant.num_threads,
        batch=case.batch,
        context=case.context,
        runs=len(runs),
        tokens_per_s=tokens_per_s,
        floor_tokens_per_s=floor_tokens_per_s,
        fraction_of_floor=tokens_per_s / floor_tokens_per_s,
        step_ms=1e3 * statistics.median(run.seconds / run.num_steps for run in runs),
        overhead_ms=1e3 * statistics.median((run.seconds - run.forward_s) / run.num_steps for run in runs),
        read_gb_per_s=limits.bytes_per_s / 1e9,
        gemm_gflops=limits.flops_per_s / 1e9,
    )


class Subject:
    """An engine under measurement. Used on one thread: `begin`, `run` as often as wanted, `end`."""

    def __init__(
        self, engine: Engine, forward: _TimedForward, cache: KvCache, size: ModelSize, max_step_tokens: int
    ) -> None:
        self.size = size
        self.kv_dtype = cache.dtype_name
        self.stop = threading.Event()
        self._engine = engine
        self._forward = forward
        self._cache = cache
        self._max_step_tokens = max_step_tokens
        self._random = np.random.default_rng(0)
        self._num_sequences = 0
        self._decoding: list[str] = []

    @classmethod
    def load(
        cls, files: ModelFiles, settings: EngineSettings, variant: Variant, stop: threading.Event
    ) -> Subject:
        """As a worker builds its engine, but for a clock around the forward pass. `stop`: ends a run at its next step,
        with RequestCancelled.
        """
        dtype = variant.compute_dtype
        model = load_model(files, dtype, quantization=variant.quantization)
        cache = KvCache.for_model(files.config, settings, dtype)
        size = ModelSize.of(model, cache.block_bytes / cache.block_size_tokens)
        forward = _TimedForward(load_forward(model, cache, settings))
        runner = TorchRunner(forward, cache, files.config.vocab_size)
        runner.warm_up(settings.max_step_tokens)
        pool = BlockPool(cache.num_blocks, cache.block_size_tokens)
        engine = Engine(runner, pool, settings, files.eos_token_ids, SystemClock())
        subject = cls(engine, forward, cache, size, settings.max_step_tokens)
        subject.stop = stop
        subject._fill_cache()
        return subject

    def begin(self, case: Case, num_runs: int) -> None:
        """Get warm. Decoding: the sequences come with their KV, as from a prefill worker."""
        if case.phase == "prefill":
            self._run_prompt(min(case.context, self._max_step_tokens))
            return
        max_tokens = case.num_tokens(num_runs) - case.context
        sequences = [self._sequence(case.context, max_tokens) for _ in range(case.batch)]
        for sequence in sequences:
            self._engine.reserve(sequence)
        self._engine.step()
        for sequence in sequences:
            self._engine.adopt(sequence.id, {0: sequence.token_ids[0]})
        self._decoding = [sequence.id for sequence in sequences]
        self._run_decode(case.batch, _WARM_UP_STEPS)

    def run(self, case: Case) -> Run:
        if case.phase == "prefill":
            return self._run_prompt(case.context)
        return self._run_decode(case.batch, _STEPS_PER_RUN)

    def end(self) -> None:
        for sequence_id in self._decoding:
            self._engine.abort(sequence_id)
        self._decoding = []
        self._engine.reset_cache()

    def work(self, case: Case, num_runs: int) -> tuple[Work, int]:
        """Of a prompt, or of the middle one of the measured decode steps; and the tokens it brings."""
        if case.phase == "prefill":
            return self.size.prefill(case.context, self._max_step_tokens), case.context
        # The first step's token is the first behind the context; each further step sees one more.
        middle = case.context + 1 + _WARM_UP_STEPS + (num_runs * _STEPS_PER_RUN - 1) / 2
        return self.size.decode(case.batch, middle), case.batch

    def _run_prompt(self, num_tokens: int) -> Run:
        """One prompt, until its only token."""
        sequence = self._sequence(num_tokens, max_tokens=1)
        started, forward_before_s, num_steps = time.perf_counter(), self._forward.seconds, 1
        self._engine.submit(sequence)
        while not self._step():
            num_steps += 1
        seconds = time.perf_counter() - started
        return Run(num_steps, num_tokens, seconds, self._forward.seconds - forward_before_s)

    def _run_decode(self, batch: int, num_steps: int) -> Run:
        started, forward_before_s = time.perf_counter(), self._forward.seconds
        for _ in range(num_steps):
            num_drawn = self._step()
            assert num_drawn == batch, f"a step drew {num_drawn} tokens of {batch}"
        seconds = time.perf_counter() - started
        return Run(num_steps, batch * num_steps, seconds, self._forward.seconds - forward_before_s)

    def _step(self) -> int:
        """Returns the number of tokens drawn. Raises what a sequence failed with."""
        if self.stop.is_set():
            raise RequestCancelled("the benchmark was stopped")
        num_drawn = 0
        for event in self._engine.step().events:
            if isinstance(event, Failed):
                raise event.error
            num_drawn += isinstance(event, NewToken)
        return num_drawn

    def _sequence(self, num_tokens: int, max_tokens: int) -> engine_sequence.Sequence:
        """Of random tokens, and with a root of its own, so that no two have a block in common."""
        self._num_sequences += 1
        name = f"bench-{self._num_sequences}"
        token_ids = self._random.integers(0, self.size.config.vocab_size, num_tokens).tolist()
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True)
        return engine_sequence.Sequence(name, token_ids, num_tokens, sampling, root=name.encode())

    def _fill_cache(self) -> None:
        """The KV of some tokens in every block: pages that are there, numbers as a model makes them."""
        sequence = self._sequence(self._cache.block_size_tokens, max_tokens=2)
        self._engine.submit(sequence)
        self._step()
        self._cache.tensor[:] = self._cache.tensor[sequence.block_ids[0]].clone()
        self._engine.abort(sequence.id)
        self._engine.reset_cache()


class _TimedForward:
    """A forward pass that counts the seconds spent in it."""

    def __init__(self, forward: ForwardPass) -> None:
        self._forward = forward
        self.seconds = 0.0

    def run(self, plan: StepPlan) -> list[int]:
        started = time.perf_counter()
        try:
            return self._forward.run(plan)
        finally:
            self.seconds += time.perf_counter() - started

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        started = time.perf_counter()
        try:
            return self._forward.logits(rows)
        finally:
            self.seconds += time.perf_counter() - started


def _pinned_thread(variant: Variant) -> ThreadPoolExecutor:
    """A thread, and those it starts, on the first cores of this process: one for each compute thread."""
    cores = sorted(os.sched_getaffinity(0))[: variant.num_threads]
    assert len(cores) == variant.num_threads
    return ThreadPoolExecutor(1, initializer=os.sched_setaffinity, initargs=(0, cores))
