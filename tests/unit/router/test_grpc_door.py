"""What the gRPC door has beside the requests themselves: metadata, details of errors, health, reflection, texts."""

import asyncio
from struct import iter_unpack
from urllib.parse import quote

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from structlog.testing import capture_logs

from headrace.block_hash import HashRoot, block_hashes
from headrace.directory.records import Role
from headrace.rpc.channel import open_channel
from headrace.rpc.server import RpcServer
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc, worker_pb2
from headrace.rpc.vllm import vllm_engine_pb2
from headrace.tier import Tier
from router.app import SERVICES
from tests.unit.router.test_service import END, answered, front, ids, manual_worker, record
from tests.unit.router.test_sessions import RPC

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def trailing_of(call) -> dict[str, str | bytes]:
    return dict(await call.trailing_metadata())


async def failure_of(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        [_ async for _ in call]
    return failure.value


def details_of(error) -> dict[str, object]:
    """By the name of their type."""
    found = {}
    for detail in rpc_status.from_call(error).details:
        kind = getattr(error_details_pb2, detail.TypeName().rsplit(".", 1)[1])
        found[kind.__name__] = kind.FromString(detail.value)
    return found


async def test_a_request_id_comes_by_metadata_and_goes_back_and_is_logged(tiny_model_files):
    async with front(tiny_model_files) as f:
        with capture_logs() as logs:
            call = f.stub.Generate(ids(1, 2), metadata=(("x-request-id", "mine"),))
            _, messages = await answered(call, f.worker, [5])
            assert (await trailing_of(call))["x-request-id"] == "mine"
        assert {message.request_id for message in messages} == {"mine"}
        assert [entry["request_id"] for entry in logs if entry["event"] == "request ended"] == ["mine"]


async def test_the_id_in_the_message_goes_before_and_without_any_one_is_made(tiny_model_files):
    async with front(tiny_model_files) as f:
        message = ids(1, 2)
        message.request_id = "own"
        call = f.stub.Generate(message, metadata=(("x-request-id", "mine"),))
        await answered(call, f.worker, [5])
        assert (await trailing_of(call))["x-request-id"] == "own"
        made = set()
        for _ in range(2):
            call = f.stub.Generate(ids(1, 2))
            _, messages = await answered(call, f.worker, [5])
            made |= {(await trailing_of(call))["x-request-id"], messages[0].request_id}
        assert len(made) == 2
        assert all(made)


async def test_an_id_that_metadata_can_not_hold_is_a_label_all_the_same(tiny_model_files):
    async with front(tiny_model_files) as f:
        message = ids(1, 2)
        message.request_id = "삼\n"
        call = f.stub.Generate(message)
        _, messages = await answered(call, f.worker, [5])
        assert messages[0].request_id == "삼\n"
        assert "x-request-id" not in await trailing_of(call)
        too_long = await failure_of(f.stub.Generate(ids(1), metadata=(("x-request-id", "x" * 257),)))
        assert too_long.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "request_id" in too_long.details()


@pytest.mark.parametrize(
    ("traceparent", "is_echoed"),
    [
        (TRACEPARENT, True),
        (TRACEPARENT.replace("00-", "42-", 1) + "-later", True),  # of a version to come
        (TRACEPARENT.upper(), False),
        (TRACEPARENT.replace("00-", "ff-", 1), False),
        ("00-" + "0" * 32 + "-b7ad6b7169203331-01", False),
        ("nonsense", False),
    ],
)
async def test_the_trace_context_goes_back_where_it_is_one(tiny_model_files, traceparent, is_echoed):
    async with front(tiny_model_files) as f:
        metadata = (("traceparent", traceparent), ("tracestate", "vendor=1"))
        call = f.stub.Tokenize(inference_pb2.TokenizeRequest(text="a"), metadata=metadata)
        await call
        found = await trailing_of(call)
        expected = {"traceparent": traceparent, "tracestate": "vendor=1"} if is_echoed else {}
        assert {key: found[key] for key in ("traceparent", "tracestate") if key in found} == expected


async def test_no_metadata_comes_before_the_outcome_so_that_a_retry_policy_holds(tiny_model_files):
    """gRPC retries by itself only as long as nothing has come."""
    policy = (
        '{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 5, "initialBackoff": "0.05s",'
        ' "maxBackoff": "0.1s", "backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}}]}'
    )
    async with front(tiny_model_files) as f:
        worker = f.view.workers["d0"]
        f.view.drop("d0", worker.incarnation)
        options = [("grpc.service_config", policy), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f.address, options=options) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(ids(1, 2))
            reading = asyncio.create_task(call.read())
            async with asyncio.timeout(10):
                while not f.door.tally.requests["UNAVAILABLE"]:
                    await asyncio.sleep(0.005)
            f.view.admit(worker)
            asked = (await f.worker.received.get()).start
            f.worker.send(asked.request_id, [5], END, finish_reason="length")
            assert list((await reading).token_ids) == [5]


async def test_errors_have_googles_details_beside_the_text(tiny_model_files):
    async with front(tiny_model_files, max_inflight_requests=1, max_queued_requests=0) as f:
        metadata = (("x-request-id", "mine"), ("traceparent", TRACEPARENT))
        wrong = await failure_of(f.stub.Generate(ids(1, top_p=1.5), metadata=metadata))
        assert wrong.details() == "top_p: 1.5 is not allowed; must be over 0 and at most 1"
        assert dict(wrong.trailing_metadata())["x-request-id"] == "mine"
        assert dict(wrong.trailing_metadata())["traceparent"] == TRACEPARENT
        status = rpc_status.from_call(wrong)
        assert (status.code, status.message) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], wrong.details())
        details = details_of(wrong)
        info = details["ErrorInfo"]
        assert (info.domain, info.reason) == ("headrace", "INVALID_REQUEST")
        assert info.metadata == {"field": "top_p", "retryable": "false"}
        [violation] = details["BadRequest"].field_violations
        assert violation.field == "top_p"
        assert violation.description == "1.5 is not allowed; must be over 0 and at most 1"
        assert "RetryInfo" not in details

        first = f.stub.Generate(ids(1, 2, 3))
        await f.worker.received.get()
        full = await failure_of(f.stub.Generate(ids(1, 2, 3)))
        details = details_of(full)
        assert details["ErrorInfo"].reason == "OVERLOADED"
        assert details["ErrorInfo"].metadata == {"retryable": "true"}
        assert details["RetryInfo"].retry_delay.ToMilliseconds() == 1000
        assert dict(full.trailing_metadata())["retry-after-ms"] == "1000"
        first.cancel()


