"""What the in-process workers have in common: jobs come in on standard input, answers go out on standard output.

A job is one JSON line ``[[prompt ids, number of output tokens], ...]``: requests that arrive together. Its answer
is one line ``{"seconds": ..., "requests": [{"ttft": ..., "last": ..., "in": ..., "out": ...}, ...]}``, seconds since
the job began. The first line out, after the first token of a first request, says that the worker is ready.

Runs in the peers' environments too: standard library only.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Request = tuple[list[int], int]
"""Prompt ids and the exact number of tokens to generate."""

FIRST = [([504, 260, 253], 1)]


def serve(generate: Callable[[list[Request]], dict[str, Any]]) -> None:
    """Answer jobs until standard input ends."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # whatever a library prints is no answer

        def answer(content: dict[str, Any]) -> None:
            answers.write(json.dumps(content) + "\n")
            answers.flush()

        answer({"ready": generate(FIRST)})
        for line in sys.stdin:
            answer(generate([(prompt, num_tokens) for prompt, num_tokens in json.loads(line)]))
