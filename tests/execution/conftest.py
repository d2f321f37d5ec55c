"""A model of twenty lines whose next token is a known function of everything it has attended to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.engine.api import SamplingParams
from octavo.engine.checkpoint.spec import ModelSpec, RopeSpec
from octavo.engine.execution.runner import ModelRunner
from octavo.engine.step import NewRow, ScheduledRow, StepPlan
from octavo.kernels.ops import AttentionMetadata, KVCacheSpec, LayerKVCache
from octavo.kernels.reference import ReferenceOps

VOCAB_SIZE = 32
EOS = 2

SPEC = ModelSpec(
    architecture="Fake",
    vocab_size=VOCAB_SIZE,
    hidden_size=VOCAB_SIZE,
    num_layers=2,
    num_q_heads=1,
    num_kv_heads=1,
    head_dim=VOCAB_SIZE,
    intermediate_size=1,
    rms_norm_eps=1e-5,
    rope=RopeSpec(theta=1e4, rotary_dim=0, scaling=None),
    max_position_embeddings=64,
    tie_word_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
    hidden_act="silu",
    sliding_window=None,
    dtype="float32",
    is_quantized=False,
    quantization=None,
)


class FakeModel:
    """Logits: the mean of the one-hot tokens so far in both layers, plus a fixed preference.

    So they depend on every token's stored value, and a wrong slot or table changes them. Token 31 is
    poison, and never likely: a row that has it gets NaN logits.
    """

    spec = SPEC
    is_recordable = True
    num_layers = 2
    num_parameters = 0

    def __init__(self) -> None:
        self.ops = ReferenceOps()
        self.num_tokens_seen: list[int] = []
        random = torch.Generator().manual_seed(1)
        self.head = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=random) * 8
        self.head[:, VOCAB_SIZE - 1] = -1000.0

    def kv_cache_spec(self, num_blocks: int, block_size: int) -> KVCacheSpec:
        return KVCacheSpec(num_blocks, block_size, 1, VOCAB_SIZE, torch.float32)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[LayerKVCache],
        metadata: Sequence[AttentionMetadata],
    ) -> Tensor:
        self.num_tokens_seen.append(len(token_ids))
        x = torch.nn.functional.one_hot(token_ids, VOCAB_SIZE).float() * (1 + positions[:, None])
        x[token_ids == VOCAB_SIZE - 1] = float("nan")
        for index, (cache, rows) in enumerate(zip(kv_caches, metadata, strict=True)):
            window = self.spec.layer(index).window
            self.ops.store_kv(x[:, None], x[:, None], cache, rows.slot_mapping)
            x = self.ops.attention(x[:, None] * 0, cache, rows, scale=1.0, window=window)[:, 0]
        return x

    def likeliest(self, hidden: Tensor) -> Tensor | None:
        return None

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head


class Driver:
    """Schedules single sequences by hand: as many plans as a test wants, in the order it wants."""

    def __init__(self, runner: ModelRunner, block_size: int, num_blocks: int) -> None:
        self.runner = runner
        self.block_size = block_size
        self.free = list(range(num_blocks))
        self.tables: dict[int, list[int]] = {}
        self.step_id = 0

    def table(self, seq_id: int, num_tokens: int) -> list[int]:
        table = self.tables.setdefault(seq_id, [])
        while len(table) * self.block_size < num_tokens:
            table.append(self.free.pop())
        return table

    def new(
        self, seq_id: int, prompt: Sequence[int], outputs: Sequence[int] = (), **sampling: Any
    ) -> NewRow:
        sampling.setdefault("temperature", 0.0)
        seed = sampling.pop("seed", 0)
        return NewRow(seq_id, list(prompt), list(outputs), SamplingParams(**sampling), seed)

    def row(
        self, seq_id: int, start: int, num_tokens: int, num_samples: int = 1, **fields: Any
    ) -> ScheduledRow:
        old = len(self.tables.get(seq_id, ()))
        table = self.table(seq_id, start + num_tokens)
        fields.setdefault("first_changed_block", old)
        return ScheduledRow(seq_id, start, num_tokens, num_samples, (table,), **fields)

    def plan(self, rows: Sequence[ScheduledRow] = (), **fields: Any) -> StepPlan:
        self.step_id += 1
        return StepPlan(self.step_id, rows=tuple(rows), **fields)

    def step(self, rows: Sequence[ScheduledRow] = (), **fields: Any) -> dict[int, Any]:
        result = self.runner.submit(self.plan(rows, **fields)).result()
        assert result.step_id == self.step_id
        return {row.seq_id: row for row in result.rows}

    def generate(
        self, seq_id: int, prompt: Sequence[int], count: int, **sampling: Any
    ) -> list[int]:
        """Prefill at once, then decode alone."""
        new = self.new(seq_id, prompt, **sampling)
        result = self.step([self.row(seq_id, 0, len(prompt))], new_rows=(new,))
        outputs = list(result[seq_id].token_ids)
        while len(outputs) < count:
            start = len(prompt) + len(outputs) - 1
            result = self.step([self.row(seq_id, start, 1)])
            assert result[seq_id].error is None
            outputs += result[seq_id].token_ids
        return outputs

    def remove(self, *seq_ids: int) -> None:
        for seq_id in seq_ids:
            self.free += self.tables.pop(seq_id)
        self.step(removed_seq_ids=seq_ids)


@pytest.fixture
def make_driver() -> Callable[..., Driver]:
    def make(block_size: int = 4, num_blocks: int = 40, **options: Any) -> Driver:
        runner = ModelRunner(
            options.pop("model", FakeModel()),
            options.pop("ops", ReferenceOps()),
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=options.pop("max_num_seqs", 4),
            max_model_len=options.pop("max_model_len", 64),
            device=torch.device("cpu"),
            eos_token_ids=(EOS,),
            num_host_blocks=options.pop("num_host_blocks", 0),
        )
        return Driver(runner, block_size, num_blocks)

    return make


@pytest.fixture
def fake_model() -> FakeModel:
    return FakeModel()
