"""Examples of the Responses API for the OpenAPI document."""

from __future__ import annotations

from typing import Any

BODIES: dict[str, Any] = {
    "a text": {"input": "What is the capital of France?", "max_output_tokens": 32},
    "messages": {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi."},
            {"role": "user", "content": [{"type": "input_text", "text": "Where is Paris?"}]},
        ],
        "temperature": 0,
    },
    "a stream": {"input": "Count to three.", "stream": True, "store": False},
    "in the background": {"input": "Tell me a long story.", "background": True},
}
MESSAGE: dict[str, Any] = {
    "id": "msg_6f1c",
    "type": "message",
    "status": "completed",
    "role": "assistant",
    "content": [{"type": "output_text", "annotations": [], "logprobs": [], "text": "Paris."}],
}
INPUT_ITEM: dict[str, Any] = {
    "id": "msg_03ab",
    "type": "message",
    "status": "completed",
    "role": "user",
    "content": [{"type": "input_text", "text": "What is the capital of France?"}],
}
RESPONSE: dict[str, Any] = {
    "id": "resp_7d0c",
    "object": "response",
    "created_at": 1767225600,
    "completed_at": 1767225601,
    "status": "completed",
    "error": None,
    "incomplete_details": None,
    "output": [MESSAGE],
    "usage": {
        "input_tokens": 37,
        "input_tokens_details": {"cached_tokens": 32, "cache_write_tokens": 5},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 40,
    },
    "background": False,
    "instructions": None,
    "max_output_tokens": 32,
    "max_tool_calls": None,
    "metadata": {},
    "model": "SmolLM2-135M-Instruct",
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
DELETED: dict[str, Any] = {"id": "resp_7d0c", "object": "response", "deleted": True}
INPUT_ITEMS: dict[str, Any] = {
    "object": "list",
    "data": [INPUT_ITEM],
    "first_id": "msg_03ab",
    "last_id": "msg_03ab",
    "has_more": False,
}
EVENTS = (
    "event: response.output_text.delta\n"
    'data: {"type":"response.output_text.delta","sequence_number":4,"item_id":"msg_6f1c",'
    '"output_index":0,"content_index":0,"delta":"Paris","logprobs":[]}\n\n'
)
