"""What a policy sees of the fleet: columns and views say the same, whatever made them."""

from dataclasses import replace

import numpy as np
import pytest

from headrace.clock import VirtualClock
from headrace.directory.records import Role, RouterShare
from headrace.directory.view import DirectoryView
from headrace.rpc.v1 import worker_pb2
from headrace.tier import Tier
from router.costs import FleetCosts
from router.fleet import Fleet
from router.ledger import Ledger
from router.policy import load_policy
from router.policy.prediction import first_token, planned, predict, step_s
from router.policy.ranking import alone_s
from router.policy.ranking import first_token as first_tokens
from router.policy.ranking import step_s as steps_s
from router.policy.views import Pool, RequestView
from tests.support.directory_samples import RECORD, digests, record

PROMPT = digests(*range(1, 31))


class Bench:
    def __init__(self, *records, router_id="own"):
        self.view = DirectoryView(VirtualClock(), router_id=router_id)
        self.ledger = Ledger(VirtualClock())
        self.costs = FleetCosts()
        for each in records:
            self.view.admit(each)

    def cluster(self, set_aside=(), failed=()):
        fleet = Fleet(self.view, "model-fingerprint", self.ledger)
        return fleet.cluster(self.view.match(PROMPT), self.costs, set(set_aside), set(failed))


def worker(name, role=Role.BOTH, **changes):
    return record(worker_id=name, incarnation=f"{name}.1", role=role, block_bytes=3200, **changes)


def ids(workers):
    return [worker.worker_id for worker in workers]


def mixed_fleet():
    """Of two kinds, with requests of this router and of another one, and blocks here and there."""
    names = [f"p{n}" for n in range(6)]
    shares = (RouterShare("other", 2, 900, 400),)
    bench = Bench(
        *(worker(name, Role.PREFILL, kind="fast" if n % 2 else "slow") for n, name in enumerate(names)),
        *(worker(f"d{n}", Role.DECODE, load=replace(RECORD.load, shares=shares * n)) for n in range(2)),
    )
    for n, name in enumerate(names):
        bench.view.index.store(name, dict.fromkeys(PROMPT[: 3 * n], Tier.DEVICE))
    end = worker_pb2.SequenceEnd(
        prefill_s=0.1, prefill_tokens=1000, decode_tokens=10, decode_s=0.1, mean_batch=2
    )
    bench.costs.observe(bench.view.workers["p1"], bench.view.workers["d0"], end)
    return bench


def test_columns_are_what_the_views_say():
    bench = mixed_fleet()
    request = RequestView(1000, seed=3)
    plan = load_policy("predicted_time")(request, bench.cluster())
    with bench.ledger.charged(plan, 1000), bench.ledger.charged(plan, 1000):
        cluster = bench.cluster()
        for pool in (cluster.prefill, cluster.decode):
            again = Pool.of(pool).columns
            for name in ("cached_tokens", "queue_s", "active_sequences", "active_tokens", "capacity_tokens"):
                assert getattr(pool.columns, name).tolist() == getattr(again, name).tolist()
            assert alone_s(request, pool.columns) == pytest.approx(alone_s(request, again))


@pytest.mark.parametrize("token_bytes", [0.0, 100.0, 4.9e5, 1e7])
def test_ranking_says_what_the_predictions_say(token_bytes):
    cluster = replace(mixed_fleet().cluster(), token_bytes=token_bytes)
    request = RequestView(1000, seed=3)
    [holder, *_] = cluster.holders
    assert holder.worker_id == "p5"
    prefill_s, fetch_s = first_tokens(request, cluster, cluster.prefill.columns, holder)
    one_by_one = [first_token(request, cluster, worker, holder) for worker in cluster.prefill]
    assert prefill_s == pytest.approx([each[0] for each in one_by_one])
    assert np.broadcast_to(fetch_s, 6) == pytest.approx([each[1] for each in one_by_one])
    steps = steps_s(request, cluster.decode.columns)
    assert steps == pytest.approx([step_s(request, worker) for worker in cluster.decode])


