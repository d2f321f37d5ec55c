"""A tiny random Llama with a byte-level tokenizer, written as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<|end|>", "<|start|>", "<|stop|>"]
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}: {{ m['content'] }}<|stop|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)


def write_tokenizer(folder: Path) -> int:
    """A vocabulary of the 256 bytes and three special tokens. Returns its size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer.get_vocab_size()


def write_model(
    folder: Path,
    *,
    window: int = 512,
    layers: int = 2,
    seed: int = 0,
    nan_token: int | None = None,
) -> Path:
    """Write the folder. A prompt that holds ``nan_token`` makes the row's logits NaN."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = write_tokenizer(folder)
    hidden, mlp, heads, kv_heads, dim = 32, 64, 4, 2, 8
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "max_position_embeddings": window,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": nan_token is None,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "eos_token_id": vocab - 3,
        "bos_token_id": None,
    }
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.3).astype(np.float32)

    tensors = {"model.embed_tokens.weight": weight(vocab, hidden)}
    if nan_token is not None:
        tensors["lm_head.weight"] = weight(vocab, hidden)
        tensors["model.embed_tokens.weight"][:, 0] = 0
        tensors["model.embed_tokens.weight"][nan_token, 0] = 4  # overflows in the first norm
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, shape in {
            "self_attn.q_proj": (heads * dim, hidden),
            "self_attn.k_proj": (kv_heads * dim, hidden),
            "self_attn.v_proj": (kv_heads * dim, hidden),
            "self_attn.o_proj": (hidden, heads * dim),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }.items():
            tensors[f"{prefix}{name}.weight"] = weight(*shape)
        tensors[f"{prefix}input_layernorm.weight"] = np.ones(hidden, np.float32)
        tensors[f"{prefix}post_attention_layernorm.weight"] = np.ones(hidden, np.float32)
    if nan_token is not None:
        tensors["model.layers.0.input_layernorm.weight"][0] = 3e38
    tensors["model.norm.weight"] = np.ones(hidden, np.float32)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE})
    )
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def poisoned_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token 7 makes a row's logits NaN."""
    return write_model(tmp_path_factory.mktemp("poisoned"), nan_token=7)