@pytest.mark.parametrize("text", ["삼" * 100_000, "%" * 100_000, "x" * 100_000, "\x00" * 100_000])
async def test_details_of_long_texts_fit_into_what_clients_take(tiny_model_files, text):
    """gRPC's clients take 8 KiB of metadata; above that they fail calls at random."""
    async with front(tiny_model_files) as f:
        message = inference_pb2.GenerateRequest(text="x", model=text, request_id="r" * 256)
        missing = await failure_of(f.stub.Generate(message))
        assert missing.code() == grpc.StatusCode.NOT_FOUND
        assert rpc_status.from_call(missing).message == missing.details()
        entries = {"grpc-message": quote(missing.details()), **dict(missing.trailing_metadata())}
        sizes = [
            len(key) + 32 + len(value) * (4 / 3 if key.endswith("-bin") else 1)
            for key, value in entries.items()
        ]
        assert sum(sizes) < 8192 - 1024  # a proxy may add some
        unknown = inference_pb2.GenerateRequest(text="x", service_class=text)
        wrong = await failure_of(f.stub.Generate(unknown))
        assert details_of(wrong)["BadRequest"].field_violations[0].field == "service_class"


async def test_each_public_service_has_a_health_of_its_own():
    server = RpcServer(RPC, SERVICES)
    try:
        async with open_channel(await server.start(), RPC) as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            async def states():
                names = ("", "headrace.v1.Inference", "vllm.grpc.engine.VllmEngine")
                return [(await stub.Check(health_pb2.HealthCheckRequest(service=n))).status for n in names]

            assert await states() == [health_pb2.HealthCheckResponse.NOT_SERVING] * 3
            await server.set_ready(ready=True)
            assert await states() == [health_pb2.HealthCheckResponse.SERVING] * 3
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await stub.Check(health_pb2.HealthCheckRequest(service="another"))
            assert failure.value.code() == grpc.StatusCode.NOT_FOUND
    finally:
        await server.stop(0)


