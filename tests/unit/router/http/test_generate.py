"""Completions and chats by OpenAI's own client, against a worker that is driven by hand."""

import asyncio
import json
from unittest.mock import patch

import pytest

from headrace.config import DEFAULT_CACHE_DIR
from headrace.model_store import resolve
from headrace.rpc.v1 import inference_pb2
from tests.support.tiny_llama import SPECIAL, write_tiny_llama
from tests.support.web import END, events, text_of, web

CHAT = [{"role": "user", "content": "hi"}]
TEXT = "naïve 🙂 삼겹살 end"


async def test_a_completion_by_openais_client(tiny_model_files):
    async with web(tiny_model_files) as w:
        call = w.openai.completions.create(model="tiny", prompt="hello", max_tokens=50)
        found, asked = await asyncio.gather(call, w.answer(TEXT, reason="length"))
        assert list(asked.token_ids) == w.tokens("hello")
        assert asked.sampling.max_tokens == 50
        (choice,) = found.choices
        assert (choice.text, choice.finish_reason, choice.index) == (TEXT, "length", 0)
        assert found.object == "text_completion"
        assert found.model == "tiny"
        assert found.usage.prompt_tokens == 5
        assert found.usage.completion_tokens == len(w.tokens(TEXT))
        assert found.usage.total_tokens == 5 + len(w.tokens(TEXT))
        assert found.usage.prompt_tokens_details.cached_tokens == 1
        assert w.front.dispatcher.admission.num_running == 0


