"""Which requests run now, which wait, and which are refused at once. One queue in front of all workers.

    enter ─┬─▶ running ───────────────────────────────────▶ leave
           ├─▶ queued ──its turn comes──▶ running ─────────▶ leave
           │      └─ its deadline passes, or can no longer be met; the client left
           └─▶ refused: a cap is reached, or its deadline can not be met: RESOURCE_EXHAUSTED with retry-after

**Between tenants: deficit round robin** (Shreedhar and Varghese, 1995) over predicted cost. In its turn a tenant gets
credit for a quantum times its weight, and goes on while that pays for its first request; what is left is kept as long
as it waits. So of two equal tenants that wait all the time, neither gets ahead by more than a quantum and two of the
largest requests.

**Within a tenant: rank**, which is the time of arrival moved by priority (`headrace.priority`): bounded privilege,
nobody starves, first come first served among equals.

**Work conserving.** A free slot and a request that may use it never stay together: a tenant that is at its own
`max_running` is passed over, and gathers no credit meanwhile.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto

from headrace.clock import Clock, Deadline, SystemClock
from headrace.config import RouterSettings, TenantSettings
from headrace.directory.records import Role, WorkerRecord
from headrace.errors import DeadlineExceeded, HeadraceError, InvalidRequest, Overloaded
from headrace.priority import rank_s
from router.requests import GenerationRequest

QUANTUM_MS = 50.0
MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 0.1, 30.0

_MIN_COST_MS, _MAX_COST_MS = 1.0, 3.6e6  # a request for nothing would keep the turn for ever
_UNNAMED = "*"  # the settings of tenants without an entry of their own
_DRAIN_MEMORY_S = 10.0


class Refusal(StrEnum):
    QUEUED_REQUESTS = "queued_requests"
    QUEUED_TOKENS = "queued_tokens"
    TENANT_QUEUED_REQUESTS = "tenant_queued_requests"
    TENANT_QUEUED_TOKENS = "tenant_queued_tokens"
    DEADLINE_UNREACHABLE = "deadline_unreachable"
    DEADLINE_PASSED = "deadline_passed"


_OF_TOKENS = {Refusal.QUEUED_TOKENS, Refusal.TENANT_QUEUED_TOKENS}
_OF_TENANT = {Refusal.TENANT_QUEUED_REQUESTS, Refusal.TENANT_QUEUED_TOKENS}


class State(Enum):
    QUEUED = auto()
    RUNNING = auto()
    OVER = auto()


@dataclass(slots=True, eq=False)
class Ticket:
    """A request's place. `state` is RUNNING while it holds a slot."""

    request: GenerationRequest
    tenant: _Tenant
    rank: tuple[float, int]
    cost_ms: float
    arrived_s: float
    deadline: Deadline
    state: State = State.QUEUED
    refusal: HeadraceError | None = None  # why its turn never comes
    decided: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_tokens(self) -> int:
        return len(self.request.token_ids)


@dataclass(slots=True, eq=False)
class _Tenant:
    """Known while it has something queued or running."""

    name: str
    settings: TenantSettings
    queue: list[Ticket] = field(default_factory=list)  # by rank
    credit_ms: float = 0.0
    queued_cost_ms: float = 0.0
    num_queued_tokens: int = 0
    num_running: int = 0

    @property
    def is_full(self) -> bool:
        limit = self.settings.max_running
        return limit is not None and self.num_running >= limit

    @property
    def share_ms(self) -> float:
        """Credit for one turn."""
        return QUANTUM_MS * self.settings.weight


