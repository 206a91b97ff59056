"""A request's log lines in all processes carry the caller's id and ours."""

from __future__ import annotations

import asyncio
import json

import grpc

from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc
from tests.support.process_fleet import ProcessWorker
from tests.support.processes import Process

PROMPT = [3 + (7 * i) % 200 for i in range(40)]
LABEL = "the-caller-s-own-id"


def lines(path, **fields) -> list[dict]:
    """Those that are JSON and have the fields."""
    found = []
    for line in path.read_text().splitlines():
        if line.startswith("{"):
            entry = json.loads(line)
            if all(entry.get(key) == value for key, value in fields.items()):
                found.append(entry)
    return found


async def test_the_request_id_is_in_the_logs_of_all_three_processes(settings_with, tmp_path):
    settings = settings_with(kv={"transport": "nixl"})
    p, d = ProcessWorker(settings, "prefill", "p", tmp_path), ProcessWorker(settings, "decode", "d", tmp_path)
    config = tmp_path / "router.json"
    config.write_text(settings.model_dump_json(exclude={"rpc", "http"}))
    router = Process(["router", "--config", str(config)], tmp_path, "router")
    try:
        await asyncio.gather(p.start(), d.start(), asyncio.to_thread(router.wait_until_serving))
        request = inference_pb2.GenerateRequest(
            request_id=LABEL,
            sampling=inference_pb2.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True),
            explain=True,
        )
        request.token_ids.ids.extend(PROMPT)
        async with grpc.aio.insecure_channel(router.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            async with asyncio.timeout(30):
                while True:  # until the router knows both
                    messages = [m async for m in stub.Generate(request, timeout=30)]
                    if messages[-1].hand_off.prefill_worker:
                        break
        async with asyncio.timeout(10):
            while not lines(tmp_path / "p.log", event="prompt ended", outcome="ok", request_id=LABEL):
                await asyncio.sleep(0.05)
    finally:
        router.stop()
        p.stop()
        d.stop()
    [computed] = lines(tmp_path / "p.log", event="prompt ended", request_id=LABEL)
    [decoded] = lines(tmp_path / "d.log", event="request ended", id=computed["id"])
    ours = computed["id"].partition(".")[0]  # behind it, the number of the dispatch
    [answered] = lines(tmp_path / "router.log", event="request ended", id=ours)
    assert decoded["request_id"] == answered["request_id"] == LABEL
    assert (computed["process"], decoded["process"], answered["process"]) == ("p", "d", "router")
