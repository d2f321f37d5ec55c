"""``POST /tokenize``, ``POST /detokenize`` and, where it is enabled, ``GET /tokenizer_info``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ..engine.api import Prompt, TextPrompt
from ..engine.errors import InvalidRequestError
from .body import read_json
from .chat_messages import chat_prompt
from .context import Context
from .errors import json_response
from .fields import check_lengths, check_supported
from .schemas import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
    body_schema,
    parse,
)

MAX_CHARS = 1 << 20
MAX_TOKENS = 1 << 20


def tokens_router(context: Context, *, has_info: bool) -> APIRouter:
    """The routes, over their collaborators."""
    router = APIRouter(tags=["tokens"])
    both = body_schema(TokenizeTextRequest, TokenizeChatRequest)

    @router.post("/tokenize", openapi_extra=both)
    async def tokenize(request: Request) -> Response:
        """Token ids of a text, or of a conversation in the model's chat template."""
        context.check_accepting()
        raw = await read_json(request)
        prompt, wants_entries = _prompt(context, raw)
        token_ids = await context.engine.tokenize(prompt)
        entries = await context.engine.vocabulary_entries(token_ids) if wants_entries else None
        return json_response(
            {
                "count": len(token_ids),
                "max_model_len": context.engine.info.max_model_len,
                "tokens": token_ids,
                "token_strs": entries,
            }
        )

    @router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids, special tokens included."""
        context.check_accepting()
        raw = await read_json(request)
        body = parse(DetokenizeRequest, raw)
        context.unknown_fields.notice(raw, DetokenizeRequest.model_fields)
        context.check_model(body.model)
        text = await context.engine.detokenize(_token_ids(body.tokens))
        return json_response({"prompt": text})

    if has_info:

        @router.get("/tokenizer_info")
        async def tokenizer_info() -> Response:
            """The tokenizer's class, sizes and special tokens, and the chat template."""
            context.check_accepting()
            return json_response(context.engine.tokenizer_info())

    return router


def _prompt(context: Context, raw: Mapping[str, Any]) -> tuple[Prompt, bool]:
    """What is to be tokenised, and whether the vocabulary's entries are wanted."""
    check_lengths(raw)
    if raw.get("messages") is not None:
        return _chat(context, raw)
    check_supported(raw)
    text = parse(TokenizeTextRequest, raw)
    context.unknown_fields.notice(raw, {*TokenizeTextRequest.model_fields, "messages"})
    context.check_model(text.model)
    if len(text.prompt) > MAX_CHARS:
        raise InvalidRequestError(
            f"prompt must have at most {MAX_CHARS} characters, got {len(text.prompt)}.",
            param="prompt",
        )
    adds_special = text.add_special_tokens is not False
    return TextPrompt(text.prompt, adds_special), bool(text.return_token_strs)


def _chat(context: Context, raw: Mapping[str, Any]) -> tuple[Prompt, bool]:
    if raw.get("prompt") is not None:
        raise InvalidRequestError("prompt and messages exclude each other.", param="prompt")
    check_supported(raw)
    chat = parse(TokenizeChatRequest, raw)
    context.unknown_fields.notice(raw, {*TokenizeChatRequest.model_fields, "prompt"})
    context.check_model(chat.model)
    return chat_prompt(chat), bool(chat.return_token_strs)


def _token_ids(tokens: Any) -> list[int]:
    """A list of integers; whether the model has them is the engine's to say."""
    if not isinstance(tokens, list) or not set(map(type, tokens)) <= {int}:
        raise InvalidRequestError("tokens must be a list of integers.", param="tokens")
    if len(tokens) > MAX_TOKENS:
        raise InvalidRequestError(
            f"tokens must hold at most {MAX_TOKENS} ids, got {len(tokens)}.", param="tokens"
        )
    return tokens
