"""One request, one trace: router, decode worker and prefill worker tell an OpenTelemetry collector of their phases."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc
import httpx2
import pytest

from headrace.config import TelemetrySettings
from headrace.directory.records import Role
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc
from headrace.tracing import start_tracing
from router.app import Router
from tests.support.fleet import workers
from tests.support.otlp import collector
from tests.support.process_fleet import ProcessWorker

P, D, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH
TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{CLIENT_SPAN}-01"
PROMPT = [3 + (7 * i) % 200 for i in range(40)]
HAND_OFF = "Generate/dispatch/decode_worker/hand_off"
SPLIT = {
    "Generate",
    "Generate/admission",
    "Generate/decision",
    "Generate/dispatch",
    "Generate/dispatch/decode_worker",
    HAND_OFF,
    f"{HAND_OFF}/prefill_worker",
    f"{HAND_OFF}/prefill_worker/queue",
    f"{HAND_OFF}/prefill_worker/prefill",
    f"{HAND_OFF}/transfer",
    "Generate/dispatch/decode_worker/decode",
}


def request(token_ids=PROMPT, **sampling) -> inference_pb2.GenerateRequest:
    options = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling}
    message = inference_pb2.GenerateRequest(
        request_id="label", sampling=inference_pb2.SamplingParams(**options)
    )
    message.token_ids.ids.extend(token_ids)
    return message


async def ask(address, message, metadata=((("traceparent", TRACEPARENT)),)):
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return [m async for m in stub.Generate(message, timeout=60, metadata=metadata)]


@asynccontextmanager
async def router_of(settings):
    router = Router(settings)
    address = await router.start()
    try:
        async with asyncio.timeout(30):
            while not router.ready:
                await asyncio.sleep(0.02)
        yield router, address
    finally:
        await router.stop()


def of_trace(spans, trace_id=TRACE):
    return [span for span in spans if span.trace_id == trace_id]


@pytest.fixture
def traced(settings_with):
    """Settings that send to `found`. The smallest prompt of another worker's takes the way over both."""

    def make(found, **changes):
        telemetry = {"otlp_endpoint": found.endpoint, **changes.pop("telemetry", {})}
        return settings_with(
            telemetry=telemetry, router={"policy": "round_robin", "placement_timeout_s": 2.0}, **changes
        )

    return make


async def test_a_request_is_one_trace_over_three_processes(traced):
    async with collector() as found:
        settings = traced(found)
        async with workers(settings, P, D), router_of(settings) as (_, address):
            await ask(address, request())
            await found.until(lambda spans: {span.path for span in of_trace(spans)} >= SPLIT)
        spans = of_trace(found.spans)
        assert sorted(span.path for span in spans) == sorted(SPLIT)  # each once
        by_path = {span.path: span for span in spans}
        root = by_path["Generate"]
        assert root.parent_id == CLIENT_SPAN
        assert {span.error for span in spans} == {None}
        services = {span.name: span.service for span in spans}
        assert services["Generate"] == services["dispatch"] == "headrace-router"
        assert services["decode_worker"] == services["transfer"] == "headrace-decode"
        assert services["prefill_worker"] == services["prefill"] == "headrace-prefill"
        assert root.attributes["gen_ai.usage.input_tokens"] == len(PROMPT)
        assert root.attributes["gen_ai.usage.output_tokens"] == 8
        assert root.attributes["request_id"] == "label"
        for span in spans:
            assert span.start_ns <= span.end_ns
            if span.parent is not None and span.parent.service == span.service:
                assert span.parent.start_ns - 1_000_000 <= span.start_ns
        assert by_path[f"{HAND_OFF}/prefill_worker/queue"].end_ns == pytest.approx(
            by_path[f"{HAND_OFF}/prefill_worker/prefill"].start_ns, abs=1000
        )


async def test_a_trace_begins_at_the_http_door_too_and_prefills_where_it_decodes(traced):
    async with collector() as found:
        settings = traced(found)
        async with workers(settings, BOTH), router_of(settings) as (router, _):
            async with httpx2.AsyncClient(base_url=router.http_address) as http:
                body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
                answer = await http.post("/v1/completions", json=body, headers={"traceparent": TRACEPARENT})
                assert answer.status_code == 200
            wanted = {f"Generate/dispatch/decode_worker/{phase}" for phase in ("queue", "prefill", "decode")}
            await found.until(lambda spans: {*wanted, "Generate"} <= {s.path for s in of_trace(spans)})
        root = next(span for span in of_trace(found.spans) if span.name == "Generate")
        assert root.parent_id == CLIENT_SPAN


