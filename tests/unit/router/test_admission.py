"""Who runs, who waits and who is refused. Time stands still unless a test moves it."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.clock import VirtualClock
from headrace.config import RouterSettings
from headrace.directory.records import Role, WorkerLoad, WorkerRecord
from headrace.errors import DeadlineExceeded, InvalidRequest, Overloaded
from headrace.priority import MAX_PRIORITY, MIN_PRIORITY, SECONDS_PER_PRIORITY
from headrace.sampling_params import SamplingParams
from router.admission import QUANTUM_MS, Admission, Refusal, State, check_fits
from router.requests import GenerationRequest

DAY_S = 86400.0


def request(tenant="", *, tokens=10, priority=0, timeout_s=DAY_S, max_tokens=None):
    return GenerationRequest(
        id="r",
        label="r",
        token_ids=[1] * tokens,
        sampling=SamplingParams(max_tokens=max_tokens or 1),
        open_ended=max_tokens is None,
        cache_salt="",
        timeout_s=timeout_s,
        tenant=tenant,
        priority=priority,
    )


def make(*, cost_ms=None, **router):
    clock = VirtualClock(100.0)
    return Admission(RouterSettings.model_validate(router), cost_ms, clock), clock


# --- any order of arrivals, cancels and completions, against a model ------------------------------------------------

MAX_RUNNING, MAX_QUEUED, MAX_TOKENS = 3, 8, 120
TENANTS = {
    "a": {},
    "b": {"weight": 3.0, "max_queued_requests": 4},
    "c": {"weight": 0.5, "max_running": 1, "max_queued_tokens": 60},
    "*": {"max_running": 2},
}


def limit(tenant, name):
    return TENANTS.get(tenant, TENANTS["*"]).get(name, 10**9)


class AdmissionMachine(RuleBasedStateMachine):
    """The model knows caps and ranks; whose turn it is between tenants is the tests' below."""

    def __init__(self):
        super().__init__()
        self.admission, self.clock = make(
            max_inflight_requests=MAX_RUNNING,
            max_queued_requests=MAX_QUEUED,
            max_queued_tokens=MAX_TOKENS,
            tenants=TENANTS,
        )
        self.running = []
        self.queued = defaultdict(list)  # by tenant
        self.over = []
        self.refused = Counter()
        self.num_arrived = self.num_left = 0

    def waiting(self):
        return [ticket for queue in self.queued.values() for ticket in queue]

    def may_run(self, tenant):
        own = sum(ticket.tenant.name == tenant for ticket in self.running)
        return len(self.running) < MAX_RUNNING and own < limit(tenant, "max_running")

    def why_refused(self, tenant, tokens):
        own, every = self.queued[tenant], self.waiting()
        if len(every) >= MAX_QUEUED:
            return Refusal.QUEUED_REQUESTS
        if sum(t.num_tokens for t in every) + tokens > MAX_TOKENS:
            return Refusal.QUEUED_TOKENS
        if len(own) >= limit(tenant, "max_queued_requests"):
            return Refusal.TENANT_QUEUED_REQUESTS
        if sum(t.num_tokens for t in own) + tokens > limit(tenant, "max_queued_tokens"):
            return Refusal.TENANT_QUEUED_TOKENS
        return None

    def note_released(self):
        """At most one after each operation, and the first in rank of its tenant."""
        released = [ticket for ticket in self.waiting() if ticket.state is not State.QUEUED]
        assert len(released) <= 1
        for ticket in released:
            assert ticket.state is State.RUNNING
            assert ticket.decided.is_set()
            queue = self.queued[ticket.tenant.name]
            assert ticket is min(queue, key=lambda other: other.rank)
            assert self.may_run(ticket.tenant.name)
            queue.remove(ticket)
            self.running.append(ticket)

    @rule(
        tenant=st.sampled_from(["a", "b", "c", "", "other"]),
        tokens=st.integers(1, 50),
        priority=st.integers(MIN_PRIORITY, MAX_PRIORITY),
    )
    def arrive(self, tenant, tokens, priority):
        self.num_arrived += 1
        starts, reason = self.may_run(tenant), self.why_refused(tenant, tokens)
        try:
            ticket = self.admission.enter(request(tenant, tokens=tokens, priority=priority))
        except Overloaded as error:
            assert not starts
            assert reason is not None
            assert 0.1 <= error.retry_after_s <= 30
            self.refused[reason] += 1
            return
        assert ticket.rank[0] == self.clock.now() + priority * SECONDS_PER_PRIORITY
        if starts:
            assert ticket.state is State.RUNNING
            self.running.append(ticket)
        else:
            assert reason is None
            assert ticket.state is State.QUEUED
            self.queued[tenant].append(ticket)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def complete(self, data):
        ticket = data.draw(st.sampled_from(self.running))
        self.running.remove(ticket)
        self.over.append(ticket)
        self.admission.leave(ticket)
        self.note_released()

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def cancel(self, data):
        ticket = data.draw(st.sampled_from(self.waiting()))
        self.queued[ticket.tenant.name].remove(ticket)
        self.over.append(ticket)
        self.num_left += 1
        self.admission.leave(ticket)
        self.note_released()

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def leave_again(self, data):
        self.admission.leave(data.draw(st.sampled_from(self.over)))
        self.note_released()

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds):
        self.clock.advance(seconds)

    @invariant()
    def counters_tell_what_is_there(self):
        admission, waiting = self.admission, self.waiting()
        assert admission.num_running == len(self.running) <= MAX_RUNNING
        assert admission.num_queued == len(waiting) <= MAX_QUEUED
        assert admission.num_queued_tokens == sum(t.num_tokens for t in waiting) <= MAX_TOKENS
        assert admission.refused == self.refused
        assert admission.num_left == self.num_left
        arrived = admission.num_admitted + admission.num_left + admission.num_queued
        assert arrived + sum(self.refused.values()) == self.num_arrived
        names = {t.tenant.name for t in [*self.running, *waiting]}  # nobody idle is remembered
        assert admission.queued_by_tenant() == {name: len(self.queued[name]) for name in names}

    @invariant()
    def work_is_conserved(self):
        assert not [t for t in self.waiting() if self.may_run(t.tenant.name)]

    @invariant()
    def states_are_final(self):
        assert all(ticket.state is State.RUNNING for ticket in self.running)
        assert all(ticket.state is State.OVER for ticket in self.over)

    def teardown(self):
        for _ in range(len(self.running) + len(self.waiting())):
            self.admission.leave(ticket := self.running.pop(0))
            self.over.append(ticket)
            self.note_released()
        assert not self.running
        assert not self.waiting()
        self.counters_tell_what_is_there()
        assert self.admission.queued_by_tenant() == {}


