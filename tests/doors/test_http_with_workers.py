"""OpenAI's client against a real router with a prefill and a decode worker, beside the gRPC door."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import Annotated, Literal

import grpc
import httpx2
import openai
import pytest
from pydantic import BaseModel, Field

from headrace.directory.records import Role
from headrace.rpc.v1 import inference_pb2, inference_pb2_grpc
from router.app import Router
from tests.fault.test_choices import router_of
from tests.support.fleet import BLOCK_SIZE, workers
from tests.support.web import events, text_of
from tests.unit.router.test_service import until

P, D = Role.PREFILL, Role.DECODE
CHAT = [{"role": "user", "content": "Tell me, in some words, what a headrace is."}]
PROMPT = "A headrace is"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "n": {"enum": [1, 2]}},
    "required": ["city", "n"],
    "additionalProperties": False,
}


@pytest.fixture
async def doors(settings_with):
    """A stub of the gRPC door and a client of each kind for the HTTP door."""
    settings = settings_with(engine={"num_blocks": 256})
    async with (
        workers(settings, P, D),
        router_of(settings, 2) as (stub, router),
        clients(router) as (client, http),
    ):
        await until(lambda: router.ready)
        yield stub, client, http


@asynccontextmanager
async def clients(router):
    url = router.http_address
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=30) as client,
        httpx2.AsyncClient(base_url=url, timeout=30) as http,
    ):
        yield client, http


async def by_grpc(stub, **fields):
    request = inference_pb2.GenerateRequest(**fields)
    messages = [message async for message in stub.Generate(request, timeout=30)]
    n = request.sampling.n or 1
    texts = ["".join(m.text for m in messages if m.choice == choice) for choice in range(n)]
    tokens = [[t for m in messages if m.choice == choice for t in m.token_ids] for choice in range(n)]
    return texts, tokens


SAMPLINGS = [
    {"temperature": 0, "max_tokens": 24},
    {"temperature": 1.5, "seed": 3, "n": 3, "max_tokens": 12},
    {"temperature": 1.0, "seed": 5, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.3, "max_tokens": 16},
    {"temperature": 0, "stop": ["a", "b", "c", "d", "e", "1"], "max_tokens": 64},
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_both_doors_give_the_same_texts_and_tokens(doors, sampling):
    stub, _, http = doors
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(**message) for message in CHAT])
    for path, body, fields in (
        ("/v1/completions", {"prompt": "A headrace is"}, {"text": "A headrace is"}),
        ("/v1/chat/completions", {"messages": CHAT}, {"chat": chat}),
    ):
        texts, tokens = await by_grpc(stub, **fields, sampling=inference_pb2.SamplingParams(**sampling))
        body = {**body, **sampling, "return_token_ids": True}
        whole = (await http.post(path, json=body)).json()
        assert [c["token_ids"] for c in whole["choices"]] == tokens
        assert [c["text"] if "text" in c else c["message"]["content"] for c in whole["choices"]] == texts
        chunks = events((await http.post(path, json={**body, "stream": True})).text)
        assert [text_of(chunks, index) for index in range(len(texts))] == texts
        found = [
            [t for c in chunks for e in c["choices"] if e["index"] == i for t in e.get("token_ids", ())]
            for i in range(len(texts))
        ]
        assert found == tokens


async def test_cached_tokens_of_a_second_turn(doors):
    _, client, _ = doors
    create = client.chat.completions.create
    first = await create(model="", messages=CHAT, temperature=0, max_tokens=20)
    again = await create(model="", messages=CHAT, temperature=0, max_tokens=20)
    assert again.choices[0].message.content == first.choices[0].message.content
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - BLOCK_SIZE


async def test_pa05_logprobs_are_numbers_whatever_is_forbidden(doors):
    """Of tokens that can not be drawn, too."""
    _, _, http = doors
    body = {"prompt": "x", "logprobs": 5, "max_tokens": 4, "temperature": 1, "seed": 1}
    for more in (
        {"top_k": 1},
        {"guided_regex": "[ab]{4}"},
        {"allowed_token_ids": [65, 66]},
        {"logit_bias": {str(token): -100 for token in range(200)}},
    ):
        response = await http.post("/v1/completions", json={**body, **more})
        entries = json.loads(response.text, parse_constant=pytest.fail)["choices"][0]["logprobs"]
        assert len(entries["tokens"]) == len(entries["token_logprobs"]) == len(entries["text_offset"]) == 4
        assert all(value <= 0 for value in entries["token_logprobs"])
        assert all(5 <= len(top) <= 6 for top in entries["top_logprobs"])


async def test_pa05_logprobs_are_those_of_the_grpc_door(doors):
    stub, client, _ = doors
    sampling = inference_pb2.SamplingParams(temperature=0, max_tokens=8, logprobs=3)
    request = inference_pb2.GenerateRequest(text="x", sampling=sampling)
    messages = [m async for m in stub.Generate(request, timeout=30)]
    expected = [entry.logprob for message in messages for entry in message.logprobs]
    found = await client.completions.create(model="", prompt="x", temperature=0, max_tokens=8, logprobs=3)
    assert found.choices[0].logprobs.token_logprobs == pytest.approx(expected)
    chat = await client.chat.completions.create(
        model="", messages=CHAT, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    for entry in chat.choices[0].logprobs.content:
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)  # greedy


@pytest.mark.parametrize("n", [1, 2])
async def test_pa05_logprobs_of_prompts_are_those_of_the_grpc_door(doors, n):
    """By themselves, as vLLM writes them, and in front of an answer's where the prompt is echoed."""
    stub, _, http = doors
    sampling = {"temperature": 0, "max_tokens": 3, "n": n}
    request = inference_pb2.GenerateRequest(text=PROMPT, sampling={**sampling, "prompt_logprobs": 2})
    messages = [message async for message in stub.Generate(request, timeout=30)]
    entries = [entry for message in messages for entry in message.prompt_logprobs]
    ids = [token_id for message in messages for token_id in message.prompt_token_ids]
    body = {"prompt": PROMPT, "prompt_logprobs": 2, "return_token_ids": True, **sampling}
    choices = (await http.post("/v1/completions", json=body)).json()["choices"]
    assert len(choices) == n
    for choice in choices:
        first, *others = choice["prompt_logprobs"]
        assert first is None
        assert choice["prompt_token_ids"][1:] == ids
        assert [found[str(i)]["logprob"] for i, found in zip(ids, others, strict=True)] == [
            pytest.approx(entry.logprob, abs=1e-4) for entry in entries
        ]
        assert [min(found, key=lambda i: found[i]["rank"] or 9) for found in others] == [
            str(entry.top_ids[0]) for entry in entries
        ]
    chat = {"messages": CHAT, "prompt_logprobs": 0, **sampling}
    answer = (await http.post("/v1/chat/completions", json=chat)).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    echo = {"prompt": PROMPT, "echo": True, "logprobs": 2, **sampling}
    whole = (await http.post("/v1/completions", json=echo)).json()["choices"]
    for choice in whole:
        found = choice["logprobs"]
        assert choice["text"].startswith(PROMPT)
        assert found["token_logprobs"][0] is None
        assert found["token_logprobs"][1 : 1 + len(ids)] == [
            pytest.approx(entry.logprob, abs=1e-4) for entry in entries
        ]
        assert len(found["tokens"]) == 1 + len(ids) + 3
        assert found["text_offset"][0] == 0
        assert found["text_offset"][1 + len(ids)] == len(PROMPT)
        assert "".join(found["tokens"][: 1 + len(ids)]).endswith(PROMPT)
    for field, more in (
        ("echo", {"stream": True}),
        ("echo", {"n": 64, "prompt": PROMPT * 20, "logprobs": 20}),
    ):
        refused = await http.post("/v1/completions", json={**echo, **more})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == field


