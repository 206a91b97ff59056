"""vLLM's engine API as its gateways use it: a plain client, with a worker driven by hand behind the router."""

import asyncio
from dataclasses import replace

import grpc
import pytest

from headrace.directory.records import Role
from headrace.rpc.v1 import inference_pb2, worker_pb2
from headrace.rpc.vllm import vllm_engine_pb2 as vllm
from router.callers import Caller
from tests.unit.router.test_service import END, front, record, until


def request(*token_ids, stream=True, request_id="r", **sampling) -> vllm.GenerateRequest:
    return vllm.GenerateRequest(
        request_id=request_id,
        tokenized=vllm.TokenizedInput(input_ids=token_ids, original_text="ignored"),
        sampling_params=vllm.SamplingParams(**sampling),
        stream=stream,
    )


def entry(logprob, *top):
    return inference_pb2.TokenLogprobs(
        logprob=logprob, top_ids=[t for t, _ in top], top_logprobs=[p for _, p in top]
    )


async def refused(f, message) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        [_ async for _ in f.vllm.Generate(message)]
    return failure.value


NUMBERS = {
    vllm.GenerateRequest: "request_id 1, tokenized 2, text 3, sampling_params 4, stream 5, kv_transfer_params 6,"
    " mm_inputs 7, kv_transfer_params_json 8, data_parallel_rank 9, media_refs 10, extra_mm_inputs 11",
    vllm.SamplingParams: "temperature 1, top_p 2, top_k 3, min_p 4, frequency_penalty 5, presence_penalty 6,"
    " repetition_penalty 7, max_tokens 8, min_tokens 9, stop 10, stop_token_ids 11, skip_special_tokens 12,"
    " spaces_between_special_tokens 13, ignore_eos 14, n 15, json_schema 16, regex 17, grammar 18,"
    " structural_tag 19, json_object 20, choice 21, logprobs 22, prompt_logprobs 23, seed 24,"
    " include_stop_str_in_output 25, logit_bias 26, truncate_prompt_tokens 27",
    vllm.GenerateStreamChunk: "token_ids 1, prompt_tokens 2, completion_tokens 3, cached_tokens 4,"
    " output_logprobs 5, input_logprobs 6, index 7",
    vllm.GenerateComplete: "output_ids 1, finish_reason 2, prompt_tokens 3, completion_tokens 4, cached_tokens 5,"
    " output_logprobs 6, input_logprobs 7, index 8, kv_transfer_params 9, matched_token_id 10,"
    " matched_stop_str 11, kv_transfer_params_json 12",
    vllm.SchedulerLoad: "dp_rank 1, num_running_reqs 2, num_waiting_reqs 3, num_total_reqs 4, num_used_tokens 5,"
    " max_total_num_tokens 6, token_usage 7, gen_throughput 8, cache_hit_rate 9, utilization 10,"
    " max_running_requests 11",
}


@pytest.mark.parametrize("message", NUMBERS)
def test_names_and_numbers_are_those_of_vllm(message):
    fields = sorted(message.DESCRIPTOR.fields, key=lambda field: field.number)
    assert ", ".join(f"{field.name} {field.number}" for field in fields) == NUMBERS[message]
    assert message.DESCRIPTOR.file.package == "vllm.grpc.engine"


async def test_a_stream_brings_new_tokens_in_chunks_and_all_in_the_complete_message(tiny_model_files):
    async with front(tiny_model_files) as f:
        call = f.vllm.Generate(request(1, 2, 3, max_tokens=9))
        asked = (await f.worker.received.get()).start
        assert list(asked.token_ids) == [1, 2, 3]
        assert asked.sampling.max_tokens == 9
        for token_id in (5, 6):
            f.worker.send(asked.request_id, [token_id])
        f.worker.send(asked.request_id, [7], END, finish_reason="length")
        *chunks, last = [message async for message in call]
        assert [t for message in chunks for t in message.chunk.token_ids] == [5, 6, 7]
        assert [m.chunk.completion_tokens for m in chunks] == [len(m.chunk.token_ids) for m in chunks]
        assert {message.chunk.prompt_tokens for message in chunks} == {3}
        assert last.complete == vllm.GenerateComplete(
            output_ids=[5, 6, 7],
            finish_reason="length",
            prompt_tokens=3,
            completion_tokens=3,
            cached_tokens=1,
        )


