"""The decoder that all families share: Llama's, with what the fields of a :class:`ModelSpec` add to it.

Touvron et al., 2023 (arXiv 2307.09288, section 2.2): decoder layers with RMS norm, rotary embedding,
grouped-query attention and a gated feed-forward. q, k and v are one linear layer here, gate and up
another. A layer hands on what it adds and what it adds to, so that the addition and the norm of the next
layer are one op.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...kernels.ops import AttentionMetadata, KVCacheSpec, LayerKVCache, Ops
from ..checkpoint.spec import ExpertSpec, ModelSpec
from .layers import Norm, fused_linear, norm_of, read_embedding, read_head, read_norm
from .rotary import RotaryTables
from .shapes import FINAL_NORM, decoder_shapes, layer_prefix, norm_names
from .weights import Weights


class Attention:
    """Grouped-query attention of one layer.

    Args:
        spec: the model; ``spec.layer(index)`` says the layer's window and rope.
        index: of the layer, from 0.
        weights: its tensors are read and packed here, and kept in packed form only.
        ops: computes everything.
        rotary: the angles that layers share.

    Raises:
        CheckpointError: a tensor cannot be read.
    """

    def __init__(
        self, spec: ModelSpec, index: int, weights: Weights, ops: Ops, rotary: RotaryTables
    ) -> None:
        layer, module = spec.layer(index), f"{layer_prefix(index)}self_attn"
        self.spec = spec
        self.ops = ops
        self.window = layer.window
        self.cos_sin = None if layer.rope is None else rotary.table(layer.rope)
        self.scale = spec.attention_scale or 1 / math.sqrt(spec.head_dim)
        names = ("qkv_proj",) if spec.has_fused_tensors else ("q_proj", "k_proj", "v_proj")
        self.qkv = fused_linear(weights, ops, module, *names)
        self.out = fused_linear(weights, ops, module, "o_proj")
        self.own_norms: tuple[Tensor, Tensor, float] | None = None
        self.fused_norms: dict[str, Any] = {}
        if spec.qk_norm:
            q_norm = ops.pack_vector(read_norm(spec, weights, f"{module}.q_norm"))
            k_norm = ops.pack_vector(read_norm(spec, weights, f"{module}.k_norm"))
            is_fused = spec.qk_norm == "head" and spec.qkv_limit is None
            if is_fused and self.cos_sin is not None:
                self.fused_norms = {"q_norm": q_norm, "k_norm": k_norm, "eps": spec.rms_norm_eps}
            else:
                self.own_norms = q_norm, k_norm, spec.rms_norm_eps

    def __call__(
        self,
        x: Tensor,  # [num_tokens, hidden_size]
        positions: Tensor,  # [num_tokens] int64
        cache: LayerKVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:  # [num_tokens, hidden_size]
        """Store the tokens' keys and values in ``cache``, then let each token look at its sequence so far.

        Activations, in and out, are of the weights' dtype.
        """
        spec, ops, slots = self.spec, self.ops, metadata.slot_mapping
        heads = self.qkv(x).view(x.shape[0], -1, spec.head_dim)
        q = heads[:, : spec.num_q_heads]
        k, v = heads[:, spec.num_q_heads :].chunk(2, dim=1)
        if self.own_norms is not None:
            q, k = ops.qk_norm(q, k, *self.own_norms)
        if (limit := spec.qkv_limit) is not None:
            q, k, v = (ops.clamp(part, limit) for part in (q, k, v))
        if self.cos_sin is None:
            ops.store_kv(k, v, cache, slots)
        else:
            norms = self.fused_norms
            q = ops.rotary_store(q, k, v, positions, self.cos_sin, cache, slots, **norms)
        mixed = ops.attention(
            q,
            cache,
            metadata,
            scale=self.scale,
            window=self.window,
            soft_cap=spec.attention_soft_cap,
        )
        return self.out(mixed.flatten(1))


class GatedMLP:
    """``down(act(gate(x)) * up(x))``."""

    def __init__(self, spec: ModelSpec, index: int, weights: Weights, ops: Ops) -> None:
        module = f"{layer_prefix(index)}mlp"
        names = ("gate_up_proj",) if spec.has_fused_tensors else ("gate_proj", "up_proj")
        self.gate_up = fused_linear(weights, ops, module, *names)
        self.down = fused_linear(weights, ops, module, "down_proj")
        gates = {"silu": ops.silu_and_mul, "gelu_pytorch_tanh": ops.gelu_and_mul}
        self.gate = gates[spec.hidden_act]

    def __call__(self, x: Tensor) -> Tensor:  # [num_tokens, hidden_size], and so the result
        return self.down(self.gate(self.gate_up(x)))


class MixtureOfExperts:
    """Each token's likeliest experts, each a gated feed-forward, weighed."""

    def __init__(self, experts: ExpertSpec, index: int, weights: Weights, ops: Ops) -> None:
        module = f"{layer_prefix(index)}mlp"
        self.experts = experts
        self.ops = ops
        self.router = fused_linear(weights, ops, module, "gate")
        modules = [f"{module}.experts.{expert}" for expert in range(experts.num_experts)]
        self.packed = ops.pack_experts(
            (
                weights.read_linear([f"{m}.gate_proj.weight", f"{m}.up_proj.weight"])
                for m in modules
            ),
            (weights.read_linear([f"{m}.down_proj.weight"]) for m in modules),
            experts.num_experts,
        )

    def __call__(self, x: Tensor) -> Tensor:  # [num_tokens, hidden_size], and so the result
        return self.ops.routed_experts(
            x,
            self.router(x),
            self.packed,
            top_k=self.experts.top_k,
            renormalise=self.experts.renormalise,
        )