async def test_a_hand_off_that_fails_is_an_error_in_an_answer_that_is_none(traced):
    async with collector() as found:
        settings = traced(found)
        async with workers(settings, P, P, D) as (_, _, d), router_of(settings) as (_, address):
            d.faults.fail_next = 1
            await ask(address, request())
            await found.until(lambda spans: "Generate" in {span.path for span in of_trace(spans)})
        spans = of_trace(found.spans)
        errors = [span.error for span in spans if span.name == "hand_off"]
        assert len(errors) == 2
        assert errors.count(None) == 1
        assert [span.error for span in spans if span.name in ("Generate", "dispatch", "decode_worker")] == [
            None
        ] * 3


async def test_requests_that_are_refused_or_fail_are_errors(traced):
    async with collector() as found:
        router = Router(traced(found))
        address = await router.start()
        try:
            with pytest.raises(grpc.aio.AioRpcError, match="max_tokens"):
                await ask(address, request(max_tokens=-1))
            with pytest.raises(grpc.aio.AioRpcError, match="no worker"):
                await ask(address, request())
            await found.until(lambda spans: [span.name for span in spans].count("Generate") == 2)
        finally:
            await router.stop()
        refused, failed = (span for span in of_trace(found.spans) if span.name == "Generate")
        assert "max_tokens" in refused.error
        assert "no worker" in failed.error
        assert failed.attributes["outcome"] == "UNAVAILABLE"


async def test_a_request_that_outlives_its_worker_has_a_dispatch_for_each(traced, tmp_path):
    async with collector() as found:
        settings = traced(
            found, kv={"transport": "nixl"}, engine={"num_blocks": 2000}, directory={"worker_ttl_s": 2.0}
        )
        d0, d1 = (ProcessWorker(settings, "decode", f"d{n}", tmp_path) for n in range(2))
        try:
            await asyncio.gather(d0.start(), d1.start())
            async with router_of(settings) as (router, address):
                async with asyncio.timeout(20):
                    while len(router.view.workers) < 2:
                        await asyncio.sleep(0.02)
                async with grpc.aio.insecure_channel(address) as channel:
                    stub = inference_pb2_grpc.InferenceStub(channel)
                    message = request(max_tokens=400)
                    message.explain = True
                    call = stub.Generate(message, timeout=60, metadata=(("traceparent", TRACEPARENT),))
                    lost = other = d0
                    async for last in call:
                        if last.HasField("plan") and lost is other:
                            lost, other = (d0, d1) if last.plan.decode_worker == "d0" else (d1, d0)
                            lost.kill()
                assert last.usage.completion_tokens == 400
                await found.until(lambda spans: "Generate" in {s.path for s in of_trace(spans)})
                await found.until(lambda spans: "decode" in {s.name for s in of_trace(spans)})
            spans = of_trace(found.spans)
            dispatches = sorted((s for s in spans if s.name == "dispatch"), key=lambda s: s.start_ns)
            assert [s.attributes["decode_worker"] for s in dispatches] == [lost.worker_id, other.worker_id]
            assert dispatches[0].error and dispatches[1].error is None
            assert next(s for s in spans if s.name == "decode").parent.parent is dispatches[1]
            assert next(s for s in spans if s.name == "Generate").error is None
        finally:
            d0.stop()
            d1.stop()


async def test_what_a_client_does_not_sample_is_not_traced(traced):
    async with collector() as found:
        settings = traced(found, telemetry={"trace_ratio": 0.0})
        async with workers(settings, P, D), router_of(settings) as (_, address):
            await ask(address, request(), metadata=(("traceparent", TRACEPARENT[:-1] + "0"),))
            await ask(address, request(), metadata=())
            await ask(address, request())  # this client has decided
            await found.until(lambda spans: "Generate" in {span.path for span in spans})
        assert {span.trace_id for span in found.spans} == {TRACE}  # self-tests are none, either
        assert [span.name for span in found.spans].count("Generate") == 1


def test_without_a_collector_a_clients_trace_is_handed_on_as_it_is():
    tracing = start_tracing(TelemetrySettings(), "headrace-router", "r")
    span = tracing.begin("Generate", TRACEPARENT, 0.0)
    assert span.child("dispatch").traceparent == TRACEPARENT
    assert tracing.begin("Generate", "", 0.0).traceparent == ""
