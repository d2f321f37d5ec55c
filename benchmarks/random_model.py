"""Llama-family models of given shapes with random weights, for checks and timings without a checkpoint.

``write_model`` makes a Hugging Face folder; ``build_model`` puts the weights straight on the device.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from model_shapes import Shape

from octavo.engine.checkpoint.families import family_of
from octavo.engine.checkpoint.hf_config import read_spec
from octavo.engine.models.model import Model
from octavo.engine.models.shapes import decoder_shapes
from octavo.engine.models.weights import Weights
from octavo.kernels.ops import Ops, QuantizedRows


def config_of(shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """As ``config.json`` says it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_q_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "hidden_act": "silu",
        "dtype": str(dtype).removeprefix("torch."),
        "eos_token_id": shape.vocab_size - 1,
        "bos_token_id": None,
    }


def random_tensor(
    name: str, shape: tuple[int, ...], device: torch.device, random: torch.Generator
) -> Tensor:
    """float32; norms are near 1, rows of matrices keep the size of what they are applied to."""
    drawn = torch.randn(shape, generator=random, device=device)
    if name.endswith("norm.weight"):
        return 1.0 + 0.1 * drawn
    return drawn if "embed" in name else drawn / shape[-1] ** 0.5


def write_model(folder: Path, shape: Shape, dtype: torch.dtype, device: str = "cpu") -> Path:
    """Write the folder, tokenizer included; the weights are drawn on ``device``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(shape, dtype)
    place, random = torch.device(device), torch.Generator(device).manual_seed(0)
    tensors = {
        name: random_tensor(name, size, place, random).to(dtype).cpu()
        for name, size in decoder_shapes(read_spec(config, "shape")).items()
    }
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(folder, shape.vocab_size)
    return folder


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """The 256 bytes and made-up pieces; the last id is the end."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += [f"t{index}" for index in range(vocab_size - len(pieces) - 1)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))


class _RandomSource:
    """Implements :class:`~octavo.engine.models.weights.WeightSource`, drawing on a device."""

    path = Path("random")

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: torch.device) -> None:
        self.shapes = shapes
        self._device = device
        self._random = torch.Generator(device).manual_seed(0)

    def own_name(self, name: str) -> str:
        return name

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        return random_tensor(name, self.shapes[name], self._device, self._random).to(dtype)

    def block_types(self, name: str) -> tuple[str, ...]:
        return ()

    def load_blocks(self, name: str, type: str) -> QuantizedRows:
        raise TypeError(f"{name} is not in blocks of {type}")

    def close(self) -> None:
        pass


def build_model(shape: Shape, ops: Ops, dtype: torch.dtype, device: torch.device) -> Model:
    """The model, its weights drawn where they stay."""
    spec = read_spec(config_of(shape, dtype), "shape")
    source = _RandomSource(dict(decoder_shapes(spec)), device)
    return family_of(spec.architecture).build(spec, Weights(source, dtype, device), ops)
