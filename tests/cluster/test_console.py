"""The console's HTTP, and `headrace top`, before a real small fleet."""

from __future__ import annotations

import asyncio
import json
import uuid
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise

import httpx2
import pytest
from rich.console import Console

from headrace.cli.top import fetch, frame
from headrace.cluster.redis_server import RedisServer
from headrace.directory.records import Role
from headrace.errors import Unauthenticated, Unavailable
from router.callers import Caller
from router.console.observer import MAX_LISTENERS
from router.console.state import state_from_json
from tests.support.console import running_router
from tests.support.fleet import STEP_TOKENS, fleet_settings, workers

P, D = Role.PREFILL, Role.DECODE
QUESTION = {"mode": "completion", "prompt": "x" * (5 * STEP_TOKENS), "max_tokens": 4}


@pytest.fixture(scope="module")
def settings(tiny_model_files):
    with RedisServer() as server:
        directory = {"url": server.url, "cluster": uuid.uuid4().hex[:8]}
        yield fleet_settings(tiny_model_files, server.url, directory=directory)


@asynccontextmanager
async def console(settings):
    async with (
        workers(settings, P, D),
        running_router(settings, 2) as router,
        httpx2.AsyncClient(base_url=router.http_address, timeout=10) as client,
    ):
        yield client, router


def events(text):
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]


async def test_top_shows_what_the_playground_did(settings):
    async with console(settings) as (client, router):
        answer = events((await client.post("/console/generate", json=QUESTION)).text)
        assert answer[0]["kind"] == "plan" and answer[0]["plan"]["decode_worker"] == "decode-1"
        end = answer[-1]
        assert (end["decode_worker"], end["report"]["prefill_worker"]) == ("decode-1", "prefill-0")
        assert end["completion_tokens"] == 4
        bounds = [(phase["start_s"], phase["end_s"]) for phase in end["phases"]]
        assert bounds[0][0] == 0 and bounds[-1][1] == end["total_s"]
        assert all(end_s == start_s for (_, end_s), (start_s, _) in pairwise(bounds))
        async with asyncio.timeout(10):
            state = state_from_json(await asyncio.to_thread(fetch, router.http_address, None))
            while state.router.requests != {"ok": 1}:
                await asyncio.sleep(0.1)
                state = state_from_json(await asyncio.to_thread(fetch, router.http_address, None))
        assert state.router.output_tokens == 4
        prefill = next(worker for worker in state.workers if worker.worker_id == "prefill-0")
        assert prefill.transfers.sent_bytes == int(end["report"]["bytes_moved"]) > 0
        paper = Console(width=300)
        with paper.capture() as drawn:
            paper.print(frame(state))
        assert "prefill-0" in drawn.get() and "ended: ok 1" in drawn.get()


async def test_what_is_no_question_is_refused(settings):
    async with console(settings) as (client, _):
        for body, field in (
            ({**QUESTION, "mode": "poem"}, "mode"),
            ({**QUESTION, "colour": "red"}, "colour"),
            ({**QUESTION, "max_tokens": 0}, "max_tokens"),
            ({**QUESTION, "temperature": -1.0}, "temperature"),
        ):
            answer = await client.post("/console/generate", json=body)
            assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(field)
        # What a page of another site can send without asking first.
        plain = await client.post(
            "/console/generate", content=json.dumps(QUESTION), headers={"content-type": "text/plain"}
        )
        assert plain.status_code == 400
        large = await client.post(
            "/console/generate", content=b"x" * (5 << 20), headers={"content-type": "application/json"}
        )
        assert large.status_code == 400


async def test_listeners_are_bounded_and_give_their_places_back(settings):
    async with console(settings) as (client, _):
        async with AsyncExitStack() as stack:
            for _ in range(MAX_LISTENERS):
                response = await stack.enter_async_context(client.stream("GET", "/console/events"))
                assert response.status_code == 200
            refused = await client.get("/console/events")
            assert refused.status_code == 429 and refused.headers["retry-after"] == "5"
        async with asyncio.timeout(10):
            while True:
                async with client.stream("GET", "/console/events") as response:
                    if response.status_code == 200:
                        return
                await asyncio.sleep(0.05)


async def test_all_but_the_page_asks_for_credentials(settings):
    class Known:
        async def caller(self, authorization: str) -> Caller:
            if authorization != "Bearer right":
                raise Unauthenticated("no such key")
            return Caller()

    async with console(settings) as (client, router):
        router._observer._door.callers = Known()
        assert (await client.get("/console")).status_code == 200
        assert (await client.get("/console/state")).status_code == 401
        assert (await client.get("/console/events")).status_code == 401
        assert (await client.post("/console/generate", json=QUESTION)).status_code == 401
        with pytest.raises(Unavailable, match="401"):
            await asyncio.to_thread(fetch, router.http_address, "wrong")
        assert state_from_json(await asyncio.to_thread(fetch, router.http_address, "right")).workers


async def test_the_page_allows_its_own_script_and_style_alone(settings):
    async with console(settings) as (client, _):
        page = await client.get("/console")
        policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'" and policy["script-src"].startswith("'sha256-")
        assert "unsafe" not in page.headers["content-security-policy"]
        assert "set-cookie" not in page.headers and "http://" not in page.text.replace(
            "http://www.w3.org", ""
        )
