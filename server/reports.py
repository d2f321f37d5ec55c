"""What an answer tells of its tokens besides their text: log-probabilities in both of OpenAI's shapes, ids.

Owns the fields that ask for it and the shapes. Must not know how chunks and answers are put together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..engine.api import CompletionOutput, Logprob, RequestOutput
from ..engine.errors import InvalidRequestError
from .schemas import ChatCompletionRequest, CompletionRequest, GenerationFields

LEAST_LOGPROB = -9999.0
"""Stands for anything less likely, minus infinity among it, which JSON has no word for."""

Entry = dict[int, Logprob]


@dataclass(frozen=True)
class Report:
    """What a request asks for."""

    num_top: int | None = None  # alternatives of each token; None: no log-probabilities at all
    num_prompt_top: int | None = None  # likewise of the prompt's, as prompt_logprobs
    has_echo: bool = False  # the prompt is the first part of the answer
    has_token_ids: bool = False
    names_ids: bool = False  # tokens are written as token_id:N
    named: tuple[int, ...] = ()  # alternatives, in place of the most likely

    @cached_property
    def tells_tokens(self) -> bool:
        """Whether anything is told of the output's tokens."""
        return self.num_top is not None or self.has_token_ids

    @property
    def tells_prompt(self) -> bool:
        """Whether anything is told of the prompt."""
        return self.has_echo or self.has_token_ids or self.num_prompt_top is not None

    @property
    def num_scored_top(self) -> int | None:
        """Alternatives to compute for each prompt token; ``None``: its log-probability is not wanted."""
        wanted = [self.num_prompt_top, self.num_top if self.has_echo else None]
        known = [count for count in wanted if count is not None]
        return (-1 if -1 in known else max(known)) if known else None


def completion_report(body: CompletionRequest) -> Report:
    """What a completion asks for.

    Raises:
        InvalidRequestError: fields exclude each other; ``param`` names one.
    """
    _check_stream(body)
    named = _named(body)
    if body.echo and body.logprobs is not None and (named or body.use_beam_search):
        other = "logprob_token_ids" if named else "use_beam_search"
        raise InvalidRequestError(
            f"echo and {other} exclude each other where there are logprobs.", param="echo"
        )
    return Report(
        body.logprobs,
        body.prompt_logprobs,
        bool(body.echo),
        bool(body.return_token_ids),
        bool(body.return_tokens_as_token_ids),
        named,
    )


def chat_report(body: ChatCompletionRequest, max_logprobs: int) -> Report:
    """What a chat asks for.

    Args:
        max_logprobs: alternatives that may be asked for; -1: any number.

    Raises:
        InvalidRequestError: fields exclude each other, or too many alternatives; ``param`` names one.
    """
    _check_stream(body)
    return Report(
        num_alternatives(body.top_logprobs, max_logprobs, bool(body.logprobs), "logprobs=true"),
        body.prompt_logprobs,
        has_token_ids=bool(body.return_token_ids),
        names_ids=bool(body.return_tokens_as_token_ids),
        named=_named(body),
    )


def num_alternatives(
    top_logprobs: int | None, max_logprobs: int, is_wanted: bool, switch: str
) -> int | None:
    """Alternatives of each token; ``None`` if log-probabilities are not wanted.

    Args:
        top_logprobs: The field.
        max_logprobs: Alternatives that may be asked for; -1: any number.
        is_wanted: Whether there are to be log-probabilities.
        switch: What asks for them, as clients write it.

    Raises:
        InvalidRequestError: too many, or no log-probabilities to have them with.
    """
    count = top_logprobs or 0
    if count and not is_wanted:
        raise InvalidRequestError(f"top_logprobs needs {switch}.", param="top_logprobs")
    if max_logprobs != -1 and not 0 <= count <= max_logprobs:
        raise InvalidRequestError(
            f"top_logprobs must be 0 to {max_logprobs}, got {count}.", param="top_logprobs"
        )
    return count if is_wanted else None


def _named(body: CompletionRequest | ChatCompletionRequest) -> tuple[int, ...]:
    named = tuple(dict.fromkeys(body.logprob_token_ids or ()))
    if named and (body.logprobs is None or body.logprobs is False):
        raise InvalidRequestError("logprob_token_ids needs logprobs.", param="logprob_token_ids")
    return named


def _check_stream(body: GenerationFields) -> None:
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs needs stream=false.", param="prompt_logprobs")


NOTHING = Report()


@dataclass(slots=True)
class Tokens:
    """A run of tokens and what is known of them; the lists have one entry per token."""

    ids: list[int] = field(default_factory=list)
    entries: list[Entry | None] | None = None  # None: log-probabilities are not wanted
    offsets: list[int] = field(default_factory=list)  # into the choice's text
    first: bytes = b""  # the first token, where it has no log-probability to name it

    def extend(self, other: Tokens) -> None:
        self.ids += other.ids
        self.offsets += other.offsets
        if other.entries is not None:
            self.entries = [] if self.entries is None else self.entries
            self.entries += other.entries


