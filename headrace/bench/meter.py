"""How fast this machine reads memory and multiplies matrices: `Limits`, measured between the runs of a benchmark.

A shared host drifts by the minute, so a figure of yesterday is no floor of today.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.bench.floors import Limits
from headrace.engine.native import library
from headrace.engine.native.packing import PackedMatrix, huge_pages
from headrace.engine.native.threads import Team

# Tokens, inputs and outputs of matrix products: those of small models, and larger ones. Multiples of 32.
_GEMM_SHAPES = ((512, 576, 1536), (512, 1536, 576), (512, 1024, 1024), (512, 2048, 2048))
_REPEATS = 3
_MAX_REPEATING_S = 0.3  # of one way: a slow one needs no second chance


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to do it, and how much it does: bytes or floating-point operations."""

    call: Callable[[], object]
    amount: float

    def rate(self) -> float:
        """Per second, the best of a few."""
        times: list[float] = []
        while len(times) < _REPEATS and sum(times) < _MAX_REPEATING_S:
            started = time.perf_counter()
            self.call()
            times.append(time.perf_counter() - started)
        return self.amount / min(times)


class Meter:
    """Use it on the thread that made it, which may run on as many cores as `num_threads`."""

    def __init__(self, working_set_bytes: int, dtype: torch.dtype, num_threads: int) -> None:
        """Finds the fastest way to read, and to multiply numbers of `dtype`: torch's or that of our kernels.

        `working_set_bytes` is read at a time. That of the weights: less would stay in caches that weights leave.
        """
        self._team = Team(num_threads) if library.load() is not None else None
        self._torch_threads = num_threads
        data = _touched(max(working_set_bytes // 4096, 1) * 4096)
        inputs = [_random(shape, dtype) for shape in _GEMM_SHAPES]
        read, gemm = self._torch_reads(data), [way for x, w in inputs for way in _torch_products(x, w)]
        with self._torch_threading():
            torch.randn(1 << 16).sum()  # torch's threads inherit the cores of the one that starts them
            if self._team is not None:
                self._team.pin_caller()
                read.append(self._native_read(data, self._team))
                gemm += [_native_product(x, w, self._team) for x, w in inputs]
            self._read, self._gemm = _fastest(read), _fastest(gemm)

    def measure(self) -> Limits:
        """Takes some tenths of a second."""
        with self._torch_threading():
            return Limits(self._read.rate(), self._gemm.rate())

    def _torch_threading(self) -> _TorchThreads:
        return _TorchThreads(self._torch_threads)

    def _torch_reads(self, data: torch.Tensor) -> list[_Way]:
        """None is the fastest everywhere."""
        ones = torch.ones(1024)
        ways: list[Callable[[], object]] = [data.amax, lambda: data.view(-1, 1024) @ ones]
        if self._torch_threads == 1:
            integers = data.numpy().view(np.int64)
            ways.append(lambda: np.bitwise_or.reduce(integers))
        return [_Way(way, data.nbytes) for way in ways]

    def _native_read(self, data: torch.Tensor, team: Team) -> _Way:
        kernels: Any = library.load()
        return _Way(lambda: kernels.read(data.data_ptr(), data.nbytes, team.handle), data.nbytes)


class _TorchThreads:
    """Within the block torch computes with so many threads."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._before = torch.get_num_threads()

    def __enter__(self) -> None:
        torch.set_num_threads(self._num_threads)

    def __exit__(self, *exc_info: object) -> None:
        torch.set_num_threads(self._before)


def _fastest(ways: list[_Way]) -> _Way:
    for way in ways:
        way.call()
    return max(ways, key=_Way.rate)


def _torch_products(x: torch.Tensor, w: torch.Tensor) -> list[_Way]:
    flops = 2.0 * x.shape[0] * w.numel()
    return [_Way(lambda: x @ w.t(), flops), _Way(lambda: w @ x.t(), flops)]


def _native_product(x: torch.Tensor, w: torch.Tensor, team: Team) -> _Way:
    kernels: Any = library.load()
    packed, out = PackedMatrix(w, w.dtype), torch.empty(x.shape[0], w.shape[0])

    def product() -> torch.Tensor:
        is_f32 = int(x.dtype == torch.float32)
        kernels.product(packed.struct, x.data_ptr(), x.shape[0], is_f32, out.data_ptr(), team.handle)
        return out

    return _Way(product, 2.0 * x.shape[0] * w.numel())


def _random(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_in, num_out = shape
    return torch.randn(num_tokens, num_in, dtype=dtype), torch.randn(num_out, num_in, dtype=dtype)


def _touched(num_bytes: int) -> torch.Tensor:
    """fp32 memory that is really there, in large pages where the system has them."""
    return torch.frombuffer(huge_pages(num_bytes), dtype=torch.float32).fill_(1.0)
