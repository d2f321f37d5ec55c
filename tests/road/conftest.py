"""The whole road with the embedded model: a server process, and transformers as the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.checkpoint.checkpoint import find_embedded_model, open_checkpoint
from octavo.engine.text.tokenizer import Tokenizer, load_tokenizer

SUBJECTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):",
    "Water boils at",
    "1, 2, 3, 4, 5,",
    "The quick brown fox",
    "To be, or not to be",
    "Dear Sir or Madam,",
    "In 1969, the first humans",
    "A list of fruit:\n\n1. apples\n2.",
    "Photosynthesis is the process by which",
    "import numpy as np\n",
    "The three laws of motion are",
    "Yesterday I went to the market and",
    "Q: What is the largest planet?\nA:",
    "Roses are red,",
    "She opened the letter slowly and",
    "The recipe needs two eggs,",
    "An octavo is a sheet",
    "Paris, London, Berlin,",
]


@pytest.fixture(scope="session")
def model_path() -> Path:
    path = find_embedded_model()
    if path is None:
        pytest.skip("needs the embedded model")
    return path


@pytest.fixture(scope="session")
def tokenizer(model_path: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(model_path))


@pytest.fixture(scope="session")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Twenty prompts of 3 to about 120 tokens."""
    return [tokenizer.encode(text * (1 + i % 4 * 3)) for i, text in enumerate(SUBJECTS)]


@pytest.fixture(scope="session")
def oracle(model_path: Path) -> Any:
    """The model in transformers, float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        model_path.parent, gguf_file=model_path.name, dtype=torch.float32
    )


@pytest.fixture(scope="session")
def greedy_choices(oracle: Any) -> Callable[[list[int], list[int]], list[int]]:
    """``(prompt, output)`` → what transformers would choose at each position of the output, in float32.

    Equal to the output if and only if transformers, generating from the prompt, gives that output.
    """
    import torch

    def choices(prompt: list[int], output: list[int]) -> list[int]:
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + output])).logits[0]
        ids: list[int] = logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
        return ids

    return choices


@pytest.fixture(scope="session")
def server(model_path: Path, start_server: Callable[..., Any]) -> Iterator[Any]:
    """The embedded model with invariants checked after every step."""
    with start_server("--check-invariants", "--served-model-name", "smol", "alias") as running:
        yield running
