"""Conversations to prompts, by the model's Jinja template.

Owns the sandbox that templates run in and the names that they see, which are transformers'. Must not
know tokens or HTTP. A template comes from the operator's checkpoint or file, never from a client.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..api import ChatPrompt
from ..checkpoint.checkpoint import Checkpoint
from ..errors import ConfigError, InvalidRequestError, NotSupportedError
from .tokenizer import Tokenizer

RESERVED_NAMES = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "bos_token",
        "eos_token",
        "tokenize",
        "tokenizer",
        "chat_template",
        "conversation",
        "documents",
        "raise_exception",
        "strftime_now",
        "return_dict",
        "return_tensors",
        "padding",
        "truncation",
        "max_length",
    }
)
"""Names that a request's template arguments may not set."""

MAX_RENDERED_CHARS = 1 << 25
MAX_REASON_CHARS = 300

_END_OF_MESSAGE = "\uf8ffend of the final message\uf8ff "
_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)


class ChatTemplate:
    """One compiled template.

    Args:
        source: Jinja, as transformers understands it.
        bos_token: value of the template's ``bos_token``.
        eos_token: value of the template's ``eos_token``.
        origin: where the template came from, for messages.

    Raises:
        ConfigError: the source is no Jinja template.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None,
        eos_token: str | None,
        origin: str = "The chat template",
    ) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            names = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"{origin} is no valid chat template: {error.message} (line {error.lineno})."
            ) from error
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self.source = source
        self.uses_tools = "tools" in names

    def render(self, prompt: ChatPrompt) -> str:
        """The prompt's text. It brings its own special tokens: encode it without adding any.

        With ``continue_final_message`` the text ends where the final message's content ends.

        Raises:
            InvalidRequestError: the conversation does not fit the template, or the text is too long;
                ``param`` names the field.
            NotSupportedError: there are tools and the template does not show them.
        """
        self._check(prompt)
        messages = [_plain(message) for message in prompt.messages]
        if prompt.continue_final_message:
            messages[-1]["content"] = f"{messages[-1]['content']}{_END_OF_MESSAGE}"
        text = self._run(
            {
                **prompt.template_kwargs,
                **self._tokens,
                "messages": messages,
                "tools": list(prompt.tools) if prompt.tools else None,
                "add_generation_prompt": prompt.add_generation_prompt,
            }
        )
        return _cut_after_message(text) if prompt.continue_final_message else text

    def _check(self, prompt: ChatPrompt) -> None:
        if not prompt.messages:
            raise InvalidRequestError("messages is empty.", param="messages")
        if prompt.continue_final_message and prompt.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other.",
                param="continue_final_message",
            )
        reserved = RESERVED_NAMES.intersection(prompt.template_kwargs)
        if reserved:
            raise InvalidRequestError(
                f"chat_template_kwargs cannot set {', '.join(sorted(reserved))}.",
                param="chat_template_kwargs",
            )
        if prompt.tools and not self.uses_tools:
            raise NotSupportedError(
                "This model's chat template does not show tools.", param="tools"
            )

    def _run(self, variables: dict[str, Any]) -> str:
        parts, num_chars = [], 0
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                num_chars += len(part)
                if num_chars > MAX_RENDERED_CHARS:
                    break
        except _RENDER_ERRORS as error:
            raise InvalidRequestError(
                f"The model's chat template cannot render these messages: {_reason(error)}",
                param="messages",
            ) from error
        if num_chars > MAX_RENDERED_CHARS:
            raise InvalidRequestError(
                f"The rendered messages are longer than {MAX_RENDERED_CHARS} characters.",
                param="messages",
            )
        return "".join(parts)


def load_chat_template(
    checkpoint: Checkpoint, tokenizer: Tokenizer, override_path: str | None = None
) -> ChatTemplate | None:
    """The template to use: of the file if one is given, else the checkpoint's, else none.

    Args:
        override_path: a file with a Jinja template (``--chat-template``).

    Raises:
        ConfigError: the file cannot be read, or the template is not valid.
    """
    if override_path is not None:
        source, origin = _read_template(override_path), override_path
    elif checkpoint.chat_template is not None:
        source, origin = checkpoint.chat_template, f"The chat template of {checkpoint.path}"
    else:
        return None
    return ChatTemplate(
        source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token, origin=origin
    )


def _read_template(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path} cannot be read: {error}.") from error


class _GenerationBlock(Extension):
    """``{% generation %}`` marks what the model wrote, for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().astimezone().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _plain(message: Any) -> dict[str, Any]:
    """A message without absent values; its content is a string, which templates concatenate."""
    kept = {key: value for key, value in message.items() if value is not None}
    if not isinstance(kept.get("content", ""), str):
        raise InvalidRequestError("A message's content must be a string.", param="messages")
    return {**kept, "content": kept.get("content", "")}


def _cut_after_message(text: str) -> str:
    """Cut at the mark that stands behind the final message's content.

    The mark ends with a space: if that is gone, the template trims contents, and spaces at the end of
    the content go as well.
    """
    at = text.rfind(_END_OF_MESSAGE.rstrip())
    if at < 0:
        raise InvalidRequestError(
            "The model's chat template leaves the final message out, so it cannot be continued.",
            param="continue_final_message",
        )
    cut = text[:at]
    return cut if text.startswith(_END_OF_MESSAGE, at) else cut.rstrip()


def _reason(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:MAX_REASON_CHARS]
