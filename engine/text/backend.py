"""What every way to build a ``tokenizers.Tokenizer`` shares.

Owns the translation of that library's errors and the step that adds the beginning token. Must not know
file formats.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tokenizers import Tokenizer, processors

from ..errors import CheckpointError, OctavoError


@contextmanager
def backend_errors(what: str) -> Iterator[None]:
    """Turn what the library raises, which is nothing narrower than ``Exception``, into a sentence."""
    try:
        yield
    except OctavoError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise CheckpointError(f"{what} cannot be used: {reason}.") from error


def add_bos(tokenizer: Tokenizer, bos: str) -> None:
    """Let every text begin with this token, once."""
    add_ends(tokenizer, bos, None)


def add_ends(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Let every text begin and end with these tokens, as far as there are any."""
    first, last = ([token] if token is not None else [] for token in (bos, eos))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", "$B", *last],
        special_tokens=[
            (token, tokenizer.token_to_id(token)) for token in dict.fromkeys(first + last)
        ],
    )


def add_nothing(tokenizer: Tokenizer) -> None:
    """Let no text get tokens of its own."""
    add_ends(tokenizer, None, None)
