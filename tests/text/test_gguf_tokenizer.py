from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex  # type: ignore[import-untyped]
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.engine.checkpoint.gguf_file import GGUFFile
from octavo.engine.errors import CheckpointError
from octavo.engine.text.gguf_tokenizer import build_gguf_tokenizer
from octavo.engine.text.pieces import BYTE_OF_CHAR, METASPACE
from octavo.engine.text.split_rules import SPLIT_RULES
from octavo.engine.text.tokenizer import Tokenizer

shared = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}

# What llama.cpp's rules say, written out once more and run by another engine.
GPT2 = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+"
    r"|\p{White_Space}+(?!\P{White_Space})"
)
LLAMA3 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\p{White_Space}\p{L}\p{N}]+[\r\n]*|\p{White_Space}*[\r\n]+"
    r"|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
    r"| ?[^\p{White_Space}\p{L}\p{N}]+[\r\n/]*|\p{White_Space}*[\r\n]+"
    r"|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+"
)
ENDINGS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDINGS}"
    r"|\p{N}{1,3}| ?[^\p{White_Space}\p{L}\p{N}]+[\r\n/]*|\p{White_Space}*[\r\n]+"
    r"|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+"
)
QWEN35 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\p{White_Space}\p{L}\p{M}\p{N}]+[\r\n]*|\p{White_Space}*[\r\n]+"
    r"|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+"
)
DEEPSEEK3 = [
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\p{White_Space}*[\r\n]+"
    r"|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+",
]
ORACLES = {
    "gpt-2": [GPT2],
    "olmo": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "starcoder": [r"\p{N}", GPT2],
    "refact": [r"\p{N}", GPT2],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"],
    "llama-bpe": [LLAMA3],
    "dbrx": [LLAMA3],
    "qwen2": [LLAMA3.replace("{1,3}", "")],
    "smaug-bpe": [LLAMA3],
    "tekken": [TEKKEN],
    "gpt-4o": [GPT4O],
    "qwen35": [QWEN35],
    "deepseek-v3": DEEPSEEK3,
}

texts = st.text(
    st.sampled_from("aebtsTHE'\u2019 \n\r\t\u00a0\u30000123½²x.,!-/<>$`é好🌶़\u0301ǅ")
    | st.characters(exclude_categories=("Cs", "Cn", "Co")),
    max_size=40,
)


def split(text: str, patterns: list[str]) -> list[str]:
    pieces = [text]
    for pattern in patterns:
        pieces = [part for piece in pieces for part in split_once(piece, pattern)]
    return pieces


def split_once(text: str, pattern: str) -> list[str]:
    """Matches, and what lies between them."""
    edges = {0, len(text)}
    for match in regex.finditer(pattern, text):
        edges |= set(match.span())
    ends = sorted(edges)
    return [text[start:end] for start, end in pairwise(ends)]


def merge_by_rank(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    parts = [CHAR_OF_BYTE[byte] for byte in word.encode()]
    while True:
        known = [(ranks[pair], at) for at, pair in enumerate(pairwise(parts)) if pair in ranks]
        if not known:
            return parts
        at = min(known)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def encode_slowly(metadata: dict[str, Any], patterns: list[str], text: str) -> list[int]:
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = metadata["tokenizer.ggml.merges"]
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    parts = [part for word in split(text, patterns) for part in merge_by_rank(word, ranks)]
    return [vocab[part] for part in parts if part in vocab]


@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "token_ids"),
    [
        ("", []),
        ("🌶", [10813, 230, 131]),
        ("Hello world", [19556, 905]),
        ("Paris Paris", [38634, 7042]),
        ("}", [109]),
        ("\n\n1.", [1116, 33, 30]),
        ("Hello world! 123", [19556, 905, 17, 216, 33, 34, 35]),
        ("Café déjà vu.", [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]),
        ("a<|im_end|>b", [81, 2, 82]),
    ],
)
def test_smollm_facts(smollm: Tokenizer, text: str, token_ids: list[int]) -> None:
    assert smollm.encode(text) == token_ids
    assert smollm.decode(token_ids, skip_special_tokens=False) == text


