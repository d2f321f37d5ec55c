"""Text of one sequence, token by token.

Owns the bytes that do not yet make a character. Must not know stop strings, requests or why tokens come.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


class Detokenizer:
    """Turns token ids into text as they come; the deltas joined equal :meth:`Tokenizer.decode` of all.

    A delta never ends inside a character: bytes that may still become one (at most three) wait for the
    next token, bytes that no longer can are marked U+FFFD at once. Costs one table look-up and one
    UTF-8 decoding of the delta's own bytes, whatever came before.

    Args:
        tokenizer: whose tokens come.
        skip_special_tokens: leave special tokens out of the text.
        keep_leading_space: keep the space that SentencePiece tokenizers drop at the start of a text,
            for text that continues other text.
    """

    __slots__ = ("_errors", "_pending", "_pieces", "_strips")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        keep_leading_space: bool = False,
    ) -> None:
        self._pieces = tokenizer.pieces(skip_special_tokens)
        self._errors = tokenizer.text_rule.errors
        self._strips = tokenizer.text_rule.strips_leading_space and not keep_leading_space
        self._pending = b""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        if len(token_ids) == 1:
            return self._decode(self._pieces[token_ids[0]])
        pieces = self._pieces
        return self._decode(b"".join([pieces[token_id] for token_id in token_ids]))

    def push_one(self, token_id: int) -> str:
        """``push([token_id])``, a little faster."""
        return self._decode(self._pieces[token_id])

    @property
    def is_inside_character(self) -> bool:
        """Whether bytes wait for the rest of their character."""
        return bool(self._pending)

    def finish(self) -> str:
        """The rest: bytes that wait for a continuation which will not come become U+FFFD."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool = False) -> str:
        if self._pending:
            data = self._pending + data
        text, num_used = utf_8_decode(data, self._errors, final)
        self._pending = data[num_used:]
        if self._strips and text:
            self._strips = False
            return text.removeprefix(" ")
        return text
