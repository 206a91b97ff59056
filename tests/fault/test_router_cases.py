"""Cases of a router in front of real workers: load, overlap, ids, messages. Predictions are held against reports.

The workers prefill what they decode, so that it is clear whose cache and whose load a request is.
"""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import httpx2
import pytest

from headrace.directory.records import Role
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc, worker_pb2
from router.app import Router
from tests.support.fleet import BLOCK_SIZE, Gate, Worker, workers
from tests.support.process_fleet import ProcessWorker
from tests.support.tiny_llama import write_tiny_llama

P, D = Role.PREFILL, Role.DECODE
NUM_REQUESTS = 32
LENGTH = 60  # of a prompt
CACHED = LENGTH - BLOCK_SIZE  # of it, when it was seen before: its last token is always computed
PINGS = [
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
REFRESH_S = 10.0  # of the router's view, on a busy machine


@dataclass(frozen=True, slots=True)
class Front:
    router: Router
    stub: inference_pb2_grpc.InferenceStub

    async def ask(self, request) -> list[inference_pb2.GenerateResponse]:
        return [message async for message in self.stub.Generate(request, timeout=60)]

    async def predicted(self, request) -> dict[str, int]:
        """Tokens of the prompt that each worker is predicted to find."""
        answer = await self.stub.Explain(inference_pb2.ExplainRequest(request=request), timeout=10)
        return {each.worker: each.cached_tokens for each in answer.plan.decode_candidates}

    async def until_known(self, worker_id: str) -> None:
        async with asyncio.timeout(REFRESH_S):
            while worker_id not in self.router.view.workers:
                await asyncio.sleep(0.01)

    async def until_reported(self, worker_id: str, num_blocks: int) -> None:
        """That it holds so many."""
        async with asyncio.timeout(REFRESH_S):
            while len(self.router.view.index.blocks(worker_id)) < num_blocks:
                await asyncio.sleep(0.01)

    async def until_nothing_is_charged(self) -> None:
        dispatcher = self.router.dispatcher
        async with asyncio.timeout(10):
            while dispatcher.admission.num_running or dispatcher.ledger.accounts:
                await asyncio.sleep(0.01)
        assert not dispatcher.admission.num_queued

    async def until_predicted(self, request, worker_id: str, cached_tokens: int | None) -> None:
        """None: it is no candidate."""
        async with asyncio.timeout(REFRESH_S):
            while (await self.predicted(request)).get(worker_id) != cached_tokens:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def front_of(settings, num_workers):
    """A router that knows so many workers. Nothing is charged or running at the end."""
    router = Router(settings)
    address = await router.start()
    try:
        async with asyncio.timeout(10):
            # With workers: until its self-test is over.
            while len(router.view.workers) < num_workers or (num_workers and not router.ready):
                await asyncio.sleep(0.01)
        async with grpc.aio.insecure_channel(address) as channel:
            front = Front(router, inference_pb2_grpc.InferenceStub(channel))
            yield front
            await front.until_nothing_is_charged()
    finally:
        await router.stop()


def tokens_of(messages) -> list[int]:
    return [token for message in messages for token in message.token_ids]


def ids(token_ids, *, request_id="", explain=False, **sampling) -> inference_pb2.GenerateRequest:
    options = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, **sampling}
    message = inference_pb2.GenerateRequest(
        request_id=request_id, explain=explain, sampling=inference_pb2.SamplingParams(**options)
    )
    message.token_ids.ids.extend(token_ids)
    return message


def prompt_of(number: int, length: int = LENGTH) -> list[int]:
    """Different from the first token on."""
    return [3 + (number + 7 * position * (number + 1)) % 200 for position in range(length)]


async def computed_by(fleet) -> int:
    """Tokens of prompts."""
    return sum([(await worker.status()).prefill_tokens for worker in fleet])


@pytest.fixture
def roomy(settings_with):
    """A pool for all requests, and assumptions that last: what makes them go is what workers report."""
    return settings_with(engine={"num_blocks": 1200}, router={"assumed_ttl_s": 60.0})


async def burst(front, fleet, clients, *, leaving=()) -> dict[str, int]:
    """Let all come, and once each is placed let the workers compute: before that none has told anything. Returns how
    many the router counted at each worker then. `leaving`: positions of clients that cancel at that moment.
    """
    gates = [Gate(worker) for worker in fleet]
    accounts = front.router.dispatcher.ledger.accounts
    tasks = [asyncio.create_task(client) for client in clients]
    try:
        async with asyncio.timeout(30):
            while sum(account.active_sequences for account in accounts.values()) < len(tasks):
                await asyncio.sleep(0.005)
        counts = {incarnation: account.num_requests for incarnation, account in accounts.items()}
        for position in leaving:
            tasks[position].cancel()
    finally:
        for gate in gates:
            gate.open()
    await asyncio.gather(*(task for position, task in enumerate(tasks) if position not in leaving))
    await front.until_nothing_is_charged()
    return {worker.worker_id: counts.get(worker.incarnation, 0) for worker in fleet}


