"""Chat templates in the manner of each family: with and without system, tools and thinking.

The templates are short ones of our own that use what the families' templates use. What they render is written
down for the cases that differ between families, and equals transformers' rendering in all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from octavo.engine.api import ChatPrompt
from octavo.engine.errors import InvalidRequestError
from octavo.engine.text.chat_template import ChatTemplate
from octavo.engine.text.tokenizer import Tokenizer

QWEN25 = """\
{%- set first = messages[0] %}
{%- set system = first.content if first.role == 'system' else 'You are a helper.' %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}
    {{- '\\n\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}
                {%- set call = call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

QWEN3 = """\
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages[::-1] %}
    {%- if ns.last_query < 0 and message.role == 'user' and message.content is string %}
        {%- set ns.last_query = (messages | length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query and thought %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

GEMMA2 = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {{ raise_exception('System role not supported') }}
{%- endif -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Roles must alternate') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""

GEMMA3 = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set prefix = '' -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {{ item['text'] | trim }}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""

PHI4 = """\
{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and \
message['tools'] is not none %}{{ '<|system|>' + message['content'] + '<|tool|>' + message['tools'] \
+ '<|/tool|><|end|>' }}{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}\
{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}\
{% endif %}"""

GRANITE = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set system = 'Year: ' + strftime_now('%Y') + '.' %}
    {%- if tools %}
        {%- set system = system + ' Use tools.' %}
    {%- endif %}
    {%- if thinking %}
        {%- set system = system + ' Think first.' %}
    {%- endif %}
    {%- set turns = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\\n' }}
{%- if tools %}
    {{- '<|start_of_role|>tools<|end_of_role|>' }}
    {{- tools | tojson(indent=4) }}
    {{- '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in turns %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' }}
        {%- if controls %}
            {{- ' ' + controls | tojson() }}
        {%- endif %}
        {{- '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}
"""

OLMO2 = """\
{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}\
{{ '<|assistant|>\\n' + message['content'] + eos_token }}{% if not loop.last %}{{ '\\n' }}{% endif %}\
{% else %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '\\n' }}{% endif %}\
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"""

SMOLLM3 = """\
{%- if enable_thinking is not defined -%}
    {%- set enable_thinking = true -%}
{%- endif -%}
{%- set mode = '/think' if enable_thinking else '/no_think' -%}
{%- set system = '' -%}
{%- if messages[0].role == 'system' -%}
    {%- set system = messages[0].content -%}
    {%- if '/no_think' in system -%}
        {%- set mode = '/no_think' -%}
    {%- endif -%}
    {%- set system = system.replace('/no_think', '').replace('/think', '').rstrip() -%}
{%- endif -%}
{{- '<|im_start|>system\\nReasoning Mode: ' + mode + '\\n' + system -}}
{%- if xml_tools -%}
    {{- '\\n<tools>\\n' -}}
    {%- for tool in xml_tools[:] -%}
        {{- (tool | string) + '\\n' -}}
    {%- endfor -%}
    {{- '</tools>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- for message in messages if message.role != 'system' -%}
    {%- set content = message.content if message.content is string else '' -%}
    {%- if message.role == 'assistant' -%}
        {% generation %}
        {{- '<|im_start|>assistant\\n' + content.lstrip('\\n') + '<|im_end|>\\n' -}}
        {% endgeneration %}
    {%- else -%}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' + ('' if mode == '/think' else '<think>\\n\\n</think>\\n') -}}
{%- endif -%}
"""

MIXTRAL = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in turns | rejectattr('role', 'equalto', 'tool') %}
    {%- if message['role'] == 'user' %}
        {%- if loop.last and tools is not none and tools is defined %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"name": ' + tool.name | tojson }}
                {%- for key, value in tool.items() if key != 'name' and value is not none %}
                    {{- ', "' + key + '": ' }}
                    {{- value | tojson }}
                {%- endfor %}
                {{- '}' }}
                {%- if not loop.last %}
                    {{- ', ' }}
                {%- endif %}
            {%- endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.first and system is defined %}
            {{- ' [INST] ' + system + '\\n\\n' + message['content'] + ' [/INST]' }}
        {%- else %}
            {{- ' [INST] ' + message['content'] + ' [/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] + eos_token }}
    {%- else %}
        {{- raise_exception('Only user, system and assistant roles') }}
    {%- endif %}
{%- endfor %}
"""

LLAMA31 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now('%Y') %}
    {%- else %}
        {%- set date_string = 'never' %}
    {%- endif %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}
    {{- 'Environment: ipython\\n' }}
{%- endif %}
{{- 'Today: ' + date_string + '\\n\\n' }}
{%- if tools is not none and not tools_in_user_message %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- '\\n\\n' }}
    {%- endfor %}
{%- endif %}
{{- system + '<|eot_id|>' }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first = messages[0]['content'] | trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception('Tools need a user message') }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nFunctions:\\n\\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- '\\n\\n' }}
    {%- endfor %}
    {{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception('One call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or (message.content is iterable and message.content is not string) %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

FAMILIES = {
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "phi4": PHI4,
    "granite": GRANITE,
    "olmo2": OLMO2,
    "smollm3": SMOLLM3,
    "mixtral": MIXTRAL,
    "llama3.1": LLAMA31,
}
WITH_TOOLS = ("qwen2.5", "granite", "mixtral", "llama3.1")

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi <there> & 'you'"}
ASSISTANT = {"role": "assistant", "content": "Hello"}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "é & <b>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ü"}}}
    ],
}
RESULT = {"role": "tool", "content": "12 °C", "tool_call_id": "1"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "history": [USER, ASSISTANT, USER],
    "system and history": [SYSTEM, USER, ASSISTANT, USER],
    "thought": [USER, THOUGHT, USER],
}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


def render(source: str, *messages: dict[str, Any], **prompt: Any) -> str:
    return template(source).render(ChatPrompt(messages, **prompt))


def test_qwen25() -> None:
    ask = f"<|im_start|>user\n{USER['content']}<|im_end|>\n"
    system = "<|im_start|>system\nYou are a helper.<|im_end|>\n"
    assert render(QWEN25, USER) == system + ask + "<|im_start|>assistant\n"
    text = render(QWEN25, SYSTEM, USER, CALL, RESULT, RESULT, tools=TOOLS)
    assert text.startswith(f"<|im_start|>system\nBe brief.\n\n# Tools\n<tools>\n{dumped(TOOLS[0])}")
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Ü"}}\n</tool_call>' in text
    response = "\n<tool_response>\n12 °C\n</tool_response>"
    assert f"<|im_start|>user{response}{response}<|im_end|>\n" in text


def dumped(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def test_qwen3_thinks_or_not_and_forgets_old_thoughts() -> None:
    end = "<|im_start|>assistant\n"
    assert render(QWEN3, USER).endswith(end)
    for flag, tail in ((True, ""), (False, "<think>\n\n</think>\n\n")):
        text = render(QWEN3, USER, template_kwargs={"enable_thinking": flag})
        assert text.endswith(end + tail)
    history = render(QWEN3, USER, THOUGHT, USER)
    assert "hm" not in history
    assert "<|im_start|>assistant\nHello<|im_end|>\n" in history
    last = render(QWEN3, USER, THOUGHT, add_generation_prompt=False)
    assert last.endswith("<think>\nhm\n</think>\n\nHello<|im_end|>\n")
    told = {**ASSISTANT, "reasoning_content": "so"}
    assert "<think>\nso\n</think>" in render(QWEN3, USER, told, add_generation_prompt=False)


def test_gemma_has_no_system_of_its_own() -> None:
    turn = f"<s><start_of_turn>user\n{{}}{USER['content']}<end_of_turn>\n<start_of_turn>model\n"
    assert render(GEMMA2, USER) == render(GEMMA3, USER) == turn.format("")
    assert render(GEMMA3, SYSTEM, USER) == turn.format("Be brief.\n\n")
    with pytest.raises(InvalidRequestError, match="System role not supported"):
        render(GEMMA2, SYSTEM, USER)
    with pytest.raises(InvalidRequestError, match="must alternate"):
        render(GEMMA2, USER, USER)


def test_phi4_ends_with_the_end_token_where_nothing_follows() -> None:
    ask = f"<|user|>{USER['content']}<|end|>"
    assert render(PHI4, SYSTEM, USER) == f"<|system|>Be brief.<|end|>{ask}<|assistant|>"
    assert render(PHI4, USER, add_generation_prompt=False) == f"{ask}</s>"
    tools = {**SYSTEM, "tools": "[]"}
    assert "<|system|>Be brief.<|tool|>[]<|/tool|><|end|>" in render(PHI4, tools, USER)


def test_granite_thinks_when_asked_and_takes_controls() -> None:
    plain = render(GRANITE, USER)
    assert "Think first." not in plain
    assert "Think first." in render(GRANITE, USER, template_kwargs={"thinking": True})
    controls = {"controls": {"length": "short"}}
    text = render(GRANITE, USER, template_kwargs=controls)
    assert text.endswith('<|start_of_role|>assistant {"length": "short"}<|end_of_role|>')
    assert dumped(TOOLS, indent=4) in render(GRANITE, SYSTEM, USER, tools=TOOLS)


def test_olmo2() -> None:
    ask = f"<|user|>\n{USER['content']}\n"
    expected = f"<s><|system|>\nBe brief.\n{ask}<|assistant|>\nHello</s>\n{ask}<|assistant|>\n"
    assert render(OLMO2, SYSTEM, USER, ASSISTANT, USER) == expected


def test_smollm3_takes_its_mode_from_the_request_or_the_system_message() -> None:
    think = render(SMOLLM3, USER)
    assert think.startswith("<|im_start|>system\nReasoning Mode: /think\n<|im_end|>\n")
    assert think.endswith("<|im_start|>assistant\n")
    off = render(SMOLLM3, USER, template_kwargs={"enable_thinking": False})
    system = {"role": "system", "content": "Be brief. /no_think"}
    for text in (off, render(SMOLLM3, system, USER)):
        assert "Reasoning Mode: /no_think" in text
        assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n")
    shown = render(SMOLLM3, USER, template_kwargs={"xml_tools": ["<t>"]})
    assert "\n<tools>\n<t>\n</tools><|im_end|>" in shown


def test_mixtral_puts_tools_before_the_last_question() -> None:
    assert render(MIXTRAL, SYSTEM, USER) == f"<s> [INST] Be brief.\n\n{USER['content']} [/INST]"
    text = render(MIXTRAL, USER, ASSISTANT, USER, tools=TOOLS)
    ask = f" [INST] {USER['content']} [/INST]"
    parameters = dumped(TOOLS[0]["function"]["parameters"])
    tools = f'{{"name": "weather", "description": "é & <b>", "parameters": {parameters}}}'
    assert text == f"<s>{ask} Hello</s>[AVAILABLE_TOOLS] [{tools}][/AVAILABLE_TOOLS]{ask}"


def test_llama31() -> None:
    kwargs = {"date_string": "today", "tools_in_user_message": False}
    text = render(LLAMA31, SYSTEM, USER, CALL, RESULT, tools=TOOLS, template_kwargs=kwargs)
    head = "<s><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\nToday: today\n\n"
    assert text.startswith(f"{head}{dumped(TOOLS[0], indent=4)}\n\nBe brief.<|eot_id|>")
    assert '{"name": "weather", "parameters": {"city": "Ü"}}<|eot_id|>' in text
    assert "<|start_header_id|>ipython<|end_header_id|>\n\n12 °C<|eot_id|>" in text
    with pytest.raises(InvalidRequestError, match="One call at a time"):
        render(LLAMA31, USER, {**CALL, "tool_calls": CALL["tool_calls"] * 2})


@pytest.mark.parametrize("family", FAMILIES)
def test_who_shows_tools(family: str) -> None:
    assert template(FAMILIES[family]).uses_tools == (family in WITH_TOOLS)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_beginning_comes_once(family: str, sentencepiece: Tokenizer) -> None:
    """A prompt from a template brings its own, and a plain one gets it from the tokenizer."""
    source = FAMILIES[family]
    token_ids = sentencepiece.encode(render(source, USER), add_special_tokens=False)
    assert token_ids.count(1) == ("bos_token" in source)
    again = sentencepiece.encode(render(source, USER), add_special_tokens=True)
    assert again.count(1) == 1
    assert again[0] == 1


@pytest.fixture(scope="module")
def apply(tmp_path_factory: pytest.TempPathFactory, byte_level: Tokenizer) -> Callable[..., str]:
    """transformers' own rendering."""
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("theirs") / "tokenizer.json"
    byte_level._backend.save(str(path))
    theirs: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(path), bos_token="<s>", eos_token="</s>"
    )

    def render_theirs(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
        return str(
            theirs.apply_chat_template(messages, chat_template=source, tokenize=False, **options)
        )

    return render_theirs


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers(family: str, apply: Callable[..., str]) -> None:
    source, num_compared = FAMILIES[family], 0
    for name, messages in CONVERSATIONS.items():
        if family == "gemma2" and "system" in name:
            continue
        for kwargs in ({}, {"enable_thinking": False}, {"enable_thinking": True, "thinking": True}):
            for tools in (None, TOOLS) if family in WITH_TOOLS else (None,):
                for begins in (True, False):
                    ours = render(
                        source,
                        *messages,
                        tools=tools or (),
                        add_generation_prompt=begins,
                        template_kwargs=kwargs,
                    )
                    options = {"tools": tools, "add_generation_prompt": begins, **kwargs}
                    assert ours == apply(source, messages, **options)
                    num_compared += 1
    assert num_compared >= 18


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2.5", "llama3.1"])
def test_calls_and_results_equal_transformers(family: str, apply: Callable[..., str]) -> None:
    messages: list[dict[str, Any]] = [SYSTEM, USER, CALL, RESULT]
    ours = render(FAMILIES[family], *messages, tools=TOOLS)
    theirs = apply(FAMILIES[family], messages, tools=TOOLS, add_generation_prompt=True)
    assert ours == theirs