@pytest.mark.model
def test_smollm_vocabulary(smollm: Tokenizer) -> None:
    assert smollm.vocab_size == 49152
    assert smollm.special_token_ids == frozenset(range(17))
    assert (smollm.bos_token, smollm.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm.first_invalid_id(range(49152)) is None
    broken = [i for i in range(49152) if smollm.token_bytes(i) != smollm.token_text(i).encode()]
    assert len(broken) == 313
    assert smollm.token_bytes(10813) == b"\xf0\x9f"
    assert smollm.token_bytes(2) == b"<|im_end|>"


@pytest.mark.model
@shared
@given(text=texts)
def test_smollm_equals_the_slow_oracle(smollm: Tokenizer, oracle_inputs: Any, text: str) -> None:
    assert smollm.encode(text) == oracle_inputs(text)


@pytest.fixture(scope="session")
def oracle_inputs(embedded_checkpoint: Any) -> Any:
    metadata = embedded_checkpoint.gguf.metadata
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = metadata["tokenizer.ggml.merges"]
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}

    def encode(text: str) -> list[int]:
        words = split(text, ORACLES["smollm"])
        parts = [part for word in words for part in merge_by_rank(word, ranks)]
        return [vocab[part] for part in parts if part in vocab]

    return encode


@pytest.mark.parametrize("pre", sorted(ORACLES))
def test_every_rule_equals_its_slow_oracle(byte_level_metadata: dict[str, Any], pre: str) -> None:
    metadata = byte_level_metadata | {"tokenizer.ggml.pre": pre}
    has_whole_words = SPLIT_RULES[pre].ignore_merges
    tokenizer = Tokenizer(build_gguf_tokenizer(metadata, "tiny.gguf"))
    splits = tokenizer._backend.pre_tokenizer

    @settings(max_examples=60, deadline=None)
    @given(text=texts)
    def check(text: str) -> None:
        words = [
            "".join(CHAR_OF_BYTE[byte] for byte in word.encode())
            for word in split(text, ORACLES[pre])
        ]
        assert [word for word, _ in splits.pre_tokenize_str(text)] == words
        if not has_whole_words:
            assert tokenizer.encode(text) == encode_slowly(metadata, ORACLES[pre], text)
        assert tokenizer.decode(tokenizer.encode(text)) == text

    check()


def test_a_whole_word_beats_merges_where_the_rule_says_so(
    byte_level_metadata: dict[str, Any],
) -> None:
    tokens = [*byte_level_metadata["tokenizer.ggml.tokens"], "qzqz"]
    types = [*byte_level_metadata["tokenizer.ggml.token_type"], 1]
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    for pre, count in (("llama-bpe", 1), ("dbrx", 4)):
        metadata = byte_level_metadata | changes | {"tokenizer.ggml.pre": pre}
        assert len(build_gguf_tokenizer(metadata, "x").encode("qzqz").ids) == count


def test_every_known_rule_compiles(byte_level_metadata: dict[str, Any]) -> None:
    for pre in SPLIT_RULES:
        metadata = byte_level_metadata | {"tokenizer.ggml.pre": pre}
        tokenizer = Tokenizer(build_gguf_tokenizer(metadata, "x"))
        assert tokenizer.decode(tokenizer.encode("It's 12 o'clock.\n")) == "It's 12 o'clock.\n"