def as_text(number: int) -> inference_pb2.GenerateRequest:
    request = ids([])
    request.text = "".join(chr(32 + token % 90) for token in prompt_of(number))
    return request


def as_chat(number: int) -> inference_pb2.GenerateRequest:
    request = ids([])
    request.chat.messages.add(role="user", content=as_text(number).text)
    return request


@pytest.mark.parametrize("entrance", [lambda number: ids(prompt_of(number)), as_text, as_chat])
@pytest.mark.parametrize("roles", [(D, D), (P, P, D)], ids=["prefilled where decoded", "handed off"])
async def test_ro01_load_is_counted_from_selection(roomy, roles, entrance):
    """A burst, of which nothing has been reported when the last one is placed. A third of the clients leave."""
    async with workers(roomy, *roles) as fleet, front_of(roomy, len(roles)) as front:
        asking = [front.ask(entrance(number)) for number in range(NUM_REQUESTS)]
        loads = await burst(front, fleet, asking, leaving=range(0, NUM_REQUESTS, 3))
        shares = [loads[worker.worker_id] for worker in fleet[:2]]
        assert sum(shares) == NUM_REQUESTS
        assert min(shares) >= 0.4 * NUM_REQUESTS


async def test_ro01_load_is_counted_from_selection_over_http(roomy):
    async with workers(roomy, D, D) as fleet, front_of(roomy, 2) as front, httpx2.AsyncClient() as client:

        async def post(number: int) -> None:
            body = {"model": "", "prompt": prompt_of(number), "max_tokens": 1}
            answer = await client.post(f"{front.router.http_address}/v1/completions", json=body, timeout=60)
            assert answer.json()["usage"]["completion_tokens"] == 1

        posts = [post(number) for number in range(NUM_REQUESTS)]
        loads = await burst(front, fleet, posts, leaving=range(0, NUM_REQUESTS, 3))
        assert min(loads.values()) >= 0.4 * NUM_REQUESTS


async def test_ro01_a_common_block_does_not_send_everything_to_one_worker(roomy):
    common = prompt_of(7, BLOCK_SIZE)
    async with workers(roomy, D, D) as fleet, front_of(roomy, 2) as front:
        await front.ask(ids([*common, *prompt_of(1)]))
        asking = [front.ask(ids([*common, *prompt_of(20 + n)])) for n in range(NUM_REQUESTS)]
        loads = await burst(front, fleet, asking, leaving=range(0, NUM_REQUESTS, 3))
        assert min(loads["decode-0"], loads["decode-1"]) >= NUM_REQUESTS / 8


async def test_ro03_chats_are_routed_by_their_prefix(roomy):
    system = inference_pb2.ChatMessage(role="system", content="You answer in one word. " * 2)

    def chat(turn: str) -> inference_pb2.GenerateRequest:
        request = ids([], explain=True)
        request.chat.messages.extend([system, inference_pb2.ChatMessage(role="user", content=turn)])
        return request

    async with workers(roomy, D, D), front_of(roomy, 2) as front:
        await front.ask(chat("first"))
        for turn in range(10):
            await front.ask(ids(prompt_of(turn, 12)))  # other traffic
            messages = await front.ask(chat(f"turn {turn}"))
            prediction = messages[0].plan.prediction
            predicted = prediction.cached_tokens + prediction.fetched_tokens
            assert predicted >= 4 * BLOCK_SIZE
            assert abs(predicted - messages[-1].usage.cached_tokens) <= BLOCK_SIZE
        other = chat("first")
        other.chat.messages[0].content = "Be brief. " * 4
        assert max((await front.predicted(other)).values()) < predicted


