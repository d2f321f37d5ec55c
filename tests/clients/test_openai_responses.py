"""The official Python SDK: the Responses API, where the server has it."""

from __future__ import annotations

from typing import Any

import openai
import pytest

ROUTE = "/v1/responses"
pytestmark = pytest.mark.usefixtures("needs_route")
QUESTION = "What is the capital of France? Answer in one word."
GREEDY: dict[str, Any] = {"model": "smol", "temperature": 0, "max_output_tokens": 16}
ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


def _say(client: openai.OpenAI, given: Any, **more: Any) -> Any:
    return client.responses.create(input=given, **{**GREEDY, **more})


def test_text_in_and_out(client: openai.OpenAI) -> None:
    answer = _say(client, QUESTION, instructions="Answer in one sentence.")
    assert (answer.object, answer.status in ("completed", "incomplete")) == ("response", True)
    assert answer.id.startswith("resp_")
    assert "Paris" in answer.output_text
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert 0 < answer.usage.output_tokens <= 16


def test_items_are_a_conversation(client: openai.OpenAI) -> None:
    items = [
        {"role": "system", "content": "Answer in one sentence."},
        {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
    ]
    as_text = _say(client, QUESTION, instructions="Answer in one sentence.")
    assert _say(client, items).output_text == as_text.output_text


def test_too_few_tokens_are_an_incomplete_answer(client: openai.OpenAI) -> None:
    answer = _say(client, QUESTION, max_output_tokens=2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 2


def test_events_come_in_order(client: openai.OpenAI) -> None:
    whole = _say(client, QUESTION)
    events = list(client.responses.create(input=QUESTION, stream=True, **GREEDY))
    kinds = [event.type for event in events]
    assert list(dict.fromkeys(kinds)) == [*ORDER, f"response.{whole.status}"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    last: Any = events[-1]
    assert "".join(deltas) == whole.output_text == last.response.output_text
    assert last.response.usage.output_tokens == whole.usage.output_tokens


def test_the_streaming_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(input=QUESTION, **GREEDY) as stream:
        said = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.output_text == said == _say(client, QUESTION).output_text


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    first = _say(client, "My name is Ada.")
    second = _say(client, "What is my name?", previous_response_id=first.id)
    items = [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "What is my name?"},
    ]
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.output_text == _say(client, items).output_text


def test_a_response_is_kept_and_deleted(client: openai.OpenAI) -> None:
    answer = _say(client, QUESTION)
    assert client.responses.retrieve(answer.id).output_text == answer.output_text
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_what_is_not_stored_is_not_found(client: openai.OpenAI) -> None:
    answer = _say(client, QUESTION, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    with pytest.raises((openai.NotFoundError, openai.BadRequestError)):
        _say(client, QUESTION, previous_response_id="resp_of_nobody")


def test_wrong_fields_are_named(client: openai.OpenAI) -> None:
    for fields, param in (({"temperature": 3}, "temperature"), ({"top_p": 0}, "top_p")):
        with pytest.raises(openai.BadRequestError) as caught:
            _say(client, QUESTION, **fields)
        assert caught.value.param == param
    with pytest.raises(openai.NotFoundError):
        _say(client, QUESTION, model="no-such")
