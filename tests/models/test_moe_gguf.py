"""GGUF files of mixtures of experts: stacked matrices give the logits of the transformers model they came from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from octavo.engine.checkpoint.checkpoint import open_checkpoint
from octavo.engine.errors import CheckpointError
from octavo.engine.models.loader import load_model
from octavo.engine.models.weights_gguf import matrices
from octavo.kernels.cpu_linear import WeightKind
from octavo.kernels.ops import Ops
from octavo.kernels.select import select_ops

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 96, (45,), generator=torch.Generator().manual_seed(3)).tolist()
SIZES: dict[str, Any] = {"vocab_size": 96, "num_experts_per_tok": 2}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 5}),
    "qwen3moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"num_experts": 5, "moe_intermediate_size": 32, "norm_topk_prob": True, "head_dim": 16},
    ),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig, {"num_experts": 5, "eos_token_id": 2}),
}


def make(architecture: str, tiny_of: Callable[..., Any]) -> Any:
    model_class, config_class, changes = MODELS[architecture]
    return tiny_of(model_class, config_class, **SIZES | changes)


def stored_tensors(model: Any, architecture: str) -> dict[str, tuple[Tensor, NDArray[Any]]]:
    """By the file's names: the model's own numbers, and how llama.cpp's converter arranges them."""
    heads = {
        "q_proj": model.config.num_attention_heads,
        "k_proj": model.config.num_key_value_heads,
    }
    stored = {}
    for name, parameter in model.named_parameters():
        layer = ""
        rest = name.removesuffix(".weight")
        if rest.startswith("model.layers."):
            index, _, rest = rest.removeprefix("model.layers.").partition(".")
            layer = f"blk.{index}."
        if rest == "mlp.experts.gate_up_proj":
            gate, up = parameter.data.chunk(2, dim=1)
            stored[f"{layer}ffn_gate_exps.weight"] = (gate, gate.numpy())
            stored[f"{layer}ffn_up_exps.weight"] = (up, up.numpy())
        elif rest == "mlp.experts.down_proj":
            stored[f"{layer}ffn_down_exps.weight"] = (parameter.data, parameter.data.numpy())
        else:
            values, num_heads = parameter.data.numpy(), heads.get(rest.split(".")[-1])
            if num_heads is not None and architecture == "llama":
                values = interleaved(values, num_heads)
            stored[f"{layer}{NAMES[rest]}.weight"] = (parameter.data, values)
    return stored


def interleaved(rows: NDArray[Any], num_heads: int) -> NDArray[Any]:
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def write(
    model: Any, architecture: str, path: Path, type: str, without: str = "", **metadata: int
) -> None:
    """Matrices, but the router's, are stored as ``type``; the model's own are rounded to what was stored."""
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
    writer.add_expert_count(5)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture == "qwen3moe":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(value)
    kind = gguf.GGMLQuantizationType[type]
    for name, (own, values) in stored_tensors(model, architecture).items():
        if name == without:
            continue
        if values.ndim == 1 or "ffn_gate_inp" in name:
            writer.add_tensor(name, values)
            continue
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        rounded = gguf.quants.dequantize(gguf.quants.quantize(own.numpy(), kind), kind)
        own.copy_(torch.from_numpy(rounded))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("type", ["F32", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("architecture", MODELS)
def test_logits(
    architecture: str,
    type: str,
    tmp_path: Path,
    tiny_of: Callable[..., Any],
    load: Callable[..., Any],
    feed: Callable[..., Any],
    transformers_logits: Callable[..., Any],
    assert_close: Callable[..., None],
    ops: Ops,
) -> None:
    theirs = make(architecture, tiny_of)
    write(theirs, architecture, tmp_path / "model.gguf", type)
    ours = load(tmp_path / "model.gguf", ops)
    assert ours.spec.architecture == MODELS[architecture][0].__name__
    assert_close(feed(ours, ops, TOKENS, [7]), transformers_logits(theirs, TOKENS))


@pytest.mark.native
@pytest.mark.parametrize("type", ["Q8_0", "Q4_0", "Q4_1"])
def test_blocks_are_multiplied_as_they_are(
    type: str,
    tmp_path: Path,
    tiny_of: Callable[..., Any],
    feed: Callable[..., Any],
    transformers_logits: Callable[..., Any],
) -> None:
    """What is left of the difference is the rounding of activations."""
    theirs, ops = make("qwen3moe", tiny_of), select_ops("cpu", CPU)
    write(theirs, "qwen3moe", tmp_path / "model.gguf", type)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    ours: Any = load_model(checkpoint, ops, dtype=torch.float32, device=CPU, keep_quantized=True)
    packed = ours.layers[0].mlp.packed
    assert packed.gate_up.kind == packed.down.kind == WeightKind[type]
    got, expected = feed(ours, ops, TOKENS, [45]), transformers_logits(theirs, TOKENS)
    difference = (got - expected).norm() / expected.norm()
    assert 0 < difference < 0.05


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID}, "expert_gating_func must be 1, the softmax, got 2"),
        ({"expert_weights_scale": 2.5}, r"expert_weights_scale must be 1, got 2\.5"),
        ({"expert_shared_count": 1}, "expert_shared_count must be 0, got 1"),
        ({"expert_used_count": 6}, "6 of 5 experts"),
        ({"expert_count": 4}, r"blk\.0\.ffn_down_exps\[4\]\.weight"),
    ],
)
def test_what_is_not_computed_is_refused(
    metadata: dict[str, Any],
    message: str,
    tmp_path: Path,
    tiny_of: Callable[..., Any],
    load: Callable[..., Any],
) -> None:
    write(make("qwen3moe", tiny_of), "qwen3moe", tmp_path / "model.gguf", "F32", **metadata)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "model.gguf", select_ops("reference", CPU))


def test_a_missing_stack_is_named(
    tmp_path: Path, tiny_of: Callable[..., Any], load: Callable[..., Any]
) -> None:
    missing = "blk.1.ffn_up_exps.weight"
    write(make("llama", tiny_of), "llama", tmp_path / "model.gguf", "F32", without=missing)
    with pytest.raises(
        CheckpointError, match=r"lacks the tensors blk\.1\.ffn_up_exps\[0\]\.weight"
    ):
        load(tmp_path / "model.gguf", select_ops("reference", CPU))


def test_a_tensor_of_matrices_is_named_by_them() -> None:
    assert dict(matrices("a.weight", (2, 3, 4))) == {
        "a[0].weight": (3, 4),
        "a[1].weight": (3, 4),
    }
    assert dict(matrices("a.weight", (3, 4))) == {"a.weight": (3, 4)}
    assert dict(matrices("a.weight", (1 << 40, 0, 4))) == {"a.weight": (1 << 40, 0, 4)}
