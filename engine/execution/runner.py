"""The executor: applies step plans to its rows, runs the model, draws tokens.

Owns the KV tensors and the per-row state. Must not know why the scheduler decided what it decided.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.ops import AttentionMetadata, Ops
from ..checkpoint.kv_groups import kv_groups, layers_per_block
from ..models.model import Model
from ..step import ExecutorRates, RowResult, ScheduledRow, StepHandle, StepPlan, StepResult
from .errors import ExecutionError
from .host_tier import HostTier
from .inputs import StepInputs, build_inputs
from .pooling import Pool
from .prompt_scores import ScoredRow, score_rows
from .rows import RowTable
from .sampler import NONFINITE, SampledRow, Sampler
from .transfer import Transfer
from .warm_up import (
    MAX_SWAPPED_BLOCKS,
    cleanup_step,
    kernel_steps,
    largest_step,
    round_trip_step,
)


class ModelRunner:
    """Implements :class:`~octavo.engine.step.Executor` with one model on one device."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        eos_token_ids: tuple[int, ...],
        num_host_blocks: int = 0,
        transfer: Transfer | None = None,
    ) -> None:
        """
        Args:
            transfer: to the device and back; ``None``: what suits the device.
        """
        self._transfer = Transfer(device) if transfer is None else transfer
        self._model = model
        self._ops = ops
        self._device = device
        self._num_blocks = num_blocks
        self._max_model_len = max_model_len
        self._groups = kv_groups(model.spec)
        spec = model.kv_cache_spec(num_blocks, block_size)
        # One for each layer that a block has room for: groups own blocks, and so do their layers.
        num_caches = layers_per_block(self._groups)
        self._kv_caches = [ops.allocate_kv_cache(spec, device) for _ in range(num_caches)]
        self._block_bytes = spec.block_bytes * num_caches
        self._host_tier: HostTier | None = None
        if num_host_blocks:
            host_spec = model.kv_cache_spec(num_host_blocks, block_size)
            self._host_tier = HostTier(ops, host_spec, self._kv_caches, device)
        places = {
            layer: (place, group)
            for group, one in enumerate(self._groups)
            for place, layer in enumerate(one.layers)
        }
        layers = [places[layer] for layer in range(model.num_layers)]
        layer_caches = [self._kv_caches[place] for place, _ in layers]

        def forward(
            token_ids: Tensor, positions: Tensor, metadata: Sequence[AttentionMetadata]
        ) -> Tensor:
            rows = [metadata[group] for _, group in layers]
            return model.forward(token_ids, positions, layer_caches, rows)

        self._forward_step = ops.record_step(forward) if model.is_recordable else forward
        self._table = RowTable(
            max_num_rows=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            vocab_size=model.spec.vocab_size,
            eos_token_ids=eos_token_ids,
            num_groups=len(self._groups),
        )
        self._sampler = Sampler(ops, self._table, self._transfer)
        self._pending: _Step | None = None

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step: on a CPU the model has run when this returns, on a GPU it is under way.

        A step whose result nobody has asked for yet is finished first: its samples are this one's input.

        Raises:
            ExecutionError: the plan contradicts what is known, or asks for what there is not.
        """
        if self._pending is not None:
            self._pending.result()
        _refuse_unsupported(plan, len(self._groups))
        self._table.apply(plan)
        with torch.inference_mode():
            swap_s = self._swap_blocks(plan)
            self._copy_blocks(plan)
            computed = self._forward(plan.rows) if plan.rows else _NOTHING
        self._pending = _Step(self, plan, computed, swap_s)
        return self._pending

    def warm_up(self, max_num_batched_tokens: int, num_rows: int = 1) -> ExecutorRates:
        """Run a step of that many tokens in ``num_rows`` rows, as far as the pool holds them.

        Memory is allocated and kernels are chosen here rather than in the first request. Leaves no
        trace but what it wrote to blocks that nobody owns.
        """
        step = largest_step(
            max_num_batched_tokens,
            num_rows,
            block_size=self._table.block_size,
            num_blocks=self._num_blocks,
            max_model_len=self._max_model_len,
            num_groups=len(self._groups),
        )
        if self._device.type == "cuda":
            self.submit(step).result()  # loads libraries: the second run shows the speed
            self.submit(cleanup_step(step)).result()
        begin = time.perf_counter()
        self.submit(step).result()
        seconds = time.perf_counter() - begin
        self.submit(cleanup_step(step)).result()
        return ExecutorRates(step.num_tokens / seconds, self._swap_rate())

    def warm_up_kernels(
        self, max_num_tokens: int, max_num_seqs: int, progress: Callable[[float], None]
    ) -> None:
        """Run a step of every kind, so that no request waits for a kernel to be compiled or loaded.

        Args:
            progress: called with the share of the steps that have run.
        """
        steps = kernel_steps(
            max_num_tokens=max_num_tokens,
            max_num_seqs=max_num_seqs,
            block_size=self._table.block_size,
            num_blocks=self._num_blocks,
            max_model_len=self._max_model_len,
            num_groups=len(self._groups),
        )
        for index, step in enumerate(steps):
            progress(index / len(steps))
            self.submit(step).result()
            self.submit(cleanup_step(step)).result()

    def _swap_rate(self) -> float:
        """Bytes per second and way between device and host tier; 0 without one."""
        if self._host_tier is None:
            return 0.0
        num_blocks = min(self._num_blocks, self._host_tier.num_blocks, MAX_SWAPPED_BLOCKS)
        step = round_trip_step(num_blocks)
        self.submit(step).result()  # the memory is touched for the first time
        seconds = self.submit(step).result().swap_s
        return len(step.block_swaps) * self._block_bytes / seconds

    def _forward(self, rows: tuple[ScheduledRow, ...]) -> _Computed:
        """Compute all rows, and what they want of the results."""
        inputs = build_inputs(rows, self._table, self._transfer)
        hidden = self._forward_step(inputs.token_ids, inputs.positions, inputs.metadata)
        scored, pooled = self._scored_tokens(rows, inputs), self._pooled_tokens(rows, inputs)
        sampled = self._sampled_rows(rows)
        tokens = logits = None
        if sampled:
            last = hidden.index_select(0, self._last_tokens(rows, inputs))
            tokens = self._model.likeliest(last) if self._sampler.are_plain(sampled) else None
            logits = self._model.logits(last) if tokens is None else None
        return _Computed(
            sampled,
            tokens,
            logits,
            None if scored is None else hidden.index_select(0, scored),
            None if pooled is None else hidden.index_select(0, pooled),
        )

    def _sampled_rows(self, rows: tuple[ScheduledRow, ...]) -> list[SampledRow]:
        sampled = []
        for row in rows:
            if not _is_sampled(row):
                continue
            place = self._table.place_of(row.seq_id)
            if row.start + row.num_tokens != self._table.columns["num_tokens"][place]:
                raise ExecutionError(f"sequence {row.seq_id} is sampled before its last token")
            sampled.append(SampledRow(row.seq_id, place, row.num_samples, row.num_candidates))
        return sampled

    def _last_tokens(self, rows: tuple[ScheduledRow, ...], inputs: StepInputs) -> Tensor:
        """Flat indices of the sampled rows' last tokens."""
        return self._transfer.upload(inputs.last_tokens[[_is_sampled(row) for row in rows]])[0]

    def _scored_tokens(self, rows: tuple[ScheduledRow, ...], inputs: StepInputs) -> Tensor | None:
        """Flat indices of the tokens before those whose log-probabilities are wanted."""
        wanted = []
        for index, row in enumerate(rows):
            if not row.num_scored:
                continue
            place, end = self._table.place_of(row.seq_id), row.start + row.num_tokens
            last = row.first_scored + row.num_scored - 1
            num_prompt = self._table.columns["num_prompt_tokens"][place]
            if not row.start < row.first_scored <= last <= min(end, num_prompt - 1):
                raise ExecutionError(f"sequence {row.seq_id} is scored outside its row and prompt")
            before = inputs.last_tokens[index] - (end - row.first_scored)
            wanted.append(np.arange(before, before + row.num_scored))
        return self._transfer.upload(np.concatenate(wanted))[0] if wanted else None

    def _pools(self, rows: tuple[ScheduledRow, ...]) -> list[tuple[int, Pool]]:
        """Of the rows whose prompts are pooled: index, and what there is of it."""
        if not self._table.pools:
            return []
        places = [self._table.place_of(row.seq_id) for row in rows]
        pools = [self._table.pools.get(place) for place in places]
        return [(index, pool) for index, pool in enumerate(pools) if pool is not None]

    def _pooled_tokens(self, rows: tuple[ScheduledRow, ...], inputs: StepInputs) -> Tensor | None:
        """Flat indices of the tokens whose hidden states are pooled."""
        wanted = []
        for index, pool in self._pools(rows):
            row = rows[index]
            positions = pool.wanted(row.start, row.num_tokens)
            end = inputs.last_tokens[index] + 1
            if positions:
                wanted.append(np.arange(end - len(positions), end))
        return self._transfer.upload(np.concatenate(wanted))[0] if wanted else None

    def _swap_blocks(self, plan: StepPlan) -> Callable[[], float] | None:
        """Execute the swaps; what they returned of their time, if there are any."""
        if not plan.block_swaps:
            return None
        if self._host_tier is None:
            raise ExecutionError("a block is swapped, and there is no host tier")
        return self._host_tier.move(plan.block_swaps)

    def _copy_blocks(self, plan: StepPlan) -> None:
        if not plan.block_copies:
            return
        ids = [(copy.src_block_id, copy.dst_block_id) for copy in plan.block_copies]
        if not all(0 <= block_id < self._num_blocks for pair in ids for block_id in pair):
            raise ExecutionError(f"a block outside the pool of {self._num_blocks} is copied")
        src, dst = self._transfer.upload(*np.array(ids, dtype=np.int64).T.copy())
        self._ops.copy_blocks(self._kv_caches, src, dst)

    def _finish(
        self, plan: StepPlan, computed: _Computed, swap_s: Callable[[], float] | None
    ) -> StepResult:
        """Draw a step's tokens and append the first sample of each row to it."""
        self._pending = None
        results = self._sample(computed)
        if computed.scored is not None:
            results = self._with_scores(plan.rows, results, computed.scored)
        if computed.pooled is not None:
            results = self._with_embeddings(plan.rows, results, computed.pooled)
        return StepResult(plan.step_id, results, 0.0 if swap_s is None else swap_s())

    def _sample(self, computed: _Computed) -> tuple[RowResult, ...]:
        rows = computed.sampled
        if computed.tokens is not None:
            results = self._sampler.take(computed.tokens, rows)
        elif computed.logits is not None:
            with torch.inference_mode():
                results = self._sampler.sample(computed.logits, rows)
        else:
            return ()
        drawn = [
            (row.place, result.token_ids[0])
            for row, result in zip(rows, results, strict=True)
            if result.token_ids
        ]
        if drawn:
            self._table.append_each(*np.array(drawn, dtype=np.int64).T)
        return tuple(results)

    def _with_scores(
        self,
        plan_rows: tuple[ScheduledRow, ...],
        results: tuple[RowResult, ...],
        hidden: Tensor,  # [num_scored, hidden_size]
    ) -> tuple[RowResult, ...]:
        """The rows' results with the log-probabilities of prompt tokens, in the plan's order."""
        scored = [self._scored_row(row) for row in plan_rows if row.num_scored]
        with torch.inference_mode():
            found = score_rows(self._model.logits, hidden, scored)
        by_seq_id = {result.seq_id: result for result in results}
        for row, logprobs in zip(scored, found, strict=True):
            result = by_seq_id.get(row.seq_id, RowResult(row.seq_id, ()))
            if logprobs is None:
                result = RowResult(row.seq_id, (), error=NONFINITE)
            elif result.error is None:
                result = result._replace(prompt_logprobs=logprobs)
            by_seq_id[row.seq_id] = result
        return tuple(by_seq_id[row.seq_id] for row in plan_rows if row.seq_id in by_seq_id)

    def _with_embeddings(
        self,
        plan_rows: tuple[ScheduledRow, ...],
        results: tuple[RowResult, ...],
        hidden: Tensor,  # [num_pooled, hidden_size]
    ) -> tuple[RowResult, ...]:
        """Take in the pooled hidden states; the rows' results with the embeddings that are complete."""
        by_seq_id = {result.seq_id: result for result in results}
        begin = 0
        for index, pool in self._pools(plan_rows):
            row = plan_rows[index]
            end = begin + len(pool.wanted(row.start, row.num_tokens))
            pool.add(hidden[begin:end])
            begin = end
            if pool.is_complete:
                by_seq_id[row.seq_id] = pool.result()
        return tuple(by_seq_id[row.seq_id] for row in plan_rows if row.seq_id in by_seq_id)

    def _scored_row(self, row: ScheduledRow) -> ScoredRow:
        place = self._table.place_of(row.seq_id)
        token_ids = self._table.tokens[place, row.first_scored : row.first_scored + row.num_scored]
        num_top = self._table.sampling[place].prompt_logprobs or 0
        return ScoredRow(row.seq_id, token_ids.tolist(), num_top)


