"""Random GPT-NeoX models: octavo's logits and greedy tokens are transformers'."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from octavo.engine.checkpoint.checkpoint import open_checkpoint
from octavo.engine.errors import CheckpointError
from octavo.kernels.ops import Ops
from octavo.kernels.reference import ReferenceOps

TOKENS = torch.randint(3, 264, (41,), generator=torch.Generator().manual_seed(5)).tolist()
VARIANTS: dict[str, dict[str, Any]] = {
    "parallel": {"use_parallel_residual": True},
    "one-after-the-other": {"use_parallel_residual": False},
    "whole-rotary": {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 1.0}},
    "half-rotary": {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "no-attention-bias": {"attention_bias": False},
    "tied": {"tie_word_embeddings": True},
    "tanh": {"hidden_act": "gelu_fast", "layer_norm_eps": 1e-3, "num_attention_heads": 2},
}


def make(tiny_of: Callable[..., Any], **changes: Any) -> Any:
    return tiny_of(GPTNeoXForCausalLM, GPTNeoXConfig, **changes)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(
    variant: str, ops: Ops, tiny_of: Callable[..., Any], check_family: Callable[..., Any]
) -> None:
    check_family(make(tiny_of, **VARIANTS[variant])).logits(ops)


@pytest.mark.native
@pytest.mark.parametrize("variant", ["parallel", "one-after-the-other"])
def test_greedy_tokens(
    variant: str, tiny_of: Callable[..., Any], check_family: Callable[..., Any]
) -> None:
    check_family(make(tiny_of, **VARIANTS[variant])).greedy("cpu")


@pytest.mark.parametrize("type", ["F32", "Q8_0"])
@pytest.mark.parametrize("is_parallel", [True, False])
def test_logits_of_a_gguf_file(
    is_parallel: bool,
    type: str,
    ops: Ops,
    tmp_path: Path,
    tiny_of: Callable[..., Any],
    write_gguf: Callable[..., None],
    check_family: Callable[..., Any],
) -> None:
    """llama.cpp's converter puts the q of all heads before their k, and these before their v."""
    theirs = make(tiny_of, use_parallel_residual=is_parallel)

    def sections(name: str, values: Any) -> Any:
        if "query_key_value" not in name:
            return values
        heads = values.reshape(4, 3, 16, *values.shape[1:])
        return heads.swapaxes(0, 1).reshape(values.shape)

    write_gguf(
        theirs,
        tmp_path / "model.gguf",
        type,
        arch="gptneox",
        is_permuted=False,
        convert=sections,
        layer_norm_eps=theirs.config.layer_norm_eps,
        rope_dimension_count=4,
        parallel_residual=is_parallel,
    )
    check_family(theirs, path=tmp_path / "model.gguf").logits(ops)


def edit(folder: Path, *without: str, **changes: Any) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: values[key] for key in values if key not in without}))


def test_spellings_of_transformers_4_mean_the_same(
    tiny_of: Callable[..., Any],
    save: Callable[..., Path],
    load: Callable[..., Any],
    feed: Callable[..., Tensor],
) -> None:
    theirs, ops = make(tiny_of, **VARIANTS["half-rotary"]), ReferenceOps()
    folder = save(theirs)
    expected = feed(load(folder, ops), ops, TOKENS, [41])
    edit(folder, "rope_parameters", rotary_pct=0.5, rotary_emb_base=10000)
    assert torch.equal(feed(load(folder, ops), ops, TOKENS, [41]), expected)
    edit(folder, rotary_emb_base=500)
    assert not torch.allclose(feed(load(folder, ops), ops, TOKENS, [41]), expected, rtol=1e-2)


def test_masks_that_old_files_hold_are_left_unread(
    tiny_of: Callable[..., Any],
    save: Callable[..., Path],
    load: Callable[..., Any],
    feed: Callable[..., Tensor],
) -> None:
    """Also those that hold no numbers."""
    folder, ops = save(make(tiny_of)), ReferenceOps()
    expected = feed(load(folder, ops), ops, TOKENS, [41])
    tensors = load_file(folder / "model.safetensors")
    tensors["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    tensors["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
    tensors["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(feed(load(folder, ops), ops, TOKENS, [41]), expected)
    tensors["gpt_neox.layers.0.mlp.mask"] = torch.ones(8, dtype=torch.bool)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"mlp\.mask has type BOOL"):
        load(folder, ops)


def test_a_share_of_nothing_is_refused(
    tiny_of: Callable[..., Any], save: Callable[..., Path]
) -> None:
    folder = save(make(tiny_of))
    edit(folder, "rope_parameters", rotary_pct=0, rotary_emb_base=10000)
    with pytest.raises(CheckpointError, match="rotary_pct must be a positive number"):
        open_checkpoint(folder)


def test_an_activation_that_is_not_computed_is_refused(
    tiny_of: Callable[..., Any], save: Callable[..., Path]
) -> None:
    folder = save(make(tiny_of))
    edit(folder, hidden_act="relu")
    with pytest.raises(CheckpointError, match="hidden_act relu is not supported"):
        open_checkpoint(folder)