async def test_ro03_tools_are_part_of_the_prefix(settings_with, tmp_path):
    """A prompt with other tools is another one from there on, and predicted so."""
    folder = write_tiny_llama(tmp_path / "with_tools")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% if tools %}{{ tools | tojson }}{% endif %}" + config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    settings = settings_with(model={"ref": str(folder), "dtype": "float32"}, engine={"num_blocks": 1200})

    def chat(tool: str, turn: str) -> inference_pb2.GenerateRequest:
        request = ids([], explain=True)
        request.chat.tools_json = json.dumps([{"type": "function", "function": {"name": tool}}])
        request.chat.messages.add(role="system", content="You answer in one word. " * 2)
        request.chat.messages.add(role="user", content=turn)
        return request

    async with workers(settings, D, D), front_of(settings, 2) as front:
        await front.ask(chat("weather", "first"))
        for turn in range(10):
            await front.ask(ids(prompt_of(turn, 12)))  # other traffic
            messages = await front.ask(chat("weather", f"turn {turn}"))
            prediction = messages[0].plan.prediction
            predicted = prediction.cached_tokens + prediction.fetched_tokens
            assert predicted >= 4 * BLOCK_SIZE
            assert abs(predicted - messages[-1].usage.cached_tokens) <= BLOCK_SIZE
        before_the_name = len('[{"type": "function", "function": {"name": "')
        other = max((await front.predicted(chat("clock", "first"))).values())
        assert other == before_the_name // BLOCK_SIZE * BLOCK_SIZE < predicted