async def test_a_streamed_completion_is_the_same(tiny_model_files):
    async with web(tiny_model_files) as w:
        call = w.openai.completions.create(
            model="tiny", prompt="hello", stream=True, stream_options={"include_usage": True}
        )
        stream, asked = await asyncio.gather(call, w.answer(TEXT))
        chunks = [chunk async for chunk in stream]
        assert asked.sampling.max_tokens == 16  # OpenAI's default
        assert "".join(c.choices[0].text for c in chunks[:-1]) == TEXT
        assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
        assert {c.id for c in chunks} == {chunks[0].id}
        assert [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == len(w.tokens(TEXT))
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 1


async def test_a_chat_by_openais_client_streamed_and_not(tiny_model_files):
    async with web(tiny_model_files) as w:
        create = w.openai.chat.completions.create
        call = create(model="tiny", messages=CHAT, max_completion_tokens=9)
        found, asked = await asyncio.gather(call, w.answer(TEXT))
        message = found.choices[0].message
        assert (message.role, message.content, message.tool_calls) == ("assistant", TEXT, None)
        assert found.object == "chat.completion"
        assert found.choices[0].finish_reason == "stop"
        assert asked.sampling.max_tokens == 9
        prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert list(asked.token_ids) == w.tokens(prompt)
        stream, _ = await asyncio.gather(create(model="tiny", messages=CHAT, stream=True), w.answer(TEXT))
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == TEXT
        assert {c.object for c in chunks} == {"chat.completion.chunk"}
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert chunks[-1].usage is None


async def test_usage_in_every_chunk_where_asked_for(tiny_model_files):
    async with web(tiny_model_files) as w:
        options = {"include_usage": True, "continuous_usage_stats": True}
        call = w.post("/v1/completions", prompt="x", stream=True, stream_options=options)
        response, _ = await asyncio.gather(call, w.answer("abcd"))
        counts = [chunk["usage"]["completion_tokens"] for chunk in events(response.text)]
        assert counts == sorted(counts)
        assert counts[-1] == 4


async def test_choices_have_an_index_each(tiny_model_files):
    async with web(tiny_model_files) as w:
        create = w.openai.chat.completions.create
        found, asked = await asyncio.gather(create(model="tiny", messages=CHAT, n=3), w.answer("abc"))
        assert asked.sampling.n == 3
        assert [(c.index, c.message.content) for c in found.choices] == [(i, "abc") for i in range(3)]
        assert found.usage.completion_tokens == 9
        call = w.post("/v1/chat/completions", messages=CHAT, n=2, stream=True)
        response, _ = await asyncio.gather(call, w.answer("abc"))
        chunks = events(response.text)
        assert [text_of(chunks, index) for index in range(2)] == ["abc", "abc"]
        roles = [c["choices"][0]["delta"].get("role") for c in chunks]
        assert roles.count("assistant") == 2


async def test_a_list_of_prompts_and_token_ids(tiny_model_files):
    async with web(tiny_model_files) as w:

        async def work():
            asked = [await w.asked() for _ in range(2)]
            for request in reversed(asked):
                for choice in range(2):
                    text = bytes(request.token_ids).decode().upper() + str(choice)
                    w.worker.send(request.request_id, w.tokens(text), choice=choice, finish_reason="stop")
                w.worker.send(request.request_id, end=END)
            return asked

        for prompt in (["ab", "cd"], [[97, 98], [99, 100]]):
            call = w.openai.completions.create(model="tiny", prompt=prompt, n=2)
            found, _ = await asyncio.gather(call, work())
            assert [c.text for c in found.choices] == ["AB0", "AB1", "CD0", "CD1"]
            assert [c.index for c in found.choices] == [0, 1, 2, 3]
            assert found.usage.prompt_tokens == 4
            call = w.post("/v1/completions", prompt=prompt, n=2, stream=True)
            response, _ = await asyncio.gather(call, work())
            texts = [text_of(events(response.text), index) for index in range(4)]
            assert texts == ["AB0", "AB1", "CD0", "CD1"]
        one, asked = await asyncio.gather(w.post("/v1/completions", prompt=[104, 105]), w.answer("ok"))
        assert list(asked.token_ids) == [104, 105]
        assert one.json()["choices"][0]["text"] == "ok"


async def test_one_refused_prompt_of_a_list_refuses_all(tiny_model_files):
    async with web(tiny_model_files, http={"max_prompts": 3}) as w:
        response = await w.post("/v1/completions", prompt=["ok", ""])
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"
        response = await w.post("/v1/completions", prompt=["ok"] * 4)
        assert response.status_code == 400
        assert "1 to 3" in response.json()["error"]["message"]
        assert w.worker.received.empty()


async def test_logprobs_of_a_completion_by_number(tiny_model_files):
    async with web(tiny_model_files) as w:
        call = w.openai.completions.create(model="tiny", prompt="x", logprobs=2)
        found, asked = await asyncio.gather(call, w.answer("aé!", logprobs=True))
        assert asked.sampling.logprobs == 2
        logprobs = found.choices[0].logprobs
        assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "!"]
        assert logprobs.text_offset == [0, 1, 1, 2]
        assert logprobs.token_logprobs == pytest.approx([-0.5, -1.5, -2.5, -3.5])
        assert logprobs.top_logprobs[3] == pytest.approx({"!": -3.5, "A": -9.0})
        call = w.post("/v1/completions", prompt="x", logprobs=2, stream=True)
        response, _ = await asyncio.gather(call, w.answer("aé!", logprobs=True))
        entries = [chunk["choices"][0]["logprobs"] for chunk in events(response.text)]
        joined = {key: [value for entry in entries for value in entry[key]] for key in entries[0]}
        assert joined == logprobs.model_dump()


async def test_logprobs_of_a_chat_by_truth_value(tiny_model_files):
    async with web(tiny_model_files) as w:
        create = w.openai.chat.completions.create
        call = create(model="tiny", messages=CHAT, logprobs=True, top_logprobs=2)
        found, asked = await asyncio.gather(call, w.answer("aé", logprobs=True))
        assert asked.sampling.logprobs == 2
        entries = found.choices[0].logprobs.content
        assert [entry.token for entry in entries] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
        assert bytes(b for entry in entries for b in entry.bytes).decode() == "aé"
        assert [entry.logprob for entry in entries] == pytest.approx([-0.5, -1.5, -2.5])
        assert entries[0].top_logprobs[1].token == "A"
        call = create(model="tiny", messages=CHAT, logprobs=True, stream=True)
        stream, asked = await asyncio.gather(call, w.answer("aé", logprobs=True))
        assert asked.sampling.logprobs == 0
        chunks = [c.choices[0].logprobs async for c in stream]
        assert [e.token for chunk in chunks if chunk for e in chunk.content] == [e.token for e in entries]


