"""Every expression of the dashboard and of the alerts, against what a running fleet tells."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from pathlib import Path
from urllib.request import urlopen

import grpc
import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from headrace.directory.records import Role
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc
from router.app import Router
from tests.support.fleet import Worker, workers

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana"
FROM_PROMETHEUS = {"instance", "job", "le"}
ROUTER_ONLY, WORKER_ONLY = "vllm:time_to_first_token_seconds_count", "vllm:num_requests_running"


def dashboard_expressions() -> list[str]:
    dashboard = json.loads((FOLDER / "dashboard.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def alerts() -> list[dict]:
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def parsed(expression: str):
    return promql.parse(expression.replace("$__rate_interval", "5m"))


def used(node, labels: frozenset[str] = frozenset()) -> list[tuple[str, set[str]]]:
    """Metrics below the node, each with the labels that it must have for the expression to mean anything."""
    match node:
        case promql.VectorSelector():
            own = {matcher.name for matcher in node.matchers.matchers}
            return [(node.name, own | labels)]
        case promql.MatrixSelector():
            return used(node.vector_selector, labels)
        case promql.AggregateExpr():
            by = node.modifier.labels if node.modifier is not None else ()
            return used(node.expr, labels | set(by))
        case promql.BinaryExpr():
            return used(node.lhs, labels) + used(node.rhs, labels)
        case promql.Call():
            return [found for argument in node.args for found in used(argument, labels)]
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            return used(node.expr, labels)
        case promql.NumberLiteral():
            return []
    raise AssertionError(f"an expression of a new kind: {type(node)}")


async def scraped(address: str) -> dict[str, set[str]]:
    """Labels of each metric's samples."""
    text = await asyncio.to_thread(lambda: urlopen(f"http://{address}/metrics", timeout=10).read().decode())
    found = defaultdict(set)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] |= sample.labels.keys()
    return found


async def ask(address: str) -> None:
    """Twice the same prompt: the second time it is cached."""
    message = inference_pb2.GenerateRequest(
        sampling=inference_pb2.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    )
    message.token_ids.ids.extend(3 + (7 * i) % 200 for i in range(40))
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for _ in range(2):
            assert [m async for m in stub.Generate(message, timeout=30)]


async def told_by_a_fleet(settings, settings_with) -> list[dict[str, set[str]]]:
    """By a router, a prefill and a decode worker, and a worker that does not fit them."""
    router = Router(settings)
    odd = Worker(settings_with(engine={"block_size_tokens": 8}), Role.DECODE, "odd")
    async with workers(settings, Role.PREFILL, Role.DECODE) as both:
        try:
            address = await router.start()
            async with asyncio.timeout(20):
                while not router.ready:
                    await asyncio.sleep(0.02)
            await ask(address)
            await odd.start()
            async with asyncio.timeout(20):
                while "field" not in (await _of(odd)).get("headrace_kv_refused_peers", ()):
                    await asyncio.sleep(0.1)
                while "state" not in (await _of(both[0]))["headrace_kv_blocks"]:  # audited when idle
                    await asyncio.sleep(0.1)
            return [await scraped(router.metrics_address), await _of(odd), *[await _of(w) for w in both]]
        finally:
            await router.stop()
            await odd.process.stop()


async def _of(worker: Worker) -> dict[str, set[str]]:
    return await scraped((await worker.status()).metrics_address)


async def test_all_expressions_name_what_exists(settings_with):
    settings = settings_with(
        engine={"host_memory_bytes": 1 << 16},
        router={"policy": "round_robin"},
        directory={"worker_ttl_s": 1.0},
    )
    of_router, *of_workers = await told_by_a_fleet(settings, settings_with)
    told = defaultdict(set)
    for process in (of_router, *of_workers):
        for name, labels in process.items():
            told[name] |= labels
    expressions = [*dashboard_expressions(), *(rule["expr"] for rule in alerts())]
    assert len(expressions) > 60
    wrong = [
        (name, sorted(labels - told.get(name, set()) - FROM_PROMETHEUS), name in told)
        for expression in expressions
        for name, labels in used(parsed(expression))
        if name not in told or labels - told[name] - FROM_PROMETHEUS
    ]
    assert wrong == []
    # One source for each figure, so that sums over all instances are right.
    vllm = [{name for name in process if name.startswith("vllm:")} for process in (of_router, *of_workers)]
    assert ROUTER_ONLY in vllm[0]
    assert all(WORKER_ONLY in names and not names & vllm[0] for names in vllm[1:])
    assert all("model_name" in told[name] for names in vllm for name in names)


def test_the_check_finds_what_is_wrong():
    [(name, labels)] = used(parsed('sum by (worker) (rate(nothing_total{reason="x"}[$__rate_interval]))'))
    assert (name, labels) == ("nothing_total", {"worker", "reason"})
    with pytest.raises(ValueError, match=r"."):
        parsed("sum(rate(x[5m])")


def test_alerts_say_what_to_do():
    names = [rule["alert"] for rule in alerts()]
    assert len(names) == len(set(names)) > 15
    for rule in alerts():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["description"].endswith(".")
        by = re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])
        given = set().union(*(labels for _, labels in used(parsed(rule["expr"]))))
        assert set(by) <= given | {"instance"}, rule["alert"]
