"""Which tokens a text holds: where each one's text begins, and when all of it has been given out.

Must not know how text is made of tokens, nor why it is held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..api import CompletionOutput, Logprob
from ..text.detokenizer import Detokenizer

Entry = dict[int, Logprob]


class _Token:
    """A token and its place in the text, in characters."""

    __slots__ = ("begin", "end", "logprobs", "token_id")

    def __init__(self, token_id: int, logprobs: Entry | None, begin: int) -> None:
        self.token_id = token_id
        self.logprobs = logprobs
        self.begin = begin
        self.end: int | None = None  # while its last bytes are no whole character


class TokenText:
    """The tokens of one sequence until their text is given out.

    Where the bytes of several tokens make one character, each of them has it as (part of) its text.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._tokens: deque[_Token] = deque()
        self._num_chars = 0  # made so far
        self._num_given = 0  # given out so far

    def push(self, token_ids: Sequence[int], logprobs: Sequence[Entry] | None) -> str:
        """The text that these tokens complete, and take note of where each has its part of it."""
        texts = []
        for index, token_id in enumerate(token_ids):
            self._tokens.append(
                _Token(token_id, logprobs[index] if logprobs else None, self._num_chars)
            )
            texts.append(self._made(self._detokenizer.push_one(token_id)))
        return "".join(texts)

    def push_silent(self, token_id: int, logprobs: Entry | None) -> None:
        """Take a token that has no text of its own, whatever its bytes are."""
        self._tokens.append(_Token(token_id, logprobs, self._num_chars))
        if not self._detokenizer.is_inside_character:
            self._made("")

    def finish(self) -> str:
        """The text of bytes whose continuation will not come."""
        return self._made(self._detokenizer.finish())

    def _made(self, text: str) -> str:
        """More text: its first character is the one that earlier tokens wait for."""
        if text or not self._detokenizer.is_inside_character:
            first_end = self._num_chars + min(1, len(text))
            self._num_chars += len(text)
            for token in reversed(self._tokens):
                if token.end is not None:
                    break
                token.end = first_end
            self._end_last()
        return text

    def _end_last(self) -> None:
        """The token that has just come ends with all of the text, or inside a character again."""
        if self._tokens:
            is_inside = self._detokenizer.is_inside_character
            self._tokens[-1].end = None if is_inside else self._num_chars

    def give(self, output: CompletionOutput, *, is_last: bool, is_cut: bool) -> None:
        """Put the tokens into ``output`` whose text ends with its text.

        Args:
            is_last: no text follows: the tokens left are given too.
            is_cut: the rest of the text was cut off. Tokens that lie wholly in it are counted.
        """
        self._num_given += len(output.text)
        output.token_ids, output.text_offsets = [], []
        output.logprobs = None
        while self._tokens and (is_last or self._is_given(self._tokens[0])):
            token = self._tokens.popleft()
            if is_cut and token.begin >= self._num_given and not self._is_given(token):
                output.num_cut_tokens += 1
            output.token_ids.append(token.token_id)
            output.text_offsets.append(token.begin)
            if token.logprobs is not None:
                output.logprobs = output.logprobs or []
                output.logprobs.append(token.logprobs)

    def _is_given(self, token: _Token) -> bool:
        return token.end is not None and token.end <= self._num_given


def text_offsets(detokenizer: Detokenizer, token_ids: Sequence[int], num_chars: int) -> list[int]:
    """Where each token's text begins, in characters of a text of ``num_chars``."""
    offsets, position = [], 0
    for token_id in token_ids:
        offsets.append(min(position, num_chars))
        position += len(detokenizer.push_one(token_id))
    return offsets
