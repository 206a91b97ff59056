"""Figures of runs, with matplotlib (the extra `report`). Each is a function from runs to a Figure.

Colours are Okabe and Ito's, which colour-blind readers tell apart. INK and GRID are replaced where a figure becomes
part of a page that has its own.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator, PercentFormatter

from headrace.bench.serve.records import RequestRecord
from headrace.bench.serve.results import Run

Json = dict[str, Any]
Plot = Callable[[Sequence[Run]], Figure]

INK, GRID = "#24292f", "#d8dee4"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_WIDTH = 8.6  # inches
_MAX_LANES = 60
_SHORTEST_MS = 0.1  # what comes faster has waited in a socket
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "headrace",
}


def png(figure: Figure) -> bytes:
    return _saved(figure, format="png", dpi=150, facecolor="white")


def svg(figure: Figure) -> str:
    """Without the XML head, to stand inside a page."""
    text = _saved(figure, format="svg", transparent=True, metadata={"Date": None}).decode()
    return text[text.index("<svg") :]


def _saved(figure: Figure, **options: Any) -> bytes:
    buffer = io.BytesIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(buffer, bbox_inches="tight", **options)
    return buffer.getvalue()


def styled(plot: Callable[..., Figure]) -> Callable[..., Figure]:
    def drawn(*arguments: Any) -> Figure:
        with mpl.rc_context(_STYLE):
            return plot(*arguments)

    return drawn


@styled
def latency_cdfs(runs: Sequence[Run]) -> Figure:
    """TTFT by request, and all gaps between tokens."""
    figure = Figure((_WIDTH, 3.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for run, colour in _coloured(runs):
        ttfts = [record.ttft_ms for record in run.complete]
        gaps = [gap for record in run.complete for gap in record.itls_ms if gap > 0]
        for one, values in zip(axes, (ttfts, gaps), strict=True):
            _cdf(one, values, colour, run.name, _quoted(run) if len(runs) == 1 else ())
    limits = runs[0].summary["slo"]
    for one, name, limit in zip(
        axes, ("Time to first token", "Gaps between tokens"), ("ttft_ms", "tpot_ms"), strict=True
    ):
        one.set(xscale="log", title=name, xlabel="ms", ylim=(0, 1.01))
        one.set_xlim(left=max(_SHORTEST_MS, one.get_xlim()[0]))
        _plain_logarithmic(one.xaxis)
        one.yaxis.set_major_formatter(PercentFormatter(1))
        if limit in limits and len(runs) == 1:
            one.axvline(limits[limit], color=INK, linewidth=1, linestyle=(0, (4, 3)))
            label = "limit" if limit == "ttft_ms" else "limit of the mean"
            at = (limits[limit], 0.03)
            one.annotate(label, at, (-4, 0), textcoords="offset points", fontsize=9, ha="right")
    axes[0].set_ylabel("share at or below")
    if len(runs) > 1:
        axes[0].legend(loc="lower right")
    return figure


@styled
def over_time(runs: Sequence[Run]) -> Figure:
    """Requests under way, and tokens a second."""
    figure = Figure((_WIDTH, 4.2), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    for run, colour in _coloured(runs):
        timeline = run.summary["timeline"]
        seconds = (np.arange(len(timeline["in_flight"])) + 1) * timeline["dt_s"]
        axes[0].plot(seconds, timeline["in_flight"], color=colour, linewidth=1.5, label=run.name)
        axes[0].fill_between(seconds, timeline["in_flight"], color=colour, alpha=0.12, linewidth=0)
        axes[1].plot(
            seconds, _smooth(timeline["tokens_per_s"], timeline["dt_s"]), color=colour, linewidth=1.5
        )
    axes[0].set(title="Requests due and not yet over", ylim=(0, None))
    axes[1].set(title="Output tokens a second, mean of 2 s", xlabel="seconds", xlim=(0, None), ylim=(0, None))
    if len(runs) > 1:
        axes[0].legend(loc="upper left", ncols=3)
    return figure


@styled
def ttft_by_prompt(runs: Sequence[Run]) -> Figure:
    """Of one run by how much was cached, of several by run."""
    figure = Figure((_WIDTH, 3.6), layout="constrained")
    axes = figure.subplots()
    for run, colour in _coloured(runs):
        prompts = [record.prompt_tokens for record in run.complete]
        ttfts = [record.ttft_ms for record in run.complete]
        shares: Any = [_cached_share(record) for record in run.complete]
        options: Json = {"s": 22, "linewidths": 0.4, "edgecolors": "white"}
        if len(runs) > 1 or None in shares:
            axes.scatter(prompts, ttfts, color=colour, label=run.name, alpha=0.75, **options)
            continue
        points = axes.scatter(prompts, ttfts, c=shares, cmap="viridis_r", vmin=0, vmax=1, **options)
        bar = figure.colorbar(points, ax=axes, format=PercentFormatter(1), pad=0.01)
        bar.set_label("of the prompt cached")
        bar.outline.set_visible(False)
    axes.set(
        title="Time to first token by length of the prompt", xlabel="prompt tokens", ylabel="ms", yscale="log"
    )
    _plain_logarithmic(axes.yaxis)
    axes.xaxis.set_major_formatter(FuncFormatter(_plain))
    if len(runs) > 1:
        axes.legend(loc="best")
    return figure


@styled
def cache_hits(runs: Sequence[Run]) -> Figure:
    """Share of the prompt tokens so far that was cached, beside what a cache that never evicts would have."""
    figure = Figure((_WIDTH, 3.2), layout="constrained")
    axes = figure.subplots()
    for run, colour in _coloured(runs):
        told = sorted(
            (record for record in run.complete if record.cached_tokens is not None),
            key=lambda record: record.scheduled_s,
        )
        if not told:
            continue
        prompts = np.cumsum([record.prompt_tokens for record in told])
        found = np.cumsum([record.cached_tokens or 0 for record in told]) / prompts
        possible = np.cumsum([record.expected_cached_tokens for record in told]) / prompts
        numbers = np.arange(1, len(told) + 1)
        name = "cached" if len(runs) == 1 else run.name
        axes.plot(numbers, found, color=colour, linewidth=1.8, label=name)
        axes.plot(
            numbers, possible, color=colour, linewidth=1, linestyle=(0, (4, 3)), label=f"{name}: could be"
        )
    axes.set(title="Cached share of all prompt tokens so far", xlabel="requests", ylim=(0, 1))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.legend(loc="best")
    return figure


@styled
def lanes(runs: Sequence[Run]) -> Figure:
    """The first requests of a run: from due to first token, and to the end."""
    [run] = runs
    records = sorted(run.complete, key=lambda record: record.scheduled_s)[:_MAX_LANES]
    figure = Figure((_WIDTH, 1.2 + 0.075 * len(records)), layout="constrained")
    axes = figure.subplots()
    for lane, record in enumerate(records):
        first_s = record.first_token_s or record.end_s
        axes.barh(lane, first_s - record.scheduled_s, left=record.scheduled_s, height=0.7, color=COLOURS[1])
        axes.barh(lane, record.end_s - first_s, left=first_s, height=0.7, color=COLOURS[0])
    axes.set(title=f"The first {len(records)} requests", xlabel="seconds", ylim=(len(records), -1), yticks=[])
    axes.grid(visible=False, axis="y")
    for colour, label in ((COLOURS[1], "until the first token"), (COLOURS[0], "until the last")):
        axes.barh(0, 0, color=colour, label=label)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 0.0))
    return figure


@styled
def rates(sweep: Json) -> Figure:
    """Goodput by rate, and how latency grows."""
    figure = Figure((_WIDTH, 3.4), layout="constrained")
    goodput, latency = figure.subplots(1, 2)
    _goodput_by_rate(goodput, sweep)
    _latency_by_rate(latency, sweep["runs"])
    return figure


def _goodput_by_rate(axes: Any, sweep: Json) -> None:
    runs, highest = sweep["runs"], sweep["highest_rate"]
    at = np.array([run["rate"] for run in runs])
    good = np.array([run["request_goodput"] for run in runs])
    attained = np.array([run["attainment"] for run in runs])
    bounds = np.array([run["interval"] or (run["attainment"],) * 2 for run in runs])
    spread = np.abs(bounds.T - attained) * (good / np.maximum(attained, 1e-9))
    possible = np.geomspace(at[0], max(at[-1], 1.01 * at[0]), 100)
    axes.plot(possible, possible, color=GRID, linewidth=1.5, zorder=1)
    axes.errorbar(at, good, spread, color=COLOURS[0], marker="o", markersize=5, linewidth=1.5, capsize=2)
    top = 1.3 * float((good + spread[1]).max()) or float(at[0])
    axes.set(title="Good answers a second", xlabel="requests a second", xscale="log", ylim=(0, top))
    _plain_logarithmic(axes.xaxis)
    if highest is not None:
        axes.axvline(highest, color=COLOURS[2], linewidth=1, linestyle=(0, (4, 3)))
        text = f"{sweep['attainment']:.0%} good up to {highest:.3g}"
        options: Json = {"textcoords": "offset points", "fontsize": 9, "color": COLOURS[2]}
        axes.annotate(text, (highest, top), (4, -10), **options)


def _latency_by_rate(axes: Any, runs: Sequence[Json]) -> None:
    for name, line in (("median", "-"), ("p95", (0, (4, 3)))):
        for metric, colour in (("ttft", COLOURS[1]), ("itl", COLOURS[0])):
            key = f"{name}_{metric}_ms"
            quoted = [run for run in runs if run[key] is not None]
            at, values = [run["rate"] for run in quoted], [run[key] for run in quoted]
            label = f"{metric.upper()} {name}"
            axes.plot(at, values, color=colour, linestyle=line, marker="o", markersize=4, label=label)
    axes.set(title="Latency, ms", xlabel="requests a second", yscale="log", xscale="log")
    _plain_logarithmic(axes.yaxis)
    _plain_logarithmic(axes.xaxis)
    axes.legend(fontsize=9)


def _cdf(axes: Any, values: list[float], colour: str, name: str, quoted: Sequence[int]) -> None:
    """`quoted`: percentiles that are pointed out."""
    if not values:
        return
    ordered = np.sort(values)
    shares = np.arange(1, len(ordered) + 1) / len(ordered)
    axes.step(ordered, shares, where="post", color=colour, linewidth=1.8, label=name)
    for percent in quoted:
        value = float(np.percentile(ordered, percent))
        axes.plot(value, percent / 100, "o", color=colour, markersize=4.5)
        options: Json = {"textcoords": "offset points", "fontsize": 9, "color": colour}
        axes.annotate(f"p{percent} {_plain(value)}", (value, percent / 100), (6, -11), **options)


def _quoted(run: Run) -> tuple[int, ...]:
    return (50, 95) if run.summary["client"]["valid"] else (50,)


def _coloured(runs: Sequence[Run]) -> list[tuple[Run, str]]:
    return [(run, COLOURS[number % len(COLOURS)]) for number, run in enumerate(runs)]


def _cached_share(record: RequestRecord) -> float | None:
    return None if record.cached_tokens is None else record.cached_tokens / max(1, record.prompt_tokens)


def _smooth(values: Sequence[float], dt_s: float) -> Any:
    width = max(1, min(len(values), round(2 / dt_s)))
    return np.convolve(values, np.ones(width) / width, mode="same")


def _plain_logarithmic(axis: Any) -> None:
    """1, 2, 5, 10, … in figures, or, over more than two decades, the powers of ten."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(_plain))
    axis.set_minor_formatter(NullFormatter())
    axis.set_minor_locator(NullLocator())


def _plain(value: float, _: object = None) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