TestAnyOrder = AdmissionMachine.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


# --- between tenants ------------------------------------------------------------------------------------------------


def served_in_turn(admission, tickets):
    """Complete one request after the other; yields each as it gets the one slot."""
    left = [ticket for ticket in tickets if ticket.state is State.QUEUED]
    (current,) = [ticket for ticket in tickets if ticket.state is State.RUNNING]
    while left:
        admission.leave(current)
        (current,) = [ticket for ticket in left if ticket.state is State.RUNNING]
        left.remove(current)
        yield current


@settings(deadline=None)
@given(
    sizes=st.lists(st.lists(st.integers(1, 400), min_size=1, max_size=25), min_size=2, max_size=4),
    weights=st.lists(st.sampled_from([0.5, 1.0, 1.0, 2.0, 7.0]), min_size=4, max_size=4),
)
def test_tenants_that_wait_all_the_time_get_their_shares(sizes, weights):
    names = [f"t{number}" for number in range(len(sizes))]
    weight = dict(zip(names, weights, strict=False))
    tenants = {name: {"weight": weight[name]} for name in names}
    admission, _ = make(max_inflight_requests=1, tenants=tenants)
    tickets = [admission.enter(request("first"))]
    tickets += [
        admission.enter(request(name, tokens=size))
        for name, own in zip(names, sizes, strict=True)
        for size in own
    ]
    bound = QUANTUM_MS + max(map(max, sizes)) / min(weight.values())
    served = Counter(dict.fromkeys(names, 0.0))
    waiting = Counter(ticket.tenant.name for ticket in tickets[1:])
    backlogged = set(names)
    for ticket in served_in_turn(admission, tickets):
        name = ticket.tenant.name
        served[name] += ticket.cost_ms / weight[name]
        for one, other in combinations(sorted(backlogged), 2):
            assert abs(served[one] - served[other]) <= bound + 1e-6
        waiting[name] -= 1
        if not waiting[name]:
            backlogged.discard(name)
    assert not backlogged


