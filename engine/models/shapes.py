"""The tensors that :mod:`.decoder` reads, by name, with their shapes. Must not know torch."""

from __future__ import annotations

from ..checkpoint.spec import ExpertSpec, ModelSpec

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

Shapes = dict[str, tuple[int, ...]]


def layer_prefix(index: int) -> str:
    return f"model.layers.{index}."


def decoder_shapes(spec: ModelSpec) -> Shapes:
    """Every tensor of the model."""
    shapes: Shapes = {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    for index in range(spec.num_layers):
        prefix = layer_prefix(index)
        shapes |= {prefix + name: shape for name, shape in layer_shapes(spec, index).items()}
    shapes |= norm_shapes(spec, FINAL_NORM.removesuffix(".weight"))
    if not spec.tie_word_embeddings:
        shapes[HEAD] = (spec.vocab_size, spec.hidden_size)
    return shapes


def layer_shapes(spec: ModelSpec, index: int) -> Shapes:
    """The tensors of one layer, without its prefix."""
    experts = spec.layer(index).experts
    mlp = mlp_shapes(spec) if experts is None else expert_shapes(spec, experts)
    shapes = attention_shapes(spec) | mlp
    for name in filter(None, norm_names(spec)):
        shapes |= norm_shapes(spec, name)
    return shapes


def attention_shapes(spec: ModelSpec) -> Shapes:
    hidden, dim = spec.hidden_size, spec.head_dim
    q_size, kv_size = spec.num_q_heads * dim, spec.num_kv_heads * dim
    rows = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
    if spec.has_fused_tensors:
        rows = {"qkv_proj": q_size + 2 * kv_size}
    shapes: Shapes = {}
    for name, num_out in rows.items():
        shapes |= linear_shapes(f"self_attn.{name}", num_out, hidden, spec.attention_bias)
    shapes |= linear_shapes("self_attn.o_proj", hidden, q_size, spec.attention_out_bias)
    if spec.qk_norm:
        sizes = (dim, dim) if spec.qk_norm == "head" else (q_size, kv_size)
        shapes |= {"self_attn.q_norm.weight": sizes[:1], "self_attn.k_norm.weight": sizes[1:]}
    return shapes


def mlp_shapes(spec: ModelSpec) -> Shapes:
    hidden, mlp = spec.hidden_size, spec.intermediate_size
    rows = {"gate_proj": mlp, "up_proj": mlp} if spec.has_gate else {"up_proj": mlp}
    if spec.has_fused_tensors and spec.has_gate:
        rows = {"gate_up_proj": 2 * mlp}
    shapes: Shapes = {}
    for name, num_out in rows.items():
        shapes |= linear_shapes(f"mlp.{name}", num_out, hidden, spec.mlp_bias)
    return shapes | linear_shapes("mlp.down_proj", hidden, mlp, spec.mlp_bias)


def expert_shapes(spec: ModelSpec, experts: ExpertSpec) -> Shapes:
    hidden, mlp = spec.hidden_size, experts.intermediate_size
    shapes: Shapes = {"mlp.gate.weight": (experts.num_experts, hidden)}
    for name in (f"mlp.experts.{index}" for index in range(experts.num_experts)):
        shapes[f"{name}.gate_proj.weight"] = shapes[f"{name}.up_proj.weight"] = (mlp, hidden)
        shapes[f"{name}.down_proj.weight"] = (hidden, mlp)
    return shapes


def linear_shapes(name: str, num_out: int, num_in: int, has_bias: bool) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (num_out, num_in)}
    return shapes | {f"{name}.bias": (num_out,)} if has_bias else shapes


def norm_shapes(spec: ModelSpec, name: str) -> Shapes:
    """A norm of hidden states."""
    kinds = ("weight", "bias") if spec.norm_kind == "layer" else ("weight",)
    return {f"{name}.{kind}": (spec.hidden_size,) for kind in kinds}


def norm_names(spec: ModelSpec) -> tuple[str | None, str | None, str | None, str | None]:
    """The norms before and after attention, before and after the feed-forward."""
    return {
        "pre": ("input_layernorm", None, "post_attention_layernorm", None),
        "post": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        "both": (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
    }[spec.norms]
