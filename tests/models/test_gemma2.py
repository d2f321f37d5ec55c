"""Random Gemma 2 models: octavo's logits and greedy tokens are transformers'."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM

from octavo.engine.checkpoint.checkpoint import open_checkpoint
from octavo.engine.errors import CheckpointError
from octavo.engine.models.loader import load_model
from octavo.kernels.ops import Ops
from octavo.kernels.reference import ReferenceOps

TOKENS = torch.randint(3, 264, (41,), generator=torch.Generator().manual_seed(5)).tolist()
SHAPE: dict[str, Any] = {"head_dim": 16, "num_hidden_layers": 3, "sliding_window": 6}
VARIANTS: dict[str, dict[str, Any]] = {
    "as-published": {},
    "tight-caps": {
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 20.0,
        "query_pre_attn_scalar": 5,
    },
    "no-caps": {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": 24,
    },
    "biases-and-a-head": {"attention_bias": True, "tie_word_embeddings": False},
    "layers-of-its-own": {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "sliding_window": 13,
    },
    "window-past-the-end": {"sliding_window": 70},
}


def make(tiny_of: Callable[..., Any], **changes: Any) -> Any:
    return tiny_of(Gemma2ForCausalLM, Gemma2Config, **(SHAPE | changes))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(
    variant: str, ops: Ops, tiny_of: Callable[..., Any], check_family: Callable[..., Any]
) -> None:
    check_family(make(tiny_of, **VARIANTS[variant])).logits(ops)


@pytest.mark.native
def test_greedy_tokens(tiny_of: Callable[..., Any], check_family: Callable[..., Any]) -> None:
    check_family(make(tiny_of)).greedy("cpu")


@pytest.mark.parametrize("type", ["F32", "Q8_0"])
def test_logits_of_a_gguf_file(
    type: str,
    ops: Ops,
    tmp_path: Path,
    tiny_of: Callable[..., Any],
    write_gguf: Callable[..., None],
    check_family: Callable[..., Any],
) -> None:
    """Norms are stored with 1 added; the scale of scores follows from the size."""
    theirs = make(tiny_of, query_pre_attn_scalar=16, hidden_size=96)
    config = theirs.config
    write_gguf(
        theirs,
        tmp_path / "model.gguf",
        type,
        arch="gemma2",
        is_permuted=False,
        convert=lambda name, values: values + 1 if "norm" in name else values,
        sliding_window=config.sliding_window,
        attn_logit_softcapping=config.attn_logit_softcapping,
        final_logit_softcapping=config.final_logit_softcapping,
    )
    check_family(theirs, path=tmp_path / "model.gguf").logits(ops)


def test_a_gguf_file_without_caps_has_the_published_ones(
    tmp_path: Path, tiny_of: Callable[..., Any], write_gguf: Callable[..., None]
) -> None:
    """The first files were written before the keys existed."""
    path = tmp_path / "model.gguf"
    write_gguf(make(tiny_of), path, arch="gemma2", is_permuted=False, sliding_window=6)
    spec = open_checkpoint(path).spec
    assert (spec.attention_soft_cap, spec.logits_soft_cap) == (50.0, 30.0)


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 7},
        {"layer_types": ["full_attention"] * 3},
        {"attn_logit_softcapping": 40.0},
        {"final_logit_softcapping": 29.0},
        {"query_pre_attn_scalar": 17},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_number_counts(
    changes: dict[str, Any],
    tiny_of: Callable[..., Any],
    save: Callable[..., Path],
    load: Callable[..., Any],
    feed: Callable[..., Tensor],
) -> None:
    """Guards the comparisons above: at these sizes, each of these is seen in the logits."""
    folder, ops = save(make(tiny_of, initializer_range=0.6)), ReferenceOps()
    before = feed(load(folder, ops), ops, TOKENS, [41])
    edit(folder, **changes)
    after = feed(load(folder, ops), ops, TOKENS, [41])
    assert (after - before).abs().max() > 1e-3 * before.abs().max()


def test_bfloat16_rounds_where_transformers_does(
    tiny_of: Callable[..., Any], save: Callable[..., Path]
) -> None:
    """The embeddings' scale is of the weights' type; 1 + a norm's weight is not."""
    theirs = make(tiny_of, hidden_size=96).bfloat16()
    model: Any = load_model(
        open_checkpoint(save(theirs)),
        ReferenceOps(),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    ids = torch.tensor(TOKENS)
    with torch.inference_mode():
        embedded = theirs.model.embed_tokens(ids)
        assert torch.equal(model.embed(ids), embedded)
        assert torch.equal(model.norm(embedded), theirs.model.norm(embedded))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention must be false"),
        ({"hidden_activation": "relu"}, "hidden_act relu is not supported for Gemma2ForCausalLM"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive number"),
        ({"sliding_window": None}, "lacks sliding_window"),
        ({"layer_types": ["full_attention"]}, "layer_types must be 3 words"),
    ],
)
def test_what_is_not_computed_is_refused(
    changes: dict[str, Any], message: str, tiny_of: Callable[..., Any], save: Callable[..., Path]
) -> None:
    folder = save(make(tiny_of))
    edit(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)