def merge_by_score(text: str, metadata: dict[str, Any]) -> list[int]:
    """SentencePiece's BPE: merge the best-scored pair of neighbours, the leftmost of equals."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scores = {
        token: score
        for token, kind, score in zip(tokens, types, metadata["tokenizer.ggml.scores"], strict=True)
        if kind == 1
    }
    parts = list(METASPACE + text.replace(" ", METASPACE)) if text else []
    while True:
        joined = [left + right for left, right in pairwise(parts)]
        best = [(-scores[part], at) for at, part in enumerate(joined) if part in scores]
        if not best:
            break
        at = min(best)[1]
        parts[at : at + 2] = [joined[at]]
    ids: list[int] = []
    for part in parts:
        ids += [tokens.index(part)] if part in scores else [3 + byte for byte in part.encode()]
    return ids


@settings(shared, max_examples=300)
@given(text=st.text(st.sampled_from("the sairnoabphq12é好\n🌶"), max_size=40))
def test_sentencepiece_equals_the_slow_oracle(
    sentencepiece: Tokenizer, sentencepiece_metadata: dict[str, Any], text: str
) -> None:
    token_ids = sentencepiece.encode(text, add_special_tokens=False)
    assert token_ids == merge_by_score(text, sentencepiece_metadata)
    assert sentencepiece.decode(token_ids) == text


def test_sentencepiece_puts_a_space_before_each_stretch_of_text(
    sentencepiece: Tokenizer, sentencepiece_metadata: dict[str, Any]
) -> None:
    the = sentencepiece_metadata["tokenizer.ggml.tokens"].index("▁the")
    assert sentencepiece.encode("the</s>the") == [1, the, 2, the]
    assert sentencepiece.token_text(the) == " the"


def test_sentencepiece_without_space_prefix(sentencepiece_metadata: dict[str, Any]) -> None:
    changes = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    tokenizer = Tokenizer(build_gguf_tokenizer(sentencepiece_metadata | changes, "x"))
    tokens = sentencepiece_metadata["tokenizer.ggml.tokens"]
    assert tokenizer.encode("he the") == [tokens.index("he"), tokens.index("▁the")]
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_runs_of_spaces_that_are_tokens_of_their_own(
    sentencepiece_metadata: dict[str, Any],
) -> None:
    """As Gemma's files have them: user-defined, with plain spaces, and the longest first."""
    runs = [" " * length for length in range(2, 6)]
    tokens = [*sentencepiece_metadata["tokenizer.ggml.tokens"], *runs]
    metadata = sentencepiece_metadata | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            *sentencepiece_metadata["tokenizer.ggml.token_type"],
            *[4] * 4,
        ],
        "tokenizer.ggml.scores": [*sentencepiece_metadata["tokenizer.ggml.scores"], *[0.0] * 4],
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = Tokenizer(build_gguf_tokenizer(metadata, "x"))
    ids = tokenizer.encode(f"he{' ' * 8}the an", add_special_tokens=False)
    assert [tokens[token_id] for token_id in ids] == [*("he", " " * 5, " " * 3, "t", "he", "▁an")]
    assert tokenizer.decode(ids) == f"he{' ' * 8}the an"


@pytest.mark.parametrize("says", ["architecture", "name", "old name", "nothing"])
def test_special_tokens_of_phi3_swallow_white_space(
    sentencepiece_metadata: dict[str, Any], says: str
) -> None:
    known = {
        "architecture": {"general.architecture": "phi3"},
        "name": {"general.name": "Phi-3 Mini"},
        "old name": {"general.name": "Phi3"},
        "nothing": {"general.architecture": "llama", "general.name": "Mini"},
    }[says]
    metadata = sentencepiece_metadata | known
    tokens = metadata["tokenizer.ggml.tokens"]
    backend = build_gguf_tokenizer(metadata, "x")
    the, newline = tokens.index("▁the"), tokens.index("<0x0A>")
    got = backend.encode("</s>\n the<s> \n", add_special_tokens=False).ids
    space, spaces = tokens.index("▁"), tokens.index("▁▁")
    if says == "nothing":
        assert got == [2, space, newline, the, 1, spaces, newline]
    else:
        assert got == [2, the, 1, spaces, newline]  # the beginning token leaves it


