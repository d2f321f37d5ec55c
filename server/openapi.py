"""The OpenAPI document: what FastAPI finds in the routes, with answers, examples and errors added.

A route is described by one entry of :data:`ROUTES`; a test keeps them equal to the application's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI

from . import responses_examples
from .errors import Failure
from .openapi_bodies import describe_body

_JSON, _SSE = "application/json", "text/event-stream"
_HI = [{"role": "user", "content": "What is the capital of France?"}]
_ASKED = (400, 401, 404, 413, 415, 429, 500, 503)  # of routes with a body
_PLAIN = (401,)


@dataclass(frozen=True)
class Described:
    """What the document adds to a route.

    Attributes:
        answer: An example of the 200.
        bodies: Named examples of the request.
        events: An example of a streamed 200.
        statuses: Of errors.
        media_type: Of ``answer``.
    """

    answer: Any
    bodies: Mapping[str, Any] = field(default_factory=dict)
    events: str | None = None
    statuses: tuple[int, ...] = _PLAIN
    media_type: str = _JSON


_USAGE = {
    "prompt_tokens": 4,
    "completion_tokens": 2,
    "total_tokens": 6,
    "prompt_tokens_details": {"cached_tokens": 0},
}
_CARD = {
    "id": "SmolLM2-135M-Instruct",
    "object": "model",
    "created": 1767225600,
    "owned_by": "octavo",
    "root": "SmolLM2-135M-Instruct",
    "parent": None,
    "max_model_len": 8192,
    "default_sampling_params": {},
}
_RENDERED = {
    "request_id": "7d0c-1f3a5b7c-0",
    "model": "SmolLM2-135M-Instruct",
    "token_ids": [19556, 905],
    "sampling_params": {"n": 1, "temperature": 0.0, "max_tokens": 16},
    "stream": False,
    "stream_options": None,
    "cache_salt": None,
    "priority": 0,
}
_COMPLETIONS = {
    "a text": {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0},
    "several prompts": {"prompt": ["Hello", "Good morning"], "max_tokens": 8, "n": 2, "seed": 7},
    "a stream": {
        "prompt": "Once upon a time",
        "stream": True,
        "stream_options": {"include_usage": True},
    },
}
_CHATS = {
    "a question": {"messages": _HI, "max_completion_tokens": 32},
    "a stream": {"messages": [{"role": "system", "content": "Be brief."}, *_HI], "stream": True},
}

ROUTES: dict[tuple[str, str], Described] = {
    ("post", "/v1/completions"): Described(
        {
            "id": "cmpl-7d0c",
            "object": "text_completion",
            "created": 1767225600,
            "model": "SmolLM2-135M-Instruct",
            "choices": [
                {
                    "index": 0,
                    "text": " there was",
                    "logprobs": None,
                    "finish_reason": "length",
                    "stop_reason": None,
                }
            ],
            "usage": _USAGE,
        },
        _COMPLETIONS,
        'data: {"id":"cmpl-7d0c","object":"text_completion","created":1767225600,'
        '"model":"SmolLM2-135M-Instruct","choices":[{"index":0,"text":" there","logprobs":null,'
        '"finish_reason":null,"stop_reason":null}]}\n\ndata: [DONE]\n\n',
        _ASKED,
    ),
    ("post", "/v1/chat/completions"): Described(
        {
            "id": "chatcmpl-7d0c",
            "object": "chat.completion",
            "created": 1767225600,
            "model": "SmolLM2-135M-Instruct",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "Paris.", "refusal": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                    "stop_reason": None,
                }
            ],
            "usage": _USAGE,
        },
        _CHATS,
        'data: {"id":"chatcmpl-7d0c","object":"chat.completion.chunk","created":1767225600,'
        '"model":"SmolLM2-135M-Instruct","choices":[{"index":0,"delta":{"content":"Paris"},'
        '"logprobs":null,"finish_reason":null}]}\n\ndata: [DONE]\n\n',
        _ASKED,
    ),
    ("post", "/v1/completions/render"): Described([_RENDERED], _COMPLETIONS, statuses=_ASKED),
    ("post", "/v1/chat/completions/render"): Described(_RENDERED, _CHATS, statuses=_ASKED),
    ("post", "/v1/responses"): Described(
        responses_examples.RESPONSE,
        responses_examples.BODIES,
        responses_examples.EVENTS,
        _ASKED,
    ),
    ("get", "/v1/responses/{response_id}"): Described(
        responses_examples.RESPONSE, events=responses_examples.EVENTS, statuses=(400, 401, 404)
    ),
    ("delete", "/v1/responses/{response_id}"): Described(
        responses_examples.DELETED, statuses=(401, 404)
    ),
    ("post", "/v1/responses/{response_id}/cancel"): Described(
        responses_examples.RESPONSE, statuses=(400, 401, 404)
    ),
    ("get", "/v1/responses/{response_id}/input_items"): Described(
        responses_examples.INPUT_ITEMS, statuses=(400, 401, 404)
    ),
    ("post", "/v1/embeddings"): Described(
        {
            "id": "embd-7d0c",
            "object": "list",
            "created": 1767225600,
            "model": "SmolLM2-135M-Instruct",
            "data": [{"index": 0, "object": "embedding", "embedding": [0.6, -0.8]}],
            "usage": {**_USAGE, "completion_tokens": 0, "total_tokens": 4},
        },
        {
            "a text": {"input": "The food was delicious."},
            "several texts": {"input": ["Hello", "Good morning"], "dimensions": 256},
            "token ids": {"input": [17, 17], "pooling_type": "mean"},
        },
        statuses=_ASKED,
    ),
    ("post", "/tokenize"): Described(
        {
            "count": 2,
            "max_model_len": 8192,
            "tokens": [19556, 905],
            "token_strs": ["Hello", "Ġworld"],
        },
        {
            "a text": {"prompt": "Hello world", "return_token_strs": True},
            "a chat": {"messages": _HI},
        },
        statuses=_ASKED,
    ),
    ("post", "/detokenize"): Described(
        {"prompt": "!!"}, {"token ids": {"tokens": [17, 17]}}, statuses=_ASKED
    ),
    ("get", "/tokenizer_info"): Described(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 8192,
            "vocab_size": 49152,
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "special_tokens": {"<|im_start|>": 1, "<|im_end|>": 2},
            "chat_template": "{% for message in messages %}...",
        },
        statuses=(401, 503),
    ),
    ("get", "/v1/models"): Described({"object": "list", "data": [_CARD]}),
    ("get", "/v1/models/{model_id}"): Described(_CARD, statuses=(401, 404)),
    ("get", "/health"): Described({"status": "ok"}, statuses=(503,)),
    ("get", "/ping"): Described({"status": "ok"}, statuses=(503,)),
    ("get", "/ready"): Described({"status": "ready"}, statuses=(503,)),
    ("get", "/startup"): Described(
        {"status": "started", "stage": "ready", "percent": 100}, statuses=(503,)
    ),
    ("get", "/load"): Described({"server_load": 3}, statuses=()),
    ("get", "/version"): Described({"version": "1.0.0"}, statuses=()),
    ("get", "/metrics"): Described(
        'vllm:num_requests_running{model_name="m",engine="0"} 3.0\n',
        statuses=(),
        media_type="text/plain",
    ),
    ("get", "/debug/kv"): Described(
        {"num_blocks": 1, "block_size": 16, "blocks": [], "sequences": []}, statuses=(401, 503)
    ),
    ("get", "/debug/steps"): Described({"steps": []}, statuses=(401,)),
    ("post", "/reset_prefix_cache"): Described({"success": True}, statuses=(401, 503)),
}

_ERRORS = {
    400: ("A field is wrong or not offered.", Failure(400, "n must be at least 1.", "n")),
    401: ("The key is missing or wrong.", Failure(401, "No key.", code="invalid_api_key")),
    404: ("No such model or response.", Failure(404, "No such model.", "model", "model_not_found")),
    413: ("The body is too large.", Failure(413, "Too large.", code="request_too_large")),
    415: ("The body is not JSON.", Failure(415, "Not JSON.", code="unsupported_media_type")),
    429: ("Too much is queued.", Failure(429, "Try again later.", code="overloaded")),
    500: ("The server failed.", Failure(500, "The server had an error.", code="internal_error")),
    503: ("Loading, stopping or dead.", Failure(503, "Loading.", code="engine_not_ready")),
}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def describe_routes(app: FastAPI) -> None:
    """Add :data:`ROUTES` to the document that ``app`` serves."""
    document = app.openapi()  # kept by the application, and served from then on
    components = document.setdefault("components", {}).setdefault("schemas", {})
    components["Error"] = _ERROR_SCHEMA
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            _describe(operation, ROUTES[method, path])
            for body in operation.get("requestBody", {}).get("content", {}).values():
                body["schema"] = describe_body(body["schema"], components)


def _describe(operation: dict[str, Any], described: Described) -> None:
    content: dict[str, Any] = {described.media_type: {"example": described.answer}}
    if described.events is not None:
        content[_SSE] = {"example": described.events}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    for status in described.statuses:
        responses[str(status)] = _error(status)
    operation["responses"] = responses
    if described.bodies:
        examples = {name: {"value": body} for name, body in described.bodies.items()}
        operation["requestBody"]["content"][_JSON]["examples"] = examples


def _error(status: int) -> dict[str, Any]:
    description, failure = _ERRORS[status]
    shape = {"$ref": "#/components/schemas/Error"}
    return {
        "description": description,
        "content": {_JSON: {"schema": shape, "example": failure.body()}},
    }