class _Computed(NamedTuple):
    """What is kept of a step's forward pass."""

    sampled: Sequence[SampledRow]
    tokens: Tensor | None  # [num_sampled_rows] int64, the most likely, if those are all they want
    logits: Tensor | None  # [num_sampled_rows, vocab_size] float32 otherwise, if there are any
    scored: Tensor | None  # [num_scored_tokens, hidden_size], of the tokens before the scored ones
    pooled: Tensor | None  # [num_pooled_tokens, hidden_size]


_NOTHING = _Computed((), None, None, None, None)


class _Step:
    """Implements :class:`~octavo.engine.step.StepHandle`."""

    def __init__(
        self,
        runner: ModelRunner,
        plan: StepPlan,
        computed: _Computed,
        swap_s: Callable[[], float] | None,
    ) -> None:
        self._runner = runner
        self._plan = plan
        self._computed = computed
        self._swap_s = swap_s
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        if self._result is None:
            self._result = self._runner._finish(self._plan, self._computed, self._swap_s)
            self._computed = _NOTHING
        return self._result


def _is_sampled(row: ScheduledRow) -> bool:
    return bool(row.num_samples or row.num_candidates)


def _refuse_unsupported(plan: StepPlan, num_groups: int) -> None:
    """
    Raises:
        ExecutionError: the plan uses what this executor does not offer; admission refuses it earlier.
    """
    groups = [swap.group for swap in plan.block_swaps]
    groups += [copy.group for copy in plan.block_copies]
    if groups and not 0 <= min(groups) <= max(groups) < num_groups:
        raise ExecutionError(
            f"there are {num_groups} KV groups, and a block of group {max(groups)} is moved"
        )
    for row in plan.rows:
        if len(row.block_tables) != num_groups:
            raise ExecutionError(f"there are {num_groups} KV groups, not {len(row.block_tables)}")
        if row.num_samples and row.num_candidates:
            raise ExecutionError(f"sequence {row.seq_id} wants samples and candidates")
    for new in plan.new_rows:
        if new.sampling.bad_words and not new.sampling.bad_word_ids:
            raise ExecutionError(f"sequence {new.seq_id} has bad words without their tokens")
