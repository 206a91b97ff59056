"""What a client is told when something is wrong: OpenAI's form, the status, the field."""

import asyncio
import json

import openai
import pytest
import structlog

from headrace.errors import Code, PermissionDenied, Unauthenticated
from router.callers import Caller
from tests.support.web import END, web

V = 259  # tokens that the tiny model has a text for
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "x"}]


PA01 = [
    ('{"prompt": "x", "temperature": NaN}', "temperature", "finite"),
    ('{"prompt": "x", "temperature": Infinity}', "temperature", "finite"),
    ('{"prompt": "x", "temperature": 1e999}', "temperature", "finite"),
    ('{"prompt": "x", "temperature": "NaN"}', "temperature", "number"),
    ('{"prompt": "x", "temperature": -1}', "temperature", "0.0..100.0"),
    ('{"prompt": "x", "temperature": 1e-9}', "temperature", "0.0001"),
    ('{"prompt": "x", "temperature": 1e9}', "temperature", "0.0..100.0"),
    ('{"prompt": "x", "temperature": true}', "temperature", "number"),
    ('{"prompt": "x", "top_p": NaN}', "top_p", "finite"),
    ('{"prompt": "x", "top_p": 0}', "top_p", "over 0"),
    ('{"prompt": "x", "top_p": 1.5}', "top_p", "at most 1"),
    ('{"prompt": "x", "min_p": NaN}', "min_p", "finite"),
    ('{"prompt": "x", "presence_penalty": 1e9}', "presence_penalty", "2.0"),
    ('{"prompt": "x", "frequency_penalty": -Infinity}', "frequency_penalty", "finite"),
    ('{"prompt": "x", "repetition_penalty": 0}', "repetition_penalty", "0.01"),
    ('{"prompt": "x", "top_k": -2}', "top_k", "-1"),
    ('{"prompt": "x", "top_k": 1.5}', "top_k", "integer"),
    ('{"prompt": "x", "top_k": 99999999999}', "top_k", "less than"),
    ('{"prompt": "x", "priority": 9}', "priority", "-4..4"),
]


async def test_pa01_not_finite_or_out_of_range(tiny_model_files):
    async with web(tiny_model_files) as w:
        for body, param, words in PA01:
            await refused(w, COMPLETION, body, param, words)


PA02 = [
    (f'{{"prompt": "x", "logit_bias": {{"{V}": 1}}}}', "logit_bias", str(V - 1)),
    ('{"prompt": "x", "logit_bias": {"-1": 1}}', "logit_bias", str(V - 1)),
    ('{"prompt": "x", "logit_bias": {"abc": 1}}', "logit_bias", "token ids"),
    ('{"prompt": "x", "logit_bias": {"99999999999999999999999": 1}}', "logit_bias", "token ids"),
    ('{"prompt": "x", "logit_bias": {"1": NaN}}', "logit_bias.1", "finite"),
    ('{"prompt": "x", "logit_bias": [1]}', "logit_bias", ""),
    ('{"prompt": [-1]}', "prompt", ""),
    (f'{{"prompt": [{V}]}}', "prompt", str(V - 1)),
    ('{"prompt": [9223372036854775808]}', "prompt", ""),
    ('{"prompt": []}', "prompt", "at least 1"),
    ('{"prompt": [[]]}', "prompt", "at least 1"),
    ('{"prompt": ""}', "prompt", "at least 1"),
    ('{"prompt": null}', "prompt", ""),
    ("{}", "prompt", "required"),
    ('{"prompt": "x", "stop_token_ids": [-1]}', "stop_token_ids[0]", ""),
    ('{"prompt": "x", "stop_token_ids": [260]}', "stop_token_ids", str(V - 1)),
    ('{"prompt": "x", "allowed_token_ids": [260]}', "allowed_token_ids", str(V - 1)),
]


async def test_pa02_token_ids_outside_the_vocabulary(tiny_model_files):
    async with web(tiny_model_files) as w:
        for body, param, words in PA02:
            await refused(w, COMPLETION, body, param, words)


PA04 = [
    *(("max_tokens", value) for value in (2**31 - 1, 2**31, 10**18, 10**30, 1e18, -1, 0)),
    *(("seed", value) for value in (2**64, -1, 10**400)),
    *(("logprobs", value) for value in (10**6, 21, -1)),
    *(("n", value) for value in (10**6, 0, 65, 2**40)),
    ("stop", ["x"] * 10**5),
    ("stop", "x" * 2**20),
    ("stop", [1]),
    ("min_tokens", 10**6),
    ("stop_token_ids", [1] * 1000),
]


async def test_pa04_huge_numbers_and_lists(tiny_model_files):
    async with web(tiny_model_files) as w:
        for field, value in PA04:
            body = {"prompt": "x", "max_tokens": 8, field: value}
            await refused(w, COMPLETION, json.dumps(body), field)


