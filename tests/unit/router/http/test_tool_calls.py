"""Calls of functions in a model's text: the notations, text that is none, and the endpoint."""

import asyncio
import json
from itertools import pairwise

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import DEFAULT_CACHE_DIR
from headrace.model_store import resolve
from router.http.tool_calls import ToolCallParser
from tests.support.tiny_llama import write_tiny_llama
from tests.support.web import events, web

F = ("f", {"a": 'x } "] {'})
G = ("g", {})
ONE = '{"name": "f", "arguments": {"a": "x } \\"] {"}}'
TWO = '{"name": "g", "arguments": {}}'

FOUND = {
    "hermes": (f"I look.\n<tool_call>\n{ONE}\n</tool_call>", "I look.\n", [F]),
    "hermes, two": (f"<tool_call>{ONE}</tool_call>\n<tool_call>{TWO}</tool_call> done", "\n done", [F, G]),
    "hermes, cut before its end": (f"<tool_call>\n{ONE}", "", [F]),
    "mistral": (f"[TOOL_CALLS] [{ONE}, {TWO}]", "", [F, G]),
    "mistral, text before": (f"Well [TOOL_CALLS][{ONE}]", "Well ", [F]),
    "mistral, by name": ('[TOOL_CALLS]f[ARGS]{"a": "x } \\"] {"}[TOOL_CALLS]g[ARGS]{}', "", [F, G]),
    "mistral, with ids": ('[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]{"a": "x } \\"] {"}', "", [F]),
    "llama": (f"<|python_tag|>{ONE.replace('arguments', 'parameters')}", "", [F]),
    "llama, two": (f"<|python_tag|>{ONE.replace('arguments', 'parameters')}; {TWO}", "", [F, G]),
    "bare": (f"\n {ONE}", "", [F]),
    "bare list": (f"[{ONE}, {TWO}]", "", [F, G]),
}
TEXT = {
    "nothing": "",
    "plain": "a < b, [TOOL] and <tool> {x}",
    "unfinished": "<tool_call>{",
    "the beginning of a beginning": "so <tool_ca",
    "bare, but no tool": '{"name": "h", "arguments": {}} and more',
    "bare, but no call": '{"answer": 5}',
    "bare list of something": "[1, 2, 3] {",
    "wrong JSON": '<tool_call>{"name": f}</tool_call>',
    "no name": '<tool_call>{"arguments": {}}</tool_call> x',
    "empty": "<tool_call></tool_call> x",
    "python": "<|python_tag|>print(1)",
    "brace later": "yes: " + ONE,
}
CASES = {**FOUND, **{name: (text, text, []) for name, text in TEXT.items()}}


def parsed(pieces):
    parser, content, calls = ToolCallParser(["f", "g"]), "", []
    for step in (*(lambda p=piece: parser.push(p) for piece in pieces), parser.finish):
        text, found = step()
        content += text
        calls += found
    return content, [(call.name, json.loads(call.arguments)) for call in calls], calls


@pytest.mark.parametrize("name", sorted(CASES))
def test_calls_and_text_however_the_text_is_split(name):
    text, content, calls = CASES[name]
    assert parsed([text])[:2] == (content, calls)
    assert parsed(list(text))[:2] == (content, calls)


@given(st.sampled_from(sorted(CASES)), st.lists(st.integers(0, 120), max_size=6))
def test_any_split_gives_the_same(name, cuts):
    text, content, calls = CASES[name]
    at = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    assert parsed([text[a:b] for a, b in pairwise(at)])[:2] == (content, calls)


@given(st.text(alphabet='<tool_cal>/[]{}":,\\ TOOLCS|python_g', max_size=60))
def test_text_without_a_whole_call_comes_back_whole(text):
    if '"name"' not in text:
        assert parsed(list(text))[:2] == (text, [])


