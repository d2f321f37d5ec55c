"""A tokenizer out of a GGUF file's metadata.

Owns the meaning of the ``tokenizer.ggml.*`` keys: byte-level BPE (model "gpt2") with its splitting rule,
and SentencePiece BPE (model "llama"). Must not know the file's binary format or its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ..errors import CheckpointError
from .backend import add_ends, backend_errors
from .pieces import METASPACE
from .split_rules import SplitRule, find_split_rule

_KEY = "tokenizer.ggml."
_KEEPS_SPACES = frozenset(("<unk>", "<s>", "<|endoftext|>"))
"""The tokens of Phi-3 that leave the white space after them alone."""


class TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build_gguf_tokenizer(metadata: Mapping[str, Any], origin: str) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes.

    Follows llama.cpp: ``tokenizer.ggml.pre`` decides how byte-level BPE splits text;
    ``add_bos_token`` whether a text starts with the beginning token (by default for SentencePiece and
    for the rules that say so); ``add_eos_token`` whether it ends with the end token; ``add_space_prefix``
    whether SentencePiece puts a space before a text.

    Args:
        metadata: the file's key-value pairs.
        origin: the file's name, for messages.

    Raises:
        CheckpointError: a key is missing or its value is not supported; named.
    """
    tokens = gguf_tokens(metadata, origin)
    types = _token_types(metadata, len(tokens), origin)
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(t for token_id, t in enumerate(tokens) if vocab[t] != token_id)
        raise CheckpointError(f"{origin} is damaged: the token {twice!r} occurs twice.")
    kind = str(_get(metadata, "model", origin))
    with backend_errors(f"{origin}: the tokenizer"):
        if kind == "gpt2":
            rule = find_split_rule(metadata.get(_KEY + "pre"), origin)
            tokenizer = _byte_level_bpe(vocab, _texts(metadata, "merges", origin), rule)
            adds_bos = rule.add_bos
        elif kind == "llama":
            tokenizer, adds_bos = _sentencepiece_bpe(vocab, types, metadata, origin), True
        else:
            raise CheckpointError(
                f"{origin} has a tokenizer of the kind {kind!r}; octavo knows 'gpt2' and 'llama'."
            )
        strips = kind == "llama" and _is_phi3(metadata)
        _add_matched_tokens(tokenizer, tokens, types, strips)
        begins = _flag(metadata, "add_bos_token", adds_bos, origin)
        ends = _flag(metadata, "add_eos_token", False, origin)
        add_ends(
            tokenizer,
            special_token(metadata, "bos", origin) if begins else None,
            special_token(metadata, "eos", origin) if ends else None,
        )
    return tokenizer


def gguf_tokens(metadata: Mapping[str, Any], origin: str) -> list[str]:
    """The vocabulary in the order of its ids."""
    return _texts(metadata, "tokens", origin)


def special_token(metadata: Mapping[str, Any], name: str, origin: str) -> str | None:
    """Text of the ``bos``, ``eos`` or ``unknown`` token; ``None`` if the file names none."""
    tokens = gguf_tokens(metadata, origin)
    token_id = metadata.get(f"{_KEY}{name}_token_id")
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise CheckpointError(
            f"{origin} is damaged: {_KEY}{name}_token_id is {token_id!r}, of {len(tokens)} tokens."
        )
    return tokens[token_id]


def _get(metadata: Mapping[str, Any], name: str, origin: str) -> Any:
    if _KEY + name not in metadata:
        raise CheckpointError(f"{origin} has no {_KEY}{name}, so it has no usable tokenizer.")
    return metadata[_KEY + name]


def _texts(metadata: Mapping[str, Any], name: str, origin: str) -> list[str]:
    texts = _get(metadata, name, origin)
    if not isinstance(texts, list):
        raise CheckpointError(f"{origin} is damaged: {_KEY}{name} is no list of strings.")
    return texts


def _flag(metadata: Mapping[str, Any], name: str, default: bool, origin: str) -> bool:
    value = metadata.get(_KEY + name, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"{origin} is damaged: {_KEY}{name} is neither true nor false.")
    return value


