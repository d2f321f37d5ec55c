"""The names under which a client sent what has others behind the routes, for refusals that come from there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ..engine.errors import InvalidRequestError
from .schemas import GenerationFields

LENGTH = "max_tokens"
_LENGTH = re.compile(rf"\b{LENGTH}\b")

SentNames = Mapping[str, str]
"""By the engine's name of a field the client's, where it is another."""


def sent_names(body: GenerationFields) -> SentNames:
    """``max_completion_tokens`` limits the answer where it is given."""
    return {} if body.max_completion_tokens is None else {LENGTH: "max_completion_tokens"}


@contextmanager
def named_as_sent(names: SentNames) -> Iterator[None]:
    """Let refusals name the fields that the client sent.

    Raises:
        InvalidRequestError: what is refused inside, of the same type.
    """
    try:
        yield
    except InvalidRequestError as error:
        if not names:
            raise
        param = names.get(error.param or "", error.param)
        message = _LENGTH.sub(names.get(LENGTH, LENGTH), error.message)
        raise type(error)(message, param=param, code=error.code) from None