def test_text_before_a_call_is_not_held_back():
    parser = ToolCallParser(["f"])
    assert parser.push("Let me see")[0] == "Let me see"
    assert parser.push(" <tool")[0] == " "
    assert parser.push("s>")[0] == "<tools>"
    for text in ("[1] says {x}", "{x", "[{x"):
        assert ToolCallParser(["f"]).push(text)[0] == text


def test_ids_are_as_mistrals_templates_want_them():
    calls = parsed([FOUND["hermes, two"][0]])[2]
    assert len({call.id for call in calls}) == 2
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)


TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.name }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}[{{ c.id }} {{ c.function.name }} {{ c.function.arguments.a }}]"
    "{% endfor %}{% endif %}{{ m.tool_call_id }}{{ m.content }}<|im_end|>{% endfor %}{{ mood }}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/Text"}},
                "$defs": {"Text": {"type": "string"}},
            },
        },
    }
    for name in ("f", "g")
]
CHAT = [{"role": "user", "content": "do f"}]


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory):
    """Its template takes tools, and a call begins with a control token."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("tools"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    tokenizer = (folder / "tokenizer.json").read_text().replace("<|im_start|>", "[TOOL_CALLS]")
    (folder / "tokenizer.json").write_text(tokenizer)
    return resolve(str(folder), cache_dir=DEFAULT_CACHE_DIR)


async def test_the_template_gets_tools_calls_and_their_answers(tool_model):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    chat = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "42"},
    ]
    async with web(tool_model) as w:
        body = {"messages": chat, "tools": TOOLS[:1], "chat_template_kwargs": {"mood": "!", "messages": []}}
        _, asked = await asyncio.gather(w.post("/v1/chat/completions", **body), w.answer("ok"))
        text = bytes(t for t in asked.token_ids if t < 256).decode()
        tools, rest = text.split("\n", 1)
        assert json.loads(tools) == TOOLS[:1]
        assert rest == "<|im_start|>user:do f<|im_start|>assistant:[c1 f é]<|im_start|>tool:fc142!"
        _, asked = await asyncio.gather(
            w.post("/v1/chat/completions", messages=CHAT, tools=TOOLS, tool_choice="none"), w.answer(ONE)
        )
        assert bytes(t for t in asked.token_ids if t < 256).decode() == "<|im_start|>user:do f"


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama", "bare", "brace later"])
async def test_calls_by_openais_client_streamed_and_not(tool_model, name):
    text, content, calls = CASES[name]
    async with web(tool_model) as w:
        create = w.openai.chat.completions.create
        call = create(model="tiny", messages=CHAT, tools=TOOLS)
        found, asked = await asyncio.gather(call, w.answer(text))
        assert not asked.sampling.HasField("grammar")
        message = found.choices[0].message
        assert message.content == (content if content or not calls else None)
        assert [read(call) for call in message.tool_calls or ()] == calls
        assert found.choices[0].finish_reason == ("tool_calls" if calls else "stop")
        stream, _ = await asyncio.gather(
            create(model="tiny", messages=CHAT, tools=TOOLS, stream=True), w.answer(text)
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == content
        pieces = [call for c in chunks for call in c.choices[0].delta.tool_calls or ()]
        assert [read(call) for call in pieces] == calls
        assert [call.index for call in pieces] == list(range(len(calls)))
        assert chunks[-1].choices[0].finish_reason == found.choices[0].finish_reason
        # a cut answer says so, whatever was in it
        cut, _ = await asyncio.gather(
            create(model="tiny", messages=CHAT, tools=TOOLS), w.answer(text, reason="length")
        )
        assert cut.choices[0].finish_reason == "length"


def read(call):
    return call.function.name, json.loads(call.function.arguments)


async def test_one_call_where_several_are_not_wanted(tool_model):
    async with web(tool_model) as w:
        call = w.openai.chat.completions.create(
            model="tiny", messages=CHAT, tools=TOOLS, parallel_tool_calls=False
        )
        found, _ = await asyncio.gather(call, w.answer(FOUND["hermes, two"][0]))
        assert [read(call) for call in found.choices[0].message.tool_calls] == [F]


async def test_a_named_function_is_called_through_a_grammar(tool_model):
    choice = {"type": "function", "function": {"name": "g"}}
    arguments = '{"a": "é🙂"}'
    async with web(tool_model) as w:
        create = w.openai.chat.completions.create
        call = create(model="tiny", messages=CHAT, tools=TOOLS, tool_choice=choice)
        found, asked = await asyncio.gather(call, w.answer(arguments))
        assert json.loads(asked.sampling.grammar.json_schema) == TOOLS[1]["function"]["parameters"]
        (made,) = found.choices[0].message.tool_calls
        assert (made.function.name, made.function.arguments) == ("g", arguments)
        assert found.choices[0].message.content is None
        assert found.choices[0].finish_reason == "stop"
        call = create(model="tiny", messages=CHAT, tools=TOOLS, tool_choice=choice, stream=True)
        stream, _ = await asyncio.gather(call, w.answer(arguments))
        pieces = [
            call for chunk in [c async for c in stream] for call in chunk.choices[0].delta.tool_calls or ()
        ]
        assert "".join(piece.function.arguments for piece in pieces) == arguments
        assert [piece.function.name for piece in pieces] == ["g"] + [None] * (len(pieces) - 1)
        with pytest.raises(openai.BadRequestError, match="must name one of tools"):
            other = {"type": "function", "function": {"name": "h"}}
            await create(model="tiny", messages=CHAT, tools=TOOLS, tool_choice=other)


async def test_a_required_call_is_one_of_the_tools_by_a_grammar(tool_model):
    async with web(tool_model) as w:
        body = {"messages": CHAT, "tools": TOOLS, "tool_choice": "required"}
        text = '[{"name": "f", "parameters": {"a": "x"}}, {"name": "g", "parameters": {}}]'
        call = w.post("/v1/chat/completions", **body, parallel_tool_calls=True)
        whole, asked = await asyncio.gather(call, w.answer(text))
        schema = json.loads(asked.sampling.grammar.json_schema)
        assert schema["$defs"] == {"Text": {"type": "string"}}
        assert [each["properties"]["name"]["const"] for each in schema["items"]["anyOf"]] == ["f", "g"]
        choice = whole.json()["choices"][0]
        names = [call["function"]["name"] for call in choice["message"]["tool_calls"]]
        assert (names, choice["finish_reason"]) == (["f", "g"], "tool_calls")
        call = w.post("/v1/chat/completions", **body, stream=True, parallel_tool_calls=False)
        streamed, asked = await asyncio.gather(call, w.answer(text[:40] + "]"))
        assert json.loads(asked.sampling.grammar.json_schema)["maxItems"] == 1
        deltas = [chunk["choices"][0]["delta"] for chunk in events(streamed.text)]
        assert [c["function"]["name"] for d in deltas for c in d.get("tool_calls", ())] == ["f"]
        both = await w.post("/v1/chat/completions", **body, response_format={"type": "json_object"})
        assert both.status_code == 400


async def test_a_control_token_that_begins_a_call_is_seen(tool_model):
    """Its text is not part of an answer otherwise."""
    async with web(tool_model) as w:
        text = f"[TOOL_CALLS][{ONE}]"
        assert len(w.tokens("[TOOL_CALLS]")) == 1
        call = w.post("/v1/chat/completions", messages=CHAT, tools=TOOLS)
        found, _ = await asyncio.gather(call, w.answer(text))
        assert len(found.json()["choices"][0]["message"]["tool_calls"]) == 1
        call = w.post("/v1/chat/completions", messages=CHAT)
        found, _ = await asyncio.gather(call, w.answer(text))
        assert found.json()["choices"][0]["message"]["content"] == f"[{ONE}]"