BODIES = [
    ("[]", "body"),
    ("", "body"),
    ('{"prompt": ', "body"),
    ('{"prompt": "\\ud800"}', "body"),
    ("[" * 100_000, "body"),
    ('{"prompt": "x", "stream": "yes"}', "stream"),
    ('{"prompt": "x", "stream_options": 1}', "stream_options"),
    ('{"prompt": "x", "response_format": {"type": "yaml"}}', "response_format.type"),
    ('{"prompt": "x", "response_format": {"type": "json_schema"}}', "response_format.json_schema.schema"),
    ('{"prompt": "x", "guided_json": "{"}', "response_format"),
    ('{"prompt": "x", "guided_choice": []}', "response_format"),
    ('{"prompt": "x", "guided_regex": ""}', "response_format"),
    ('{"prompt": "x", "guided_json": false}', "response_format"),
    ('{"prompt": "x", "guided_regex": "a", "guided_choice": ["a"]}', "structured_outputs"),
    ('{"prompt": ["x", 1]}', "prompt"),
    ('{"prompt": {"a": 1}}', "prompt"),
]


async def test_bodies_that_say_nothing(tiny_model_files):
    async with web(tiny_model_files) as w:
        for body, param in BODIES:
            await refused(w, COMPLETION, body, param)


TOOL = {"type": "function", "function": {"name": "f"}}


CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ({"messages": MESSAGES, "logprobs": 5}, "logprobs"),
    ({"messages": MESSAGES, "top_logprobs": 5}, "top_logprobs"),
    ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 50}, "logprobs"),
    ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
    ({"messages": MESSAGES, "tools": [TOOL]}, "tools"),  # the tiny model's template takes none
    ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools[0].function"),
    ({"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
    ({"messages": MESSAGES, "max_completion_tokens": 10**6}, "max_tokens"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]},
        "messages[0].tool_calls",
    ),
]


async def test_chats_that_are_wrong(tiny_model_files):
    async with web(tiny_model_files) as w:
        for body, param in CHATS:
            await refused(w, CHAT, json.dumps(body), param)


async def refused(w, path, body, param, words=""):
    response = await w.http.post(path, content=body)
    assert response.status_code == 400, (body[:100], response.text)
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "INVALID_ARGUMENT"
    assert error["param"] == param
    assert words in error["message"]
    assert len(error["message"]) < 1000
    assert w.worker.received.empty()


async def test_openais_client_sees_the_field(tiny_model_files):
    async with web(tiny_model_files) as w:
        with pytest.raises(openai.BadRequestError) as failure:
            await w.openai.chat.completions.create(model="tiny", messages=MESSAGES, temperature=1000)
        assert failure.value.param == "temperature"
        with pytest.raises(openai.NotFoundError, match="tiny"):
            await w.openai.chat.completions.create(model="other", messages=MESSAGES)


class Strict:
    """Knows "good", and "poor", who may nothing."""

    async def caller(self, authorization: str) -> Caller:
        if authorization == "Bearer poor":
            raise PermissionDenied("nothing is allowed to this key")
        if authorization != "Bearer good":
            raise Unauthenticated("no key that is known")
        return Caller("t")


async def test_strangers_and_those_who_may_not(tiny_model_files):
    async with web(tiny_model_files, callers=Strict()) as w:
        for path in (COMPLETION, CHAT, "/tokenize", "/detokenize"):
            stranger = await w.http.post(path, content=b"not even JSON")
            assert stranger.status_code == 401
            assert stranger.json()["error"]["type"] == "authentication_error"
            assert stranger.headers["www-authenticate"] == "Bearer"
        poor = await w.http.get("/v1/models", headers={"authorization": "Bearer poor"})
        assert poor.status_code == 403
        assert poor.json()["error"]["type"] == "permission_error"
        call = w.http.post(COMPLETION, json={"prompt": "x"}, headers={"authorization": "Bearer good"})
        good, asked = await asyncio.gather(call, w.answer("a"))
        assert good.status_code == 200
        assert asked.cache_salt == "t"
        assert (await w.http.get("/health")).status_code == 200


async def test_no_such_path_or_method(tiny_model_files):
    async with web(tiny_model_files) as w:
        missing = await w.http.get("/v1/nothing")
        assert missing.status_code == 404
        assert missing.json()["error"]["type"] == "not_found_error"
        wrong = await w.http.get(COMPLETION)
        assert wrong.status_code == 405
        assert "error" in wrong.json()
        assert (await w.http.get("/v1/models/other")).status_code == 404


async def test_an_overload_says_when_to_come_back(tiny_model_files):
    async with web(tiny_model_files, max_inflight_requests=1, max_queued_requests=0) as w:
        running = asyncio.create_task(w.post(COMPLETION, prompt="x"))
        await w.asked()
        refused = await w.post(COMPLETION, prompt="x", stream=True)
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        assert float(refused.headers["retry-after-ms"]) > 0
        running.cancel()


