"""`headrace top`: the fleet as its router sees it, live, from the state that the router's console serves."""

from __future__ import annotations

import select
import sys
import termios
import tty
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from headrace.cli.progress import output
from headrace.errors import HeadraceError, InvalidRequest, Unavailable
from router.console.state import (
    Condition,
    FleetState,
    Hits,
    Latency,
    RouterState,
    WorkerState,
    state_from_json,
)

_INTERVAL_S = 1.0
_TIMEOUT_S = 5.0
_MAX_STATE_BYTES = 16 << 20
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 24
_BAR_WIDTH = 10
_STYLES = {
    Condition.SERVING: "green",
    Condition.DRAINING: "yellow",
    Condition.SET_ASIDE: "red",
    Condition.GONE: "dim red",
}
_UNITS = ("B", "kB", "MB", "GB", "TB")


def show_fleet(url: str, api_key: str | None, *, as_json: bool, once: bool) -> None:
    """Until q or Ctrl-C; a router that does not answer for a while is waited for. Raises HeadraceError when the first
    answer does not come.
    """
    answer = fetch(url, api_key)
    state = state_from_json(answer)
    if as_json:
        _print_json(url, api_key, answer, once=once)
    elif once or not sys.stdout.isatty():
        output.print(frame(state))
    else:
        _show_live(url, api_key, state)


def fetch(url: str, api_key: str | None) -> bytes:
    """The state as JSON. Raises HeadraceError."""
    address = url if "://" in url else f"http://{url}"
    if not address.startswith(("http://", "https://")):
        raise InvalidRequest("address", url, "must be an http or https URL, or HOST:PORT")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    request = Request(f"{address.rstrip('/')}/console/state", headers=headers)
    try:
        with urlopen(request, timeout=_TIMEOUT_S) as response:
            return response.read(_MAX_STATE_BYTES)
    except HTTPError as error:
        with error:
            raise Unavailable(f"{address} answers {error.code} {error.reason}") from None
    except (URLError, OSError, ValueError) as error:
        raise Unavailable(
            f"no router answers HTTP at {address}: {error}; start a cluster with `headrace up`, or say --address"
        ) from None


def frame(state: FleetState) -> RenderableType:
    """One picture: the router's figures, and a row per worker."""
    return Group(_router(state), _workers(state))


def _print_json(url: str, api_key: str | None, first: bytes, *, once: bool) -> None:
    """A line each second."""
    with suppress(KeyboardInterrupt), _keys() as pressed:
        for number in count():
            sys.stdout.write((fetch(url, api_key) if number else first).decode() + "\n")
            sys.stdout.flush()
            if once or pressed(_INTERVAL_S) == "q":
                return


def _show_live(url: str, api_key: str | None, state: FleetState) -> None:
    note = "[dim]q or Ctrl-C ends it[/]"
    with suppress(KeyboardInterrupt), _keys() as pressed, Live(console=output, screen=True) as live:
        live.update(Group(frame(state), note))
        while pressed(_INTERVAL_S) != "q":
            try:
                state = state_from_json(fetch(url, api_key))
                live.update(Group(frame(state), note))
            except HeadraceError as error:
                live.update(Group(frame(state), f"[red]not of now: {escape(str(error))}[/]", note))


@contextmanager
def _keys() -> Generator[_Pressed]:
    """Within the block the terminal gives keys at once; it is set back in any case."""
    if not sys.stdin.isatty():
        yield _Pressed(None)
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield _Pressed(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class _Pressed:
    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def __call__(self, timeout_s: float) -> str:
        """The key, or "" when none was pressed in that time."""
        watched = [] if self._descriptor is None else [self._descriptor]
        ready, _, _ = select.select(watched, [], [], timeout_s)
        return sys.stdin.read(1) if ready else ""


def _router(state: FleetState) -> RenderableType:
    router, history = state.router, state.history
    title = f"router of {router.model!r}: {len(state.workers)} workers, up {_age(router.up_s)}"
    table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD)
    for column in ("tokens/s", "requests/s", "in flight", "queued", "TTFT p50/p95", "ITL p50/p95", "cached"):
        table.add_column(column, no_wrap=True)
    table.add_row(
        f"{router.tokens_per_s:.1f}",
        f"{router.requests_per_s:.1f}",
        str(router.inflight),
        f"{router.queued} ({router.queued_tokens} tokens)" if router.queued else "0",
        _spread(router.ttft),
        _spread(router.itl),
        _hits(router.hits),
    )
    series = (history.tokens_per_s, history.requests_per_s, history.inflight, history.queued)
    table.add_row(*(f"[cyan]{sparkline(values)}[/]" for values in series))
    return Group(table, _facts(router))