async def test_without_streaming_there_is_one_message_for_each_answer(tiny_model_files):
    async with front(tiny_model_files) as f:
        call = f.vllm.Generate(request(1, 2, stream=False, n=2))
        asked = (await f.worker.received.get()).start
        assert asked.sampling.n == 2
        f.worker.send(asked.request_id, [5, 6], choice=1, finish_reason="stop")
        f.worker.send(asked.request_id, [8], END, choice=0, finish_reason="length")
        messages = [message.complete async for message in call]
        assert [(m.index, list(m.output_ids), m.finish_reason) for m in messages] == [
            (0, [8], "length"),
            (1, [5, 6], "stop"),
        ]
        assert [message.cached_tokens for message in messages] == [1, 1]


async def test_zero_and_absent_mean_what_they_mean_to_vllm(tiny_model_files):
    async with front(tiny_model_files) as f:
        call = f.vllm.Generate(vllm.GenerateRequest(text="hello", sampling_params={"seed": -5}))
        asked = (await f.worker.received.get()).start
        assert list(asked.token_ids) == f.model.tokenizer.encode("hello", add_special=True)
        sampling = asked.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.n) == (1.0, 1.0, 0, 1)
        assert (sampling.repetition_penalty, sampling.min_p, sampling.min_tokens) == (1.0, 0.0, 0)
        assert sampling.seed == 2**64 - 5
        assert not sampling.HasField("logprobs") and not sampling.HasField("prompt_logprobs")
        call.cancel()


async def test_all_sampling_params_reach_the_worker(tiny_model_files):
    async with front(tiny_model_files) as f:
        given = {
            **{"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "frequency_penalty": 0.5},
            **{"presence_penalty": -0.5, "repetition_penalty": 1.5, "max_tokens": 20, "min_tokens": 2},
            **{"stop_token_ids": [9, 8], "ignore_eos": True, "seed": 3, "logit_bias": {4: -100.0}},
            **{"logprobs": 0, "prompt_logprobs": 2, "n": 2},
        }
        call = f.vllm.Generate(request(1, 2, **given))
        sampling = (await f.worker.received.get()).start.sampling
        for name, value in given.items():
            found = getattr(sampling, name)
            assert (list(found) if name == "stop_token_ids" else found) == value, name
        call.cancel()


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        ({"json_schema": "{}"}, {"json_schema": "{}"}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"grammar": 'start: "a"'}, {"lark": 'start: "a"'}),
        ({"json_object": True}, {"json_object": True}),
        ({"choice": {"choices": ["a", "b"]}}, {"choice": {"texts": ["a", "b"]}}),
    ],
)
async def test_constraints_are_grammars(tiny_model_files, constraint, expected):
    async with front(tiny_model_files) as f:
        call = f.vllm.Generate(request(1, 2, **constraint))
        asked = (await f.worker.received.get()).start
        assert asked.sampling.grammar == inference_pb2.Grammar(**expected)
        call.cancel()