async def test_reflection_shows_both_services(tiny_model_files):
    async with front(tiny_model_files) as f:
        stub = reflection_pb2_grpc.ServerReflectionStub(f.channel)

        async def asked(**request):
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(**request)]))
            return await call.read()

        listed = await asked(list_services="")
        names = {service.name for service in listed.list_services_response.service}
        assert {"headrace.v1.Inference", "vllm.grpc.engine.VllmEngine", "grpc.health.v1.Health"} <= names
        found = await asked(file_containing_symbol="vllm.grpc.engine.VllmEngine")
        assert vllm_engine_pb2.DESCRIPTOR.serialized_pb in (
            found.file_descriptor_response.file_descriptor_proto
        )


async def test_token_ids_become_the_text_that_an_answer_of_them_has(tiny_model_files):
    async with front(tiny_model_files) as f:
        token_ids = f.model.tokenizer.encode("naïve 🙂 end", add_special=False)
        request = inference_pb2.DetokenizeRequest(token_ids=token_ids)
        assert (await f.stub.Detokenize(request)).text == "naïve 🙂 end"
        cut = inference_pb2.DetokenizeRequest(token_ids=token_ids[:-6])
        _, messages = await answered(f.stub.Generate(ids(1)), f.worker, token_ids[:-6])
        assert (await f.stub.Detokenize(cut)).text == "".join(message.text for message in messages)


async def test_the_stop_that_ended_an_answer_is_told(tiny_model_files):
    async with front(tiny_model_files) as f:
        encode = f.model.tokenizer.encode
        call = f.stub.Generate(ids(1, 2, n=3, stop=["two", "STOP"], stop_token_ids=[9]))
        asked = (await f.worker.received.get()).start
        f.worker.send(asked.request_id, encode("one STOP two", add_special=False))
        f.worker.send(asked.request_id, [9], choice=1, finish_reason="stop")
        f.worker.send(asked.request_id, [8], END, choice=2, finish_reason="stop")
        ends = {message.choice: message async for message in call if message.finish_reason}
        assert ends[0].matched_string == "STOP"
        assert ends[1].matched_token_id == 9
        assert ends[2].WhichOneof("matched_stop") is None  # by itself


def of_prompt(first_index, *logprobs, num_top=0):
    entries = [
        inference_pb2.TokenLogprobs(
            logprob=logprob, top_ids=[2**31] * num_top, top_logprobs=[logprob] * num_top
        )
        for logprob in logprobs
    ]
    return worker_pb2.PromptLogprobs(first_index=first_index, entries=entries)


