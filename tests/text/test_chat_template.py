from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from octavo.engine.api import ChatPrompt
from octavo.engine.checkpoint.checkpoint import Checkpoint
from octavo.engine.errors import ConfigError, InvalidRequestError, NotSupportedError
from octavo.engine.text import chat_template
from octavo.engine.text.chat_template import RESERVED_NAMES, ChatTemplate, load_chat_template
from octavo.engine.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = """\
{%- if messages[0]['role'] == 'system' -%}
    {%- set turns = messages[1:] -%}
    {%- set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' -%}
{%- else -%}
    {%- set turns = messages -%}
    {%- set system = '' -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/...') }}
    {%- endif -%}
    {%- set content = (system if loop.first else '') + message['content'] -%}
    {%- if message['role'] == 'user' -%}
        {{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' -%}
        {{ ' ' + content.strip() + ' ' + eos_token }}
    {%- endif -%}
{%- endfor -%}
"""
LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- for message in messages %}
    {%- set head = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}
    {%- if loop.first and tools is not none and tools is defined %}
        {{- head + date_string + '\\n' + (tools | tojson(indent=2)) + '<|eot_id|>' }}
        {%- continue %}
    {%- endif %}
    {{- head + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi\n"}
ASSISTANT = {"role": "assistant", "content": "Hello there "}
CONVERSATIONS = ([USER], [SYSTEM, USER], [USER, ASSISTANT, USER], [SYSTEM, USER, ASSISTANT])


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


def render(source: str, *messages: dict[str, Any], **prompt: Any) -> str:
    return template(source).render(ChatPrompt(messages, **prompt))


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([USER], "<s>[INST] Hi [/INST]"),
        ([SYSTEM, USER], "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]"),
        ([USER, ASSISTANT, USER], "<s>[INST] Hi [/INST] Hello there </s><s>[INST] Hi [/INST]"),
    ],
)
def test_llama2(messages: list[dict[str, str]], expected: str) -> None:
    assert render(LLAMA2, *messages) == expected


def test_llama3() -> None:
    user = "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    head = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert render(LLAMA3, USER) == "<s>" + user + head
    assert render(LLAMA3, USER, add_generation_prompt=False) == "<s>" + user
    tools = [{"name": "<é>"}]
    shown = render(LLAMA3, USER, USER, tools=tools, template_kwargs={"date_string": "today"})
    assert 'today\n[\n  {\n    "name": "<é>"\n  }\n]<|eot_id|>' in shown


def test_chatml() -> None:
    default, user = "<|im_start|>system\nBe kind.<|im_end|>\n", "<|im_start|>user\nHi\n<|im_end|>\n"
    assistant = "<|im_start|>assistant\n"
    assert render(CHATML, USER) == default + user + assistant
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert render(CHATML, SYSTEM, USER) == system + user + assistant
    history = render(CHATML, USER, ASSISTANT, USER)
    assert history == default + user + assistant + "Hello there <|im_end|>\n" + user + assistant


@pytest.mark.model
def test_smollm(smollm: Tokenizer, embedded_checkpoint: Checkpoint) -> None:
    loaded = load_chat_template(embedded_checkpoint, smollm)
    assert loaded is not None
    assert not loaded.uses_tools
    text = loaded.render(ChatPrompt([{"role": "user", "content": ""}]))
    assert text.endswith("<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")
    token_ids = smollm.encode(text, add_special_tokens=False)
    assert token_ids.count(1) == 3
    assert token_ids.count(2) == 2


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_absent_content_is_empty(content: dict[str, Any]) -> None:
    calls = {"tool_calls": [{"id": "1"}]}
    assert "assistant\n<|im_end|>" in render(
        CHATML, USER, {"role": "assistant", **content, **calls}
    )


def test_absent_values_are_left_out() -> None:
    source = "{{ 'name' in messages[0] }} {{ 'tool_calls' in messages[0] }}"
    assert render(source, {**USER, "name": None, "tool_calls": None}) == "False False"


@pytest.mark.parametrize(("source", "kept"), [(CHATML, "Hello there "), (LLAMA3, "Hello there")])
def test_the_final_message_can_be_continued(source: str, kept: str) -> None:
    prompt = {"add_generation_prompt": False, "continue_final_message": True}
    text = render(source, USER, ASSISTANT, **prompt)
    assert text.endswith(kept)
    assert render(source, USER, ASSISTANT, add_generation_prompt=False).startswith(text)


