"""The oracle: every op in slow, obvious torch. Other op sets are tested against this one.

Computes in float32 wherever rounding matters and rounds once, at the end. Uses the default KV layout
``[num_blocks, block_size, num_kv_heads, head_dim]``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .kv_store import allocate_kv_cache
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
)
from .philox import philox_uniform


class ReferenceLinear(NamedTuple):
    """A linear layer as it came."""

    weight: Tensor  # [out_features, in_features]
    bias: Tensor | None  # [out_features]


class ReferenceExperts(NamedTuple):
    """A layer's experts as they came, by id."""

    gate_up: list[Tensor]  # [2 * mlp, hidden] each
    down: list[Tensor]  # [hidden, mlp] each


class ReferenceOps:
    """Implements :class:`~.ops.Ops`; see there for every contract."""

    name = "reference"
    quantized_types: frozenset[str] = frozenset()

    def pack_linear(
        self, weight: Tensor | QuantizedRows, bias: Tensor | None = None
    ) -> ReferenceLinear:
        return ReferenceLinear(dense(weight), bias)

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        bias = None if packed.bias is None else packed.bias.float()
        return functional.linear(x.float(), packed.weight.float(), bias).to(x.dtype)

    def pack_head(self, weight: Tensor | QuantizedRows) -> Tensor:
        return dense(weight)

    def logits(self, x: Tensor, packed: Any) -> Tensor:
        return functional.linear(x.float(), packed.float())

    def pack_experts(
        self,
        gate_up: Iterable[Tensor | QuantizedRows],
        down: Iterable[Tensor | QuantizedRows],
        num_experts: int,
    ) -> ReferenceExperts:
        return ReferenceExperts([dense(w) for w in gate_up], [dense(w) for w in down])

    def routed_experts(
        self, x: Tensor, router_logits: Tensor, packed: Any, *, top_k: int, renormalise: bool
    ) -> Tensor:
        out = torch.empty_like(x)
        for token in range(x.shape[0]):
            logits = router_logits[token].float()
            chosen = torch.sort(logits, descending=True, stable=True).indices[:top_k]
            weights = torch.softmax(logits, dim=0)[chosen]
            if renormalise:
                weights = weights / weights.sum()
            results = [self._expert(x[token].float(), packed, expert) for expert in chosen.tolist()]
            out[token] = weights @ torch.stack(results)
        return out

    def _expert(self, x: Tensor, packed: ReferenceExperts, expert: int) -> Tensor:
        """``x [hidden]`` float32 → the same."""
        gate_up = functional.linear(x, packed.gate_up[expert].float())
        return functional.linear(self.silu_and_mul(gate_up), packed.down[expert].float())

    def pack_vector(self, vector: Tensor) -> Tensor:
        return vector

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return table[token_ids]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return (wide * scale * weight.float()).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        centred = x.float() - x.float().mean(dim=-1, keepdim=True)
        scale = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
        out = centred * scale * weight.float()
        return (out if bias is None else out + bias.float()).to(x.dtype)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.layer_norm(total, weight, bias, eps), total

    def qk_norm(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self._norm_heads(q, q_weight, eps), self._norm_heads(k, k_weight, eps)

    def _norm_heads(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        size = heads.shape[1] * heads.shape[2]
        rows = heads.reshape(len(heads), size // len(weight), len(weight))
        return self.rms_norm(rows, weight, eps).view(heads.shape)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return (x.float() * factor).to(x.dtype)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return x + residual

    def clamp(self, x: Tensor, limit: float) -> Tensor:
        return x.clamp(-limit, limit)

    def gelu(self, x: Tensor, *, is_tanh: bool) -> Tensor:
        approximate = "tanh" if is_tanh else "none"
        return functional.gelu(x.float(), approximate=approximate).to(x.dtype)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        return (functional.silu(gate) * up).to(x.dtype)

    def gelu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        return (functional.gelu(gate, approximate="tanh") * up).to(x.dtype)

    def rotary(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

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
        key_scale, value_scale = kv_scales or KVScales(1.0, 1.0)
        block_size = cache.key.shape[1]
        places = [divmod(slot, block_size) for slot in slot_mapping.tolist()]
        for token, (block, offset) in enumerate(places):
            if block < 0:
                continue
            if offset == 0:
                cache.key[block] = 0
                cache.value[block] = 0
            cache.key[block, offset] = _fit(k[token], key_scale, cache.key.dtype)
            cache.value[block, offset] = _fit(v[token], value_scale, cache.value.dtype)

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
        key_scale, value_scale = kv_scales or KVScales(1.0, 1.0)
        out = torch.empty_like(q)
        token = 0
        lengths = zip(metadata.query_lens_host, metadata.seq_lens_host, strict=True)
        for row, (query_len, seq_len) in enumerate(lengths):
            keys = _gather(cache.key, metadata.block_tables[row], seq_len) * key_scale
            values = _gather(cache.value, metadata.block_tables[row], seq_len) * value_scale
            for position in range(seq_len - query_len, seq_len):
                first = 0 if window is None else max(0, position - window + 1)
                seen = slice(first, position + 1)
                out[token] = _attend(q[token], keys[seen], values[seen], scale, soft_cap, sinks)
                token += 1
        return out

    def copy_blocks(self, caches: Sequence[LayerKVCache], src: Tensor, dst: Tensor) -> None:
        for cache in caches:
            for source, target in zip(src.tolist(), dst.tolist(), strict=True):
                cache.key[target] = cache.key[source]
                cache.value[target] = cache.value[source]

    def swap_blocks(
        self,
        src_caches: Sequence[LayerKVCache],
        dst_caches: Sequence[LayerKVCache],
        src: Tensor,
        dst: Tensor,
    ) -> None:
        for source_cache, target_cache in zip(src_caches, dst_caches, strict=True):
            for source, target in zip(src.tolist(), dst.tolist(), strict=True):
                target_cache.key[target] = source_cache.key[source]
                target_cache.value[target] = source_cache.value[source]

    def record_step(self, forward: Forward) -> Forward:
        return forward

    def likeliest(self, x: Tensor, packed: Any) -> Tensor:
        tokens = [_sample_row(row, 0.0, 0, 1.0, 0.0, 0.0) for row in self.logits(x, packed)]
        return torch.tensor(tokens, dtype=torch.int64, device=x.device)

    def sample(
        self, logits: Tensor, params: SamplingTensors, summary: SamplingSummary | None = None
    ) -> Tensor:
        uniforms = philox_uniform(params.seed, params.position)
        drawn = [
            _sample_row(
                logits[row],
                float(params.temperature[row]),
                int(params.top_k[row]),
                float(params.top_p[row]),
                float(params.min_p[row]),
                float(uniforms[row]),
            )
            for row in range(logits.shape[0])
        ]
        return torch.tensor(drawn, dtype=torch.int64, device=logits.device)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``2 * cos.shape[-1]`` of each head of ``x [num_tokens, num_heads, head_dim]``."""
    half = cos.shape[-1]
    wide = x.float()
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    rotated = (first * cos - second * sin, second * cos + first * sin, rest)
    return torch.cat(rotated, dim=-1).to(x.dtype)


def _gather(cache: Tensor, block_table: Tensor, seq_len: int) -> Tensor:
    """The first ``seq_len`` tokens of one sequence, ``[seq_len, num_kv_heads, head_dim]`` float32."""
    block_size = cache.shape[1]
    positions = torch.arange(seq_len, device=cache.device)
    blocks = block_table[positions // block_size].long()
    return cache[blocks, positions % block_size].float()


def _fit(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """``x / scale`` as the cache holds it: a float8 has no infinity, and saturates."""
    wide = x.float() / scale
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        wide = wide.clamp(-largest, largest)
    return wide.to(dtype)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One token's ``query [num_q_heads, head_dim]`` over what it sees → the same shape."""
    group = query.shape[0] // keys.shape[1]
    keys = keys.repeat_interleave(group, dim=1)  # [num_seen, num_q_heads, head_dim]
    values = values.repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,shd->hs", query.float(), keys) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().unsqueeze(1)), dim=1)
    weights = torch.softmax(scores, dim=-1)[:, : keys.shape[0]]
    return torch.einsum("hs,shd->hd", weights, values).to(query.dtype)


def _sample_row(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    """Draw from one row, ``logits [vocab_size]``. Sorting is stable: ties go to the lower id."""
    if not math.isfinite(logits.max()):
        return -1
    if temperature == 0.0:
        return int(torch.nonzero(logits == logits.max())[0])
    weights = torch.exp((logits - logits.max()) / temperature).double()
    order = torch.sort(logits, descending=True, stable=True).indices
    kept = torch.ones_like(order, dtype=torch.bool)  # in the order of ``order``
    if top_k > 0:
        kept[top_k:] = False
    ranked = weights[order] * kept
    if top_p < 1.0:
        mass_before = ranked.cumsum(0) - ranked
        kept &= mass_before < top_p * ranked.sum()
    kept &= ranked >= min_p * ranked[0]
    weights[order[~kept]] = 0.0
    cumulative = weights.cumsum(0)
    above = cumulative > uniform * cumulative[-1]
    return int(above.nonzero()[0])
