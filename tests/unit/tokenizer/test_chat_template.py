"""The template dialect, against the rendering of transformers itself."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from headrace.errors import InvalidRequest, ModelError
from headrace.tokenizer.chat_template import ChatMessage, ChatOptions, ChatTemplate, ToolCall

CHAT = [("system", "Be <brief> & \"kind\" 'é'"), ("user", "1 < 2?\n"), ("assistant", " yes "), ("user", "🙂")]
TEMPLATES = {
    "plain": "{% for message in messages %}\n  {% if true %}\n{{ message['role'] }}: {{ message.content }}\n"
    "  {% endif %}\n{% endfor %}\n",
    "tokens": "{{ bos_token }}{% for m in messages %}{{ m.content | trim }}{{ eos_token }}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ messages[0] | tojson(sort_keys=true) }}"
    "{{ messages[0] | tojson(true, none, [',', ':']) }}",
    "no tools": "{% if tools is not none %}tools{% endif %}{% if tools is defined %}defined{% endif %}"
    "{% if documents %}documents{% endif %}{{ messages | length }}",
    "loops": "{% for m in messages %}{% if m.role == 'assistant' %}{% continue %}{% endif %}{{ loop.index }}"
    "{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% endif %}{% endfor %}",
    "macro": "{% macro turn(m) %}{{ bos_token }}{{ m.role }}{% endmacro %}{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ turn(m) }}{{ ns.n }}{% endfor %}",
    "prompt": "{% if add_generation_prompt %}<|assistant|>{% else %}-{% endif %}",
    "year": "{{ strftime_now('%Y') }}",
}


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_templates_render_as_in_transformers(name, prompt):
    template = ChatTemplate(TEMPLATES[name], bos_token="<s>", eos_token="</s>")
    ours = template.render([ChatMessage(*entry) for entry in CHAT], ChatOptions(prompt))
    theirs, _ = render_jinja_template(
        conversations=[[{"role": role, "content": content} for role, content in CHAT]],
        chat_template=TEMPLATES[name],
        add_generation_prompt=prompt,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert ours == theirs[0]
    assert ours


TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"b": 1, "a": {}}}}
]
CALLS = (
    "{% for t in tools %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}{{ m.name }}{{ m.content }}"
    "{% if 'tool_calls' in m %}{% for c in m.tool_calls %}{{ c.id }}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endif %}{{ m.tool_call_id }}{% endfor %}{{ mood }}"
)


def test_tools_calls_and_variables_render_as_in_transformers():
    call = ToolCall("c1", "f", {"x": "é", "n": [1]})
    chat = [
        ChatMessage("user", "go", name="ann"),
        ChatMessage("assistant", "", tool_calls=(call,)),
        ChatMessage("tool", "42", tool_call_id="c1", name="f"),
    ]
    options = ChatOptions(tools=TOOLS, variables={"mood": "!", "messages": [], "bos_token": "?"})
    ours = ChatTemplate(CALLS, bos_token="", eos_token="").render(chat, options)
    function = {"name": "f", "arguments": {"x": "é", "n": [1]}}
    as_dicts = [
        {"role": "user", "content": "go", "name": "ann"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "42", "tool_call_id": "c1", "name": "f"},
    ]
    theirs, _ = render_jinja_template([as_dicts], tools=TOOLS, chat_template=CALLS, mood="!")
    assert ours == theirs[0]
    assert "c1f" in ours


def test_tools_for_a_template_that_takes_none_are_refused():
    template = ChatTemplate("{% set tools = 1 %}{{ messages }}", bos_token="", eos_token="")
    with pytest.raises(InvalidRequest, match="tools: '1 tools' is not allowed"):
        template.render([ChatMessage("user", "x")], ChatOptions(tools=TOOLS))


@pytest.mark.parametrize("content", ["Sure, ", " Sure", "a b", "x"])
@pytest.mark.parametrize("trim", ["", " | trim"])
def test_a_message_that_is_continued_ends_as_in_transformers(content, trim):
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content" + trim + " }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    chat = [("user", "a b x"), ("assistant", content)]
    ours = ChatTemplate(source, bos_token="", eos_token="").render(
        [ChatMessage(*entry) for entry in chat],
        ChatOptions(add_generation_prompt=False, continue_final_message=True),
    )
    theirs, _ = render_jinja_template(
        [[{"role": role, "content": text} for role, text in chat]],
        chat_template=source,
        continue_final_message=True,
    )
    assert ours == theirs[0]
    assert not ours.endswith("</s>")


def test_a_message_that_the_template_does_not_show_can_not_be_continued():
    template = ChatTemplate("{{ messages | length }}", bos_token="", eos_token="")
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        template.render([ChatMessage("user", "x")], ChatOptions(False, True))


def render(source: str, messages: list[ChatMessage] | None = None) -> str:
    messages = [ChatMessage("user", "x")] if messages is None else messages
    return ChatTemplate(source, bos_token="", eos_token="").render(messages, ChatOptions())


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ nothing.at.all }}",
    ],
)
def test_a_chat_that_the_template_refuses_is_the_callers_fault(source):
    with pytest.raises(
        InvalidRequest, match=r"chat: \['user'\] is not allowed; the model's chat template refuses"
    ):
        render(source)


def test_the_templates_own_words_reach_the_caller():
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_an_empty_chat_is_refused():
    with pytest.raises(InvalidRequest, match="at least one message"):
        render("x", [])


def test_a_template_that_can_not_be_compiled_is_the_models_fault():
    with pytest.raises(ModelError, match="can not be compiled"):
        render("{% for %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
    ],
)
def test_a_template_can_not_leave_its_sandbox(source):
    with pytest.raises((ModelError, InvalidRequest)):
        render(source)