async def test_ro04_a_worker_that_is_cleared(roomy):
    request = ids(prompt_of(1))
    async with workers(roomy, D) as [worker], front_of(roomy, 1) as front:
        await front.ask(request)
        await front.until_reported("decode-0", CACHED // BLOCK_SIZE)
        assert await front.predicted(request) == {"decode-0": CACHED}
        await worker.process._engine.call(lambda engine: engine.reset_cache())
        await front.until_predicted(request, "decode-0", 0)
        assert (await front.ask(request))[-1].usage.cached_tokens == 0
        await front.until_predicted(request, "decode-0", CACHED)


async def test_ro04_a_worker_that_is_replaced_and_one_that_is_removed(roomy):
    """Under its name and address. And a router that starts anew."""
    async with workers(roomy, D), front_of(roomy, 1) as front:
        old = Worker(roomy, D, "other")
        await old.start()
        try:
            await front.until_known("other")
            request, answer = await _first_answer_of(front, "other")
            await front.until_reported("other", CACHED // BLOCK_SIZE)
            async with front_of(roomy, 2) as second:
                await second.until_predicted(request, "other", CACHED)
        finally:
            await old.process.stop()
        rpc = roomy.rpc.model_copy(update={"port": int(old.address.rsplit(":", 1)[1])})
        new = Worker(roomy.model_copy(update={"rpc": rpc}), D, "other")
        await new.start()
        try:
            assert new.address == old.address
            await front.until_predicted(request, "other", 0)
            assert tokens_of(await front.ask(request)) == tokens_of(answer)
        finally:
            await new.process.stop()
        await front.until_predicted(request, "other", None)
        for number in range(10):
            answer = await front.ask(ids(prompt_of(40 + number)))
            assert answer[-1].hand_off.decode_worker == "decode-0"


async def test_ro04_a_worker_that_is_killed_and_comes_back_at_its_address(settings_with, tmp_path):
    """Nobody takes leave: what its life before had cached is forgotten with it."""
    settings = settings_with(kv={"transport": "nixl"}, directory={"cluster": "killed", "worker_ttl_s": 2.0})
    worker = ProcessWorker(settings, "decode", "d", tmp_path)
    request = ids(prompt_of(1))
    try:
        await worker.start()
        async with front_of(settings, 1) as front:
            answer = await front.ask(request)
            await front.until_reported("d", CACHED // BLOCK_SIZE)
            assert await front.predicted(request) == {"d": CACHED}
            worker.kill()
            await worker.start()
            async with asyncio.timeout(REFRESH_S):
                while front.router.view.workers["d"].incarnation != worker.incarnation:
                    await asyncio.sleep(0.01)
            assert await front.predicted(request) == {"d": 0}
            again = await front.ask(request)
            assert tokens_of(again) == tokens_of(answer)
            assert again[-1].usage.cached_tokens == 0
            await worker.assert_idle()
    finally:
        worker.stop()


async def _first_answer_of(front: Front, name: str):
    """A request that this worker has answered first, and its answer."""
    for number in range(20):
        request = ids(prompt_of(number))
        answer = await front.ask(request)
        if answer[-1].hand_off.decode_worker == name:
            return request, answer
    raise AssertionError(f"{name} got none of 20 requests")


async def test_ro06_half_a_pair(settings_with):
    """Nobody, and a prefill worker alone: UNAVAILABLE, and nothing is begun. A decode worker alone prefills itself."""
    settings = settings_with(directory={"cluster": "pair"}, router={"placement_timeout_s": 0.1})

    async def refused(front: Front) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await front.ask(ids(prompt_of(1)))
        assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
        await front.until_nothing_is_charged()

    async with front_of(settings, 0) as front:
        await refused(front)
        async with workers(settings, P) as [p]:
            await front.until_known("prefill-0")
            await refused(front)
            status = await p.status()
            assert (status.prefill_tokens, status.waiting, len(status.holds)) == (0, 0, 0)
            async with named_worker(settings, D, "d"):
                await front.until_known("d")
                both = await front.ask(ids(prompt_of(1), max_tokens=8))
                assert both[-1].hand_off.prefill_worker == "prefill-0"
            async with asyncio.timeout(REFRESH_S):
                while "d" in front.router.view.workers:
                    await asyncio.sleep(0.01)
            await refused(front)
        async with workers(settings, D):
            await front.until_known("decode-0")
            alone = await front.ask(ids(prompt_of(1), max_tokens=8))
            assert alone[-1].hand_off.prefill_worker == ""
            assert tokens_of(alone) == tokens_of(both)


@asynccontextmanager
async def named_worker(settings, role, name):
    worker = Worker(settings, role, name)
    await worker.start()
    try:
        yield worker
        await worker.assert_idle()
    finally:
        await worker.process.stop()


async def test_id01_ids_are_labels(roomy):
    """Two at once under one id; then 50 times: cancelled, and sent again under it at once."""
    prompts = [prompt_of(n) for n in range(2)]
    draw = random.Random(1)
    async with workers(roomy, D, D) as both, front_of(roomy, 2) as front:
        expected = [tokens_of(await front.ask(ids(prompt, max_tokens=8))) for prompt in prompts]
        answers = await asyncio.gather(
            *(front.ask(ids(prompt, request_id="X", max_tokens=8)) for prompt in prompts)
        )
        assert [tokens_of(messages) for messages in answers] == expected
        assert {message.request_id for messages in answers for message in messages} == {"X"}
        for _ in range(50):
            call = front.stub.Generate(ids(prompts[0], request_id="X", max_tokens=400))
            await asyncio.sleep(draw.random() * 0.02)
            call.cancel()
            again = await front.ask(ids(prompts[1], request_id="X", max_tokens=8))
            assert tokens_of(again) == expected[1]
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await front.ask(ids(prompts[0], request_id="x" * 1_000_000))
        assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "request_id" in failure.value.details()
        unnamed = [await front.ask(ids(prompts[0], max_tokens=8)) for _ in range(2)]
        assert [tokens_of(messages) for messages in unnamed] == [expected[0]] * 2
        assert len({messages[0].request_id for messages in unnamed} - {""}) == 2
        for worker in both:
            await worker.assert_idle()
        drawn = sum([(await worker.status()).output_tokens for worker in both])
        assert drawn < 50 * 400 / 4  # no orphan goes on


async def test_gr02_what_is_larger_than_the_limit_names_it_and_the_channel_lives(settings_with):
    settings = settings_with(rpc={"max_message_bytes": 1 << 20}, router={"max_prompt_bytes": 100_000})
    async with workers(settings, D), front_of(settings, 1) as front:
        for text, code, limit in (
            ("x" * 5_000_000, grpc.StatusCode.RESOURCE_EXHAUSTED, str(1 << 20)),
            ("x" * 500_000, grpc.StatusCode.INVALID_ARGUMENT, "100000"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await front.ask(inference_pb2.GenerateRequest(text=text))
            assert failure.value.code() == code
            assert limit in failure.value.details()
            assert len(tokens_of(await front.ask(ids(prompt_of(1))))) == 1


async def test_gr02_a_prompt_that_becomes_larger_than_the_limit_on_its_way_harms_nobody(settings_with):
    """It came in as text of half the size. To send it would end the worker's session, and with it all its requests."""
    settings = settings_with(rpc={"max_message_bytes": 4096}, engine={"num_blocks": 1200})
    async with workers(settings, D) as [worker], front_of(settings, 1) as front:
        gate = Gate(worker)
        other = asyncio.create_task(front.ask(ids(prompt_of(1), max_tokens=8)))
        await gate.begun(1)
        large = inference_pb2.GenerateRequest(text="é" * 1100)
        try:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await front.ask(large)
        finally:
            gate.open()
        assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "4096" in failure.value.details()
        assert await front.predicted(large) == {"decode-0": 0}  # it was not sent
        messages = await other
        assert len(tokens_of(messages)) == 8
        assert front.router.tally.requests == {"INVALID_ARGUMENT": 1, "ok": 1}


async def test_gr02_messages_to_a_worker_may_exceed_grpcs_own_limit(roomy):
    """4 MiB, where a channel without limits of its own breaks. The worker refuses the prompt, and no more."""
    async with workers(roomy, D) as [worker], front_of(roomy, 1) as front:
        session = await front.router._sessions.get(worker.worker_id, worker.incarnation, worker.address)
        start = worker_pb2.StartRequest(
            request_id="large", token_ids=[100_000] * 2_000_000, sampling={"n": 1}, timeout_s=30
        )
        assert start.ByteSize() > 4 << 20
        async with asyncio.timeout(30):
            delta = await session.start(start).take()
        session.forget("large")
        assert delta.end is not None
        assert delta.end.error_code == "INVALID_ARGUMENT"
        assert len(tokens_of(await front.ask(ids(prompt_of(1))))) == 1
        assert not session.lost


async def test_gr02_a_client_that_pings_is_not_sent_away(settings_with):
    """Six pings without a call, beside a slow stream; gRPC's default is to end the connection at the third."""
    settings = settings_with(engine={"num_blocks": 400})
    async with (
        workers(settings, D),
        front_of(settings, 1) as front,
        grpc.aio.insecure_channel(front.router.address, options=PINGS) as channel,
    ):
        pinging = Front(front.router, inference_pb2_grpc.InferenceStub(channel))
        assert len(tokens_of(await pinging.ask(ids(prompt_of(1))))) == 1
        assert channel.get_state() == grpc.ChannelConnectivity.READY
        changed = asyncio.create_task(channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
        slow = front.stub.Generate(ids(prompt_of(2), max_tokens=400))
        messages = [await slow.read()]
        done, _ = await asyncio.wait([changed], timeout=6.5)
        assert not done, "the server ended the connection"
        changed.cancel()
        assert len(tokens_of(await pinging.ask(ids(prompt_of(1))))) == 1
        while (message := await slow.read()) is not grpc.aio.EOF:
            messages.append(message)
        assert len(tokens_of(messages)) == 400


async def test_me01_hits_are_counted_once_a_request(settings_with):
    settings = settings_with(engine={"num_blocks": 24})  # so few that requests wait, and are preempted
    async with workers(settings, D) as [worker], front_of(settings, 1) as front:

        def counted() -> tuple[float, int]:
            registry = front.router.metrics.registry
            hits = registry.get_sample_value("headrace_router_reported_cached_tokens_total")
            return hits, front.router.tally.prompt_tokens["ok"]

        prompts = [prompt_of(n, 20) for n in range(12)]
        await asyncio.gather(*(front.ask(ids(prompt, max_tokens=30)) for prompt in prompts))
        metrics = await worker.metrics()
        assert any(n.startswith("vllm:num_preemptions_total") and v > 0 for n, v in metrics.items())
        assert counted() == (0, sum(map(len, prompts)))
        same = prompt_of(77, 4 * BLOCK_SIZE + 1)
        for _ in range(10):
            await front.ask(ids(same))
        assert counted() == (9 * 4 * BLOCK_SIZE, sum(map(len, prompts)) + 10 * len(same))


@pytest.mark.parametrize(
    "sampling",
    [{}, {"n": 3}, {"max_tokens": 12, "stop": True}, {"max_tokens": 12, "stop": True, "n": 3}],
    ids=["one token", "of each of three", "stop string", "in each of three"],
)
async def test_me01_what_is_not_reported_as_cached_was_computed(roomy, sampling):
    """Over all requests for one prompt, to workers that have it and workers that do not, many at once. Ends that come
    with the first token, or by the router's abort, are reported like others.
    """
    prompt, num_requests = prompt_of(1), 48
    async with workers(roomy, P, P, D, D) as fleet, front_of(roomy, 4) as front:
        before = await computed_by(fleet)  # the router's self-test
        first = await front.ask(ids(prompt, max_tokens=12))
        cached = [first[-1].usage.cached_tokens]
        if sampling.get("stop"):
            sampling = {**sampling, "stop": ["".join(message.text for message in first)[:1]]}
        for _ in range(num_requests // 8):
            answers = await asyncio.gather(*(front.ask(ids(prompt, **sampling)) for _ in range(8)))
            cached += [messages[-1].usage.cached_tokens for messages in answers]
        assert (min(cached), max(cached)) == (0, CACHED)
        assert sum(LENGTH - tokens for tokens in cached) == await computed_by(fleet) - before
