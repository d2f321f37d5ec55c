"""How far each precision is from float32: the embedded model, 20 prompts, 200 greedy tokens each.

    python benchmarks/accuracy.py [--tokens 200] [--json FILE]

The float32 model (native kernels, weights dequantised from the GGUF file) writes; the others are shown the same
tokens and asked for the next one at every position (teacher forcing). Printed are the share of positions at
which the most likely token is the same, the mean KL divergence of their distributions from float32's, and the
largest difference between two logits.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.engine.checkpoint.checkpoint import find_embedded_model, open_checkpoint
from octavo.engine.models.loader import load_model
from octavo.engine.models.model import Model
from octavo.engine.text.tokenizer import load_tokenizer
from octavo.kernels.ops import AttentionMetadata, Ops
from octavo.kernels.select import select_ops

BLOCK_SIZE = 16
PROMPTS = (
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
)


class Scorer:
    """One precision: logits at every position of a text."""

    def __init__(self, ops: Ops, dtype: torch.dtype, max_tokens: int, *, keep: bool) -> None:
        path = find_embedded_model()
        if path is None:
            sys.exit("the embedded model is not installed")
        device = torch.device("cpu")
        self.model: Model = load_model(
            open_checkpoint(path), ops, dtype=dtype, device=device, keep_quantized=keep
        )
        spec = self.model.kv_cache_spec(max_tokens // BLOCK_SIZE + 1, BLOCK_SIZE)
        self.caches = [ops.allocate_kv_cache(spec, device) for _ in range(self.model.num_layers)]

    def logits(self, token_ids: list[int], start: int = 0) -> Tensor:
        """``[len(token_ids) - start, vocab_size]``; tokens before ``start`` were computed before."""
        count, length = len(token_ids) - start, len(token_ids)
        positions = torch.arange(start, length)
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, count], dtype=torch.int32),
            seq_lens=torch.tensor([length], dtype=torch.int32),
            block_tables=torch.arange(-(-length // BLOCK_SIZE), dtype=torch.int32)[None],
            slot_mapping=positions.clone(),
            query_lens_host=(count,),
            seq_lens_host=(length,),
            max_query_len=count,
            max_seq_len=length,
        )
        with torch.inference_mode():
            ids = torch.tensor(token_ids[start:])
            rows = [metadata] * self.model.num_layers
            return self.model.logits(self.model.forward(ids, positions, self.caches, rows))


def write(scorer: Scorer, prompt: list[int], num_tokens: int) -> list[int]:
    """The prompt and what the model continues it with, greedily."""
    token_ids, start = list(prompt), 0
    for _ in range(num_tokens):
        following = int(scorer.logits(token_ids, start)[-1].argmax())
        start = len(token_ids)
        token_ids.append(following)
    return token_ids


def compare(exact: list[Tensor], other: list[Tensor]) -> dict[str, Any]:
    left, right = torch.cat(exact), torch.cat(other)
    wanted, got = left.log_softmax(-1), right.log_softmax(-1)
    divergence = (wanted.exp() * (wanted - got)).sum(-1)
    same = left.argmax(-1) == right.argmax(-1)
    return {
        "positions": len(left),
        "top1_agreement": round(float(same.double().mean()), 4),
        "mean_kl": round(float(divergence.double().mean()), 6),
        "max_logit_error": round(float((left - right).abs().max()), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    native = select_ops("cpu", torch.device("cpu"))
    integers = select_ops("cpu", torch.device("cpu"), rounds_activations=True)
    path = find_embedded_model()
    if path is None:
        sys.exit("the embedded model is not installed")
    tokenizer = load_tokenizer(open_checkpoint(path))
    room = args.tokens + 64
    exact = Scorer(native, torch.float32, room, keep=False)
    texts = [write(exact, tokenizer.encode(prompt), args.tokens) for prompt in PROMPTS]
    expected = [exact.logits(text) for text in texts]
    variants = {
        "bfloat16, native": (native, torch.bfloat16, False),
        "the file's Q4_1 and Q8_0, native": (native, torch.bfloat16, True),
        "the same by integers (int8), native": (integers, torch.bfloat16, True),
        "bfloat16, torch": (select_ops("torch", torch.device("cpu")), torch.bfloat16, False),
    }
    rows = []
    for name, (ops, dtype, keep) in variants.items():
        scorer = Scorer(ops, dtype, room, keep=keep)
        rows.append({"precision": name, **compare(expected, [scorer.logits(t) for t in texts])})
        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        command = f"python benchmarks/accuracy.py --tokens {args.tokens} --json FILE"
        args.json.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
