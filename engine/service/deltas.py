"""Deltas of a sequence, one put behind the other."""

from __future__ import annotations

from typing import TypeVar

from ..api import CompletionOutput

Item = TypeVar("Item")


def append_delta(into: CompletionOutput, delta: CompletionOutput) -> None:
    """Let ``into`` end as ``delta`` does. Its cumulative log-probability is the caller's to set."""
    into.text += delta.text
    into.token_ids += delta.token_ids
    into.logprobs = _extended(into.logprobs, delta.logprobs)
    into.text_offsets = _extended(into.text_offsets, delta.text_offsets)
    into.num_cut_tokens = delta.num_cut_tokens
    into.finish_reason, into.stop_reason = delta.finish_reason, delta.stop_reason


def _extended(known: list[Item] | None, more: list[Item] | None) -> list[Item] | None:
    """In place where there is a list: a copy for each of many tokens would add up."""
    if known is None or more is None:
        return known if more is None else [*more]
    known += more
    return known