def test_continuing_an_empty_message() -> None:
    prompt = {"add_generation_prompt": False, "continue_final_message": True}
    text = render(CHATML, USER, {"role": "assistant", "content": None}, **prompt)
    assert text.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("source", "messages", "prompt", "param", "reason"),
    [
        (LLAMA2, [USER, USER], {}, "messages", "roles must alternate"),
        (CHATML, [{"content": "x"}], {}, "messages", "role"),
        (CHATML, [{"role": "user", "content": ["x"]}], {}, "messages", "str"),
        ("{{ messages.append(1) }}", [USER], {}, "messages", "append"),
        ("{{ ''.__class__.__mro__ }}", [USER], {}, "messages", "unsafe"),
        ("{{ 1 // 0 }}", [USER], {}, "messages", "zero"),
        ("{% for i in range(10**9) %}x{% endfor %}", [USER], {}, "messages", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", [USER], {}, "messages", "recursion"),
        ("{{ raise_exception('one\ntwo') }}", [USER], {}, "messages", "one$"),
        (CHATML, [], {}, "messages", "empty"),
        (CHATML, [USER], {"continue_final_message": True}, "continue_final_message", "exclude"),
        (
            "{{ messages[0]['role'] }}",
            [USER],
            {"continue_final_message": True, "add_generation_prompt": False},
            "continue_final_message",
            "leaves the final message out",
        ),
    ],
)
def test_refusals(
    source: str, messages: list[dict[str, Any]], prompt: Any, param: str, reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        render(source, *messages, **prompt)
    assert caught.value.param == param
    assert "\n" not in caught.value.message


def test_tools_are_never_dropped_in_silence() -> None:
    with pytest.raises(NotSupportedError, match="does not show tools") as caught:
        render(CHATML, USER, tools=[{"type": "function"}])
    assert caught.value.param == "tools"
    assert render(CHATML, USER, tools=[]) == render(CHATML, USER)


@pytest.mark.parametrize("name", sorted(RESERVED_NAMES))
def test_reserved_names_cannot_be_set(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"cannot set {name}") as caught:
        render(CHATML, USER, template_kwargs={name: True})
    assert caught.value.param == "chat_template_kwargs"


def test_the_text_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1000)
    with pytest.raises(InvalidRequestError, match="longer than 1000 characters"):
        render("{% for i in range(10000) %}{{ i }}{% endfor %}", USER)


def test_the_names_that_templates_use() -> None:
    assert render("{{ strftime_now('%Y') | int > 2000 }}", USER) == "True"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}", USER) == "Hi\n"
    source = "{% for i in range(9) %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(source, USER) == "012"


def test_a_template_that_is_none_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"a/file is no valid chat template: .*line 2"):
        ChatTemplate("x\n{% if %}", bos_token=None, eos_token=None, origin="a/file")


def test_which_template_is_used(tmp_path: Path, byte_level: Tokenizer) -> None:
    own = cast(Checkpoint, SimpleNamespace(path=Path("m"), chat_template="own"))
    none = cast(Checkpoint, SimpleNamespace(path=Path("m"), chat_template=None))
    file = tmp_path / "other.jinja"
    file.write_text("other")
    prompt = ChatPrompt([USER])
    for checkpoint, path, text in ((own, None, "own"), (own, file, "other"), (none, file, "other")):
        loaded = load_chat_template(checkpoint, byte_level, str(path) if path else None)
        assert loaded is not None
        assert loaded.render(prompt) == text
    assert load_chat_template(none, byte_level) is None
    with pytest.raises(ConfigError, match=r"--chat-template .*missing"):
        load_chat_template(own, byte_level, str(tmp_path / "missing"))


@pytest.mark.slow
def test_equals_transformers(tmp_path: Path, byte_level: Tokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    byte_level._backend.save(str(tmp_path / "tokenizer.json"))
    theirs: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )

    def check(source: str, messages: list[dict[str, str]], **options: Any) -> None:
        ours = render(source, *messages, **options)
        options.setdefault("add_generation_prompt", True)
        copied = json.loads(json.dumps(messages))
        assert ours == theirs.apply_chat_template(
            copied, chat_template=source, tokenize=False, **options
        )

    for source in (CHATML, LLAMA2, LLAMA3):
        for messages in CONVERSATIONS:
            check(source, messages)
            check(source, messages, add_generation_prompt=False)
            check(source, messages, add_generation_prompt=False, continue_final_message=True)
    tools = [{"type": "function", "function": {"name": "f", "description": "<é> & 'x'"}}]
    check(LLAMA3, [SYSTEM, USER], tools=tools)