async def test_the_stop_that_ended_an_answer_is_told(tiny_model_files):
    async with front(tiny_model_files) as f:
        encode = f.model.tokenizer.encode
        call = f.vllm.Generate(request(1, stop=["no", "STOP"]))
        asked = (await f.worker.received.get()).start
        f.worker.send(asked.request_id, encode("one STOP two", add_special=False))
        assert (await f.worker.received.get()).HasField("abort")
        f.worker.send(asked.request_id, end=END)
        last = [message async for message in call][-1].complete
        assert (last.finish_reason, last.matched_stop_str) == ("stop", "STOP")
        for token_id, matched in ((9, "matched_token_id"), (7, None)):  # 7: as an end-of-text token would
            call = f.vllm.Generate(request(1, stop_token_ids=[9]))
            asked = (await f.worker.received.get()).start
            f.worker.send(asked.request_id, [token_id], END, finish_reason="stop")
            last = [message async for message in call][-1].complete
            assert (last.finish_reason, last.WhichOneof("matched_stop")) == ("stop", matched)
        assert last.matched_token_id == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_logprobs_of_prompt_and_answer(tiny_model_files, stream):
    async with front(tiny_model_files) as f:
        call = f.vllm.Generate(request(1, 2, 3, stream=stream, logprobs=1, prompt_logprobs=1))
        asked = (await f.worker.received.get()).start
        of_prompt = [entry(-1.5, (4, -0.5)), entry(-2.5, (5, -0.25))]
        for index, each in enumerate(of_prompt, start=1):
            part = worker_pb2.PromptLogprobs(first_index=index, entries=[each])
            f.worker.send(asked.request_id, prompt_logprobs=part)
        f.worker.send(asked.request_id, [6], logprobs=[entry(-3.5, (7, -0.125))])
        f.worker.send(asked.request_id, [8], END, logprobs=[entry(-4.5, (9, -1.0))], finish_reason="length")
        messages = [message async for message in call]
        if stream:
            first, second = (message.chunk for message in messages[:2])
            given, outputs = first.input_logprobs, [first.output_logprobs, second.output_logprobs]
            assert not second.HasField("input_logprobs")
            assert not messages[-1].complete.HasField("output_logprobs")
        else:
            [message] = messages
            given, outputs = message.complete.input_logprobs, [message.complete.output_logprobs]
        assert list(given.token_ids) == [1, 2, 3]
        assert [each.HasField("value") for each in given.token_logprobs] == [False, True, True]
        assert [each.value for each in given.token_logprobs[1:]] == [-1.5, -2.5]
        assert [list(top.token_ids) for top in given.top_logprobs] == [[], [4], [5]]
        assert [t for part in outputs for t in part.token_ids] == [6, 8]
        assert [p for part in outputs for p in part.token_logprobs] == [-3.5, -4.5]
        tops = [top for part in outputs for top in part.top_logprobs]
        assert [(list(top.token_ids), list(top.values)) for top in tops] == [([7], [-0.125]), ([9], [-1.0])]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (vllm.GenerateRequest(text="x", mm_inputs={}), ["mm_inputs", "multimodal"]),
        (vllm.GenerateRequest(text="x", media_refs={}), ["media_refs"]),
        (vllm.GenerateRequest(text="x", extra_mm_inputs=[{}]), ["extra_mm_inputs"]),
        (vllm.GenerateRequest(text="x", kv_transfer_params={"remote_port": 1}), ["kv_transfer_params"]),
        (vllm.GenerateRequest(text="x", kv_transfer_params_json="{}"), ["kv_transfer_params_json"]),
        (vllm.GenerateRequest(text="x", data_parallel_rank=1), ["data_parallel_rank: 1", "rank 0"]),
        (vllm.GenerateRequest(), ["input", "tokenized"]),
        (request(), ["prompt", "at least 1"]),
        (request(1, structural_tag="{}"), ["structural_tag", "json_schema"]),
        (request(1, truncate_prompt_tokens=4), ["truncate_prompt_tokens"]),
        (request(1, grammar='root ::= "a"'), ["grammar", "Lark"]),
        (request(1, stop=["a<|im_end|>"]), ["stop", "stop_token_ids"]),
        (request(1, logprobs=-1), ["logprobs: -1", "0..20"]),
        (request(1, n=2**32 - 1), ["n: ", "1..64"]),
        (request(1, top_p=float("nan")), ["top_p: nan"]),
        (request(1, temperature=float("inf")), ["temperature: inf"]),
        (request(1, logit_bias={-1: 1.0}), ["logit_bias", "-1"]),
        (request(300), ["token_ids: 300", "258"]),
    ],
)
async def test_what_is_not_done_or_wrong_is_refused_by_name(tiny_model_files, message, words):
    async with front(tiny_model_files) as f:
        failure = await refused(f, message)
        assert failure.code() == grpc.StatusCode.INVALID_ARGUMENT
        for word in words:
            assert word in failure.details()
        assert f.worker.received.empty()


async def test_fields_that_are_not_known_are_refused_by_number(tiny_model_files):
    async with front(tiny_model_files) as f:
        lora = bytes([99 << 3 & 0x7F | 0x80, 99 >> 4]) + bytes([5])  # field 99, a number
        message = vllm.GenerateRequest.FromString(request(1).SerializeToString() + lora)
        failure = await refused(f, message)
        assert failure.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "GenerateRequest field 99" in failure.details()


async def test_an_abort_ends_the_answer_with_what_there_is_and_the_work(tiny_model_files):
    async with front(tiny_model_files) as f:
        call = f.vllm.Generate(request(1, 2))
        asked = (await f.worker.received.get()).start
        f.worker.send(asked.request_id, [5])
        assert list((await call.read()).chunk.token_ids) == [5]
        await f.vllm.Abort(vllm.AbortRequest(request_ids=["unknown", "r"]))
        assert (await f.worker.received.get()).abort.request_id == asked.request_id
        last = (await call.read()).complete
        assert (list(last.output_ids), last.finish_reason) == ([5], "abort")
        assert await call.read() is grpc.aio.EOF
        assert await call.code() == grpc.StatusCode.OK
        await until(lambda: not f.dispatcher.admission.num_running)
        assert f.door.tally.requests == {"cancelled": 1}