async def test_token_ids_where_asked_for(tiny_model_files):
    async with web(tiny_model_files) as w:
        for path, body in (
            ("/v1/completions", {"prompt": "xy"}),
            ("/v1/chat/completions", {"messages": CHAT}),
        ):
            whole, chunks = await w.both(path, TEXT, **body, return_token_ids=True)
            choices = [chunk["choices"][0] for chunk in chunks]
            assert whole["choices"][0]["token_ids"] == w.tokens(TEXT)
            assert [t for choice in choices for t in choice.get("token_ids", ())] == w.tokens(TEXT)
            wholes, firsts = (whole["choices"][0], choices[0]) if "prompt" in body else (whole, chunks[0])
            assert wholes["prompt_token_ids"] == firsts["prompt_token_ids"]
            assert len(wholes["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]


async def test_an_echo_of_the_prompt(tiny_model_files):
    async with web(tiny_model_files) as w:
        for prompt in ("héllo ", w.tokens("héllo ")):
            whole, chunks = await w.both("/v1/completions", "world", prompt=prompt, echo=True)
            assert whole["choices"][0]["text"] == text_of(chunks) == "héllo world"


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": CHAT})]
)
async def test_what_ended_an_answer(tiny_model_files, path, body):
    async with web(tiny_model_files) as w:
        for stop, expected in (({"stop": ["GH"]}, "GH"), ({"stop": ["Z"]}, None)):
            whole, chunks = await w.both(path, "ABCDEFGHIJKL", **body, **stop)
            assert whole["choices"][0]["stop_reason"] == expected
            assert chunks[-1]["choices"][0]["stop_reason"] == expected


async def test_hints_and_what_does_not_go_together(tiny_model_files):
    async with web(tiny_model_files) as w:
        sessions = []
        for hint in ({"session_id": "one"}, {"prompt_cache_key": "one"}, {}):
            with patch.object(
                w.front.dispatcher, "_request_view", wraps=w.front.dispatcher._request_view
            ) as view:
                response, _ = await asyncio.gather(
                    w.post("/v1/completions", prompt="x", **hint), w.answer("a")
                )
            assert response.status_code == 200
            sessions.append(view.call_args.args[0].session_id)
        assert sessions == ["one", "one", ""]
        for field, body in (
            ("prompt_logprobs", {"prompt": "x", "prompt_logprobs": 1, "stream": True}),
            ("prompt_logprobs", {"prompt": "x", "prompt_logprobs": -1}),
            ("return_timings", {"prompt": ["x", "y"], "return_timings": True}),
        ):
            response = await w.post("/v1/completions", **body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == field


async def test_sampling_fields_reach_the_worker(tiny_model_files):
    fields = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 7,
        "min_p": 0.125,
        "seed": 2**64 - 1,
        "min_tokens": 2,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 0.25,
        "n": 2,
    }
    async with web(tiny_model_files) as w:
        call = w.openai.completions.create(
            model="tiny",
            prompt="x",
            logit_bias={"65": 3, "258": -100},
            extra_body={**fields, "stop_token_ids": [66], "allowed_token_ids": [65, 66, 67], "priority": -2},
        )
        _, asked = await asyncio.gather(call, w.answer("A"))
        for name, value in fields.items():
            assert getattr(asked.sampling, name) == value, name
        assert dict(asked.sampling.logit_bias) == {65: 3.0, 258: -100.0}
        assert list(asked.sampling.stop_token_ids) == [66]
        assert list(asked.sampling.allowed_token_ids) == [65, 66, 67]
        assert asked.priority == -2
        call = w.post(
            "/v1/completions", prompt="x", ignore_eos=True, temperature=0, top_k=-1, seed=None, stop=None
        )
        _, asked = await asyncio.gather(call, w.answer("A"))
        assert asked.sampling.ignore_eos
        assert asked.sampling.temperature == 0
        assert asked.sampling.top_k == 0
        assert asked.sampling.top_p == 1.0


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            {"json_schema": json.dumps(SCHEMA)},
        ),
        ({"guided_json": SCHEMA}, {"json_schema": json.dumps(SCHEMA)}),
        ({"guided_json": json.dumps(SCHEMA)}, {"json_schema": json.dumps(SCHEMA)}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": {"texts": ["a", "b"]}}),
        ({"guided_grammar": 'start: "a"'}, {"lark": 'start: "a"'}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": json.dumps(SCHEMA)}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a"]}}, {"choice": {"texts": ["a"]}}),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, {"lark": 'start: "a"'}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
    ],
)
async def test_what_an_answer_has_to_look_like(tiny_model_files, body, grammar):
    async with web(tiny_model_files) as w:
        _, asked = await asyncio.gather(w.post("/v1/chat/completions", messages=CHAT, **body), w.answer("a"))
        assert asked.sampling.HasField("grammar") == (grammar is not None)
        if grammar is not None:
            assert asked.sampling.grammar == inference_pb2.Grammar(**grammar)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("stop", "expected", "reason"),
    [
        (["DEFGHIJ"], "ABC", "stop"),
        (["FGX", "GH"], "ABCDEF", "stop"),
        ("GH", "ABCDEF", "stop"),
        ("ABCDEFGHIJKL", "", "stop"),
        (["ABCDEFGHIJKLMNO"], "ABCDEFGHIJKL", "length"),
    ],
)
async def test_st01_stop_strings_over_tokens(tiny_model_files, path, stop, expected, reason):
    body = {"prompt": "x"} if path == "/v1/completions" else {"messages": CHAT}
    async with web(tiny_model_files) as w:
        found = []
        for stream in (False, True):
            call = w.post(path, **body, stop=stop, stream=stream)
            response, _ = await asyncio.gather(call, w.answer("ABCDEFGHIJKL", reason="length"))
            found.append(response)
        whole, chunks = found[0].json()["choices"][0], events(found[1].text)
        assert (whole["text"] if "text" in whole else whole["message"]["content"]) == expected
        assert whole["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == reason
        assert text_of(chunks) == expected


async def test_st01_an_empty_stop_string_is_refused(tiny_model_files):
    async with web(tiny_model_files) as w:
        response = await w.post("/v1/completions", prompt="x", stop=[""])
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "stop"


@pytest.mark.parametrize(
    ("data", "stop", "expected"),
    [
        ("é 삼겹살 🙂 👩‍👩‍👧".encode(), None, "é 삼겹살 🙂 👩‍👩‍👧"),
        ("ok 🙂".encode()[:-2], None, "ok \ufffd"),
        (b"a\xffb", None, "a\ufffdb"),
        ("one 🙂 two".encode(), "🙂", "one "),
    ],
)
async def test_st03_characters_over_several_tokens(tiny_model_files, data, stop, expected):
    async with web(tiny_model_files) as w:

        async def work():
            asked = await w.asked()
            for position, byte in enumerate(data):
                last = position == len(data) - 1
                w.worker.send(asked.request_id, [byte], finish_reason="length" if last else "")
            w.worker.send(asked.request_id, end=END)

        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": CHAT}),
        ):
            whole, _ = await asyncio.gather(w.post(path, **body, stop=stop), work())
            streamed, _ = await asyncio.gather(w.post(path, **body, stop=stop, stream=True), work())
            choice = whole.json()["choices"][0]
            assert (choice["text"] if "text" in choice else choice["message"]["content"]) == expected
            assert text_of(events(streamed.text)) == expected


