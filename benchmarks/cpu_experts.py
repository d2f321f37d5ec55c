"""Native experts beside torch's loop over them (oneDNN's packed products), in alternation.

    python benchmarks/cpu_experts.py [--tokens 1 8 64 512] [--dtypes bfloat16 float32] [--threads 2]
        [--repeats 15] [--json PATH]

One layer of OLMoE's kind: hidden 2048, 64 experts of 1024, 8 of them for a token. Each call routes other
tokens, so that weights come from memory as in a step. Native is a recorded program of the whole op; both look
their tokens up in a table. Medians; `ratio` is torch's time over the native one, above 1 where native is faster.
`GB/s` counts the weights of the experts that were chosen, once a call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from octavo.kernels.cpu_ops import CpuOps
from octavo.kernels.ops import AttentionMetadata, Ops
from octavo.kernels.select import select_ops
from octavo.kernels.torch_ops import TorchOps

HIDDEN, MLP, NUM_EXPERTS, TOP_K = 2048, 1024, 64, 8
VOCAB_SIZE = 1 << 14  # tokens, each with hidden states and router logits of its own
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Row:
    """One line of the report."""

    dtype: str
    tokens: int
    microseconds: float  # of one call
    torch_microseconds: float
    ratio: float  # torch's time over the native one
    gigabytes: float  # of chosen experts' weights, a second, native


class Mixture:
    """One layer in one op set: token ids in, hidden states out."""

    def __init__(self, ops: Ops, dtype: torch.dtype, capacity: int) -> None:
        random = torch.Generator().manual_seed(1)

        def draw(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=random) / shape[-1] ** 0.5).to(dtype)

        self.ops = ops
        self.states = draw(VOCAB_SIZE, HIDDEN)
        self.logits = draw(VOCAB_SIZE, NUM_EXPERTS) * 8
        self.experts = ops.pack_experts(
            (draw(2 * MLP, HIDDEN) for _ in range(NUM_EXPERTS)),
            (draw(HIDDEN, MLP) for _ in range(NUM_EXPERTS)),
            NUM_EXPERTS,
        )
        self.step = ops.record_step(self.forward)
        self(torch.zeros(capacity, dtype=torch.int64))

    def forward(
        self, token_ids: Tensor, positions: Tensor, metadata: Sequence[AttentionMetadata]
    ) -> Tensor:
        x, logits = (self.ops.embed(token_ids, table) for table in (self.states, self.logits))
        return self.ops.routed_experts(x, logits, self.experts, top_k=TOP_K, renormalise=False)

    def __call__(self, token_ids: Tensor) -> Tensor:
        none = torch.zeros(1, dtype=torch.int32)
        metadata = AttentionMetadata(none, none[:0], none[None], token_ids, (), (), 0, 0)
        return self.step(token_ids, token_ids, [metadata])


def time_of(call: Callable[[Tensor], Tensor], token_ids: Tensor) -> float:
    start = time.perf_counter()
    call(token_ids)
    return time.perf_counter() - start


def measure(
    native: Mixture, by_torch: Mixture, num_tokens: int, repeats: int
) -> tuple[float, float, float]:
    """Median seconds of either, and how many experts a call chose."""
    random = torch.Generator().manual_seed(num_tokens)
    times: tuple[list[float], list[float]] = ([], [])
    num_chosen = []
    for _ in range(repeats + 1):
        token_ids = torch.randint(0, VOCAB_SIZE, (num_tokens,), generator=random)
        for mixture, mine in zip((native, by_torch), times, strict=True):
            mine.append(time_of(mixture, token_ids))
        num_chosen.append(len(native.logits[token_ids].float().topk(TOP_K).indices.unique()))
    return *(statistics.median(mine[1:]) for mine in times), statistics.mean(num_chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 64, 512])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ops = select_ops("cpu", CPU)
    if not isinstance(ops, CpuOps):
        parser.exit(1, "The native kernels cannot be used here.\n")
    rows = []
    print("dtype     tokens         us   torch us    ratio     GB/s")
    for name in options.dtypes:
        dtype, capacity = getattr(torch, name), max(options.tokens)
        native, by_torch = (Mixture(one, dtype, capacity) for one in (ops, TorchOps()))
        bytes_each = 3 * HIDDEN * MLP * dtype.itemsize
        for num_tokens in options.tokens:
            own, other, chosen = measure(native, by_torch, num_tokens, options.repeats)
            speed = chosen * bytes_each / own / 1e9
            row = Row(name, num_tokens, own * 1e6, other * 1e6, other / own, speed)
            rows.append(row)
            print(
                f"{name:9} {num_tokens:6} {row.microseconds:10.0f} {row.torch_microseconds:10.0f}"
                f" {row.ratio:8.2f} {speed:8.1f}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
