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
    token_id = tokenizer.token_to_id(bos)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, token_id)]
    )


def add_nothing(tokenizer: Tokenizer) -> None:
    """Let no text get tokens of its own."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["$A"], pair=["$A", "$B"], special_tokens=[]
    )