async def test_where_the_time_went_on_request(doors):
    _, _, http = doors
    body = {"messages": CHAT, "max_tokens": 4, "temperature": 0, "return_timings": True}
    whole = (await http.post("/v1/chat/completions", json=body)).json()
    last = events((await http.post("/v1/chat/completions", json={**body, "stream": True})).text)[-1]
    for answer in (whole, last):
        timings, hand_off = answer["timings"], answer["hand_off"]
        assert 0 < timings["time_to_first_token_s"] <= timings["total_s"]
        parts = timings["queue_s"] + timings["prefill_s"]
        assert parts == pytest.approx(timings["time_to_first_token_s"])
        assert hand_off["decode_worker"]
    assert whole["hand_off"]["prefill_worker"]
    plain = (await http.post("/v1/chat/completions", json={**body, "return_timings": False})).json()
    assert "timings" not in plain


async def test_structured_answers_and_their_refusal(doors):
    _, client, http = doors
    answer_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    found = await client.chat.completions.create(
        model="", messages=CHAT, response_format=answer_format, seed=1, max_tokens=200
    )
    value = json.loads(found.choices[0].message.content)
    assert value["n"] in (1, 2)
    assert len(value["city"]) <= 8
    for body, words in (
        ({"response_format": {"type": "json_object"}}, "{"),
        ({"guided_choice": ["yes", "no"]}, "yes no"),
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "ab"),
        ({"guided_grammar": 'start: "x" "y"'}, "xy"),
    ):
        response = await http.post(
            "/v1/completions", json={"prompt": "x", "max_tokens": 60, "seed": 1, **body}
        )
        assert response.json()["choices"][0]["text"][0] in words, response.text
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"foo": "bar"}}}}
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model="", messages=CHAT, response_format=bad)


