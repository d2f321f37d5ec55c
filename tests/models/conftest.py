"""Tiny random models from transformers' own classes, and a driver that runs octavo's over paged KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from octavo.engine.checkpoint.checkpoint import open_checkpoint
from octavo.engine.models.loader import load_model
from octavo.engine.models.model import Model
from octavo.kernels.ops import AttentionMetadata, Ops
from octavo.kernels.select import select_ops

CPU = torch.device("cpu")
BLOCK_SIZE = 4
UNWRITTEN = 1e4  # a slot that is read without having been written spoils the logits
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # logits far enough apart for a wrong layer to show
}


def _make_tiny(family: str = "llama", **changes: Any) -> Any:
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(7)
    model = model_class(config_class(**(TINY | changes)))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0, 0.5)
        elif "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    return model.eval()


class PagedSequence:
    """One sequence fed to a model in pieces; its blocks lie in descending order, never adjacent."""

    def __init__(self, model: Model, ops: Ops, max_tokens: int) -> None:
        num_blocks = -(-max_tokens // BLOCK_SIZE)
        spec = model.kv_cache_spec(2 * num_blocks, BLOCK_SIZE)
        self.model = model
        self.num_computed_tokens = 0
        self.block_ids = list(range(2 * num_blocks - 1, 0, -2))
        self.caches = [ops.allocate_kv_cache(spec, CPU) for _ in range(model.num_layers)]
        for cache in self.caches:
            cache.key.fill_(UNWRITTEN)
            cache.value.fill_(UNWRITTEN)

    def feed(self, token_ids: Sequence[int]) -> Tensor:
        """Logits of ``token_ids``, ``[len(token_ids), vocab_size]``."""
        start, end = self.num_computed_tokens, self.num_computed_tokens + len(token_ids)
        self.num_computed_tokens = end
        with torch.inference_mode():
            hidden = self.model.forward(
                torch.tensor(token_ids),
                torch.arange(start, end),
                self.caches,
                self._metadata(start, end),
            )
            return self.model.logits(hidden)

    def _metadata(self, start: int, end: int) -> AttentionMetadata:
        blocks = self.block_ids[: -(-end // BLOCK_SIZE)]
        slots = [
            blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for position in range(start, end)
        ]
        return AttentionMetadata(
            query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            block_tables=torch.tensor([blocks], dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            query_lens_host=[end - start],
            seq_lens_host=[end],
            max_query_len=end - start,
            max_seq_len=end,
            num_decode_rows=int(end - start == 1),
        )


def _feed(model: Model, ops: Ops, token_ids: Sequence[int], chunks: Sequence[int]) -> Tensor:
    sequence, logits, start = PagedSequence(model, ops, len(token_ids)), list[Tensor](), 0
    while start < len(token_ids):
        size = chunks[len(logits) % len(chunks)]
        logits.append(sequence.feed(token_ids[start : start + size]))
        start += size
    return torch.cat(logits)


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{_GGUF_NAMES[module]}.{kind}"
    index, _, rest = module.removeprefix("model.layers.").partition(".")
    return f"blk.{index}.{_GGUF_NAMES[rest]}.{kind}"


def _permute(rows: Any, num_heads: int) -> Any:
    """How llama.cpp's converter stores q and k."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _write_gguf(model: Any, path: Path, type: str = "F32", **metadata: Any) -> None:
    """Write a transformers Llama as GGUF and round the model's own weights to what was written."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(value)
    kind = gguf.GGMLQuantizationType[type]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        values, num_heads = parameter.detach().numpy(), heads.get(name.split(".")[-2])
        stored = values if num_heads is None else _permute(values, num_heads)
        if values.ndim == 1:
            writer.add_tensor(_gguf_name(name), stored)
            continue
        writer.add_tensor(_gguf_name(name), gguf.quants.quantize(stored, kind), raw_dtype=kind)
        rounded = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        parameter.data.copy_(torch.from_numpy(rounded))
    if config.rope_parameters["rope_type"] == "llama3":
        plain = 1.0 / 10000.0 ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _transformers_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([list(token_ids)])).logits[0]
    return logits


def _assert_close(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert got.dtype == torch.float32
    difference = (got - expected).abs().max().item()
    assert difference <= 1e-4 * expected.abs().max().item()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads and lose much where the processors are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_tiny() -> Callable[..., Any]:
    """``make_tiny(family="llama", **config)``: a random transformers model in float32."""
    return _make_tiny


@pytest.fixture(scope="session")
def transformers_logits() -> Callable[[Any, Sequence[int]], Tensor]:
    """transformers' logits of every position, ``[num_tokens, vocab_size]``."""
    return _transformers_logits


@pytest.fixture(scope="session")
def feed() -> Callable[[Model, Ops, Sequence[int], Sequence[int]], Tensor]:
    """Logits of every position when tokens come in pieces of the given sizes, over and over."""
    return _feed


@pytest.fixture(scope="session")
def assert_close() -> Callable[[Tensor, Tensor], None]:
    """The bound of the project: ``max|a - b| <= 1e-4 * max|b|``, in float32."""
    return _assert_close


@pytest.fixture(params=["reference", "torch", pytest.param("cpu", marks=pytest.mark.native)])
def ops(request: pytest.FixtureRequest) -> Ops:
    return select_ops(request.param, CPU)


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """``save(model, **options)``: a transformers model as a folder."""

    def save_model(model: Any, **options: Any) -> Path:
        model.save_pretrained(tmp_path / "model", **options)
        return tmp_path / "model"

    return save_model


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., None]:
    """``write_gguf(model, path, type="F32", **metadata)``: metadata by GGUFWriter's ``add_`` names.

    Matrices are stored as ``type``; the model's own are rounded to the values that were stored.
    """
    return _write_gguf


@pytest.fixture(scope="session")
def load() -> Callable[[Path, Ops], Model]:
    """A checkpoint as octavo loads it in float32."""

    def load_path(path: Path, ops: Ops) -> Model:
        return load_model(open_checkpoint(path), ops, dtype=torch.float32, device=CPU)

    return load_path