def test_a_tenant_that_comes_back_at_once_does_not_take_the_others_turns():
    admission, _ = make(max_inflight_requests=1)
    slot = admission.enter(request("x"))
    tickets = [admission.enter(request(name, tokens=40)) for name in ["a", *"bc" * 20]]
    served = Counter()
    for _ in range(30):
        admission.leave(slot)
        (slot,) = [ticket for ticket in tickets if ticket.state is State.RUNNING]
        tickets.remove(slot)
        served[slot.tenant.name] += 1
        if slot.tenant.name == "a":
            tickets.append(admission.enter(request("a", tokens=40)))
    assert max(served.values()) - min(served.values()) <= 2


def test_many_small_requests_do_not_hold_up_another_tenant():
    admission, _ = make(max_inflight_requests=1)
    tickets = [admission.enter(request("many")) for _ in range(500)]
    single = admission.enter(request("one", tokens=100))
    order = list(served_in_turn(admission, [*tickets, single]))
    assert order.index(single) <= (100 + QUANTUM_MS) / 10


def test_a_tenant_at_its_own_limit_is_passed_over_and_saves_up_nothing():
    admission, _ = make(max_inflight_requests=2, tenants={"a": {"max_running": 1}})
    slots = deque(admission.enter(request(name, tokens=1)) for name in "ab")
    waiting = [admission.enter(request(name, tokens=1)) for name in "ab" for _ in range(100)]
    for _ in range(100):
        admission.leave(slots.popleft())
        (next_one,) = [ticket for ticket in waiting if ticket.state is State.RUNNING]
        waiting.remove(next_one)
        slots.append(next_one)
        assert Counter(ticket.tenant.name for ticket in slots)["a"] <= 1
        assert all(ticket.tenant.credit_ms <= QUANTUM_MS for ticket in (*slots, *waiting))
    assert len({ticket.tenant.name for ticket in waiting}) == 2


def test_a_limit_that_binds_for_a_moment_costs_no_share():
    admission, _ = make(max_inflight_requests=1, tenants={"a": {"max_running": 1}})
    tickets = [admission.enter(request("x"))]
    tickets += [admission.enter(request(name)) for name in "ab" for _ in range(40)]
    order = [ticket.tenant.name for ticket in served_in_turn(admission, tickets)]
    assert abs(Counter(order[:40])["a"] - 20) * 10 <= QUANTUM_MS


def test_costs_are_the_policys_where_it_predicts_them():
    admission, _ = make(max_inflight_requests=1, cost_ms=lambda r: 1000.0 if r.tenant == "dear" else 10.0)
    tickets = [admission.enter(request("x"))]
    tickets += [admission.enter(request(name)) for name in ("dear", "cheap") for _ in range(60)]
    first_60 = Counter(
        ticket.tenant.name for ticket, _ in zip(served_in_turn(admission, tickets), range(60), strict=False)
    )
    assert first_60["cheap"] > 55