class _DrainRate:
    """Cost that leaves the queue per second while there is one, over about the last `_DRAIN_MEMORY_S` of such time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s: float | None = None  # the sums hold what came before; None: nothing is queued
        self._cost_ms = 0.0
        self._seconds = 0.0

    def begin(self) -> None:
        """The queue is no longer empty."""
        self._since_s = self._clock.now()

    def end(self) -> None:
        self._since_s = None

    def drained(self, cost_ms: float) -> None:
        passed_s = self._passed_s()
        kept = math.exp(-passed_s / _DRAIN_MEMORY_S)
        self._cost_ms = self._cost_ms * kept + cost_ms
        self._seconds = self._seconds * kept + passed_s
        self._since_s = self._clock.now()

    def seconds_for(self, cost_ms: float) -> float | None:
        """None while nothing was measured."""
        seconds = self._seconds + self._passed_s()
        return cost_ms * seconds / self._cost_ms if self._seconds else None

    def _passed_s(self) -> float:
        return 0.0 if self._since_s is None else self._clock.now() - self._since_s


class Admission:
    """Used on the event loop only. The counters may be read at any time."""

    def __init__(
        self,
        settings: RouterSettings,
        cost_ms: Callable[[GenerationRequest], float] | None = None,
        clock: Clock | None = None,
        *,
        least_prefill_ms: Callable[[GenerationRequest], float] | None = None,
    ) -> None:
        """`cost_ms` predicts what a request takes of the fleet, in milliseconds; without it tokens stand in for them
        between tenants. `least_prefill_ms` is what passes in any case before its first token, for its deadline; by
        default as much as it costs, if that is predicted.
        """
        self._settings = settings
        self._cost_ms = cost_ms
        self._least_prefill_ms = least_prefill_ms or cost_ms or (lambda request: 0.0)
        self._clock = clock or SystemClock()
        self._drain_rate = _DrainRate(self._clock)
        self._tenants: dict[str, _Tenant] = {}
        self._ring: deque[_Tenant] = deque()  # those with a queue; the first one's turn it is
        self._has_share = False  # whether the first one got its credit for this turn
        self._num_arrived = 0
        self.num_running = 0
        self.num_queued = 0
        self.num_queued_tokens = 0
        self.num_admitted = 0
        self.num_left = 0  # while queued: the client did not wait
        self.waited_s = 0.0  # by those that were admitted, in all
        self.refused: Counter[Refusal] = Counter()

    def queued_by_tenant(self) -> dict[str, int]:
        """Of tenants that have something queued or running now."""
        return {tenant.name: len(tenant.queue) for tenant in self._tenants.values()}

    @asynccontextmanager
    async def admitted(self, request: GenerationRequest) -> AsyncGenerator[GenerationRequest]:
        """Within the block the request holds a slot; it is given with what is left of its time. Raises Overloaded at
        once, DeadlineExceeded when its time is over.
        """
        ticket = self.enter(request)
        try:
            try:
                async with asyncio.timeout(ticket.deadline.remaining_s()):
                    await ticket.decided.wait()
            except TimeoutError:
                if ticket.refusal is None:
                    self._refuse(ticket, self._deadline_passed(ticket))
            if ticket.refusal is not None:
                raise ticket.refusal
            yield replace(request, timeout_s=ticket.deadline.remaining_s())
        finally:
            self.leave(ticket)

    def enter(self, request: GenerationRequest) -> Ticket:
        """Start the request or queue it; `leave` must follow. Raises Overloaded or DeadlineExceeded."""
        now_s = self._clock.now()
        tenant = self._tenants.get(request.tenant) or _Tenant(
            request.tenant, self._settings_of(request.tenant)
        )
        ticket = Ticket(
            request=request,
            tenant=tenant,
            rank=(rank_s(now_s, request.priority), self._num_arrived),
            cost_ms=self._cost_of(request),
            arrived_s=now_s,
            deadline=Deadline.after(request.timeout_s, self._clock),
        )
        self._num_arrived += 1
        if self.num_running < self._settings.max_inflight_requests and not tenant.is_full:
            self._start(ticket)  # nobody waits who could have had this slot
        else:
            self._check_caps(ticket)
            self._check_deadline(ticket, self._predicted_wait_s(ticket))
            self._enqueue(ticket)
        self._tenants[tenant.name] = tenant
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """The request is over: queued, running, or, for a second time, neither."""
        state, ticket.state = ticket.state, State.OVER
        if state is State.QUEUED:
            self._dequeue(ticket)
            self.num_left += 1
        elif state is State.RUNNING:
            ticket.tenant.num_running -= 1
            self.num_running -= 1
        self._forget_if_idle(ticket.tenant)
        self._fill()

    def _fill(self) -> None:
        """Give free slots to those whose turn it is."""
        while self.num_running < self._settings.max_inflight_requests:
            ticket = self._next()
            if ticket is None:
                return
            try:
                self._check_deadline(ticket, 0.0)
            except (DeadlineExceeded, Overloaded) as error:
                self._refuse(ticket, error)
                continue
            ticket.tenant.credit_ms -= ticket.cost_ms
            self._drain_rate.drained(ticket.cost_ms)
            self._dequeue(ticket)
            self._start(ticket)

    def _next(self) -> Ticket | None:
        """Whose turn it is, among those that may run; None if there is none."""
        while True:
            for _ in range(len(self._ring)):
                tenant = self._ring[0]
                if tenant.is_full:
                    tenant.credit_ms = 0.0  # not to be saved up for when it may run again
                else:
                    tenant.credit_ms += 0.0 if self._has_share else tenant.share_ms
                    self._has_share = True
                    if tenant.credit_ms >= tenant.queue[0].cost_ms:
                        return tenant.queue[0]
                self._ring.rotate(-1)
                self._has_share = False
            if not self._skip_rounds():
                return None

    def _skip_rounds(self) -> bool:
        """Give all credit for the rounds in which nobody can pay. Returns whether anybody may run."""
        ready = [tenant for tenant in self._ring if not tenant.is_full]
        rounds = min(
            (math.ceil((t.queue[0].cost_ms - t.credit_ms) / t.share_ms) - 1 for t in ready), default=0
        )
        for tenant in ready:
            tenant.credit_ms += max(0, rounds) * tenant.share_ms
        return bool(ready)

    def _start(self, ticket: Ticket) -> None:
        ticket.state = State.RUNNING
        ticket.tenant.num_running += 1
        self.num_running += 1
        self.num_admitted += 1
        self.waited_s += self._clock.now() - ticket.arrived_s
        ticket.decided.set()

    def _enqueue(self, ticket: Ticket) -> None:
        tenant = ticket.tenant
        if not self.num_queued:
            self._drain_rate.begin()
        if not tenant.queue:
            self._ring.append(tenant)
        insort(tenant.queue, ticket, key=_rank)
        tenant.queued_cost_ms += ticket.cost_ms
        tenant.num_queued_tokens += ticket.num_tokens
        self.num_queued += 1
        self.num_queued_tokens += ticket.num_tokens

    def _dequeue(self, ticket: Ticket) -> None:
        tenant = ticket.tenant
        del tenant.queue[bisect_left(tenant.queue, ticket.rank, key=_rank)]
        tenant.queued_cost_ms -= ticket.cost_ms
        tenant.num_queued_tokens -= ticket.num_tokens
        self.num_queued -= 1
        self.num_queued_tokens -= ticket.num_tokens
        if not self.num_queued:
            self._drain_rate.end()
        if not tenant.queue:
            if self._ring[0] is tenant:
                self._has_share = False  # the next one's turn begins
            self._ring.remove(tenant)
            tenant.credit_ms = tenant.queued_cost_ms = 0.0

    def _refuse(self, ticket: Ticket, error: HeadraceError) -> None:
        """It is not to wait any longer. A slot that it has just got is given back by `leave`."""
        if ticket.state is State.QUEUED:
            self._dequeue(ticket)
            ticket.state = State.OVER
        ticket.refusal = error
        ticket.decided.set()

    def _forget_if_idle(self, tenant: _Tenant) -> None:
        known = self._tenants.get(tenant.name)
        if known is tenant and not tenant.queue and not tenant.num_running:
            del self._tenants[tenant.name]

    def _check_caps(self, ticket: Ticket) -> None:
        """Raises Overloaded for the first cap that the queue would exceed."""
        tenant, limits, own = ticket.tenant, self._settings, ticket.tenant.settings
        num_tokens = self.num_queued_tokens + ticket.num_tokens
        num_own_tokens = tenant.num_queued_tokens + ticket.num_tokens
        for reason, count, limit in (
            (Refusal.QUEUED_REQUESTS, self.num_queued + 1, limits.max_queued_requests),
            (Refusal.QUEUED_TOKENS, num_tokens, limits.max_queued_tokens),
            (Refusal.TENANT_QUEUED_REQUESTS, len(tenant.queue) + 1, own.max_queued_requests),
            (Refusal.TENANT_QUEUED_TOKENS, num_own_tokens, own.max_queued_tokens),
        ):
            if limit is not None and count > limit:
                raise self._queue_full(ticket, reason, count, limit)

    def _queue_full(self, ticket: Ticket, reason: Refusal, count: int, limit: int) -> Overloaded:
        """To be tried again when what is queued has drained: all of it, or all of the tenant's."""
        tenant = ticket.tenant
        what = "prompt tokens" if reason in _OF_TOKENS else "requests"
        if reason in _OF_TENANT:
            what += f" of tenant {tenant.name!r}"
            queued_ms = self._with_others(tenant, tenant.queued_cost_ms + ticket.cost_ms)
        else:
            queued_ms = sum(other.queued_cost_ms for other in self._ring) + ticket.cost_ms
        message = f"{count} {what} would be queued, the limit is {limit}"
        return self._overloaded(reason, message, self._drain_rate.seconds_for(queued_ms))

    def _check_deadline(self, ticket: Ticket, wait_s: float | None) -> None:
        """Raises DeadlineExceeded, or Overloaded for one that passes before the wait and the prefill can be over."""
        left_s = ticket.deadline.remaining_s()
        if not left_s:
            raise self._deadline_passed(ticket)
        prefill_s = _bounded(self._least_prefill_ms(ticket.request)) / 1000
        lacking_s = (wait_s or 0.0) + prefill_s - left_s
        if lacking_s > 0:
            message = (
                f"{wait_s or 0.0:.3g} s of waiting and {prefill_s:.3g} s of prefill are predicted,"
                f" and the request's deadline is in {left_s:.3g} s"
            )
            raise self._overloaded(Refusal.DEADLINE_UNREACHABLE, message, lacking_s)

    def _deadline_passed(self, ticket: Ticket) -> DeadlineExceeded:
        self.refused[Refusal.DEADLINE_PASSED] += 1
        return DeadlineExceeded(f"the request's {ticket.request.timeout_s:g} s passed before its turn came")

    def _overloaded(self, reason: Refusal, message: str, retry_after_s: float | None) -> Overloaded:
        self.refused[reason] += 1
        if retry_after_s is None:
            return Overloaded(message)
        return Overloaded(message, round(min(max(retry_after_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S), 3))

    def _predicted_wait_s(self, ticket: Ticket) -> float | None:
        """Rather too short than too long: what is refused for it can not be met. None while nothing was measured."""
        queue = ticket.tenant.queue
        before = queue[: bisect_left(queue, ticket.rank, key=_rank)]
        ahead_ms = self._with_others(ticket.tenant, sum(other.cost_ms for other in before))
        return self._drain_rate.seconds_for(ahead_ms)

    def _with_others(self, tenant: _Tenant, own_ms: float) -> float:
        """Cost that drains until so much of the tenant's own has: the others get their shares of that time, as far as
        they have work for it.
        """
        per_weight = own_ms / tenant.settings.weight
        others = (other for other in self._ring if other is not tenant)
        return own_ms + sum(min(other.queued_cost_ms, per_weight * other.settings.weight) for other in others)

    def _cost_of(self, request: GenerationRequest) -> float:
        cost_ms = float(len(request.token_ids)) if self._cost_ms is None else self._cost_ms(request)
        return _bounded(cost_ms, _MIN_COST_MS)

    def _settings_of(self, tenant: str) -> TenantSettings:
        tenants = self._settings.tenants
        return tenants.get(tenant) or tenants.get(_UNNAMED) or TenantSettings()


def check_fits(request: GenerationRequest, workers: Iterable[WorkerRecord]) -> None:
    """Raises InvalidRequest for a request that no worker here can ever hold. Without workers it is not its fault."""
    sizes = [
        min(worker.num_blocks * worker.block_size_tokens, worker.max_model_tokens)
        for worker in workers
        if worker.role in (Role.DECODE, Role.BOTH) and not worker.draining
    ]
    if not sizes:
        return
    num_tokens, largest = len(request.token_ids), max(sizes)
    holds = f"the largest worker holds {largest} tokens"
    if num_tokens >= largest:
        raise InvalidRequest("prompt", f"{num_tokens} tokens", f"{holds}, and the answer needs at least 1")
    max_tokens = request.sampling.max_tokens
    if not request.open_ended and num_tokens + max_tokens > largest:
        raise InvalidRequest(
            "max_tokens",
            max_tokens,
            f"{holds} and the prompt has {num_tokens}, so at most {largest - num_tokens} remain",
        )


def _bounded(milliseconds: float, least: float = 0.0) -> float:
    return min(max(least, milliseconds), _MAX_COST_MS)  # in this order NaN is the least


def _rank(ticket: Ticket) -> tuple[float, int]:
    return ticket.rank