async def test_unknown_fields_are_ignored_and_unsupported_ones_are_not(tiny_model_files):
    async with web(tiny_model_files) as w:
        body = {"prompt": "x", "user": "u", "store": True, "metadata": {"a": 1}, "best_of": 1, "suffix": None}
        response, _ = await asyncio.gather(w.post("/v1/completions", **body), w.answer("a"))
        assert response.status_code == 200
        for name, value in (
            ("suffix", "x"),
            ("best_of", 2),
            ("bad_words", ["x"]),
            ("skip_special_tokens", False),
            ("include_stop_str_in_output", True),
        ):
            response = await w.post("/v1/completions", prompt="x", **{name: value})
            assert response.status_code == 400, name
            assert response.json()["error"]["param"] == name


async def test_md03_bos_exactly_once(tmp_path):
    """Of a template that writes BOS and a tokenizer that adds it; of a text with it, without it, and without asking."""
    folder = write_tiny_llama(tmp_path / "m")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"add_bos_token": True, "chat_template": "{{ bos_token }}" + config["chat_template"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    bos = SPECIAL["<|endoftext|>"]
    async with web(resolve(str(folder), cache_dir=DEFAULT_CACHE_DIR)) as w:
        for path, body, count in (
            ("/v1/chat/completions", {"messages": CHAT}, 1),
            ("/v1/completions", {"prompt": "hi"}, 1),
            ("/v1/completions", {"prompt": "<|endoftext|>hi"}, 1),
            ("/v1/completions", {"prompt": "hi", "add_special_tokens": False}, 0),
            ("/v1/completions", {"prompt": "hi"}, 1),
            ("/v1/completions", {"prompt": [104, 105]}, 0),
        ):
            _, asked = await asyncio.gather(w.post(path, **body), w.answer("a"))
            assert list(asked.token_ids).count(bos) == count, body
            if "prompt" in body and isinstance(body["prompt"], str):
                tokens = (await w.post("/tokenize", **body)).json()["tokens"]
                assert tokens == list(asked.token_ids)
        chat_ids = (await w.post("/tokenize", messages=CHAT)).json()["tokens"]
        assert chat_ids[0] == bos
        assert chat_ids.count(bos) == 1


async def test_the_last_message_can_be_continued(tiny_model_files):
    chat = [*CHAT, {"role": "assistant", "content": "Sure, "}]
    async with web(tiny_model_files) as w:
        call = w.post("/v1/chat/completions", messages=chat, continue_final_message=True)
        _, asked = await asyncio.gather(call, w.answer("a"))
        text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nSure, "
        assert list(asked.token_ids) == w.tokens(text)
        call = w.post("/v1/chat/completions", messages=CHAT, add_generation_prompt=False)
        _, asked = await asyncio.gather(call, w.answer("a"))
        assert list(asked.token_ids) == w.tokens("<|im_start|>user\nhi<|im_end|>\n")
        both = {"continue_final_message": True, "add_generation_prompt": True}
        response = await w.post("/v1/chat/completions", messages=chat, **both)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "add_generation_prompt"


async def test_parts_of_text_are_joined_and_developers_are_the_system(tiny_model_files):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    async with web(tiny_model_files) as w:
        chat = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
        _, asked = await asyncio.gather(w.post("/v1/chat/completions", messages=chat), w.answer("a"))
        assert bytes(t for t in asked.token_ids if t < 256).decode() == "system\nbe\nuser\na\nb\nassistant\n"
        image = [{"type": "image_url", "image_url": {"url": "http://x"}}]
        response = await w.post("/v1/chat/completions", messages=[{"role": "user", "content": image}])
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith("messages[0].content")


async def test_a_salt_divides_the_cache_of_its_tenant(tiny_model_files):
    async with web(tiny_model_files) as w:
        salts = []
        for body in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}):
            _, asked = await asyncio.gather(w.post("/v1/completions", prompt="x", **body), w.answer("a"))
            salts.append(asked.cache_salt)
        assert salts[0] == ""
        assert len(set(salts)) == 3