def _numbers(metadata: Mapping[str, Any], name: str, num_tokens: int, origin: str) -> NDArray[Any]:
    """One number a token."""
    numbers = np.asarray(_get(metadata, name, origin))
    if numbers.ndim != 1 or numbers.dtype.kind not in "iuf" or np.isnan(numbers).any():
        raise CheckpointError(f"{origin} is damaged: {_KEY}{name} is no list of numbers.")
    if len(numbers) != num_tokens:
        raise CheckpointError(
            f"{origin} is damaged: {_KEY}{name} has {len(numbers)} entries for {num_tokens} tokens."
        )
    return numbers


def _token_types(metadata: Mapping[str, Any], num_tokens: int, origin: str) -> list[int]:
    if _KEY + "token_type" not in metadata:
        return [TokenType.NORMAL] * num_tokens
    types: list[int] = _numbers(metadata, "token_type", num_tokens, origin).tolist()
    return types


def _byte_level_bpe(vocab: dict[str, int], merges: Sequence[str], rule: SplitRule) -> Tokenizer:
    pairs = [_split_merge(merge) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab, pairs, ignore_merges=rule.ignore_merges))
    splits: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.patterns
    ]
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece_bpe(
    vocab: dict[str, int], types: list[int], metadata: Mapping[str, Any], origin: str
) -> Tokenizer:
    scores = _numbers(metadata, "scores", len(vocab), origin).astype(np.float32)
    has_prefix = _flag(metadata, "add_space_prefix", True, origin)
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            _merges_from_scores(list(vocab), types, scores),
            unk_token=special_token(metadata, "unknown", origin) or _unknown_token(vocab, types),
            fuse_unk=True,
            byte_fallback=TokenType.BYTE in types,
        )
    )
    prefix: list[Any] = [normalizers.Prepend(METASPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", METASPACE)])
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(METASPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _unknown_token(vocab: dict[str, int], types: list[int]) -> str | None:
    return next((token for token in vocab if types[vocab[token]] == TokenType.UNKNOWN), None)


def _merges_from_scores(
    tokens: list[str], types: list[int], scores: NDArray[np.float32]
) -> list[tuple[str, str]]:
    """The merges that SentencePiece makes: the best-scored pair of neighbours that is a token.

    Every way to cut a token in two tokens is a merge, ranked by the whole's score (Kudo & Richardson,
    "SentencePiece", EMNLP 2018). Tokens of equal score are taken in the order of their ids. A large
    vocabulary has more than a million cuts, which is why the loop is tight.
    """
    order = [i for i in np.argsort(-scores, kind="stable").tolist() if types[i] == TokenType.NORMAL]
    ranked = dict.fromkeys(tokens[token_id] for token_id in order)
    return [
        (left, right)
        for token in ranked
        for at in range(1, len(token))
        if (left := token[:at]) in ranked and (right := token[at:]) in ranked
    ]


def _add_matched_tokens(
    tokenizer: Tokenizer, tokens: list[str], types: list[int], strips: bool
) -> None:
    """Tokens that are found in the text as they stand, before it is split.

    Args:
        strips: whether they swallow the white space that follows.
    """
    for kinds, is_special in (
        ((TokenType.CONTROL, TokenType.UNKNOWN), True),
        ((TokenType.USER_DEFINED,), False),
    ):
        matched = [
            AddedToken(
                token,
                special=is_special,
                normalized=False,
                rstrip=strips and token not in _KEEPS_SPACES,
            )
            for token, kind in zip(tokens, types, strict=True)
            if kind in kinds
        ]
        tokenizer.add_special_tokens(matched) if is_special else tokenizer.add_tokens(matched)


def _is_phi3(metadata: Mapping[str, Any]) -> bool:
    """Whether special tokens swallow white space, which GGUF has no key for: as llama.cpp, by name."""
    name = str(metadata.get("general.name", "")).lower()
    return metadata.get("general.architecture") == "phi3" or "phi3" in name or "phi-3" in name