async def test_no_worker_is_a_503(tiny_model_files):
    async with web(tiny_model_files, with_worker=False, ready=False) as w:
        for stream in (False, True):
            response = await w.post(COMPLETION, prompt="x", stream=stream)
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"]["type"] == "unavailable_error"
        assert (await w.http.get("/ready")).status_code == 503
        assert (await w.http.get("/health")).status_code == 200


async def test_the_deadline_of_a_header(tiny_model_files):
    async with web(tiny_model_files) as w:
        call = w.http.post(COMPLETION, json={"prompt": "x"}, headers={"x-request-timeout-s": "0.25"})
        response, asked = await asyncio.gather(call, w.asked())
        assert response.status_code == 504
        assert response.json()["error"]["type"] == "timeout_error"
        assert asked.timeout_s <= 0.25
        for text in ("0", "-1", "nan", "soon", "inf"):
            response = await w.http.post(
                COMPLETION, json={"prompt": "x"}, headers={"x-request-timeout-s": text}
            )
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "x-request-timeout-s"


MANY = 1 << 21


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"prompt": [' + "1," * MANY + "1]}", "values"),
        ('{"prompt": [' + "[]," * MANY + "[]]}", "lists and objects"),
        ('{"prompt": "x", "else": [' + '"",' * MANY + '""]}', "strings"),
        ('{"prompt": "x", "else": [' + '"\\\\\\"",' * MANY + '""]}', "strings"),
        ('{"prompt": "x", "else": {' + ",".join(f'"{key}":1' for key in range(MANY)) + "}}", "strings"),
    ],
)
async def test_a_body_of_too_many_parts_is_not_parsed(tiny_model_files, body, words):
    """Parsing would keep everybody else waiting."""
    async with web(tiny_model_files) as w:
        await refused(w, COMPLETION, body, "body", words)


async def test_a_text_is_not_taken_for_parts(tiny_model_files):
    """However it is escaped."""
    async with web(tiny_model_files, max_prompt_bytes=1 << 24) as w:
        text = '{"a": ["b\\\\", 1, 2, {}], "\\"": "\\n"},' * 100_000
        response = await w.post(COMPLETION, prompt=text)
        assert "the model takes 4096 tokens" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("code", "status"),
    [(Code.INTERNAL, 500), (Code.INVALID_ARGUMENT, 400), (Code.RESOURCE_EXHAUSTED, 429)],
)
async def test_what_a_worker_answers_before_the_first_token(tiny_model_files, code, status):
    async with web(tiny_model_files) as w:
        for stream in (False, True):
            call = asyncio.create_task(w.post(COMPLETION, prompt="x", stream=stream))
            asked = await w.asked()
            end = type(END)(error_code=code.value, error_message="as the worker says")
            w.worker.send(asked.request_id, end=end)
            response = await call
            assert response.status_code == status
            assert response.json()["error"]["message"] == "as the worker says"
            assert response.json()["error"]["code"] == code.value


async def test_an_error_within_a_stream_is_its_last_event(tiny_model_files):
    async with web(tiny_model_files) as w:
        end = type(END)(error_code=Code.INTERNAL.value, error_message="it broke")
        call = asyncio.create_task(w.post(COMPLETION, prompt="x", stream=True))
        asked = await w.asked()
        w.worker.send(asked.request_id, w.tokens("ab"))
        w.worker.send(asked.request_id, end=end)
        response = await call
        assert response.status_code == 200
        *chunks, last, rest = response.text.split("\n\n")
        assert chunks
        assert rest == ""
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["message"], error["type"]) == ("it broke", "server_error")
        assert "[DONE]" not in response.text
        call = w.openai.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        creating = asyncio.create_task(call)
        asked = await w.asked()
        w.worker.send(asked.request_id, w.tokens("ab"))
        w.worker.send(asked.request_id, end=end)
        with pytest.raises(openai.APIError, match="it broke"):
            [chunk async for chunk in await creating]


async def test_the_request_id_is_kept(tiny_model_files):
    async with web(tiny_model_files) as w:
        call = w.http.post(COMPLETION, json={"prompt": "x"}, headers={"x-request-id": "mine"})
        response, _ = await asyncio.gather(call, w.answer("a"))
        assert response.headers["x-request-id"] == "mine"
        assert response.json()["id"] == "cmpl-mine"
        made = await w.http.get("/v1/models")
        assert len(made.headers["x-request-id"]) == 32
        call = w.http.post(COMPLETION, json={"prompt": "x"}, headers={"x-request-id": "m" * 300})
        assert (await call).json()["error"]["param"] == "request_id"


async def test_the_trace_of_the_caller_is_in_the_log(tiny_model_files):
    trace = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    for header, found in ((trace, {trace}), ("00-nonsense\\n", {None})):
        async with web(tiny_model_files) as w:
            with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as logs:
                headers = {"traceparent": header}
                call = w.http.post(COMPLETION, json={"prompt": "x"}, headers=headers)
                await asyncio.gather(call, w.answer("a"))
            ends = [entry for entry in logs if entry["event"] == "request ended"]
            assert {entry.get("traceparent") for entry in ends} == found