async def test_prompt_logprobs_go_on_with_another_worker_and_none_comes_twice(tiny_model_files):
    async with front(tiny_model_files) as f, manual_worker(f, "d1") as other:
        d1 = f.view.workers["d1"]
        f.view.drop("d1", d1.incarnation)
        call = f.stub.Generate(ids(1, 2, 3, 4, 5, prompt_logprobs=0))
        first = (await f.worker.received.get()).start
        f.view.admit(d1)
        f.worker.send(first.request_id, prompt_logprobs=of_prompt(1, -1, -2))
        message = await call.read()
        assert [entry.logprob for entry in message.prompt_logprobs] == [-1, -2]
        assert list(message.prompt_token_ids) == [2, 3]
        f.worker.frames.put_nowait(None)
        second = (await other.received.get()).start
        assert second.sampling == first.sampling
        other.send(second.request_id, prompt_logprobs=of_prompt(1, -1))
        other.send(second.request_id, prompt_logprobs=of_prompt(2, -2, -3, -4))
        other.send(second.request_id, [7], END, finish_reason="length")
        messages = []
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
        assert [entry.logprob for message in messages for entry in message.prompt_logprobs] == [-3, -4]
        assert [t for message in messages for t in message.prompt_token_ids] == [4, 5]
        assert [t for message in messages for t in message.token_ids] == [7]


async def test_gr02_prompt_logprobs_over_the_limit_of_a_plain_client(tiny_model_files):
    """More than 4 MiB in all, and no message has so much."""
    async with front(tiny_model_files) as f, grpc.aio.insecure_channel(f.address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(ids(1, 2, prompt_logprobs=20))
        asked = (await f.worker.received.get()).start
        num_entries = 18_000
        for start in range(0, num_entries, 6000):
            f.worker.send(asked.request_id, prompt_logprobs=of_prompt(1 + start, *[-1.0] * 6000, num_top=20))
        f.worker.send(asked.request_id, [7], END, finish_reason="length")
        messages = [message async for message in call]
        assert sum(len(message.prompt_logprobs) for message in messages) == num_entries
        assert sum(message.ByteSize() for message in messages) > 4 << 20
        assert max(message.ByteSize() for message in messages) < 1 << 20


async def test_a_session_goes_to_the_same_workers_where_nothing_tells_them_apart(tiny_model_files):
    async with front(tiny_model_files) as f:
        for name in ("p1", "p2", "p3"):
            f.view.admit(record(f.model.files, name, Role.PREFILL, "127.0.0.1:1"))

        async def workers_for(session_id):
            request = inference_pb2.GenerateRequest(text="hello", session_id=session_id)
            plan = (await f.stub.Explain(inference_pb2.ExplainRequest(request=request))).plan
            return plan.prefill_workers[0]

        assert len({await workers_for("one") for _ in range(16)}) == 1
        assert len({await workers_for(f"number {n}") for n in range(16)}) > 1
        assert len({await workers_for("") for _ in range(16)}) > 1


async def test_a_prompt_whose_logprobs_are_asked_for_is_not_sent_after_its_cached_blocks(tiny_model_files):
    """It is computed whole: nothing is fetched, and no hit is predicted."""
    async with front(tiny_model_files) as f:
        f.view.admit(record(f.model.files, "p1", Role.PREFILL, "127.0.0.1:2"))
        prompt = list(range(1, 42))
        root = HashRoot(f.model.files.fingerprint, f.model.files.tokenizer_fingerprint, 4, "float32")
        f.view.index.store("p1", dict.fromkeys(block_hashes(root, prompt), Tier.HOST))
        for prompt_logprobs, num_cached in ((None, 40), (0, 0)):
            request = inference_pb2.ExplainRequest(request=ids(*prompt, prompt_logprobs=prompt_logprobs))
            plan = (await f.stub.Explain(request)).plan
            assert plan.prediction.cached_tokens == num_cached


async def test_the_server_bounds_the_calls_of_one_connection():
    """As its SETTINGS say, HTTP/2's first frame."""
    server = RpcServer(RPC, [])
    try:
        host, port = (await server.start()).rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(10):
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            head = await reader.readexactly(9)
            settings = await reader.readexactly(int.from_bytes(head[:3]))
        writer.close()
        await writer.wait_closed()
        assert head[3] == 4  # SETTINGS
        found = dict(iter_unpack(">HI", settings))
        assert found[3] == 8192  # MAX_CONCURRENT_STREAMS
    finally:
        await server.stop(0)