class City(BaseModel):
    city: Annotated[str, Field(max_length=8)]
    n: Literal[1, 2]


async def test_the_helpers_of_openais_client(doors):
    """`parse` and `stream` look closely at what they get."""
    _, client, _ = doors
    fields = {"model": "", "messages": CHAT, "response_format": City, "seed": 1, "max_tokens": 200}
    parsed = (await client.chat.completions.parse(**fields)).choices[0].message.parsed
    assert isinstance(parsed, City)
    async with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)
    assert final.choices[0].message.parsed == parsed
    assert final.usage.completion_tokens > 0


async def test_what_generates_nothing(doors):
    stub, client, http = doors
    (model,) = [model async for model in client.models.list()]
    assert (await client.models.retrieve(model.id)).id == model.id
    assert model.to_dict()["max_model_len"] == 4096
    listed = await stub.ListModels(inference_pb2.ListModelsRequest())
    assert model.id == listed.models[0].name
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/ready")).status_code == 200
    assert (await http.get("/version")).json()["version"]
    await client.completions.create(model=model.id, prompt="x", max_tokens=1)
    metrics = (await http.get("/metrics")).text
    assert 'headrace_router_requests_total{outcome="ok"}' in metrics


async def test_tokens_of_texts_and_chats_and_back(doors):
    stub, _, http = doors
    text = "naïve 🙂<|im_end|>"
    found = (await http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    expected = await stub.Tokenize(inference_pb2.TokenizeRequest(text=text))
    assert found["tokens"] == list(expected.token_ids)
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == 4096
    assert found["token_strs"][-1] == "<|im_end|>"
    assert (await http.post("/detokenize", json={"tokens": found["tokens"]})).json() == {"prompt": text}
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(**message) for message in CHAT])
    expected = await stub.Tokenize(inference_pb2.TokenizeRequest(chat=chat))
    assert (await http.post("/tokenize", json={"messages": CHAT})).json()["tokens"] == list(
        expected.token_ids
    )
    for tokens in ([259], [-1], ["a"], 5):
        assert (await http.post("/detokenize", json={"tokens": tokens})).status_code == 400


async def test_ready_follows_the_decode_workers(settings):
    router = Router(settings)
    await router.start()
    try:
        async with clients(router) as (_, http):
            assert (await http.get("/ready")).status_code == 503
            assert (await http.get("/health")).status_code == 200
            async with workers(settings, D):
                async with asyncio.timeout(20):
                    while (await http.get("/ready")).status_code != 200:
                        await asyncio.sleep(0.02)
            async with asyncio.timeout(20):
                while (await http.get("/ready")).status_code != 503:
                    await asyncio.sleep(0.02)
    finally:
        await router.stop()


async def test_a_router_without_http(settings_with):
    router = Router(settings_with(http={"enabled": False}))
    await router.start()
    assert router.http_address == ""
    await router.stop()


async def test_stopping_the_router_drains_both_doors(settings):
    async with workers(settings, D):
        router = Router(settings)
        address = await router.start()
        async with clients(router) as (_, http), grpc.aio.insecure_channel(address) as channel:
            await until(lambda: router.ready)
            sampling = {"max_tokens": 100, "temperature": 0}
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = inference_pb2.GenerateRequest(
                text="x", sampling=inference_pb2.SamplingParams(**sampling)
            )
            call = stub.Generate(request, timeout=30)
            messages = aiter(call)
            await anext(messages)
            body = {"prompt": "x", "stream": True, **sampling}
            async with http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.aiter_lines()
                await anext(lines)
                stopping = asyncio.create_task(router.stop())
                rest = [line async for line in lines]
                assert rest[-2] == "data: [DONE]"
            *_, last = [message async for message in messages]
            assert last.usage.completion_tokens == 100
            await stopping
            with pytest.raises(httpx2.ConnectError):
                await http.get("/health")
