"""The public API over a real gRPC server, with a worker driven by hand behind it."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from headrace.block_hash import HashRoot, block_hashes
from headrace.config import RouterSettings
from headrace.directory.records import Role, WorkerLoad, WorkerRecord
from headrace.directory.view import DirectoryView
from headrace.rpc.channel import open_channel
from headrace.rpc.server import RpcServer
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from headrace.rpc.vllm import vllm_engine_pb2_grpc
from headrace.tier import Tier
from headrace.tokenizer import load_tokenizer
from router.app import SERVICES, add_services
from router.breakers import MAX_FAILURES, Breakers, HealthProbe
from router.dispatch import Dispatcher
from router.front_door import FrontDoor
from router.policy import load_policy
from router.requests import RequestParser, ServedModel
from router.sessions import Sessions
from tests.unit.router.test_sessions import RPC, ManualWorker

END = worker_pb2.SequenceEnd(cached_tokens=1, prefill_worker="p0", blocks_moved=3)

# A client whose receive window stays at 64 KiB: how far gRPC opens it for others depends on the machine's speed.
NARROW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]


def taken_out(view, name):
    known = view.workers[name]
    view.drop(name, known.incarnation)
    return known


class Front:
    def __init__(self, channel, worker, door, dispatcher, view, model, address) -> None:
        self.address = address
        self.door = door
        self.channel = channel
        self.stub = inference_pb2_grpc.InferenceStub(channel)
        self.vllm = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        self.worker = worker
        self.dispatcher = dispatcher
        self.view = view
        self.model = model


@asynccontextmanager
async def front(files, *, with_worker=True, max_prompt_bytes=1000, callers=None, **router):
    model = ServedModel("tiny", files, load_tokenizer(files), files.config.max_model_tokens)
    worker, worker_server = ManualWorker("i1"), RpcServer(RPC, [])
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, worker_server.grpc_server)
    worker_address = await worker_server.start()
    view = DirectoryView()
    if with_worker:
        view.admit(record(files, "d0", Role.DECODE, worker_address))
        view.admit(record(files, "p0", Role.PREFILL, "127.0.0.1:1"))
    settings = RouterSettings.model_validate(
        {"placement_timeout_s": 0.1, "default_timeout_s": 30.0, **router}
    )
    sessions = Sessions(RPC, view.mark_gone, settings.max_unread_tokens)
    breakers = Breakers(HealthProbe(view, RPC))
    dispatcher = Dispatcher(view, sessions, breakers, load_policy("predicted_time"), model, settings)
    server = RpcServer(RPC, SERVICES)
    parser = RequestParser(model, max_prompt_bytes, settings.classes)
    door = FrontDoor(parser, dispatcher, settings.default_timeout_s, callers)
    add_services(server, door, model, view, lambda: bool(view.workers))
    address = await server.start()
    channel = open_channel(address, RPC)
    try:
        yield Front(channel, worker, door, dispatcher, view, model, address)
    finally:
        await channel.close()
        await server.stop(0)
        await sessions.close()
        await breakers.close()
        worker.frames.put_nowait(None)
        await worker_server.stop(0)


def record(files, name, role, address) -> WorkerRecord:
    return WorkerRecord(
        worker_id=name,
        role=role,
        address=address,
        incarnation="i1",
        model_name="tiny",
        model_fingerprint=files.fingerprint,
        tokenizer_fingerprint=files.tokenizer_fingerprint,
        kv_dtype="float32",
        block_size_tokens=4,
        num_blocks=64,
        max_model_tokens=files.config.max_model_tokens,
        vocab_size=files.config.vocab_size,
        transport="local",
        draining=False,
        load=WorkerLoad(running=0, waiting=0, waiting_tokens=0, free_blocks=64, cached_blocks=0),
    )


def ids(*values, **sampling) -> inference_pb2.GenerateRequest:
    message = inference_pb2.GenerateRequest(sampling=inference_pb2.SamplingParams(**sampling))
    message.token_ids.ids.extend(values)
    return message


def chat(**fields) -> inference_pb2.GenerateRequest:
    message = inference_pb2.ChatMessage(role="user", content="x")
    return inference_pb2.GenerateRequest(chat=inference_pb2.Chat(messages=[message], **fields))


async def answered(call, worker, token_ids, end=END):
    """Let the worker send these tokens one by one, then the end; returns what it was asked and all messages."""
    asked = (await worker.received.get()).start
    for token_id in token_ids:
        worker.send(asked.request_id, [token_id])
    worker.send(asked.request_id, end=end, finish_reason="length")
    return asked, [message async for message in call]


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_text_arrives_as_the_tokens_say_with_usage_at_the_end(tiny_model_files):
    async with front(tiny_model_files) as f:
        answer = f.model.tokenizer.encode("naïve 🙂 end", add_special=False)
        call = f.stub.Generate(inference_pb2.GenerateRequest(text="hello", request_id="mine"))
        asked, messages = await answered(call, f.worker, answer)
        assert list(asked.token_ids) == f.model.tokenizer.encode("hello", add_special=True)
        assert asked.prefill_workers[0].worker_id == "p0"
        assert "".join(message.text for message in messages) == "naïve 🙂 end"
        assert [t for message in messages for t in message.token_ids] == answer
        assert {message.request_id for message in messages} == {"mine"}
        last = messages[-1]
        assert last.finish_reason == inference_pb2.FINISH_REASON_LENGTH
        assert last.usage.prompt_tokens == len(asked.token_ids)
        assert last.usage.completion_tokens == len(answer)
        assert last.usage.cached_tokens == 1
        assert last.hand_off.prefill_worker == "p0"
        assert last.timings.total_s >= last.timings.time_to_first_token_s > 0
        assert f.dispatcher.ledger.active_tokens == {}
        assert f.dispatcher.admission.num_running == 0


async def test_absent_sampling_fields_take_their_defaults_and_zero_is_zero(tiny_model_files):
    async with front(tiny_model_files) as f:
        asked, _ = await answered(f.stub.Generate(ids(1, 2, 3)), f.worker, [5])
        assert asked.sampling.temperature == 1.0
        assert asked.sampling.top_p == 1.0
        # 64 blocks of 4 tokens at the worker are met before the model's own limit
        assert asked.sampling.max_tokens == min(f.model.max_model_tokens, 256) - 3
        asked, _ = await answered(f.stub.Generate(ids(1, 2, 3, temperature=0.0, max_tokens=4)), f.worker, [5])
        assert asked.sampling.temperature == 0.0
        assert asked.sampling.max_tokens == 4


async def test_a_stop_string_ends_the_answer_and_the_work(tiny_model_files):
    async with front(tiny_model_files) as f:
        encode = f.model.tokenizer.encode
        call = f.stub.Generate(inference_pb2.GenerateRequest(text="x", sampling={"stop": ["STOP"]}))
        asked = (await f.worker.received.get()).start
        for token_id in encode("one STOP two", add_special=False):
            f.worker.send(asked.request_id, [token_id])
        aborting = asyncio.create_task(f.worker.received.get())
        messages = [message async for message in call if message.text or message.finish_reason]
        abort = await aborting
        assert abort.abort.request_id == asked.request_id
        assert "".join(message.text for message in messages) == "one "
        assert messages[-1].finish_reason == inference_pb2.FINISH_REASON_STOP
        assert messages[-1].usage.completion_tokens <= len(encode("one STOP", add_special=False))


async def test_a_report_that_comes_behind_the_last_token_is_waited_for(tiny_model_files):
    """Nothing is aborted: the worker knows that the answer is whole."""
    async with front(tiny_model_files) as f:
        call = f.stub.Generate(ids(1, 2, 3))
        asked = (await f.worker.received.get()).start
        f.worker.send(asked.request_id, [4], finish_reason="length")
        await until(lambda: f.dispatcher.ledger.accounts["i1"].active_tokens == 4)  # it has arrived
        f.worker.send(asked.request_id, end=END)
        messages = [message async for message in call]
        assert messages[-1].usage.cached_tokens == END.cached_tokens
        assert f.worker.received.empty()


async def test_choices_have_texts_ends_and_logprobs_of_their_own_and_one_usage(tiny_model_files):
    async with front(tiny_model_files) as f:
        encode = f.model.tokenizer.encode
        texts = ["naïve 🙂", "two", "drei"]
        answers = [encode(text, add_special=False) for text in texts]
        call = f.stub.Generate(ids(1, 2, n=3, logprobs=0))
        asked = (await f.worker.received.get()).start
        assert asked.sampling.n == 3
        for position in range(max(map(len, answers))):  # in turn, so that characters are split over messages
            for choice, answer in enumerate(answers):
                if position < len(answer):
                    f.worker.send(
                        asked.request_id,
                        [answer[position]],
                        choice=choice,
                        logprobs=[inference_pb2.TokenLogprobs(logprob=-choice - position / 100)],
                        finish_reason="length" if position == len(answer) - 1 else "",
                    )
        f.worker.send(asked.request_id, end=END)
        messages = [message async for message in call]
        for choice, answer in enumerate(answers):
            own = [message for message in messages if message.choice == choice]
            assert "".join(message.text for message in own) == texts[choice]
            assert [t for message in own for t in message.token_ids] == answer
            found = [entry.logprob for message in own for entry in message.logprobs]
            assert found == pytest.approx([-choice - p / 100 for p in range(len(answer))])
            reasons = [message.finish_reason for message in own]
            assert reasons == [0] * (len(own) - 1) + [inference_pb2.FINISH_REASON_LENGTH]
        assert [message.HasField("usage") for message in messages] == [False] * (len(messages) - 1) + [True]
        assert messages[-1].usage.completion_tokens == sum(map(len, answers))
        assert messages[-1].hand_off.prefill_worker == "p0"


async def test_a_stop_string_ends_one_choice_alone_and_the_last_one_everything(tiny_model_files):
    async with front(tiny_model_files) as f:
        encode = f.model.tokenizer.encode
        request = inference_pb2.GenerateRequest(text="x", sampling={"stop": ["STOP"], "n": 2})
        call = f.stub.Generate(request)
        asked = (await f.worker.received.get()).start
        f.worker.send(asked.request_id, encode("one STOP more", add_special=False), choice=1)
        abort = (await f.worker.received.get()).abort
        assert (abort.request_id, abort.choice) == (asked.request_id, 1)
        f.worker.send(asked.request_id, encode("late", add_special=False), choice=1)  # sent before it knew
        f.worker.send(asked.request_id, encode("two STOP more", add_special=False))
        abort = (await f.worker.received.get()).abort
        assert not abort.HasField("choice")
        f.worker.send(asked.request_id, end=END)
        messages = [message async for message in call]
        texts = ["".join(m.text for m in messages if m.choice == choice) for choice in range(2)]
        assert texts == ["two ", "one "]
        assert [m.finish_reason for m in messages if m.finish_reason] == [
            inference_pb2.FINISH_REASON_STOP
        ] * 2
        assert messages[-1].usage.cached_tokens == END.cached_tokens
        assert messages[-1].usage.completion_tokens == sum(len(m.token_ids) for m in messages)


async def test_a_worker_that_ends_the_request_but_not_its_choices(tiny_model_files):
    async with front(tiny_model_files) as f:
        call = f.stub.Generate(ids(1, 2, n=2))
        asked = (await f.worker.received.get()).start
        f.worker.send(asked.request_id, [5], END, finish_reason="length")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            [_ async for _ in call]
        assert failure.value.code() == grpc.StatusCode.INTERNAL
        assert f.door.tally.output_tokens == {"INTERNAL": 1}


async def test_the_index_of_cached_blocks_decides_where_the_prompt_goes(tiny_model_files):
    async with front(tiny_model_files) as f:
        prompt = list(range(1, 41))
        hashes = block_hashes(
            HashRoot(f.model.files.fingerprint, f.model.files.tokenizer_fingerprint, 4, "float32"), prompt
        )
        f.view.admit(record(f.model.files, "p1", Role.PREFILL, "127.0.0.1:2"))
        f.view.index.store("p1", dict.fromkeys(hashes[:5], Tier.HOST))
        for _ in range(5):
            asked, _ = await answered(f.stub.Generate(ids(*prompt)), f.worker, [5])
            assert asked.prefill_workers[0].worker_id == "p1"


async def test_what_is_to_be_fetched_counts_as_predicted(tiny_model_files):
    """The blocks are at a worker that takes nothing new; the one that prefills finds them once it has read them."""
    async with front(tiny_model_files) as f:
        prompt = list(range(1, 41))
        hashes = block_hashes(
            HashRoot(f.model.files.fingerprint, f.model.files.tokenizer_fingerprint, 4, "float32"), prompt
        )
        leaving = record(f.model.files, "p1", Role.PREFILL, "127.0.0.1:2")
        f.view.admit(replace(leaving, draining=True, block_bytes=1024))
        f.view.index.store("p1", dict.fromkeys(hashes[:5], Tier.DEVICE))
        request = ids(*prompt)
        request.explain = True
        _, messages = await answered(f.stub.Generate(request), f.worker, [5])
        prediction = messages[0].plan.prediction
        assert (prediction.cached_tokens, prediction.fetched_tokens) == (0, 20)
        registry = f.dispatcher._metrics.registry
        assert registry.get_sample_value("headrace_router_predicted_cached_tokens_total") == 20


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        (inference_pb2.GenerateRequest(), "INVALID_ARGUMENT", ["input"]),
        (inference_pb2.GenerateRequest(text="x", model="other"), "NOT_FOUND", ["other", "tiny"]),
        (inference_pb2.GenerateRequest(text="x", model="삼" * 9000), "NOT_FOUND", ["삼삼삼"]),
        (ids(1, temperature=-1), "INVALID_ARGUMENT", ["temperature", "-1", "100"]),
        (ids(1, temperature=float("nan")), "INVALID_ARGUMENT", ["temperature", "nan"]),
        (ids(1, top_p=0), "INVALID_ARGUMENT", ["top_p", "0"]),
        (ids(1, top_k=-2), "INVALID_ARGUMENT", ["top_k", "-2"]),
        (ids(1, min_p=float("nan")), "INVALID_ARGUMENT", ["min_p", "nan"]),
        (ids(1, presence_penalty=1e9), "INVALID_ARGUMENT", ["presence_penalty", "2.0"]),
        (ids(1, repetition_penalty=0), "INVALID_ARGUMENT", ["repetition_penalty", "0.01"]),
        (ids(1, logit_bias={-1: 1.0}), "INVALID_ARGUMENT", ["logit_bias", "-1", "258"]),
        (ids(1, logit_bias={260: 1.0}), "INVALID_ARGUMENT", ["logit_bias", "260", "258"]),
        (ids(1, logit_bias={5: float("inf")}), "INVALID_ARGUMENT", ["logit_bias", "5", "inf"]),
        (ids(1, banned_token_ids=[260]), "INVALID_ARGUMENT", ["banned_token_ids", "260"]),
        (ids(1, n=0), "INVALID_ARGUMENT", ["n: 0", "1..64"]),
        (inference_pb2.GenerateRequest(text="x", priority=5), "INVALID_ARGUMENT", ["priority: 5", "-4..4"]),
        (inference_pb2.GenerateRequest(text="x", priority=-5), "INVALID_ARGUMENT", ["priority: -5", "-4..4"]),
        (inference_pb2.GenerateRequest(text="x", service_class="a"), "INVALID_ARGUMENT", ["'a'", "none"]),
        (ids(1, n=1000), "INVALID_ARGUMENT", ["n: 1000", "1..64"]),
        (ids(1, logprobs=21), "INVALID_ARGUMENT", ["logprobs", "21", "20"]),
        (ids(1, max_tokens=2, min_tokens=3), "INVALID_ARGUMENT", ["min_tokens", "3", "2"]),
        (ids(1, grammar={}), "INVALID_ARGUMENT", ["grammar"]),
        (ids(1, max_tokens=0), "INVALID_ARGUMENT", ["max_tokens", "0", "1"]),
        (ids(1, max_tokens=1 << 40), "INVALID_ARGUMENT", ["max_tokens", str(1 << 40)]),
        (ids(1, stop=[""]), "INVALID_ARGUMENT", ["stop"]),
        (ids(1, stop_token_ids=[1 << 30]), "INVALID_ARGUMENT", ["stop_token_ids", str(1 << 30)]),
        (ids(1 << 31), "INVALID_ARGUMENT", ["token_ids", str(1 << 31)]),
        (ids(*[1] * 5000), "INVALID_ARGUMENT", ["5000"]),
        (inference_pb2.GenerateRequest(text="x" * 2000), "INVALID_ARGUMENT", ["text", "2000", "1000"]),
        (
            inference_pb2.GenerateRequest(chat={"messages": [{"role": "robot", "content": "x"}]}),
            "INVALID_ARGUMENT",
            ["chat.messages[0].role", "robot", "assistant"],
        ),
        (inference_pb2.GenerateRequest(chat={}), "INVALID_ARGUMENT", ["chat.messages"]),
        (chat(tools_json="{"), "INVALID_ARGUMENT", ["chat.tools_json", "JSON"]),
        (chat(tools_json="{}"), "INVALID_ARGUMENT", ["chat.tools_json", "list"]),
        (chat(tools_json='["f"]'), "INVALID_ARGUMENT", ["tools", "takes none"]),
        (chat(template_variables_json="[]"), "INVALID_ARGUMENT", ["chat.template_variables_json", "object"]),
        (chat(tools_json="[" * 100_000), "INVALID_ARGUMENT", ["chat", "100016 bytes", "1000"]),
        (ids(1, shown_token_ids=[260]), "INVALID_ARGUMENT", ["shown_token_ids", "260", "258"]),
        (
            inference_pb2.GenerateRequest(text="x", request_id="r" * 300),
            "INVALID_ARGUMENT",
            ["request_id", "256"],
        ),
    ],
)
async def test_bad_input_names_field_value_and_limit(tiny_model_files, message, code, words):
    async with front(tiny_model_files) as f:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            [_ async for _ in f.stub.Generate(message)]
        assert failure.value.code().name == code
        for word in words:
            assert word in failure.value.details()
        assert f.worker.received.empty()


async def test_too_many_requests_are_refused_at_once_with_a_hint(tiny_model_files):
    async with front(tiny_model_files, max_inflight_requests=1, max_queued_requests=0) as f:
        first = f.stub.Generate(ids(1, 2, 3))
        asked = (await f.worker.received.get()).start
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            [_ async for _ in f.stub.Generate(ids(1, 2, 3))]
        assert failure.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(failure.value.trailing_metadata())["retry-after-ms"] == "1000"
        f.worker.send(asked.request_id, [4], END, finish_reason="length")
        assert [t async for m in first for t in m.token_ids] == [4]


async def test_what_is_above_the_limit_waits_and_is_sent_with_what_is_left_of_its_time(tiny_model_files):
    async with front(tiny_model_files, max_inflight_requests=1) as f:
        first = f.stub.Generate(ids(1, 2, 3))
        asked = (await f.worker.received.get()).start
        second = f.stub.Generate(ids(4, 5, 6))
        await until(lambda: f.dispatcher.admission.num_queued == 1)
        assert f.worker.received.empty()
        f.worker.send(asked.request_id, [4], END, finish_reason="length")
        assert [t async for m in first for t in m.token_ids] == [4]
        asked, messages = await answered(second, f.worker, [7])
        assert list(asked.token_ids) == [4, 5, 6]
        assert 0 < asked.timeout_s < 30  # the default
        assert messages[-1].timings.queue_s > 0


async def test_ab01_requests_that_are_cancelled_in_the_queue_never_reach_a_worker(tiny_model_files):
    async with front(tiny_model_files, max_inflight_requests=2) as f:
        running = [f.stub.Generate(ids(1, 2, 3)) for _ in range(2)]
        asked = [(await f.worker.received.get()).start for _ in running]
        waiting = [f.stub.Generate(ids(4, 5, 6)) for _ in range(10)]
        await until(lambda: f.dispatcher.admission.num_queued == 10)
        for call in waiting:
            call.cancel()
        await until(lambda: f.dispatcher.admission.num_queued == 0)
        assert f.dispatcher.admission.num_left == 10
        for start in asked:
            f.worker.send(start.request_id, [4], END, finish_reason="length")
        for call in running:
            assert [t async for m in call for t in m.token_ids] == [4]
        asked, _ = await answered(f.stub.Generate(ids(7, 8, 9)), f.worker, [5])
        assert list(asked.token_ids) == [7, 8, 9]  # nothing came before it
        assert f.worker.received.empty()


CLASSES = {"fast": {"ttft_target_s": 0.5, "itl_target_s": 0.05, "priority": -2}}


@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({}, 0),
        ({"priority": 4}, 4),
        ({"service_class": "fast"}, -2),
        ({"service_class": "fast", "priority": 0}, 0),
    ],
)
async def test_the_worker_is_told_the_priority_of_the_request_or_else_of_its_class(
    tiny_model_files, fields, priority
):
    async with front(tiny_model_files, classes=CLASSES) as f:
        message = inference_pb2.GenerateRequest(text="x", **fields)
        asked, _ = await answered(f.stub.Generate(message), f.worker, [5])
        assert asked.priority == priority


async def test_a_service_class_brings_its_targets(tiny_model_files):
    model = ServedModel("tiny", tiny_model_files, load_tokenizer(tiny_model_files), 100)
    classes = RouterSettings.model_validate({"classes": CLASSES}).classes
    parser = RequestParser(model, 1000, classes)
    for name, targets in (("fast", (0.5, 0.05)), ("", (None, None))):
        message = inference_pb2.GenerateRequest(text="x", service_class=name)
        parsed = await parser.generation(message, 1.0)
        assert (parsed.ttft_target_s, parsed.itl_target_s) == targets


async def test_an_unknown_service_class_is_refused_with_those_there_are(tiny_model_files):
    async with front(tiny_model_files, classes=CLASSES) as f:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            [_ async for _ in f.stub.Generate(inference_pb2.GenerateRequest(text="x", service_class="slow"))]
        assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "service_class: 'slow'" in failure.value.details()
        assert "fast" in failure.value.details()


async def test_a_prompt_that_fits_no_worker_is_refused_though_all_slots_are_taken(tiny_model_files):
    async with front(tiny_model_files, max_inflight_requests=1) as f:
        first = f.stub.Generate(ids(1, 2, 3))
        asked = (await f.worker.received.get()).start
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            [_ async for _ in f.stub.Generate(ids(*[1] * 256))]
        assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "256" in failure.value.details()
        f.worker.send(asked.request_id, [4], END, finish_reason="length")
        assert [t async for m in first for t in m.token_ids] == [4]


async def test_without_a_decode_worker_the_answer_is_unavailable(tiny_model_files):
    async with front(tiny_model_files, with_worker=False) as f:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            [_ async for _ in f.stub.Generate(ids(1))]
        assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "'tiny'" in failure.value.details()


async def test_without_another_decode_worker_a_lost_one_ends_the_request_with_a_hint(tiny_model_files):
    async with front(tiny_model_files) as f:
        call = f.stub.Generate(ids(1, 2, 3))
        asked = (await f.worker.received.get()).start
        f.worker.send(asked.request_id, [4])
        f.worker.frames.put_nowait(None)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            [_ async for _ in call]
        assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
        assert dict(failure.value.trailing_metadata())["retry-after-ms"] == "1000"
        assert "d0" not in f.view.workers
        assert f.dispatcher.ledger.active_tokens == {}


async def test_a_request_waits_for_a_decode_worker(tiny_model_files):
    async with front(tiny_model_files, placement_timeout_s=20) as f:
        known = taken_out(f.view, "d0")
        call = f.stub.Generate(ids(1, 2, 3))
        await until(lambda: f.dispatcher.admission.num_running)
        f.view.admit(known)
        _, messages = await answered(call, f.worker, [5])
        assert [t for message in messages for t in message.token_ids] == [5]


@pytest.mark.parametrize(
    "how",
    [
        None,  # its session ends
        worker_pb2.SequenceEnd(error_code="UNAVAILABLE", error_message="draining"),
        worker_pb2.SequenceEnd(error_code="CANCELLED"),
    ],
)
async def test_a_request_goes_on_at_another_worker_from_its_tokens_so_far(tiny_model_files, how):
    """One whole character is split over the two workers; one choice was over; every update comes once."""
    async with front(tiny_model_files) as f, manual_worker(f, "d1") as other:
        d1 = taken_out(f.view, "d1")
        encode = f.model.tokenizer.encode
        text = encode("naïve 🙂 end", add_special=False)
        call = f.stub.Generate(ids(*range(1, 30), n=3, logprobs=0, max_tokens=50))
        first = (await f.worker.received.get()).start
        f.view.admit(d1)
        assert not first.delivered
        assert first.prefill_workers
        logprobs = [inference_pb2.TokenLogprobs(logprob=-p) for p in range(len(text))]
        f.worker.send(first.request_id, text[:3], logprobs=logprobs[:3])
        f.worker.send(first.request_id, [7, 8], choice=1, finish_reason="stop")
        lost(f.worker, first.request_id, how)
        second = (await other.received.get()).start
        assert second.request_id != first.request_id
        assert second.sampling == first.sampling
        assert 0 < second.timeout_s <= first.timeout_s
        assert not second.prefill_workers  # the choices have split
        assert [(d.choice, list(d.token_ids), d.finished) for d in second.delivered] == [
            (0, text[:3], False),
            (1, [7, 8], True),
        ]
        other.send(second.request_id, text[3:], logprobs=logprobs[3:], finish_reason="stop")
        other.send(second.request_id, [9], END, choice=2, finish_reason="length")
        messages = [message async for message in call]
        own = [message for message in messages if message.choice == 0]
        assert "".join(message.text for message in own) == "naïve 🙂 end"
        assert [t for message in own for t in message.token_ids] == text
        assert [e.logprob for message in own for e in message.logprobs] == [-p for p in range(len(text))]
        assert [t for m in messages if m.choice == 1 for t in m.token_ids] == [7, 8]
        assert [t for m in messages if m.choice == 2 for t in m.token_ids] == [9]
        assert len([m for m in messages if m.finish_reason]) == 3
        assert messages[-1].usage.completion_tokens == len(text) + 3
        assert messages[-1].hand_off.decode_worker == "d1"
        assert f.dispatcher.ledger.active_tokens == {}
        assert f.dispatcher.ledger.pending_prefill_tokens == {}


async def test_the_prefill_worker_of_the_lost_dispatch_is_asked_again(tiny_model_files):
    """It has the prompt in its cache, whatever the index says."""
    async with front(tiny_model_files) as f, manual_worker(f, "d1") as other:
        d1 = taken_out(f.view, "d1")
        call = f.stub.Generate(ids(*range(1, 30)))
        first = (await f.worker.received.get()).start
        f.view.admit(d1)
        f.view.admit(record(f.model.files, "p1", Role.PREFILL, "127.0.0.1:2"))
        hashes = block_hashes(
            HashRoot(f.model.files.fingerprint, f.model.files.tokenizer_fingerprint, 4, "float32"),
            list(range(1, 30)),
        )
        f.view.index.store("p1", dict.fromkeys(hashes, Tier.HOST))
        f.worker.send(first.request_id, [50])
        f.worker.frames.put_nowait(None)
        second = (await other.received.get()).start
        assert [ref.worker_id for ref in second.prefill_workers] == ["p0", "p1"]
        other.send(second.request_id, [51], END, finish_reason="length")
        assert [t async for m in call for t in m.token_ids] == [50, 51]


async def test_a_stop_string_over_the_loss_of_a_worker(tiny_model_files):
    async with front(tiny_model_files) as f, manual_worker(f, "d1") as other:
        d1 = taken_out(f.view, "d1")
        encode = f.model.tokenizer.encode
        call = f.stub.Generate(inference_pb2.GenerateRequest(text="x", sampling={"stop": ["STOP"]}))
        first = (await f.worker.received.get()).start
        f.view.admit(d1)
        f.worker.send(first.request_id, encode("one ST", add_special=False))
        f.worker.frames.put_nowait(None)
        second = (await other.received.get()).start
        assert list(second.delivered[0].token_ids) == encode("one ST", add_special=False)
        other.send(second.request_id, encode("OP two", add_special=False))
        assert (await other.received.get()).abort.request_id == second.request_id
        other.send(second.request_id, end=END)
        messages = [message async for message in call]
        assert "".join(message.text for message in messages) == "one "
        assert messages[-1].finish_reason == inference_pb2.FINISH_REASON_STOP


async def test_a_request_is_dispatched_three_times_at_most(tiny_model_files):
    async with (
        front(tiny_model_files) as f,
        manual_worker(f, "d1") as d1,
        manual_worker(f, "d2") as d2,
        manual_worker(f, "d3"),
    ):
        others = {name: taken_out(f.view, name) for name in ("d1", "d2", "d3")}
        call = f.stub.Generate(ids(1, 2, 3))
        for worker, following in ((f.worker, "d1"), (d1, "d2"), (d2, "d3")):  # one after the other is alive
            asked = (await worker.received.get()).start
            f.view.admit(others[following])
            worker.send(asked.request_id, [4])
            worker.frames.put_nowait(None)
        received = []
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for message in call:
                received += message.token_ids
        assert received == [4, 4, 4]
        assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "3 decode workers" in failure.value.details()
        assert set(f.view.workers) == {"d3", "p0"}


async def test_a_client_that_cancels_a_request_between_workers_leaves_nothing(tiny_model_files):
    async with front(tiny_model_files, placement_timeout_s=20) as f:
        call = f.stub.Generate(ids(1, 2, 3))
        asked = (await f.worker.received.get()).start
        f.worker.send(asked.request_id, [4])
        await anext(aiter(call))
        f.worker.frames.put_nowait(None)
        await until(lambda: "d0" not in f.view.workers)
        await until(lambda: not f.dispatcher.ledger.active_tokens)
        assert f.dispatcher.admission.num_running == 1
        call.cancel()
        await until(lambda: not f.dispatcher.admission.num_running)
        assert f.door.tally.requests == {"cancelled": 1}


async def test_ro06_a_refused_connection_marks_the_worker_down_and_another_is_tried(tiny_model_files):
    async with front(tiny_model_files, placement_timeout_s=20) as f:
        well = taken_out(f.view, "d0")
        f.view.admit(record(f.model.files, "d9", Role.DECODE, "127.0.0.1:1"))
        call = f.stub.Generate(ids(1, 2, 3))
        await until(lambda: "d9" not in f.view.workers)
        f.view.admit(well)
        _, messages = await answered(call, f.worker, [5])
        assert messages[-1].hand_off.decode_worker == "d0"
        assert "d9" not in f.view.workers


async def test_ro06_a_prefill_worker_that_fails_is_set_aside_until_it_is_well(tiny_model_files):
    """Five hand-offs in a row fail; its health check brings it back, without a restart."""
    async with front(tiny_model_files) as f, manual_worker(f, "p0", Role.PREFILL) as p0:
        failed = worker_pb2.SequenceEnd(failed_attempts=1)
        await p0.server.set_ready(ready=False)
        for _ in range(MAX_FAILURES):
            asked, _ = await answered(f.stub.Generate(ids(1, 2, 3)), f.worker, [5], failed)
            assert asked.prefill_workers
        asked, _ = await answered(f.stub.Generate(ids(1, 2, 3)), f.worker, [5])
        assert not asked.prefill_workers  # the decode worker prefills
        await p0.server.set_ready(ready=True)
        async with asyncio.timeout(20):
            while not asked.prefill_workers:
                asked, _ = await answered(f.stub.Generate(ids(1, 2, 3)), f.worker, [5], failed)
        asked, _ = await answered(f.stub.Generate(ids(1, 2, 3)), f.worker, [5])
        assert not asked.prefill_workers  # half-open: one failure is enough


async def test_gr01_a_slow_reader_is_ended_and_loses_no_token(tiny_model_files):
    """One client does not read: its sequence is aborted and what is kept is bounded; the other one does not notice."""
    async with (
        front(tiny_model_files, max_unread_tokens=1000) as f,
        grpc.aio.insecure_channel(f.address, options=NARROW) as channel,
    ):
        slow = inference_pb2_grpc.InferenceStub(channel).Generate(ids(1, 2))
        asked = (await f.worker.received.get()).start
        fast = f.stub.Generate(ids(1, 3))
        other = (await f.worker.received.get()).start
        sent = 0
        while f.worker.received.empty():  # what gRPC buffers comes on top: some 64 KiB at either end
            assert sent < 1_000_000
            f.worker.send(asked.request_id, range(100))
            sent += 100
            await asyncio.sleep(0.001)  # room for the transport
        assert (await f.worker.received.get()).abort.request_id == asked.request_id
        f.worker.send(other.request_id, [4], END, finish_reason="length")
        assert [t async for m in fast for t in m.token_ids] == [4]
        received = []
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for message in slow:
                received += message.token_ids
        assert failure.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "client reads too slowly" in failure.value.details()
        assert received == [position % 100 for position in range(len(received))]
        assert 1000 < len(received) <= sent


async def test_gr01_twenty_slow_readers_beside_a_fast_one(tiny_model_files):
    """The fast one gets each token before the next step; what is kept for the slow ones is bounded until they end."""
    async with (
        front(tiny_model_files, max_unread_tokens=4096) as f,
        grpc.aio.insecure_channel(f.address, options=NARROW) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        calls = [stub.Generate(ids(1, 2)) for _ in range(20)]
        running = {(await f.worker.received.get()).start.request_id for _ in calls}
        fast = f.stub.Generate(ids(1, 3))
        fast_id = (await f.worker.received.get()).start.request_id
        [session] = [task.result() for task in f.dispatcher._sessions._opening.values()]
        step = 0
        while running:
            assert step < 1000
            f.worker.step({**dict.fromkeys(running, range(500)), fast_id: [step % 100]})
            assert list((await fast.read()).token_ids) == [step % 100]
            step += 1
            assert all(stream._num_unread_tokens <= 4096 + 500 for stream in session._streams.values())
            while not f.worker.received.empty():
                running.remove(f.worker.received.get_nowait().abort.request_id)
        f.worker.send(fast_id, [4], END, finish_reason="length")
        assert await read_to_the_end(fast) == ([4], grpc.StatusCode.OK)
        for received, code in await asyncio.gather(*map(read_to_the_end, calls)):
            assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert received == [position % 500 for position in range(len(received))]


async def test_gr01_a_reader_that_goes_on_within_the_limit_gets_every_token_once(tiny_model_files):
    async with (
        front(tiny_model_files, max_unread_tokens=20_000) as f,
        grpc.aio.insecure_channel(f.address, options=NARROW) as channel,
    ):
        slow = inference_pb2_grpc.InferenceStub(channel).Generate(ids(1, 2))
        asked = (await f.worker.received.get()).start
        f.worker.send(asked.request_id, [7])
        assert list((await slow.read()).token_ids) == [7]
        [session] = [task.result() for task in f.dispatcher._sessions._opening.values()]
        for _ in range(40):
            f.worker.send(asked.request_id, range(500))
        f.worker.send(asked.request_id, end=END, finish_reason="length")
        await until(lambda: session._streams == {} or session._streams[asked.request_id].ended)
        received, code = await read_to_the_end(slow)
        assert code == grpc.StatusCode.OK
        assert received == [*range(500)] * 40


async def read_to_the_end(call):
    """Token ids and status."""
    received = []
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            received += message.token_ids
    except grpc.aio.AioRpcError:
        pass
    return received, await call.code()


def lost(worker, request_id, how):
    if how is None:
        worker.frames.put_nowait(None)
    else:
        worker.send(request_id, end=how)


@asynccontextmanager
async def manual_worker(f, name, role=Role.DECODE):
    """One more worker that is driven by hand, in the view."""
    worker = ManualWorker(f"i1-{name}")
    worker.server = RpcServer(RPC, [])
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, worker.server.grpc_server)
    address = await worker.server.start()
    f.view.admit(replace(record(f.model.files, name, role, address), incarnation=worker.incarnation))
    try:
        yield worker
    finally:
        worker.frames.put_nowait(None)
        await worker.server.stop(0)


async def test_a_client_that_cancels_aborts_at_the_worker(tiny_model_files):
    async with front(tiny_model_files) as f:
        call = f.stub.Generate(ids(1, 2, 3))
        asked = (await f.worker.received.get()).start
        call.cancel()
        assert (await f.worker.received.get()).abort.request_id == asked.request_id
        await until(lambda: not f.dispatcher.admission.num_running)
        assert f.dispatcher.ledger.active_tokens == {}
        assert f.door.tally.requests == {"cancelled": 1}


async def test_a_worker_that_is_silent_past_the_deadline_is_told_to_stop(tiny_model_files, monkeypatch):
    """The client set no deadline of its own, which would end its call first."""
    monkeypatch.setattr("router.request_run._DEADLINE_GRACE_S", 0.1)
    async with front(tiny_model_files) as f:
        f.door._default_timeout_s = 0.1
        call = f.stub.Generate(ids(1, 2, 3))
        asked = (await f.worker.received.get()).start
        f.worker.send(asked.request_id, [4])
        received = []
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for message in call:
                received += message.token_ids
        assert received == [4]
        assert failure.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert "silent" in failure.value.details()
        assert (await f.worker.received.get()).abort.request_id == asked.request_id
        assert f.dispatcher.ledger.accounts == {}


async def test_what_was_answered_is_counted_by_outcome(tiny_model_files):
    async with front(tiny_model_files) as f:
        await answered(f.stub.Generate(ids(1, 2, 3)), f.worker, [5, 6])
        call = f.stub.Generate(ids(1, 2))
        asked = (await f.worker.received.get()).start
        f.worker.send(asked.request_id, [4], worker_pb2.SequenceEnd(error_code="RESOURCE_EXHAUSTED"))
        with pytest.raises(grpc.aio.AioRpcError):
            [_ async for _ in call]
        tally = f.door.tally
        assert tally.requests == {"ok": 1, "RESOURCE_EXHAUSTED": 1}
        assert tally.prompt_tokens == {"ok": 3, "RESOURCE_EXHAUSTED": 2}
        assert tally.output_tokens == {"ok": 2, "RESOURCE_EXHAUSTED": 1}


async def test_list_models_and_tokenize(tiny_model_files):
    async with front(tiny_model_files) as f:
        (model,) = (await f.stub.ListModels(inference_pb2.ListModelsRequest())).models
        assert model.name == "tiny"
        assert model.max_tokens == f.model.max_model_tokens
        ids_of_text = await f.stub.Tokenize(inference_pb2.TokenizeRequest(text="hello"))
        assert list(ids_of_text.token_ids) == f.model.tokenizer.encode("hello", add_special=True)


async def test_a_decision_is_explained_when_asked_for_and_nothing_is_run(tiny_model_files):
    async with front(tiny_model_files) as f:
        f.view.admit(record(f.model.files, "p1", Role.PREFILL, "127.0.0.1:2"))
        request = ids(*range(1, 41))
        plan = (await f.stub.Explain(inference_pb2.ExplainRequest(request=request))).plan
        assert f.worker.received.empty()
        assert f.dispatcher.ledger.accounts == {}
        assert plan.decode_worker == "d0"
        assert {each.worker for each in plan.prefill_candidates} == {"p0", "p1"}
        assert [each.worker for each in plan.decode_candidates] == ["d0"]
        assert plan.prediction.worker == plan.prefill_workers[0]
        assert plan.prediction.time_to_first_token_s > 0
        assert plan.reason
        request.explain = True
        asked, messages = await answered(f.stub.Generate(request), f.worker, [5, 6])
        assert [message.HasField("plan") for message in messages] == [True] + [False] * (len(messages) - 1)
        assert messages[0].plan.prefill_workers == [ref.worker_id for ref in asked.prefill_workers]
        _, messages = await answered(f.stub.Generate(ids(1, 2)), f.worker, [5])
        assert not any(message.HasField("plan") for message in messages)


async def test_reports_of_requests_teach_the_costs(tiny_model_files):
    async with front(tiny_model_files) as f:
        before = f.dispatcher.costs.of(f.view.workers["p0"])
        end = worker_pb2.SequenceEnd(
            prefill_worker="p0", prefill_tokens=3, prefill_s=2.0, bytes_moved=1000, transfer_s=0.5
        )
        await answered(f.stub.Generate(ids(1, 2, 3)), f.worker, [5], end)
        after = f.dispatcher.costs.of(f.view.workers["p0"])
        assert after.prefill.seconds(3, 0) > 10 * before.prefill.seconds(3, 0)
        assert f.dispatcher.costs.transfer("p0", "d0").seconds(1000) > 0.05