class PlainMLP:
    """``down(gelu(up(x)))``."""

    def __init__(self, spec: ModelSpec, index: int, weights: Weights, ops: Ops) -> None:
        module = f"{layer_prefix(index)}mlp"
        self.up = fused_linear(weights, ops, module, "up_proj")
        self.down = fused_linear(weights, ops, module, "down_proj")
        self.is_tanh = spec.hidden_act == "gelu_pytorch_tanh"
        self.ops = ops

    def __call__(self, x: Tensor) -> Tensor:  # [num_tokens, hidden_size], and so the result
        return self.down(self.ops.gelu(self.up(x), is_tanh=self.is_tanh))


def _mlp_of(
    spec: ModelSpec, index: int, weights: Weights, ops: Ops
) -> GatedMLP | MixtureOfExperts | PlainMLP:
    experts = spec.layer(index).experts
    if experts is not None:
        return MixtureOfExperts(experts, index, weights, ops)
    return (GatedMLP if spec.has_gate else PlainMLP)(spec, index, weights, ops)


class DecoderLayer:
    """Attention, then feed-forward, each with its norms."""

    def __init__(
        self, spec: ModelSpec, index: int, weights: Weights, ops: Ops, rotary: RotaryTables
    ) -> None:
        self.spec = spec
        self.ops = ops
        self.attention = Attention(spec, index, weights, ops, rotary)
        self.mlp = _mlp_of(spec, index, weights, ops)
        self.first_norm, self.attention_norm, self.middle_norm, self.mlp_norm = (
            None if name is None else norm_of(spec, weights, ops, layer_prefix(index) + name)
            for name in norm_names(spec)
        )

    def __call__(
        self,
        x: Tensor,  # [num_tokens, hidden_size]: what attention looks at
        residual: Tensor,  # [num_tokens, hidden_size]: the sum so far
        next_norm: Norm | None,  # before the next layer's attention
        positions: Tensor,  # [num_tokens] int64
        cache: LayerKVCache,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:  # x and residual of the next layer
        """Compute the layer; activations, in and out, are of the weights' dtype.

        ``residual`` may be overwritten. What comes back as x has gone through ``next_norm``, if there is one.
        """
        if self.spec.is_parallel:
            looked_at = x if self.middle_norm is None else self.middle_norm(residual)
            x = self.ops.add(self.attention(x, positions, cache, metadata), self.mlp(looked_at))
            return self._add(x, None, residual, next_norm)
        x = self.attention(x, positions, cache, metadata)
        x, residual = self._add(x, self.attention_norm, residual, self.middle_norm)
        x = self.mlp(x)
        return self._add(x, self.mlp_norm, residual, next_norm)

    def _add(
        self, x: Tensor, own_norm: Norm | None, residual: Tensor, next_norm: Norm | None
    ) -> tuple[Tensor, Tensor]:
        """What comes next and the sum, after ``x`` went through its own norm."""
        if own_norm is not None:
            x = own_norm(x)
        if self.spec.residual_scale != 1:
            x = self.ops.scale(x, self.spec.residual_scale)
        if next_norm is not None:
            return next_norm.add(x, residual)
        total = self.ops.add(x, residual)
        return total, total


class Decoder:
    """Implements :class:`~.model.Model`."""

    is_recordable = True

    def __init__(self, spec: ModelSpec, weights: Weights, ops: Ops) -> None:
        self.spec = spec
        self.ops = ops
        self.dtype = weights.dtype
        self.num_parameters = sum(math.prod(shape) for shape in decoder_shapes(spec).values())
        self.embedding = read_embedding(spec, weights)  # [vocab_size, hidden_size]
        rotary = RotaryTables(spec.max_position_embeddings, weights.device)
        self.layers = [
            DecoderLayer(spec, index, weights, ops, rotary) for index in range(spec.num_layers)
        ]
        self.norm = norm_of(spec, weights, ops, FINAL_NORM.removesuffix(".weight"))
        self.head = ops.pack_head(read_head(spec, weights, self.embedding))

    @property
    def num_layers(self) -> int:
        return self.spec.num_layers

    def kv_cache_spec(self, num_blocks: int, block_size: int) -> KVCacheSpec:
        heads, dim = self.spec.num_kv_heads, self.spec.head_dim
        return KVCacheSpec(num_blocks, block_size, heads, dim, self.dtype)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[LayerKVCache],
        metadata: Sequence[AttentionMetadata],
    ) -> Tensor:
        """See :meth:`.model.Model.forward`."""
        x = residual = self.embed(token_ids)
        first_norms = [layer.first_norm for layer in self.layers]
        if first_norms[0] is not None:
            x = first_norms[0](residual)
        next_norms = [*first_norms[1:], self.norm]
        layers = zip(self.layers, kv_caches, metadata, next_norms, strict=True)
        for layer, cache, rows, next_norm in layers:
            x, residual = layer(x, residual, next_norm, positions, cache, rows)
        return x

    def embed(self, token_ids: Tensor) -> Tensor:  # [num_tokens, hidden_size]
        x = self.ops.embed(token_ids, self.embedding)
        return x if self.spec.embedding_scale == 1 else self.ops.scale(x, self.spec.embedding_scale)

    def likeliest(self, hidden: Tensor) -> Tensor | None:
        # A scale or a cap could make two logits equal, of which the first would be taken.
        if self.spec.logits_scale != 1 or self.spec.logits_soft_cap is not None:
            return None
        return self.ops.likeliest(hidden, self.head)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.ops.logits(hidden, self.head)
        if self.spec.logits_scale != 1:
            logits = logits.mul_(self.spec.logits_scale)
        if (cap := self.spec.logits_soft_cap) is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)
        return logits
