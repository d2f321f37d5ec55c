"""The Llama family: Llama 2 and 3, Mistral, TinyLlama, SmolLM2.

Touvron et al., 2023 (arXiv 2307.09288, section 2.2): pre-norm decoder layers with RMS norm, rotary
embedding, grouped-query attention and a SwiGLU feed-forward. Mistral (Jiang et al., 2023) adds a
sliding window. q, k and v are one linear layer here, gate and up another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ...kernels.ops import AttentionMetadata, KVCacheSpec, LayerKVCache, Ops
from ..checkpoint.spec import ModelSpec
from .layers import EMBEDDING, HEAD, fused_linear, read_embedding, read_head
from .rotary import rotary_table
from .weights import Weights


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model needs, by transformers' name."""
    hidden, mlp = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    linears = {
        "self_attn.q_proj": (q_size, hidden, spec.attention_bias),
        "self_attn.k_proj": (kv_size, hidden, spec.attention_bias),
        "self_attn.v_proj": (kv_size, hidden, spec.attention_bias),
        "self_attn.o_proj": (hidden, q_size, spec.attention_bias),
        "mlp.gate_proj": (mlp, hidden, spec.mlp_bias),
        "mlp.up_proj": (mlp, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, mlp, spec.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, hidden)}
    for prefix in (f"model.layers.{index}." for index in range(spec.num_layers)):
        for name, (num_out, num_in, has_bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (num_out, num_in)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (num_out,)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_word_embeddings:
        shapes[HEAD] = (spec.vocab_size, hidden)
    return shapes


def is_ignored(spec: ModelSpec, name: str) -> bool:
    """Whether a tensor may be left unread: frequencies that old checkpoints saved, and a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (spec.tie_word_embeddings and name == HEAD)


class LlamaLayer:
    """One decoder layer."""

    def __init__(self, spec: ModelSpec, prefix: str, weights: Weights, ops: Ops) -> None:
        self.spec = spec
        self.ops = ops
        self.qkv = fused_linear(weights, ops, f"{prefix}self_attn", "q_proj", "k_proj", "v_proj")
        self.out = fused_linear(weights, ops, f"{prefix}self_attn", "o_proj")
        self.gate_up = fused_linear(weights, ops, f"{prefix}mlp", "gate_proj", "up_proj")
        self.down = fused_linear(weights, ops, f"{prefix}mlp", "down_proj")
        self.attention_norm = ops.pack_vector(weights.read(f"{prefix}input_layernorm.weight"))
        self.mlp_norm = ops.pack_vector(weights.read(f"{prefix}post_attention_layernorm.weight"))

    def attention(
        self,
        x: Tensor,  # [num_tokens, hidden_size]
        positions: Tensor,  # [num_tokens] int64
        cos_sin: Tensor,  # [max_position, rotary_dim] float32
        cache: LayerKVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:  # [num_tokens, hidden_size]
        spec = self.spec
        heads = self.qkv(x).view(x.shape[0], -1, spec.head_dim)
        q = heads[:, : spec.num_q_heads]
        k, v = heads[:, spec.num_q_heads :].chunk(2, dim=1)
        slots = metadata.slot_mapping
        q = self.ops.rotary_store(q, k, v, positions, cos_sin, cache, slots)
        scale = 1 / math.sqrt(spec.head_dim)
        mixed = self.ops.attention(q, cache, metadata, scale=scale, window=spec.sliding_window)
        return self.out(mixed.flatten(1))

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(self.ops.silu_and_mul(self.gate_up(x)))


class Llama:
    """Implements :class:`~.model.Model`."""

    def __init__(self, spec: ModelSpec, weights: Weights, ops: Ops) -> None:
        self.spec = spec
        self.ops = ops
        self.dtype = weights.dtype
        self.num_parameters = sum(math.prod(shape) for shape in tensor_shapes(spec).values())
        self.cos_sin = rotary_table(spec.rope, spec.max_position_embeddings).to(weights.device)
        self.embedding = read_embedding(spec, weights)  # [vocab_size, hidden_size]
        self.layers = [
            LlamaLayer(spec, f"model.layers.{index}.", weights, ops)
            for index in range(spec.num_layers)
        ]
        self.norm = ops.pack_vector(weights.read("model.norm.weight"))
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
        metadata: AttentionMetadata,
    ) -> Tensor:
        eps, add_norm = self.spec.rms_norm_eps, self.ops.add_rms_norm
        residual = self.ops.embed(token_ids, self.embedding)
        x = self.ops.rms_norm(residual, self.layers[0].attention_norm, eps)
        next_norms = [layer.attention_norm for layer in self.layers[1:]] + [self.norm]
        for layer, cache, next_norm in zip(self.layers, kv_caches, next_norms, strict=True):
            x = layer.attention(x, positions, self.cos_sin, cache, metadata)
            x, residual = add_norm(x, residual, layer.mlp_norm, eps)
            x = layer.mlp(x)
            x, residual = add_norm(x, residual, next_norm, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return self.ops.logits(hidden, self.head)
