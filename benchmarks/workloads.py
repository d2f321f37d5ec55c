"""Workloads A to E on the embedded model: fixed token ids, greedy, exact lengths.

| | work | concurrency | figure |
|---|---|---|---|
| A | 32 requests, 128 tokens in, 128 out | 32 | output tokens/s |
| B | 1 request, 128 in, 128 out | 1 | TTFT, decode tokens/s |
| C | 32 requests sharing 512 tokens, 32 own, 64 out | 32 | seconds |
| D | 8 requests, 1024 in, 1 out | 8 | prefill tokens/s |
| E | 64 requests, 100-300 in, 64 out | 16 | requests/s, TTFT and ITL |

The text is Python's own documentation, cut at random but seeded places. ``repeat`` gives equal sizes
with other text, so that no cache of an earlier run is warm.
"""

from __future__ import annotations

import pydoc_data.topics
import random
from typing import NamedTuple

from octavo.engine.text.tokenizer import Tokenizer

CONCURRENCY = {"A": 32, "B": 1, "C": 32, "D": 8, "E": 16, "W": 4}


class Work(NamedTuple):
    """One request: prompt ids and the exact number of tokens to generate."""

    prompt: list[int]
    num_output_tokens: int


def corpus(tokenizer: Tokenizer) -> list[int]:
    text = "\n\n".join(body for _, body in sorted(pydoc_data.topics.topics.items()))
    special = tokenizer.special_token_ids
    return [i for i in tokenizer.encode(text, add_special_tokens=False) if i not in special]


def workload(name: str, repeat: int, ids: list[int]) -> list[Work]:
    """The requests of workload ``name``; ``W`` is a short warm-up."""
    rng = random.Random(f"{name}{repeat}")

    def window(length: int) -> list[int]:
        begin = rng.randrange(len(ids) - length)
        return ids[begin : begin + length]

    if name == "A":
        return [Work(window(128), 128) for _ in range(32)]
    if name == "B":
        return [Work(window(128), 128)]
    if name == "C":
        shared = window(512)
        return [Work(shared + window(32), 64) for _ in range(32)]
    if name == "D":
        return [Work(window(1024), 1) for _ in range(8)]
    if name == "E":
        return [Work(window(rng.randint(100, 300)), 64) for _ in range(64)]
    return [Work(window(64), 16) for _ in range(4)]