def test_space_stays_after_special_tokens_of_byte_level_phi(
    byte_level_metadata: dict[str, Any],
) -> None:
    metadata = byte_level_metadata | {
        "general.architecture": "phi3",
        "tokenizer.ggml.pre": "gpt-4o",
    }
    tokenizer = Tokenizer(build_gguf_tokenizer(metadata, "x"))
    assert tokenizer.decode(tokenizer.encode("<|end|> a"), skip_special_tokens=False) == "<|end|> a"


def test_the_end_token_where_the_file_wants_it(byte_level_metadata: dict[str, Any]) -> None:
    metadata = byte_level_metadata | {
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }
    tokenizer = Tokenizer(build_gguf_tokenizer(metadata, "x"), bos_token="<|begin|>")
    bos, eos = (metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos"))
    inner = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [bos, *inner, eos]
    assert eos not in inner


@pytest.mark.parametrize(
    ("pre", "key", "begins"),
    [
        ("smollm", None, False),
        ("smollm", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_the_beginning_token(
    byte_level_metadata: dict[str, Any], pre: str, key: bool | None, begins: bool
) -> None:
    metadata = byte_level_metadata | {"tokenizer.ggml.pre": pre}
    del metadata["tokenizer.ggml.add_bos_token"]
    if key is not None:
        metadata["tokenizer.ggml.add_bos_token"] = key
    tokenizer = Tokenizer(build_gguf_tokenizer(metadata, "x"), bos_token="<|begin|>")
    bos = metadata["tokenizer.ggml.bos_token_id"]
    encode = partial(tokenizer.encode, "<|begin|>hello")
    assert tokenizer.encode("") == [bos] * begins
    assert encode().count(bos) == encode(add_special_tokens=False).count(bos) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pre": "martian"},
            "tokenizer.ggml.pre 'martian', which octavo does not know. Known: .*qwen2",
        ),
        ({"pre": None}, "no tokenizer.ggml.pre"),
        ({"model": "bert"}, "kind 'bert'"),
        ({"model": None}, "no tokenizer.ggml.model"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"merges": ["a zzz"]}, "the tokenizer cannot be used: .*zzz"),
        ({"token_type": [1]}, "token_type has 1 entries"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "the token 'a' occurs twice"),
        ({"bos_token_id": 10**6, "add_bos_token": True}, "bos_token_id is 1000000"),
        ({"model": "llama"}, "no tokenizer.ggml.scores"),
        ({"model": "llama", "scores": [0.0]}, "scores has 1 entries"),
        ({"model": "llama", "scores": [math.nan] * 300}, "scores is no list of numbers"),
        ({"model": "llama", "scores": "0"}, "scores is no list of numbers"),
        ({"token_type": 1}, "token_type is no list of numbers"),
        ({"merges": 1}, "merges is no list of strings"),
        ({"tokens": "abc"}, "tokens is no list of strings"),
        ({"add_bos_token": "no"}, "add_bos_token is neither true nor false"),
        ({"bos_token_id": "a", "add_bos_token": True}, "bos_token_id is 'a'"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    byte_level_metadata: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    metadata = dict(byte_level_metadata)
    for key, value in changes.items():
        metadata["tokenizer.ggml." + key] = value
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        build_gguf_tokenizer(metadata, "tiny.gguf")


def test_reads_what_a_gguf_file_holds(
    sentencepiece: Tokenizer, sentencepiece_metadata: dict[str, Any], tmp_path: Path
) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(sentencepiece_metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(sentencepiece_metadata["tokenizer.ggml.token_type"])
    writer.add_token_scores(sentencepiece_metadata["tokenizer.ggml.scores"])
    writer.add_bos_token_id(1)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = GGUFFile.open(tmp_path / "tiny.gguf").metadata
    tokenizer = Tokenizer(build_gguf_tokenizer(metadata, "tiny.gguf"), bos_token="<s>")
    text = "the ship is in the sea\n好"
    assert tokenizer.encode(text) == sentencepiece.encode(text)
