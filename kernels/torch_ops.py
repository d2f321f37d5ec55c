"""Every op in vectorised torch: the set for CPUs, correct on any device that torch knows.

Uses the default KV layout ``[num_blocks, block_size, num_kv_heads, head_dim]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from . import torch_experts, torch_linear, torch_sampling
from .attention_plan import AttentionGroup, plan_attention
from .kv_store import StorePlan, allocate_kv_cache, move_blocks, plan_store
from .ops import (
    AttentionMetadata,
    Forward,
    KVCacheSpec,
    KVScales,
    LayerKVCache,
    QuantizedRows,
    SamplingSummary,
    SamplingTensors,
    dense,
    refuse_extras,
)
from .step_memo import StepMemo
from .torch_attention import attend_group


class TorchOps:
    """Implements :class:`~.ops.Ops`; see there for every contract."""

    name = "torch"
    quantized_types: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._attention_plans: StepMemo[list[AttentionGroup]] = StepMemo()
        self._store_plans: StepMemo[StorePlan] = StepMemo()
        self._angles: StepMemo[tuple[Tensor, Tensor]] = StepMemo()

    def pack_linear(self, weight: Tensor | QuantizedRows, bias: Tensor | None = None) -> Any:
        return torch_linear.pack_linear(dense(weight), bias)

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        return torch_linear.linear(x, packed)

    def pack_head(self, weight: Tensor | QuantizedRows) -> Any:
        return torch_linear.pack_head(dense(weight))

    def logits(self, x: Tensor, packed: Any) -> Tensor:
        return torch_linear.logits(x, packed)

    def likeliest(self, x: Tensor, packed: Any) -> Tensor:
        return torch_sampling.likeliest(self.logits(x, packed))

    def pack_experts(
        self,
        gate_up: Iterable[Tensor | QuantizedRows],
        down: Iterable[Tensor | QuantizedRows],
        num_experts: int,
    ) -> Any:
        return torch_experts.pack_experts(gate_up, down)

    def routed_experts(
        self, x: Tensor, router_logits: Tensor, packed: Any, *, top_k: int, renormalise: bool
    ) -> Tensor:
        ids, weights = torch_experts.route(router_logits, top_k, renormalise)
        return torch_experts.mix(x, ids, weights, packed)

    def pack_vector(self, vector: Tensor) -> Tensor:
        return vector

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return table[token_ids]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide, weight = _alike(x, weight)
        return functional.rms_norm(wide, (x.shape[-1],), weight, eps).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        residual = residual.add_(x)
        return self.rms_norm(residual, weight, eps), residual

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        wide, weight = _alike(x, weight)
        bias = None if bias is None else bias.to(weight.dtype)
        return functional.layer_norm(wide, (x.shape[-1],), weight, bias, eps).to(x.dtype)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        residual = residual.add_(x)
        return self.layer_norm(residual, weight, bias, eps), residual

    def qk_norm(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self._norm_heads(q, q_weight, eps), self._norm_heads(k, k_weight, eps)

    def _norm_heads(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = heads.reshape(len(heads), -1, len(weight))
        return self.rms_norm(rows, weight, eps).view(heads.shape)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x.mul_(factor)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual.add_(x)

    def clamp(self, x: Tensor, limit: float) -> Tensor:
        return x.clamp_(-limit, limit)

    def gelu(self, x: Tensor, *, is_tanh: bool) -> Tensor:
        return functional.gelu(x, approximate="tanh" if is_tanh else "none")

    def silu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def gelu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh").mul_(up)

    def rotary(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        cos, sin = self._angles.get((positions,), cos_sin, lambda: _full_angles(cos_sin, positions))
        num_q_heads, rotary_dim = q.shape[1], cos.shape[-1]
        heads = torch.cat((q, k), dim=1)
        wide = heads[..., :rotary_dim].float()
        rotated = torch.addcmul(wide * cos, wide.roll(rotary_dim // 2, dims=-1), sin)
        if rotary_dim == heads.shape[-1]:
            heads = rotated.to(q.dtype)
        else:
            heads[..., :rotary_dim] = rotated
        return heads[:, :num_q_heads], heads[:, num_q_heads:]

    def allocate_kv_cache(self, spec: KVCacheSpec, device: torch.device) -> LayerKVCache:
        return allocate_kv_cache(spec, device)

    def store_kv(
        self,
        k: Tensor,
        v: Tensor,
        cache: LayerKVCache,
        slot_mapping: Tensor,
        kv_scales: KVScales | None = None,
    ) -> None:
        refuse_extras(self.name, None, kv_scales)
        block_size = cache.key.shape[1]
        plan = self._store_plans.get(
            (slot_mapping,), block_size, lambda: plan_store(slot_mapping, block_size)
        )
        plan.store(k, cache.key)
        plan.store(v, cache.value)

    def rotary_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        cache: LayerKVCache,
        slot_mapping: Tensor,
        kv_scales: KVScales | None = None,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        if q_norm is not None and k_norm is not None:
            q, k = self.qk_norm(q, k, q_norm, k_norm, eps)
        q, k = self.rotary(q, k, positions, cos_sin)
        self.store_kv(k, v, cache, slot_mapping, kv_scales)
        return q

    def attention(
        self,
        q: Tensor,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        kv_scales: KVScales | None = None,
    ) -> Tensor:
        refuse_extras(self.name, sinks, kv_scales)
        block_size = cache.key.shape[1]
        groups = self._attention_plans.get(
            (metadata,),
            (block_size, window, q.dtype),
            lambda: plan_attention(metadata, block_size, window, q.dtype),
        )
        q = q.contiguous()
        if len(groups) == 1 and isinstance(groups[0].tokens, slice):
            return attend_group(q, cache, groups[0], scale, soft_cap)
        out = torch.empty_like(q)
        for group in groups:
            out[group.tokens] = attend_group(q[group.tokens], cache, group, scale, soft_cap)
        return out

    def copy_blocks(self, caches: Sequence[LayerKVCache], src: Tensor, dst: Tensor) -> None:
        for cache in caches:
            for tensor in cache:
                flat = tensor.view(tensor.shape[0], -1)
                flat.index_copy_(0, dst, flat.index_select(0, src))

    def swap_blocks(
        self,
        src_caches: Sequence[LayerKVCache],
        dst_caches: Sequence[LayerKVCache],
        src: Tensor,
        dst: Tensor,
    ) -> None:
        for source_cache, target_cache in zip(src_caches, dst_caches, strict=True):
            for source, target in zip(source_cache, target_cache, strict=True):
                move_blocks(source, target, src, dst)

    def record_step(self, forward: Forward) -> Forward:
        """``forward``, after which nothing is kept of what its ops have derived alike."""

        def step(
            token_ids: Tensor, positions: Tensor, metadata: Sequence[AttentionMetadata]
        ) -> Tensor:
            try:
                return forward(token_ids, positions, metadata)
            finally:
                self._attention_plans.clear()
                self._store_plans.clear()
                self._angles.clear()

        return step

    def sample(
        self, logits: Tensor, params: SamplingTensors, summary: SamplingSummary | None = None
    ) -> Tensor:
        return torch_sampling.sample(logits, params)


def _alike(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider one's type, as torch's fused norms want them."""
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return x.to(dtype), weight.to(dtype)


def _full_angles(cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines for whole heads, ``[num_tokens, 1, rotary_dim]`` float32.

    With ``roll(x, rotary_dim / 2)``, the rotation is ``x * cos + roll(x) * sin``.
    """
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