@pytest.mark.parametrize("cost_ms", [0.0, -1.0, float("inf"), float("nan")])
def test_a_prediction_that_is_none_does_not_stop_the_queue(cost_ms):
    admission, _ = make(max_inflight_requests=1, cost_ms=lambda r: cost_ms)
    tickets = [admission.enter(request(name, timeout_s=1e9)) for name in "abab"]
    assert len(list(served_in_turn(admission, tickets))) == 3


# --- within a tenant ------------------------------------------------------------------------------------------------


def test_a_level_of_priority_is_worth_so_many_seconds():
    admission, clock = make(max_inflight_requests=1)
    tickets = {"slot": admission.enter(request()), "early": admission.enter(request())}
    clock.advance(SECONDS_PER_PRIORITY - 1)
    tickets["urgent"] = admission.enter(request(priority=-1))
    clock.advance(2)
    tickets["urgent, too late"] = admission.enter(request(priority=-1))
    tickets["late"] = admission.enter(request())
    order = served_in_turn(admission, list(tickets.values()))
    names = {id(ticket): name for name, ticket in tickets.items()}
    assert [names[id(ticket)] for ticket in order] == ["urgent", "early", "urgent, too late", "late"]


def test_the_least_urgent_is_not_starved_by_the_most_urgent():
    admission, clock = make(max_inflight_requests=1)
    slot = admission.enter(request())
    least = admission.enter(request(priority=MAX_PRIORITY))
    num_before = 0
    while least.state is State.QUEUED:
        urgent = admission.enter(request(priority=MIN_PRIORITY))
        clock.advance(1.0)
        admission.leave(slot)
        slot = urgent
        num_before += 1
    assert num_before == pytest.approx((MAX_PRIORITY - MIN_PRIORITY) * SECONDS_PER_PRIORITY, abs=2)


# --- overload and deadlines -----------------------------------------------------------------------------------------


def drained(admission, clock, *, num_requests=1, seconds=1.0, tokens=100):
    """Let a queue drain at one request in so many seconds. Returns the ticket that holds the slot then."""
    tickets = [admission.enter(request(tokens=tokens)) for _ in range(num_requests + 1)]
    for ticket in tickets[:-1]:
        clock.advance(seconds)
        admission.leave(ticket)
    assert tickets[-1].state is State.RUNNING
    return tickets[-1]


def refusal(admission, *args, **fields) -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        admission.enter(request(*args, **fields))
    return caught.value


@pytest.mark.parametrize(
    ("seconds", "num_queued", "retry_after_s"),
    [(1.0, 4, 5.0), (2.0, 4, 10.0), (60.0, 4, 30.0), (1e-3, 4, 0.1)],
)
def test_retry_after_is_the_time_that_the_queue_takes_to_drain(seconds, num_queued, retry_after_s):
    admission, clock = make(max_inflight_requests=1, max_queued_requests=num_queued)
    drained(admission, clock, num_requests=4, seconds=seconds)
    for _ in range(num_queued):
        admission.enter(request(tokens=100))
    error = refusal(admission, tokens=100)
    assert error.retry_after_s == pytest.approx(retry_after_s, abs=0.01)
    assert str(num_queued) in str(error)


def test_a_queue_that_stands_still_puts_retries_off():
    admission, clock = make(max_inflight_requests=1, max_queued_requests=1)
    drained(admission, clock)
    admission.enter(request(tokens=100))
    soon = refusal(admission, tokens=100).retry_after_s
    clock.advance(5)
    assert refusal(admission, tokens=100).retry_after_s > 2 * soon


