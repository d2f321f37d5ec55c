"""Random Llama and Mistral models: octavo's logits are transformers'."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from octavo.engine.checkpoint.checkpoint import open_checkpoint
from octavo.engine.models.loader import load_model
from octavo.kernels.ops import Ops, QuantizedRows, dense
from octavo.kernels.reference import ReferenceOps

TOKENS = torch.randint(0, 96, (45,), generator=torch.Generator().manual_seed(3)).tolist()

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped-query": ("llama", {}),
    "one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "multi-head": ("llama", {"num_key_value_heads": 4}),
    "head-dim-of-its-own": ("llama", {"head_dim": 24}),
    "rope-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "rope-llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "rope-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "attention-bias": ("llama", {"attention_bias": True}),
    "mlp-bias": ("llama", {"mlp_bias": True}),
    "one-layer": ("llama", {"num_hidden_layers": 1, "rms_norm_eps": 1e-3}),
    "mistral-window": ("mistral", {"sliding_window": 6}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(
    variant: str,
    ops: Ops,
    make_tiny: Callable[..., Any],
    save: Callable[..., Path],
    load: Callable[..., Any],
    feed: Callable[..., Any],
    transformers_logits: Callable[..., Any],
    assert_close: Callable[..., None],
) -> None:
    family, changes = VARIANTS[variant]
    theirs = make_tiny(family, **changes)
    ours = load(save(theirs), ops)
    expected = transformers_logits(theirs, TOKENS)
    for chunks in ([len(TOKENS)], [1], [3], [7], [30, 1, 1, 3]):
        assert_close(feed(ours, ops, TOKENS, chunks), expected)


@pytest.mark.native
@pytest.mark.parametrize("window", [None, 6], ids=["llama", "mistral-window"])
def test_greedy_tokens(
    window: int | None, tiny_of: Callable[..., Any], check_family: Callable[..., Any]
) -> None:
    if window is None:
        theirs = tiny_of(LlamaForCausalLM, LlamaConfig)
    else:
        theirs = tiny_of(MistralForCausalLM, MistralConfig, sliding_window=window)
    check_family(theirs).greedy("cpu")


def test_logits_of_a_gguf_file(
    ops: Ops,
    tmp_path: Path,
    tiny_of: Callable[..., Any],
    write_gguf: Callable[..., None],
    check_family: Callable[..., Any],
) -> None:
    theirs = tiny_of(LlamaForCausalLM, LlamaConfig)
    write_gguf(theirs, tmp_path / "model.gguf")
    check_family(theirs, path=tmp_path / "model.gguf").logits(ops)


def test_a_window_changes_logits_only_past_it(
    make_tiny: Callable[..., Any],
    save: Callable[..., Path],
    load: Callable[..., Any],
    feed: Callable[..., Any],
) -> None:
    """Guards the comparison above: at these lengths the window matters."""
    folder, ops = save(make_tiny("mistral", sliding_window=6)), ReferenceOps()
    windowed = feed(load(folder, ops), ops, TOKENS, [len(TOKENS)])
    edit_config(folder, sliding_window=None)
    full = feed(load(folder, ops), ops, TOKENS, [len(TOKENS)])
    assert torch.equal(windowed[:6], full[:6])
    assert not torch.allclose(windowed[6:], full[6:], rtol=1e-2)


@pytest.mark.parametrize("spelling", ["transformers-4", "transformers-4-old-type"])
def test_old_rope_spellings_mean_the_same(
    spelling: str,
    make_tiny: Callable[..., Any],
    save: Callable[..., Path],
    load: Callable[..., Any],
    feed: Callable[..., Any],
) -> None:
    folder, ops = save(make_tiny(rope_parameters=LLAMA3_ROPE)), ReferenceOps()
    expected = feed(load(folder, ops), ops, TOKENS, [len(TOKENS)])
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    if spelling == "transformers-4-old-type":
        scaling["type"] = scaling.pop("rope_type")
    edit_config(folder, rope_parameters=None, rope_theta=10000.0, rope_scaling=scaling)
    assert torch.equal(feed(load(folder, ops), ops, TOKENS, [len(TOKENS)]), expected)


def test_shards_load_as_one_file_does(
    make_tiny: Callable[..., Any],
    save: Callable[..., Path],
    load: Callable[..., Any],
    feed: Callable[..., Any],
    transformers_logits: Callable[..., Any],
    assert_close: Callable[..., None],
) -> None:
    theirs, ops = make_tiny(), ReferenceOps()
    folder = save(theirs, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    ours = feed(load(folder, ops), ops, TOKENS, [len(TOKENS)])
    assert_close(ours, transformers_logits(theirs, TOKENS))


def test_bfloat16_weights_stay_bfloat16_and_logits_are_float32(
    ops: Ops,
    make_tiny: Callable[..., Any],
    save: Callable[..., Path],
    feed: Callable[..., Any],
    transformers_logits: Callable[..., Any],
) -> None:
    theirs = make_tiny()
    model = load_model(
        open_checkpoint(save(theirs)), ops, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    logits = feed(model, ops, TOKENS, [7])
    assert logits.dtype == torch.float32
    assert model.kv_cache_spec(8, 4).dtype == torch.bfloat16
    expected = transformers_logits(theirs, TOKENS)
    assert torch.nn.functional.cosine_similarity(logits, expected).min() > 0.98


def test_the_model_says_what_it_is(
    make_tiny: Callable[..., Any], save: Callable[..., Path], load: Callable[..., Any]
) -> None:
    theirs = make_tiny(tie_word_embeddings=True)
    model = load(save(theirs), ReferenceOps())
    assert model.num_parameters == theirs.num_parameters()
    assert model.num_layers == 2
    spec = model.kv_cache_spec(10, 16)
    assert (spec.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim) == (10, 16, 2, 16)


def test_a_tied_head_shares_the_embedding(
    make_tiny: Callable[..., Any], save: Callable[..., Path], load: Callable[..., Any]
) -> None:
    packed: list[torch.Tensor] = []

    class SpyOps(ReferenceOps):
        def pack_head(self, weight: torch.Tensor | QuantizedRows) -> torch.Tensor:
            packed.append(dense(weight))
            return super().pack_head(weight)

    model = load(save(make_tiny(tie_word_embeddings=True)), SpyOps())
    assert [weight.data_ptr() for weight in packed] == [model.embedding.data_ptr()]


def test_progress_grows_to_one(make_tiny: Callable[..., Any], save: Callable[..., Path]) -> None:
    seen: list[tuple[str, float]] = []
    load_model(
        open_checkpoint(save(make_tiny())),
        ReferenceOps(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        progress=lambda stage, fraction: seen.append((stage, fraction)),
    )
    fractions = [fraction for _, fraction in seen]
    assert {stage for stage, _ in seen} == {"loading"}
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