def output_tokens(output: CompletionOutput, base: int) -> Tokens | None:
    """The tokens of a delta, without those of a stop string that was cut; ``None`` if there are none.

    Args:
        base: characters of the choice's text before the output's.
    """
    end = len(output.token_ids) - output.num_cut_tokens
    if end <= 0:
        return None
    offsets = [base + offset for offset in (output.text_offsets or [0] * end)[:end]]
    entries: list[Entry | None] | None = None
    if output.logprobs is not None:
        entries = [*output.logprobs[:end]]
    return Tokens(output.token_ids[:end], entries, offsets)


@dataclass(frozen=True)
class PromptReport:
    """What is known of a prompt."""

    text: str
    tokens: Tokens

    @classmethod
    def of(cls, output: RequestOutput) -> PromptReport:
        """What an output says of its prompt."""
        return cls(
            output.prompt or "",
            Tokens(
                output.prompt_token_ids,
                output.prompt_logprobs,
                output.prompt_text_offsets or [],
                output.first_prompt_token,
            ),
        )


def chat_logprobs(tokens: Tokens | None, report: Report) -> dict[str, Any] | None:
    """The ``logprobs`` of a chat's choice; ``None`` if they are not wanted or there is no token."""
    if report.num_top is None or tokens is None or tokens.entries is None:
        return None
    content = []
    for token_id, entry in zip(tokens.ids, tokens.entries, strict=True):
        if entry is not None:
            top = _alternative_ids(entry, report)
            one = _chat_token(token_id, entry[token_id], report)
            one["top_logprobs"] = [_chat_token(other, entry[other], report) for other in top]
            content.append(one)
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: Logprob, report: Report) -> dict[str, Any]:
    text = f"token_id:{token_id}" if report.names_ids else logprob.decoded_token
    return {"token": text, "logprob": _shown(logprob), "bytes": list(logprob.token_bytes)}


def completion_logprobs(tokens: Tokens | None, report: Report) -> dict[str, Any] | None:
    """The ``logprobs`` of a completion's choice; ``None`` if they are not wanted or there is no token.

    The first token of an echoed prompt has no log-probability: null.
    """
    if report.num_top is None or tokens is None or tokens.entries is None:
        return None
    pairs = list(zip(tokens.ids, tokens.entries, strict=True))
    return {
        "tokens": [
            _name(i, tokens.first if e is None else e[i].token_bytes, report) for i, e in pairs
        ],
        "token_logprobs": [None if entry is None else _shown(entry[i]) for i, entry in pairs],
        "top_logprobs": [None if e is None else _alternatives(i, e, report) for i, e in pairs],
        "text_offset": tokens.offsets,
    }


def _alternatives(token_id: int, entry: Entry, report: Report) -> dict[str, float]:
    """The most likely tokens and the token itself; of several with one name, the most likely."""
    likely = _alternative_ids(entry, report)
    found: dict[str, float] = {}
    for one in [*likely, *([] if token_id in likely else [token_id])]:
        found.setdefault(_name(one, entry[one].token_bytes, report), _shown(entry[one]))
    return found


def _name(token_id: int, data: bytes, report: Report) -> str:
    """A token as text; as OpenAI does it, ``bytes:\\xf0\\x9f`` where that is not whole characters."""
    if report.names_ids:
        return f"token_id:{token_id}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def prompt_logprobs(
    entries: Sequence[Entry | None] | None, report: Report
) -> list[dict[str, dict[str, Any]] | None] | None:
    """The value of ``prompt_logprobs``: per token null or ``{id: {logprob, rank, decoded_token}}``."""
    count = report.num_prompt_top
    if entries is None or count is None:
        return None
    return [None if entry is None else _by_id(entry, count) for entry in entries]


def _by_id(entry: Entry, count: int) -> dict[str, dict[str, Any]]:
    own, *_ = entry
    kept = dict.fromkeys([own, *_most_likely(entry, count)])
    return {
        str(token_id): {
            "logprob": _shown(entry[token_id]),
            "rank": entry[token_id].rank,
            "decoded_token": entry[token_id].decoded_token,
        }
        for token_id in kept
    }


def _alternative_ids(entry: Entry, report: Report) -> list[int]:
    if report.named:
        return _most_likely({i: entry[i] for i in report.named if i in entry}, -1)
    return _most_likely(entry, report.num_top or 0)


def _most_likely(entry: Entry, count: int) -> list[int]:
    """So many ids, most likely first; -1: all."""
    ordered = sorted(entry, key=lambda token_id: -entry[token_id].logprob)
    return ordered if count < 0 else ordered[:count]


def _shown(logprob: Logprob) -> float:
    return max(logprob.logprob, LEAST_LOGPROB)
