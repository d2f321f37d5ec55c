"""Streams of requests with the length distributions of Kwon et al., SOSP 2023 (arXiv 2309.06180), figure 11.

The paper gives the means and pictures of the rest. Modelled here: input and output lengths are independent
and log-normal, a request's sum is cut at 2048 tokens, and the scales are chosen so that the means over the stream are
the paper's. The shapes (sigma of the logarithm) of the outputs are chosen so that the contiguous
reservations come out near the paper's own figures for them; the paged memory's figures have no such choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from random import Random
from typing import NamedTuple

MAX_MODEL_LEN = 2048


class Lengths(NamedTuple):
    """One request."""

    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True)
class LengthModel:
    """How long requests of a data set are."""

    name: str
    mean_prompt: float
    mean_output: float
    sigma_prompt: float
    sigma_output: float

    def draw(self, count: int, seed: int) -> list[Lengths]:
        """A stream of ``count`` requests whose mean lengths are the model's."""
        random = Random(seed)
        normals = [(random.gauss(0, 1), random.gauss(0, 1)) for _ in range(count)]
        scale_prompt, scale_output = self.mean_prompt, self.mean_output
        stream: list[Lengths] = []
        for _ in range(30):  # a fixed point: each round corrects what the cut takes
            stream = [self._cut(scale_prompt, scale_output, *pair) for pair in normals]
            got_prompt, got_output = means(stream)
            scale_prompt *= self.mean_prompt / got_prompt
            scale_output *= self.mean_output / got_output
        return stream

    def _cut(
        self, scale_prompt: float, scale_output: float, normal: float, other: float
    ) -> Lengths:
        num_prompt = round(scale_prompt * exp(self.sigma_prompt * normal)) or 1
        num_prompt = min(num_prompt, MAX_MODEL_LEN // 2)
        num_output = round(scale_output * exp(self.sigma_output * other)) or 1
        return Lengths(num_prompt, min(num_output, MAX_MODEL_LEN - num_prompt))


def means(stream: Sequence[Lengths]) -> tuple[float, float]:
    """Mean prompt and mean output length."""
    return (
        sum(one.num_prompt_tokens for one in stream) / len(stream),
        sum(one.num_output_tokens for one in stream) / len(stream),
    )


SHAREGPT = LengthModel("ShareGPT", 161, 338, 1.0, 0.8)
ALPACA = LengthModel("Alpaca", 19, 58, 0.5, 0.85)
TRANSLATION = LengthModel("translation", 30, 35, 0.5, 0.5)
"""Sentences to translate, without the shared prefix. Ours: the paper does not give their lengths."""