def _facts(router: RouterState) -> str:
    parts = (
        f"ended: {_counts(router.requests)}",
        f"refused: {_counts(router.refused)}",
        f"index {router.index_blocks} blocks, {_bytes(router.index_bytes)}",
        f"event lag {_seconds(router.event_lag_s)}",
        f"directory answered {_seconds(router.directory_silence_s)} ago",
    )
    return f" [dim]{escape(' · '.join(parts))}[/]\n"


def _workers(state: FleetState) -> Table:
    window = _age(state.window_s)
    title = f"workers (TTFT, ITL, cached, KV sent and read: of this router's answers of the last {window})"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for column in ("worker", "role", "state", "KV used", "cached blocks", "run/wait", "owed"):
        table.add_column(column, no_wrap=column in ("worker", "role", "state"))
    for column in ("TTFT p50/p95", "ITL p50/p95", "cached", "KV sent", "KV read", "address"):
        table.add_column(column)
    for worker in state.workers:
        table.add_row(*_row(worker))
    return table


def _row(worker: WorkerState) -> list[str]:
    since_s = worker.seen_s if worker.gone_s is None else worker.gone_s
    moved = worker.transfers
    sent = f"{_bytes(moved.sent_bytes)} {_bytes(moved.sent_bytes_per_s)}/s"
    failed = f" [red]{moved.failures} failed[/]" if moved.failures else ""
    breaker = "" if worker.breaker == "closed" else f" [yellow]breaker {worker.breaker}[/]"
    return [
        escape(worker.worker_id),
        escape(worker.role),
        f"[{_STYLES[worker.condition]}]{worker.condition} {_age(since_s)}[/]{breaker}",
        f"{bar(worker.used_blocks, worker.num_blocks)} {worker.used_blocks}/{worker.num_blocks}",
        str(worker.cached_blocks),
        f"{worker.running}/{worker.waiting}",
        _seconds(worker.queue_s),
        _spread(worker.ttft),
        _spread(worker.itl),
        _hits(worker.hits),
        sent + failed,
        f"{_bytes(moved.received_bytes)} {_bytes(moved.received_bytes_per_s)}/s",
        escape(worker.address),
    ]


def sparkline(values: Sequence[float]) -> str:
    """The latest ones, the largest as a full block."""
    shown = values[-_SPARK_WIDTH:]
    largest = max([*shown, 1e-9])
    return "".join(_SPARKS[round((len(_SPARKS) - 1) * max(0.0, value) / largest)] for value in shown)


def bar(part: int, whole: int) -> str:
    filled = round(_BAR_WIDTH * min(1.0, part / whole)) if whole else 0
    return f"[cyan]{'━' * filled}[/][dim]{'─' * (_BAR_WIDTH - filled)}[/]"


def _spread(latency: Latency) -> str:
    if latency.p50_s is None or latency.p95_s is None:
        return "-"
    return f"{_seconds(latency.p50_s)}/{_seconds(latency.p95_s)}"


def _hits(hits: Hits) -> str:
    if not hits.prompt_tokens:
        return "-"
    reported, predicted = (
        100 * tokens / hits.prompt_tokens for tokens in (hits.reported_tokens, hits.predicted_tokens)
    )
    return f"{reported:.0f} % ({predicted:.0f} % predicted)"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in counts.items()) or "none"


def _seconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _age(seconds: float) -> str:
    for limit_s, unit_s, unit in ((100, 1, "s"), (6000, 60, "min"), (172800, 3600, "h")):
        if seconds < limit_s:
            return f"{seconds // unit_s:.0f} {unit}"
    return f"{seconds // 86400:.0f} d"


def _bytes(value: float) -> str:
    for unit in _UNITS[:-1]:
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} {_UNITS[-1]}"