def test_time_without_a_queue_does_not_count_as_slow():
    admission, clock = make(max_inflight_requests=1, max_queued_requests=1, max_queued_tokens=150)
    drained(admission, clock)  # 100 tokens a second
    clock.advance(1000)
    assert refusal(admission, tokens=200).retry_after_s == pytest.approx(2.0)
    admission.enter(request(tokens=100))
    assert refusal(admission, tokens=100).retry_after_s == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("router", "words", "reason"),
    [
        ({"max_queued_requests": 1}, ["2 requests", "limit is 1"], Refusal.QUEUED_REQUESTS),
        ({"max_queued_tokens": 19}, ["20 prompt tokens", "limit is 19"], Refusal.QUEUED_TOKENS),
        (
            {"tenants": {"a": {"max_queued_requests": 1}}},
            ["2 requests of tenant 'a'", "limit is 1"],
            Refusal.TENANT_QUEUED_REQUESTS,
        ),
        (
            {"tenants": {"*": {"max_queued_tokens": 19}}},
            ["20 prompt tokens of tenant 'a'", "limit is 19"],
            Refusal.TENANT_QUEUED_TOKENS,
        ),
    ],
)
def test_a_refusal_names_the_cap_and_is_counted(router, words, reason):
    admission, _ = make(max_inflight_requests=1, **router)
    for _ in range(2):
        admission.enter(request("a"))
    error = refusal(admission, "a")
    assert all(word in str(error) for word in words)
    assert error.retry_after_s == 1.0  # nothing was measured yet
    assert admission.refused == {reason: 1}
    assert admission.queued_by_tenant() == {"a": 1}


def test_what_can_not_be_in_time_is_refused_at_once():
    admission, clock = make(max_inflight_requests=1)
    drained(admission, clock, num_requests=4)  # 100 tokens a second
    for _ in range(3):
        admission.enter(request(tokens=100))
    error = refusal(admission, timeout_s=2.0)
    assert error.retry_after_s == pytest.approx(1.0)
    assert admission.refused == {Refusal.DEADLINE_UNREACHABLE: 1}
    admission.enter(request(timeout_s=3.5))
    admission.enter(request(timeout_s=1.0, priority=-1))  # goes before them
    admission.enter(request("other", timeout_s=1.0))  # has a share of its own


def test_a_predicted_prefill_counts_and_is_looked_at_again_when_its_turn_comes():
    admission, clock = make(max_inflight_requests=1, cost_ms=lambda r: 1000.0)
    slot = admission.enter(request())
    assert "1 s of prefill" in str(refusal(admission, timeout_s=0.9))
    late, patient = admission.enter(request(timeout_s=3.0)), admission.enter(request())
    clock.advance(2.5)
    admission.leave(slot)
    assert isinstance(late.refusal, Overloaded)
    assert late.decided.is_set()
    assert patient.state is State.RUNNING
    admission.leave(late)
    assert (admission.num_queued, admission.num_running) == (0, 1)
    assert admission.num_left == 0
    assert admission.refused == {Refusal.DEADLINE_UNREACHABLE: 2}


def test_one_whose_deadline_has_passed_gets_no_slot():
    admission, clock = make(max_inflight_requests=1)
    slot, late = admission.enter(request()), admission.enter(request(timeout_s=1.0))
    clock.advance(1.0)
    admission.leave(slot)
    assert isinstance(late.refusal, DeadlineExceeded)
    assert admission.num_running == 0


def test_waiting_is_summed_up_for_those_that_were_admitted():
    admission, clock = make(max_inflight_requests=1)
    slot = admission.enter(request())
    tickets = [admission.enter(request()) for _ in range(2)]
    clock.advance(3)
    admission.leave(slot)
    admission.leave(tickets[1])
    assert (admission.num_admitted, admission.waited_s, admission.num_left) == (2, 3.0, 1)


# --- as the dispatcher uses it --------------------------------------------------------------------------------------


class Client:
    """A task that holds a slot until it is told to end."""

    def __init__(self, admission, sent) -> None:
        self.got: GenerationRequest | None = None
        self.end = asyncio.Event()
        self.task = asyncio.create_task(self._run(admission, sent))

    async def _run(self, admission, sent) -> None:
        async with admission.admitted(sent) as self.got:
            await self.end.wait()


