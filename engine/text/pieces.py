"""The bytes that each token stands for, and how they become text.

Owns the decoding half of a tokenizer: every supported decoder is a table of bytes per token, one rule
for bytes that are no UTF-8, and whether a leading space falls away. So decoding is exact, local and
cheap, whole or in pieces. Must not know sequences, stop strings or how text is split into tokens.
"""

from __future__ import annotations

import codecs
import json
import re
from dataclasses import dataclass
from typing import Any

import tokenizers

from ..errors import CheckpointError

REPLACEMENT = "\ufffd"
METASPACE = "▁"
REPLACE_EACH_BYTE = "octavo-replace-each-byte"
"""Codec error handler: one U+FFFD per byte, as SentencePiece marks what byte tokens leave broken."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(REPLACE_EACH_BYTE, _replace_each_byte)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself if it prints, else the next free above 255."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in sorted(printable)}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_alphabet()


@dataclass(frozen=True)
class TextRule:
    """How tokens become text, read from a tokenizer's decoder.

    Three kinds exist: byte-level BPE (each character of a token is a byte), SentencePiece
    (replacements such as "▁" → " ", byte tokens such as ``<0x0A>``), and none (words joined by spaces).
    """

    is_byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    has_byte_tokens: bool = False
    prefix: str = ""
    strips_leading_space: bool = False

    @property
    def errors(self) -> str:
        """Codec error handler for bytes that are no UTF-8."""
        return REPLACE_EACH_BYTE if self.has_byte_tokens else "replace"

    def piece(self, token: str) -> bytes:
        """The bytes of an ordinary token."""
        if self.is_byte_level:
            try:
                return bytes([BYTE_OF_CHAR[char] for char in token])
            except KeyError:
                return token.encode()
        match = _BYTE_TOKEN.fullmatch(token) if self.has_byte_tokens else None
        if match:
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return (self.prefix + token).encode()


def read_text_rule(backend: tokenizers.Tokenizer, origin: str) -> TextRule:
    """The rule of a tokenizer's decoder.

    Raises:
        CheckpointError: a decoder of a kind that octavo does not know; named.
    """
    if backend.decoder is None:
        return TextRule(prefix=" ", strips_leading_space=True)
    state = json.loads(backend.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    if [part["type"] for part in parts if part["type"] != "Fuse"] == ["ByteLevel"]:
        return TextRule(is_byte_level=True)
    return _read_sentencepiece_rule(parts, origin)


def _read_sentencepiece_rule(parts: list[dict[str, Any]], origin: str) -> TextRule:
    """Replacements, byte fallback, fusion, then at most one leading space stripped: in that order."""
    replacements: list[tuple[str, str]] = []
    kinds = []
    for part in parts:
        kinds.append(part["type"])
        if part["type"] == "Replace" and "String" in part["pattern"]:
            replacements.append((part["pattern"]["String"], part["content"]))
        elif part["type"] == "Strip":
            is_usual = part["content"] == " " and part["start"] == 1 and part["stop"] == 0
            if not is_usual or "Fuse" not in kinds:
                _refuse_decoder(kinds, origin)
        elif part["type"] not in ("ByteFallback", "Fuse"):
            _refuse_decoder(kinds, origin)
    order = ["Replace"] * len(replacements) + ["ByteFallback", "Fuse", "Strip"]
    if kinds != [kind for kind in order if kind in kinds]:
        _refuse_decoder(kinds, origin)
    return TextRule(
        replacements=tuple(replacements),
        has_byte_tokens="ByteFallback" in kinds,
        strips_leading_space="Strip" in kinds,
    )


def _refuse_decoder(kinds: list[str], origin: str) -> None:
    raise CheckpointError(
        f"{origin} has a decoder of the kind {', '.join(kinds)}; octavo knows ByteLevel, and "
        "SentencePiece's Replace, ByteFallback, Fuse, Strip."
    )


class Pieces(dict[int, bytes]):
    """Bytes of every token id, each worked out when first asked for.

    Ids without a token have no bytes. Special tokens give their literal text, or nothing if skipped.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, rule: TextRule, *, skip_special_tokens: bool
    ) -> None:
        super().__init__()
        self._backend = backend
        self._rule = rule
        self._added = backend.get_added_tokens_decoder()
        self._skips = skip_special_tokens

    def __missing__(self, token_id: int) -> bytes:
        if token_id < 0:
            return b""
        added, token = self._added.get(token_id), self._backend.id_to_token(token_id)
        if added is not None and (added.special or self._rule.is_byte_level):
            piece = (
                b""
                if added.special and self._skips
                else (self._rule.prefix + added.content).encode()
            )
        else:
            piece = b"" if token is None else self._rule.piece(token)
        self[token_id] = piece
        return piece
