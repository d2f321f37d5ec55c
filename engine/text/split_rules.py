"""How each kind of GGUF byte-level tokenizer cuts text into words before merging.

Owns the table from ``tokenizer.ggml.pre`` to regular expressions. The rules are those that llama.cpp
applies under the same names: expressions apply one after the other, each within the pieces that the
one before it left; a match is a piece and so is what lies between matches. Names that are not here
are refused: a wrong rule gives plausible, worse text.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import CheckpointError


@dataclass(frozen=True)
class SplitRule:
    """One way to cut text into words."""

    patterns: tuple[str, ...]  # Oniguruma syntax, in the order of application
    ignore_merges: bool = False  # a word that is a token is not built from merges
    add_bos: bool = False  # unless the file says otherwise


_CONTRACTIONS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_SPACES = r"\s+(?!\S)|\s+"
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|" + _SPACES
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_GPT2 = SplitRule((_GPT2_WORDS,))
_DIGITS_THEN_GPT2 = SplitRule((r"\p{N}", _GPT2_WORDS))
_DEFAULT = SplitRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"))
_FALCON = SplitRule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, r"[0-9][0-9][0-9]"))
_TRIPLE_DIGITS = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_OTHERS}"
_SINGLE_DIGITS = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_OTHERS}"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)
_OTHERS_WITH_SLASHES = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_OTHERS_WITH_SLASHES}"
_GPT4O = (
    rf"{_CASED[0]}(?:{_CONTRACTIONS})?|{_CASED[1]}(?:{_CONTRACTIONS})?|\p{{N}}{{1,3}}|"
    rf"{_OTHERS_WITH_SLASHES}"
)
_MARKED_WORDS = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
)
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"  # Han, hiragana, katakana
_DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|" + _SPACES
)

SPLIT_RULES: dict[str, SplitRule] = {
    "default": _DEFAULT,
    "falcon": _FALCON,
    **dict.fromkeys(
        (
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "exaone4",
            "granite-docling",
            "mellum",
        ),
        _GPT2,
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        _DIGITS_THEN_GPT2,
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0"),
        SplitRule((_TRIPLE_DIGITS,), ignore_merges=True, add_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), SplitRule((_TRIPLE_DIGITS,))),
    "glm4": SplitRule((_TRIPLE_DIGITS,), ignore_merges=True),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "grok-2", "solar-open"),
        SplitRule((_SINGLE_DIGITS,)),
    ),
    "qwen35": SplitRule((_MARKED_WORDS,)),
    "tekken": SplitRule((_TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), SplitRule((_GPT4O,))),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
        SplitRule((r"\p{N}{1,3}", _CJK, _DEEPSEEK_WORDS)),
    ),
}
"""``tokenizer.ggml.pre`` → rule. For "tekken" and the kin of "gpt-4o" it is the models' own expression,
which llama.cpp's approximates over ASCII."""


def find_split_rule(name: object, origin: str) -> SplitRule:
    """The rule of that name.

    Raises:
        CheckpointError: the file names no rule, or one that octavo does not know.
    """
    if name is None:
        raise CheckpointError(
            f"{origin} has no tokenizer.ggml.pre, so how it splits text is unknown; convert the model "
            "again with a recent converter."
        )
    if not isinstance(name, str) or name not in SPLIT_RULES:
        known = ", ".join(sorted(SPLIT_RULES))
        raise CheckpointError(
            f"{origin} has the tokenizer.ggml.pre {name!r}, which octavo does not know. Known: {known}."
        )
    return SPLIT_RULES[name]
