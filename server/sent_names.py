"""The name under which a client sent what has two names, for refusals that come from behind the routes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..engine.errors import InvalidRequestError
from .schemas import GenerationFields

LENGTH = "max_tokens"


def length_param(body: GenerationFields) -> str:
    """The field that limits the answer: ``max_completion_tokens`` where it is given."""
    return LENGTH if body.max_completion_tokens is None else "max_completion_tokens"


@contextmanager
def named_as_sent(name: str) -> Iterator[None]:
    """Let what is refused of ``max_tokens`` name the field that the client sent."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param != LENGTH or name == LENGTH:
            raise
        message = error.message.replace(LENGTH, name)
        raise InvalidRequestError(message, param=name, code=error.code) from None
