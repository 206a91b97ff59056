"""The load generator before a real small fleet, through both doors, and its page in a real browser."""

from __future__ import annotations

import json
import uuid

import pytest

from headrace.bench.serve.arrivals import Arrivals
from headrace.bench.serve.grpc_endpoint import GrpcEndpoint
from headrace.bench.serve.http_endpoint import HttpEndpoint
from headrace.bench.serve.lengths import Lengths
from headrace.bench.serve.measure import Measurer
from headrace.bench.serve.page import comparison_page, run_page, sweep_page
from headrace.bench.serve.results import read_runs
from headrace.bench.serve.slo import Objective
from headrace.bench.serve.source import Drawn
from headrace.bench.serve.sweep import Bounds, highest_rate, sweep_json
from headrace.bench.serve.workload import Shape
from headrace.clock import SystemClock
from headrace.cluster.redis_server import RedisServer
from headrace.config import ClientSettings
from headrace.directory.records import Role
from tests.support.console import browser_page, running_router
from tests.support.fleet import fleet_settings, workers

P, D = Role.PREFILL, Role.DECODE
SLO = Objective.parse("--slo", "ttft:60000,tpot:60000")
TALKS = Shape(
    Lengths.parse("", "6:10"),
    Lengths.parse("", "5"),
    prefix_tokens=40,
    num_prefixes=2,
    turns=Lengths.parse("", "2"),
)


@pytest.fixture(scope="module")
def redis_url():
    with RedisServer() as server:
        yield server.url


@pytest.fixture
def settings(tiny_model_files, redis_url):
    directory = {"url": redis_url, "cluster": uuid.uuid4().hex[:8]}
    return fleet_settings(tiny_model_files, redis_url, directory=directory, engine={"num_blocks": 1024})


async def measured(endpoint, folder, label, source=None, rate=None, phase=1):
    source = source or Drawn(TALKS, Arrivals("poisson", 20.0), seed=3, count=12)
    try:
        served = await endpoint.served()
        measurer = Measurer(endpoint, SystemClock(), SLO, served.vocab_size or 200, seed=3)
        plan, facts = source.plan(rate, served.max_tokens)
        facts = {"label": label, "backend": label, "endpoint": "here", "model_id": served.model, **facts}
        await measurer.warm_up(source.warm_up(1, served.max_tokens))
        return await measurer.measure(plan, facts, folder, phase)
    finally:
        await endpoint.close()


def check(summary, records):
    assert summary["completed"] == summary["num_prompts"] == 24
    assert summary["total_output_tokens"] == 24 * 5
    assert summary["cut_short"] == 0
    assert summary["slo"]["attainment"] == 1.0
    cache = summary["cache"]
    assert (
        cache["hit_rate_tokens"]
        == sum(record["cached_tokens"] for record in records) / summary["total_input_tokens"]
    )
    # All but two first requests share a system prompt of ten blocks, which may be on its way while the next one comes.
    assert 0.2 < cache["hit_rate_tokens"] <= cache["bound_infinite"]
    for record in records:
        assert record["cached_tokens"] <= record["expected_cached_tokens"]
        if summary["backend"] == "grpc":  # over HTTP, tokens without text of their own do not show
            assert len(record["itls_ms"]) == record["output_tokens"] - 1


async def test_through_both_doors(settings, tmp_path):
    async with workers(settings, P, D), running_router(settings, 2) as router:
        client = ClientSettings()
        grpc = GrpcEndpoint(router.address, client, 0.0, 60.0)
        http = HttpEndpoint(router.http_address, client, "", 0.0, 60.0, chat=False)
        summaries = [
            await measured(endpoint, tmp_path / name, name, phase=phase)
            for phase, (name, endpoint) in enumerate((("grpc", grpc), ("http", http)), 1)
        ]
    for summary in summaries:
        lines = (tmp_path / summary["label"] / "requests.jsonl").read_text().splitlines()
        check(summary, [json.loads(line) for line in lines])
    # The text is drawn anew, the schedule is not.
    assert summaries[0]["schedule_sha256"] == summaries[1]["schedule_sha256"]
    assert summaries[0]["total_input_tokens"] == summaries[1]["total_input_tokens"]
    for told in summaries:
        assert told["routing"]["decode_requests"] == {"decode-1": 24}
        assert told["pd"]["decode_ms"]["mean"] > 0
        assert sum(told["routing"].get("prefill_requests", {}).values()) + told["pd"]["local_prefills"] == 24
    assert sum(told["pd"]["kv_bytes"] for told in summaries) > 0
    await _look_at(tmp_path, summaries)


async def _look_at(folder, summaries):
    """The pages show the figures, load nothing, and the browser has nothing to complain of."""
    runs = read_runs([folder / "grpc", folder / "http"])
    run_page(runs[0]).write(folder / "grpc" / "report.html")
    comparison_page(runs).write(folder / "both.html")
    async with browser_page() as page:
        loaded: list[str] = []
        page.on("request", lambda request: loaded.append(request.url))
        await page.goto((folder / "grpc" / "report.html").as_uri())
        assert await page.title() == "grpc under load"
        text = await page.locator("body").inner_text()
        assert "24 of 24" in text
        assert f"{summaries[0]['median_ttft_ms']:,.1f}" in text
        assert await page.locator("figure svg").count() == 5
        await page.goto((folder / "both.html").as_uri())
        assert await page.locator("figure svg").count() == 4
        assert "×" in await page.locator("table").inner_text()
        assert [url for url in loaded if not url.startswith("file://")] == []
        await page.set_viewport_size({"width": 375, "height": 800})
        assert await page.evaluate("document.documentElement.scrollWidth") <= 375
    pictures = sorted(path.name for path in (folder / "grpc" / "plots").iterdir())
    assert pictures == ["cache.png", "lanes.png", "latency.png", "over_time.png", "ttft_by_prompt.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (folder / "plots").iterdir())


async def test_a_sweep_of_a_real_fleet(settings, tmp_path):
    """All answers are good at any rate, by so mild an objective: the upper bound is the highest rate."""
    shape = Shape(Lengths.parse("", "8"), Lengths.parse("", "3"))
    source = Drawn(shape, Arrivals("constant", 1.0), seed=0, count=6)
    rates: list[float] = []
    async with workers(settings, D), running_router(settings, 1) as router:

        async def measure_at(rate):
            rates.append(rate)
            endpoint = GrpcEndpoint(router.address, ClientSettings(), 0.0, 60.0)
            summary = await measured(endpoint, None, "x", source, rate, len(rates))
            summary["client"]["valid"] = True  # however busy this machine is
            return summary

        probes = await highest_rate(Bounds(5.0, 20.0, 0.9), measure_at)
    sweep = sweep_json(Bounds(5.0, 20.0, 0.9), probes)
    assert (sweep["highest_rate"], rates) == (20.0, [5.0, 20.0])
    sweep_page(sweep).write(tmp_path / "report.html")
    async with browser_page() as page:
        await page.goto((tmp_path / "report.html").as_uri())
        assert "20 or more" in await page.title()
        assert await page.locator("figure svg").count() == 1
