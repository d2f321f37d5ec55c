"""KV memory of a model with windowed and full layers, with and without KV groups.

    python benchmarks/kv_groups.py [--tokens 8192] [--chunk 512]

The shape is Gemma 3 270M's: 18 layers, every sixth of them with full attention, the others with a window of 512
tokens; one KV head of 256 numbers in bfloat16; blocks of 16 tokens. A sequence is scheduled to its full length
with a fake executor, once as octavo does and once with one group of all layers, which keeps every block. Prints
the blocks that it had, most of them and at its end, and their bytes.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from octavo.engine.api import SamplingParams
from octavo.engine.checkpoint.kv_groups import kv_groups, layers_per_block
from octavo.engine.checkpoint.spec import LayerSpec, ModelSpec, RopeSpec
from octavo.engine.memory.kv_cache_manager import KVCacheManager
from octavo.engine.scheduling.limits import SchedulerLimits
from octavo.engine.scheduling.request import NewRequest
from octavo.engine.scheduling.scheduler import Scheduler
from octavo.engine.step import RowResult, StepPlan, StepResult

NUM_LAYERS, FULL_EVERY, WINDOW = 18, 6, 512
BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, NUMBER_BYTES = 16, 1, 256, 2
LAYER_BLOCK_BYTES = 2 * BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM * NUMBER_BYTES
NUM_OUTPUT_TOKENS = 256
ROPE = RopeSpec(1e4, HEAD_DIM)
WINDOWS = [None if (index + 1) % FULL_EVERY == 0 else WINDOW for index in range(NUM_LAYERS)]
SPEC = ModelSpec(
    architecture="Gemma3ForCausalLM",
    vocab_size=262144,
    hidden_size=640,
    num_layers=NUM_LAYERS,
    num_q_heads=4,
    num_kv_heads=NUM_KV_HEADS,
    head_dim=HEAD_DIM,
    intermediate_size=2048,
    rms_norm_eps=1e-6,
    rope=ROPE,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
    hidden_act="gelu_pytorch_tanh",
    sliding_window=None,
    dtype="bfloat16",
    layers=tuple(LayerSpec(ROPE, window) for window in WINDOWS),
)


class Held(NamedTuple):
    """Blocks that one sequence had."""

    num_most: int
    num_last: int  # when it had all its tokens
    block_bytes: int


def execute(plan: StepPlan) -> StepResult:
    rows = tuple(RowResult(row.seq_id, (7,)) for row in plan.rows if row.num_samples)
    return StepResult(plan.step_id, rows)


def run(windows: tuple[int | None, ...], num_layers: int, num_tokens: int, chunk: int) -> Held:
    """One sequence of ``num_tokens``, most of them its prompt."""
    num_blocks = len(windows) * -(-num_tokens // BLOCK_SIZE)
    memory = KVCacheManager(num_blocks, BLOCK_SIZE, windows, max_step_tokens=chunk)
    scheduler = Scheduler(SchedulerLimits(chunk, 1, num_tokens), memory)
    prompt = [index % 1000 for index in range(num_tokens - NUM_OUTPUT_TOKENS)]
    sampling = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS)
    scheduler.add(NewRequest("only", prompt, sampling, 0, 0.0))
    used = [0]
    while scheduler.has_work:
        plan = scheduler.schedule()
        used.append(memory.pool.num_used_blocks)
        scheduler.commit(plan, execute(plan))
    last = [count for count in used if count][-1]
    return Held(max(used), last, num_layers * LAYER_BLOCK_BYTES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=512, help="most tokens of a step")
    options = parser.parse_args()
    groups = kv_groups(SPEC)
    windows = tuple(group.window for group in groups)
    cases = {
        f"{len(groups)} groups of {layers_per_block(groups)} layers": run(
            windows, layers_per_block(groups), options.tokens, options.chunk
        ),
        f"1 group of {NUM_LAYERS} layers": run((None,), NUM_LAYERS, options.tokens, options.chunk),
    }
    print(f"one sequence of {options.tokens} tokens, at most {options.chunk} a step")
    for name, held in cases.items():
        for when, count in (("most", held.num_most), ("at the end", held.num_last)):
            mebibytes = count * held.block_bytes / 2**20
            print(
                f"{name}, {when}: {count} blocks of {held.block_bytes} bytes = {mebibytes:.2f} MiB"
            )


if __name__ == "__main__":
    main()
