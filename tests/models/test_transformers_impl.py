"""Decoders through transformers' own code: the same logits over octavo's paged attention."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo.engine.checkpoint.checkpoint import open_checkpoint
from octavo.engine.checkpoint.families import architectures
from octavo.engine.errors import CheckpointError
from octavo.engine.models.hf import check
from octavo.engine.models.loader import load_model
from octavo.kernels.ops import Ops
from octavo.kernels.select import select_ops

GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "starcoder2: a window": ("Starcoder2ForCausalLM", {"sliding_window": 13}),
    "cohere: a scale of logits": ("CohereForCausalLM", {"logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2: windows in some layers": (
        "Cohere2ForCausalLM",
        {"sliding_window": 13, "num_hidden_layers": 4},
    ),
    "glm4: neighbours rotate": ("Glm4ForCausalLM", {"head_dim": 16}),
    "nemotron: squared relu": ("NemotronForCausalLM", {"head_dim": 16}),
    "opt: learned positions": ("OPTForCausalLM", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt2: transposed weights": ("GPT2LMHeadModel", GPT),
    "phi: a head with a bias": ("PhiForCausalLM", {}),
    "qwen2-moe: experts": (
        "Qwen2MoeForCausalLM",
        {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    ),
}
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"attention_bias": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {"head_dim": 16, "sliding_window": 13, "query_pre_attn_scalar": 16, "num_hidden_layers": 4}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
}


def tiny(tiny_of: Callable[..., Any], name: str, changes: dict[str, Any]) -> Any:
    model_class = getattr(transformers, name)
    return tiny_of(model_class, model_class.config_class, **changes)


def test_variants_are_of_architectures_without_a_family() -> None:
    """The others would be computed by octavo's own code, and their tests here would say nothing."""
    own = set(architectures())
    assert [variant for variant, (name, _) in VARIANTS.items() if name in own] == []
    assert [family for family, (name, _) in OWN.items() if name not in own] == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(
    variant: str, tiny_of: Callable[..., Any], check_family: Callable[..., Any], ops: Ops
) -> None:
    """Of architectures that octavo has no file for."""
    checked = check_family(tiny(tiny_of, *VARIANTS[variant]))
    checked.logits(ops, has_foreign_products=variant.endswith("experts"))


@pytest.mark.native
@pytest.mark.parametrize("family", OWN)
def test_logits_where_octavo_has_a_family(
    family: str, tiny_of: Callable[..., Any], check_family: Callable[..., Any]
) -> None:
    theirs = tiny(tiny_of, *OWN[family])
    checked = check_family(theirs, model_impl="transformers")
    checked.logits(select_ops("cpu", torch.device("cpu")))


@pytest.mark.native
@pytest.mark.parametrize("variant", ["cohere2: windows in some layers", "gpt2: transposed weights"])
def test_greedy_tokens(
    variant: str, tiny_of: Callable[..., Any], check_family: Callable[..., Any]
) -> None:
    check_family(tiny(tiny_of, *VARIANTS[variant])).greedy("cpu")


@pytest.mark.native
@pytest.mark.parametrize("variant", ["starcoder2: a window", "gpt2: transposed weights"])
def test_a_row_has_the_same_bits_in_any_company(
    variant: str, tiny_of: Callable[..., Any], save: Callable[..., Path], feed: Callable[..., Any]
) -> None:
    model = load(save(tiny(tiny_of, *VARIANTS[variant])), "cpu")
    ops = select_ops("cpu", torch.device("cpu"))
    ids = list(range(3, 40))
    alone = feed(model, ops, ids, [1])
    for chunks in ([5], [37]):
        assert torch.equal(feed(model, ops, ids, chunks), alone)


# --- what is refused ----------------------------------------------------------------------------
def load(folder: Path, ops: str = "torch") -> Any:
    device = torch.device("cpu")
    checkpoint = open_checkpoint(folder)
    return load_model(checkpoint, select_ops(ops, device), dtype=torch.float32, device=device)


def refused(folder: Path, pattern: str, ops: str = "torch") -> None:
    with pytest.raises(CheckpointError, match=pattern) as error:
        load(folder, ops)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("StableLmForCausalLM", "StableLmForCausalLM does not let its attention be replaced"),
        ("BloomForCausalLM", "BloomForCausalLM does not let its attention be replaced"),
        ("DiffLlamaForCausalLM", "DiffLlamaForCausalLM .* not each of its 2 layers attends once"),
    ],
)
def test_classes_that_cannot_are_refused(
    name: str, pattern: str, tiny_of: Callable[..., Any], save: Callable[..., Path]
) -> None:
    refused(save(tiny(tiny_of, name, {})), pattern)


@pytest.fixture
def folder(tiny_of: Callable[..., Any], save: Callable[..., Path]) -> Path:
    return save(tiny(tiny_of, "CohereForCausalLM", {}))


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"is_encoder_decoder": True}, "the model is an encoder and a decoder"),
        ({"vision_config": {}}, r"parts of its own \(vision_config\)"),
        ({"kv_lora_rank": 8}, "multi-head latent attention"),
        ({"alibi": True}, r"ALiBi"),
        ({"layer_types": ["full_attention", "mamba"]}, "layers of type mamba"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type dynamic follows"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised with gptq"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"model_type": "own"}, "no CohereForCausalLM for the model type own"),
        ({"model_type": "llama"}, "no CohereForCausalLM for the model type llama"),
        ({"architectures": ["T5ForConditionalGeneration"]}, "not supported; .* by transformers"),
        ({"intermediate_size": 80}, "has another shape"),
        ({"num_hidden_layers": 3}, "lacks the tensors model.layers.2"),
        ({"num_hidden_layers": 1}, "has no place for the tensors? model.layers.1"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}, "asks for a window"),
    ],
)
def test_configurations_that_cannot_are_refused(
    changes: dict[str, Any], pattern: str, folder: Path
) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    refused(folder, pattern)


def test_sinks_are_refused_where_the_kernels_have_none(
    tiny_of: Callable[..., Any], save: Callable[..., Path]
) -> None:
    changes = {"head_dim": 16, "num_local_experts": 4}
    refused(save(tiny(tiny_of, "GptOssForCausalLM", changes)), "attention sinks", "cpu")


def test_code_beside_the_weights_is_never_run(folder: Path) -> None:
    path, ran = folder / "config.json", folder / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')\nOwn = OwnConfig = None\n")
    own = {"auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    load(folder)
    assert not ran.exists()


def test_octavo_alone_is_refused_without_a_family(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="CohereForCausalLM is not supported; octavo runs"):
        open_checkpoint(folder, "octavo")


def test_a_model_whose_logits_differ_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a class that looks at more than its attention's arguments."""
    own_logits = check.own_logits

    def shifted(causal: Any, spec: Any) -> list[torch.Tensor]:
        return [logits.roll(1, 0) for logits in own_logits(causal, spec)]

    monkeypatch.setattr("octavo.engine.models.hf.load.own_logits", shifted)
    refused(folder, "over paged keys and values its logits are off by")
