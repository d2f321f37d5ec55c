"""Text to token ids and back.

Owns the one tokenizer that the rest of octavo sees, whatever file it came from. Must not know requests,
sequences, blocks or transformers. Everything here may be called from any thread.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

import tokenizers

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.fields import check_id
from ..errors import CheckpointError, InvalidRequestError
from .gguf_tokenizer import build_gguf_tokenizer, special_token
from .hf_tokenizer import find_tokenizer_file, read_hf_tokenizer
from .pieces import Pieces, TextRule, read_text_rule

KEPT_WORDS = 2000


class Tokenizer:
    """A ``tokenizers.Tokenizer`` with octavo's rules for ids, bytes and beginnings of text.

    Args:
        backend: does the encoding.
        num_rows: rows of the model's embedding; ids at or above are not valid. ``None``: no limit.
        bos_token: text of the beginning token, if there is one.
        eos_token: text of the end token, if there is one.
        origin: where the tokenizer came from, for messages.

    Attributes:
        vocab_size: ids are below this: the model's rows, else the highest id plus one.
        special_token_ids: tokens that ``skip_special_tokens`` leaves out.
        max_token_chars: no token stands for more characters than this, so a text of n characters
            has at least ``n / max_token_chars`` tokens (spaces beside special tokens and characters
            that a normaliser composes apart).
        text_rule: how tokens become text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        num_rows: int | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        origin: str = "The tokenizer",
    ) -> None:
        vocab = backend.get_vocab(with_added_tokens=True)
        if not vocab:
            raise CheckpointError(f"{origin} has no tokens.")
        num_ids = max(vocab.values()) + 1
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.vocab_size = num_ids if num_rows is None else num_rows
        self.max_token_chars = max(map(len, vocab))
        self.text_rule: TextRule = read_text_rule(backend, origin)
        self.special_token_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        _bound_word_cache(backend)
        self._backend = backend
        self._bos_id = None if bos_token is None else backend.token_to_id(bos_token)
        self._exceeds_model = num_ids > self.vocab_size
        self._is_token = bytearray(num_ids)
        for token_id in vocab.values():
            self._is_token[token_id] = 1
        self._skipping = Pieces(backend, self.text_rule, skip_special_tokens=True)
        self._literal = Pieces(backend, self.text_rule, skip_special_tokens=False)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Releases the GIL while it works.

        Special tokens that are written out in the text become these tokens, as the tokenizer does it by
        default.

        Args:
            text: any text; the empty one may have no tokens.
            add_special_tokens: add what the tokenizer adds to a text, usually the beginning token. It
                is there once, even if the text brings it. False for rendered chats, which bring their own.

        Raises:
            InvalidRequestError: the text holds half of a surrogate pair, or a token that the model lacks.
        """
        try:
            batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise InvalidRequestError(
                "The text is not valid Unicode: it holds half of a surrogate pair.", param="prompt"
            ) from error
        token_ids: list[int] = batch[0].ids
        if (
            add_special_tokens
            and len(token_ids) > 1
            and token_ids[0] == token_ids[1] == self._bos_id
        ):
            del token_ids[0]
        if self._exceeds_model:
            self._check_in_model(token_ids)
        return token_ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of these tokens.

        Bytes that make no character become U+FFFD: one for each longest broken character in byte-level
        tokenizers (Unicode's recommendation), one a byte in SentencePiece ones. Ids without a token
        have no text.
        """
        pieces = self.pieces(skip_special_tokens)
        data = b"".join([pieces[token_id] for token_id in token_ids])
        text, _ = utf_8_decode(data, self.text_rule.errors, True)
        return text.removeprefix(" ") if self.text_rule.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds inside a text; special tokens give their literal text."""
        return self._literal[token_id]

    def token_text(self, token_id: int) -> str:
        """:meth:`token_bytes` as text, U+FFFD where they are no whole characters."""
        return utf_8_decode(self._literal[token_id], self.text_rule.errors, True)[0]

    def vocabulary_entries(self, token_ids: Sequence[int]) -> list[str]:
        """How the vocabulary writes these tokens: ``Ġworld`` in byte-level ones; empty without one."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def pieces(self, skip_special_tokens: bool) -> Pieces:
        """Bytes by token id."""
        return self._skipping if skip_special_tokens else self._literal

    def is_valid_id(self, token_id: int) -> bool:
        """Whether the id has a token and the model has a row for it."""
        if not 0 <= token_id < self.vocab_size or token_id >= len(self._is_token):
            return False
        return bool(self._is_token[token_id])

    def first_invalid_id(self, token_ids: Sequence[int]) -> int | None:
        """The first of these ids that is not valid."""
        return next((token_id for token_id in token_ids if not self.is_valid_id(token_id)), None)

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token that is written like this, if there is one.

        A stop string that equals a special token never shows up in text without special tokens; its
        id can stop the sequence instead.
        """
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self.special_token_ids else None

    def _check_in_model(self, token_ids: list[int]) -> None:
        for token_id in token_ids:
            if token_id >= self.vocab_size:
                token = self.token_text(token_id)
                raise InvalidRequestError(
                    f"The text holds the token {token!r} ({token_id}), but the model has only "
                    f"{self.vocab_size} tokens.",
                    param="prompt",
                )


def _bound_word_cache(backend: tokenizers.Tokenizer) -> None:
    """Keep the tokens of fewer words: ``tokenizers`` keeps those of 10,000 in each thread, 2 KB each if they are odd.

    Twenty megabytes a thread that fill for hours look like a leak. Text with more words than the cache took 8% longer.
    """
    resize = getattr(backend.model, "_resize_cache", None)  # only models with a cache have it
    if resize is not None:
        resize(KEPT_WORDS)


def load_tokenizer(checkpoint: Checkpoint, tokenizer_path: str | None = None) -> Tokenizer:
    """The tokenizer of a checkpoint, or another for it.

    Args:
        checkpoint: the model; its ``spec.vocab_size`` limits the ids.
        tokenizer_path: a folder with ``tokenizer.json``, or that file (``--tokenizer``).

    Raises:
        CheckpointError: there is no tokenizer, none that octavo can use, or its beginning or end token is
            outside the model's vocabulary.
    """
    num_rows = checkpoint.spec.vocab_size
    if tokenizer_path is None and checkpoint.gguf is not None:
        metadata, origin = checkpoint.gguf.metadata, str(checkpoint.path)
        return Tokenizer(
            build_gguf_tokenizer(metadata, origin),
            num_rows=num_rows,
            bos_token=special_token(metadata, "bos", origin),
            eos_token=special_token(metadata, "eos", origin),
            origin=origin,
        )
    file = find_tokenizer_file(tokenizer_path or checkpoint.tokenizer_path or checkpoint.path)
    backend, bos_token, eos_token = read_hf_tokenizer(file)
    for name, text in (("bos_token", bos_token), ("eos_token", eos_token)):
        if text is not None and (token_id := backend.token_to_id(text)) is not None:
            check_id(token_id, f"{file}: {name} {text!r}", num_rows)
    return Tokenizer(
        backend, num_rows=num_rows, bos_token=bos_token, eos_token=eos_token, origin=str(file)
    )