async def test_an_abort_reaches_a_request_in_the_queue(tiny_model_files):
    async with front(tiny_model_files, max_inflight_requests=1) as f:
        first = f.vllm.Generate(request(1, request_id="first"))
        await f.worker.received.get()
        second = f.vllm.Generate(request(2, request_id="second", n=2))
        await until(lambda: f.dispatcher.admission.num_queued == 1)
        await f.vllm.Abort(vllm.AbortRequest(request_ids=["second"]))
        assert [m.complete.finish_reason async for m in second] == ["abort", "abort"]
        assert f.dispatcher.admission.num_queued == 0
        assert f.worker.received.empty()
        first.cancel()


class TwoTenants:
    """The credential is the tenant's name."""

    async def caller(self, authorization: str) -> Caller:
        return Caller(tenant=authorization)


async def test_ids_are_those_of_the_caller(tiny_model_files):
    async with front(tiny_model_files, callers=TwoTenants()) as f:
        a, b = ((("authorization", name),) for name in ("a", "b"))
        call = f.vllm.Generate(request(1, 2), metadata=a)
        asked = (await f.worker.received.get()).start
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            [_ async for _ in f.vllm.Generate(request(3), metadata=a)]
        assert failure.value.code() == grpc.StatusCode.ALREADY_EXISTS
        assert "'r'" in failure.value.details()
        other = f.vllm.Generate(request(3), metadata=b)
        others = (await f.worker.received.get()).start
        await f.vllm.Abort(vllm.AbortRequest(request_ids=["r"]), metadata=b)
        assert [message.complete.finish_reason async for message in other] == ["abort"]
        assert (await f.worker.received.get()).abort.request_id == others.request_id
        f.worker.send(asked.request_id, [5], END, finish_reason="length")
        assert [message async for message in call][-1].complete.finish_reason == "length"
        again = f.vllm.Generate(request(1), metadata=a)  # the id is free once more
        asked = (await f.worker.received.get()).start
        f.worker.send(asked.request_id, [5], END, finish_reason="length")
        assert len([message async for message in again]) == 2


async def test_health_model_server_and_loads(tiny_model_files):
    async with front(tiny_model_files) as f:
        assert (await f.vllm.HealthCheck(vllm.HealthCheckRequest())).healthy
        info = await f.vllm.GetModelInfo(vllm.GetModelInfoRequest())
        assert (info.served_model_name, info.is_generation, info.supports_vision) == ("tiny", True, False)
        assert info.max_context_length == f.model.max_model_tokens
        assert info.vocab_size == f.model.tokenizer.vocab_size
        assert set(info.eos_token_ids) == f.model.files.eos_token_ids
        load = replace(f.view.workers["d0"].load, running=3, waiting=2, free_blocks=16, cached_blocks=16)
        f.view.admit(replace(f.view.workers["d0"], load=load))
        stranger = record(f.model.files, "x0", Role.DECODE, "127.0.0.1:3")
        f.view.admit(replace(stranger, model_fingerprint="another", load=load))
        loads = await f.vllm.GetLoads(vllm.GetLoadsRequest())
        assert loads.dp_rank_count == 1
        [load] = loads.loads
        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (3, 2, 5)
        assert (load.num_used_tokens, load.max_total_num_tokens, load.token_usage) == (128, 256, 0.5)
        call = f.vllm.Generate(request(1))
        await f.worker.received.get()
        server = await f.vllm.GetServerInfo(vllm.GetServerInfoRequest())
        assert (server.active_requests, server.is_paused, server.data_parallel_size) == (1, False, 1)
        assert server.last_receive_timestamp > 0
        assert server.uptime_seconds > 0
        call.cancel()


async def test_without_a_decode_worker_it_is_not_healthy(tiny_model_files):
    async with front(tiny_model_files, with_worker=False) as f:
        answer = await f.vllm.HealthCheck(vllm.HealthCheckRequest())
        assert not answer.healthy
        assert "tiny" in answer.message
        [load] = (await f.vllm.GetLoads(vllm.GetLoadsRequest())).loads
        assert load.token_usage == 0.0


async def test_other_calls_of_vllm_are_unimplemented(tiny_model_files):
    async with front(tiny_model_files) as f:
        call = f.channel.unary_unary("/vllm.grpc.engine.VllmEngine/Embed")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call(b"")
        assert failure.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_client_that_leaves_ends_the_work(tiny_model_files):
    async with front(tiny_model_files) as f:
        call = f.vllm.Generate(request(1))
        asked = (await f.worker.received.get()).start
        call.cancel()
        assert (await f.worker.received.get()).abort.request_id == asked.request_id
        async with asyncio.timeout(10):
            while (await f.vllm.GetServerInfo(vllm.GetServerInfoRequest())).active_requests:
                await asyncio.sleep(0.005)
        again = f.vllm.Generate(request(1))
        assert (await f.worker.received.get()).start.token_ids == [1]
        again.cancel()