def test_what_other_routers_have_at_a_worker_counts_beside_ones_own():
    shares = (RouterShare("own", 7, 7000, 7000), RouterShare("other", 2, 900, 400))
    load = replace(RECORD.load, shares=shares)
    bench = Bench(worker("d0", load=load), worker("d1"), worker("p0", Role.PREFILL, load=load))
    request = RequestView(1000, seed=1)
    plan = planned(request, bench.cluster(), bench.cluster().decode[1], (), "")
    with bench.ledger.charged(plan, 1000):
        d0, d1 = bench.cluster().decode
        assert (d0.active_sequences, d0.active_tokens, d0.pending_prefill_tokens) == (2, 900, 400)
        assert (d1.active_sequences, d1.active_tokens, d1.pending_prefill_tokens) == (1, 1000, 1000)
        cost = d0.costs.prefill
        assert d0.queue_s == pytest.approx(cost.seconds(400, 0))
        assert bench.cluster().prefill[0].queue_s == pytest.approx(2 * cost.seconds(200, 0))
        assert d1.queue_s == pytest.approx(plan.prediction.prefill_s)


def test_what_others_may_have_sent_grows_with_the_age_of_reports_and_their_part_in_the_load():
    load = replace(RECORD.load, shares=(RouterShare("own", 7, 7000, 7000), RouterShare("other", 3, 900, 400)))
    bench = Bench(worker("d0", load=load), worker("d1"))
    assert bench.cluster().unseen_s == 0, "reports are new"
    bench.view.report_age_s = 0.4
    assert bench.cluster().unseen_s == pytest.approx(0.4)
    plan = planned(RequestView(1000, seed=1), bench.cluster(), bench.cluster().decode[1], (), "")
    with bench.ledger.charged(plan, 1000):
        assert bench.cluster().unseen_s == pytest.approx(0.4 * 3 / 4)
    bench.view.report_age_s = 3600.0
    assert bench.cluster().unseen_s == pytest.approx(2.0)
    alone = Bench(worker("d0"))
    alone.view.report_age_s = 0.4
    assert alone.cluster().unseen_s == 0, "there is no other router"


def test_a_thousand_workers_cost_few_views():
    bench = Bench(*(worker(f"w{n}") for n in range(1000)))
    for n in range(1000):
        bench.view.index.store(f"w{n}", dict.fromkeys(PROMPT[:3], Tier.DEVICE))
    cluster = bench.cluster()
    load_policy("predicted_time")(RequestView(1000, seed=1), cluster)
    assert len(cluster.decode._views) <= 10
    assert len(list(cluster.decode)) == len(set(ids(cluster.decode))) == 1000  # all of them for who asks
    assert predict(RequestView(1000, seed=1), cluster, cluster.decode[999], None).cached_tokens == 96


def test_who_drains_is_no_candidate_and_still_a_source():
    bench = Bench(worker("d0"), worker("d1", draining=True))
    bench.view.index.store("d1", dict.fromkeys(PROMPT, Tier.DEVICE))
    cluster = bench.cluster()
    assert (ids(cluster.decode), ids(cluster.holders)) == (["d0"], ["d1"])


def test_who_is_set_aside_is_no_candidate_and_who_failed_is_the_last_resort():
    bench = Bench(worker("p0", Role.PREFILL), worker("d0"), worker("d1"))
    assert ids(bench.cluster(failed=["d1.1"]).decode) == ["d0"]
    assert ids(bench.cluster(failed=["d0.1", "d1.1"]).decode) == ["d0", "d1"]
    assert ids(bench.cluster(set_aside=["d0.1"], failed=["d1.1"]).decode) == ["d1"]
    assert ids(bench.cluster(set_aside=["p0.1"]).prefill) == []
    assert bench.cluster(set_aside=["d0.1", "d1.1"]) is None


def test_workers_of_the_commonest_layout_work_together():
    bench = Bench(worker("d0"), worker("d1", kv_dtype="bfloat16"), worker("d2"))
    bench.view.admit(replace(worker("d3"), model_fingerprint="another"))
    assert ids(bench.cluster().decode) == ["d0", "d2"]


def test_rows_of_workers_that_are_gone_are_used_again():
    bench = Bench(worker("d0"))
    for n in range(1, 500):
        bench.view.drop(f"d{n - 1}", f"d{n - 1}.1")
        bench.view.admit(worker(f"d{n}"))
        plan = load_policy("predicted_time")(RequestView(1000, seed=1), bench.cluster())
        with bench.ledger.charged(plan, 1000):
            [view] = bench.cluster().decode
            assert (view.num_requests, view.active_tokens) == (1, 1000)
        [view] = bench.cluster().decode
        assert (view.num_requests, view.active_tokens, view.queue_s) == (0, 0, 0.0)
    assert len(bench.ledger._figures) == 64
    assert len(bench.view._others) == 1