async def settled():
    """All that is ready to run has run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_slot_goes_from_one_to_the_next_with_what_is_left_of_its_time():
    admission, clock = make(max_inflight_requests=1)
    sent = request(timeout_s=50.0)
    first, second = Client(admission, request()), Client(admission, sent)
    await settled()
    assert first.got is not None
    assert second.got is None
    clock.advance(20)
    first.end.set()
    await settled()
    assert second.got == replace(sent, timeout_s=30.0)
    second.end.set()
    await asyncio.gather(first.task, second.task)
    assert admission.num_running == 0


async def test_a_deadline_that_passes_in_the_queue_ends_the_wait():
    admission, _ = make(max_inflight_requests=1)
    slot = admission.enter(request())
    with pytest.raises(DeadlineExceeded, match=r"0\.01 s"):
        async with admission.admitted(request("b", timeout_s=0.01)):
            pytest.fail("it got a slot")
    assert (admission.num_queued, admission.num_left) == (0, 0)
    assert admission.refused == {Refusal.DEADLINE_PASSED: 1}
    assert admission.queued_by_tenant() == {"": 0}
    admission.leave(slot)
    assert admission.queued_by_tenant() == {}


async def test_ab01_waiting_ones_that_are_cancelled_are_gone_at_once():
    admission, _ = make(max_inflight_requests=2)
    holders = [Client(admission, request()) for _ in range(2)]
    clients = [Client(admission, request(f"t{number % 3}")) for number in range(10)]
    await settled()
    assert admission.num_queued == 10
    for client in clients:
        client.task.cancel()
    await settled()
    assert (admission.num_queued, admission.num_queued_tokens, admission.num_running) == (0, 0, 2)
    assert admission.queued_by_tenant() == {"": 0}
    assert all(client.got is None for client in clients)
    for client in holders:
        client.end.set()
    await asyncio.gather(*(client.task for client in holders))
    assert admission.num_left == 10


async def test_a_slot_that_was_given_to_somebody_who_leaves_in_that_moment_is_not_lost():
    admission, _ = make(max_inflight_requests=1)
    slot = admission.enter(request())
    leaving, last = Client(admission, request()), Client(admission, request())
    await settled()
    admission.leave(slot)
    leaving.task.cancel()  # it has the slot, and has not run since
    assert admission.num_running == 1
    await settled()
    assert leaving.got is None
    assert last.got is not None
    last.end.set()
    await last.task
    assert (admission.num_running, admission.num_queued) == (0, 0)


# --- what fits nobody -----------------------------------------------------------------------------------------------


def worker(role=Role.DECODE, *, num_blocks=10, max_model_tokens=1000, draining=False):
    return WorkerRecord(
        worker_id="w",
        role=role,
        address="a",
        incarnation="i",
        model_name="m",
        model_fingerprint="f",
        tokenizer_fingerprint="t",
        kv_dtype="float32",
        block_size_tokens=4,
        num_blocks=num_blocks,
        max_model_tokens=max_model_tokens,
        vocab_size=100,
        transport="local",
        draining=draining,
        load=WorkerLoad(running=0, waiting=0, waiting_tokens=0, free_blocks=0, cached_blocks=0),
    )


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (request(tokens=40), ["prompt", "40 tokens", "holds 40"]),
        (request(tokens=30, max_tokens=11), ["max_tokens", "11", "holds 40", "at most 10"]),
    ],
)
def test_what_no_worker_can_hold_is_refused_with_the_limit(sent, words):
    small = [
        worker(),
        worker(num_blocks=100, max_model_tokens=40),
        worker(num_blocks=100, draining=True),
        worker(Role.PREFILL, num_blocks=100),
    ]
    with pytest.raises(InvalidRequest) as caught:
        check_fits(sent, small)
    assert all(word in str(caught.value) for word in words)
    check_fits(sent, [*small, worker(Role.BOTH, num_blocks=11)])
    check_fits(sent, [])


@pytest.mark.parametrize("sent", [request(tokens=39), request(tokens=30, max_tokens=10)])
def test_what_just_fits_is_let_in(sent):
    check_fits(sent, [worker()])
