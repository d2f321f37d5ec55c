"""GGUF files written by the gguf package give the logits of the transformers model they came from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from octavo.engine.checkpoint.checkpoint import open_checkpoint
from octavo.engine.checkpoint.gguf_file import GGUFFile
from octavo.engine.errors import CheckpointError
from octavo.engine.models.rotary import inverse_frequencies, rotary_table
from octavo.kernels.ops import Ops
from octavo.kernels.reference import ReferenceOps

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
TOKENS = torch.randint(0, 96, (45,), generator=torch.Generator().manual_seed(3)).tolist()
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize("type", TYPES)
def test_logits_of_every_tensor_type(
    type: str,
    tmp_path: Path,
    make_tiny: Callable[..., Any],
    write_gguf: Callable[..., None],
    load: Callable[..., Any],
    feed: Callable[..., Any],
    transformers_logits: Callable[..., Any],
    assert_close: Callable[..., None],
    ops: Ops,
) -> None:
    theirs = make_tiny()
    write_gguf(theirs, tmp_path / "model.gguf", type)
    ours = load(tmp_path / "model.gguf", ops)
    assert_close(feed(ours, ops, TOKENS, [7]), transformers_logits(theirs, TOKENS))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"tie_word_embeddings": True}, id="tied"),
        pytest.param({"attention_bias": True, "mlp_bias": True}, id="biases"),
        pytest.param({"num_key_value_heads": 4}, id="multi-head"),
        pytest.param({"head_dim": 32}, id="head-dim-of-its-own"),
        pytest.param({"rope_parameters": LLAMA3_ROPE}, id="rope-factors"),
    ],
)
def test_logits_of_every_shape(
    changes: dict[str, Any],
    tmp_path: Path,
    make_tiny: Callable[..., Any],
    write_gguf: Callable[..., None],
    load: Callable[..., Any],
    feed: Callable[..., Any],
    transformers_logits: Callable[..., Any],
    assert_close: Callable[..., None],
) -> None:
    theirs, ops = make_tiny(**changes), ReferenceOps()
    write_gguf(theirs, tmp_path / "model.gguf")
    ours = load(tmp_path / "model.gguf", ops)
    assert_close(feed(ours, ops, TOKENS, [len(TOKENS)]), transformers_logits(theirs, TOKENS))


def test_linear_rope_scaling_and_window_are_read(
    tmp_path: Path, make_tiny: Callable[..., Any], write_gguf: Callable[..., None]
) -> None:
    write_gguf(
        make_tiny(),
        tmp_path / "model.gguf",
        rope_scaling_type=gguf.RopeScalingType.LINEAR,
        rope_scaling_factor=4.0,
        sliding_window=24,
    )
    spec = open_checkpoint(tmp_path / "model.gguf").spec
    assert spec.rope.scaling == {"rope_type": "linear", "factor": 4.0}
    assert spec.sliding_window == 24


def test_yarn_is_read(
    tmp_path: Path, make_tiny: Callable[..., Any], write_gguf: Callable[..., None]
) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    theirs = make_tiny(rope_parameters=yarn | {"rope_theta": 10000.0})
    write_gguf(
        theirs,
        tmp_path / "model.gguf",
        rope_scaling_type=gguf.RopeScalingType.YARN,
        rope_scaling_factor=4.0,
        rope_scaling_orig_ctx_len=32,
    )
    rope = open_checkpoint(tmp_path / "model.gguf").spec.rope
    expected = theirs.model.rotary_emb
    assert rope.attention_factor == pytest.approx(expected.attention_scaling)
    torch.testing.assert_close(inverse_frequencies(rope, 128), expected.inv_freq)


@pytest.mark.parametrize("max_model_len", [32, 33])
def test_long_rope_is_read(
    max_model_len: int,
    tmp_path: Path,
    tiny_of: Callable[..., Any],
    write_gguf: Callable[..., None],
) -> None:
    short, long = [1.0 + 0.1 * i for i in range(8)], [2.0 + i for i in range(8)]
    rope = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    theirs = tiny_of(
        Phi3ForCausalLM,
        Phi3Config,
        original_max_position_embeddings=32,
        rope_parameters=rope | {"rope_theta": 10000.0},
    )
    embedding = theirs.model.rotary_emb
    write_gguf(
        theirs,
        tmp_path / "model.gguf",
        arch="phi3",
        is_permuted=False,
        rope_scaling_orig_ctx_len=32,
        rope_scaling_attn_factors=embedding.attention_scaling,
        tensors={"rope_factors_short.weight": short, "rope_factors_long.weight": long},
    )
    cos, sin = embedding(torch.zeros(1), torch.arange(max_model_len)[None])
    spec = open_checkpoint(tmp_path / "model.gguf").spec
    table = rotary_table(spec.rope, max_model_len)
    torch.testing.assert_close(table, torch.cat((cos[0, :, :8], sin[0, :, :8]), dim=-1))


def test_long_rope_needs_both_lists(
    tmp_path: Path, tiny_of: Callable[..., Any], write_gguf: Callable[..., None]
) -> None:
    path = tmp_path / "model.gguf"
    factors = {"rope_factors_long.weight": [2.0] * 8}
    write_gguf(
        tiny_of(Phi3ForCausalLM, Phi3Config),
        path,
        arch="phi3",
        is_permuted=False,
        tensors=factors,
    )
    with pytest.raises(CheckpointError, match=r"lacks the tensor rope_factors_short\.weight"):
        open_checkpoint(path)


def test_everything_around_the_weights_is_read(
    tmp_path: Path, make_tiny: Callable[..., Any], write_gguf: Callable[..., None]
) -> None:
    write_gguf(
        make_tiny(),
        tmp_path / "model.gguf",
        "Q4_1",
        bos_token_id=1,
        eos_token_id=2,
        eot_token_id=5,
        chat_template="{{ messages }}",
        vocab_size=96,
    )
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    assert checkpoint.kind == "gguf"
    assert checkpoint.eos_token_ids == (2, 5)
    assert checkpoint.bos_token_id == 1
    assert checkpoint.chat_template == "{{ messages }}"
    assert checkpoint.spec.quantization == "Q4_1"
    assert checkpoint.spec.is_quantized
    assert not checkpoint.spec.tie_word_embeddings


def test_a_control_token_that_ends_turns_is_an_end_though_the_file_does_not_say_so(
    tmp_path: Path, make_tiny: Callable[..., Any], write_gguf: Callable[..., None]
) -> None:
    tokens = [f"t{index}" for index in range(96)]
    types = [gguf.TokenType.NORMAL] * 96
    tokens[7], types[7] = "<end_of_turn>", gguf.TokenType.CONTROL
    tokens[8], types[8] = "<|im_end|>", gguf.TokenType.NORMAL
    tokens[9], types[9] = "<start_of_turn>", gguf.TokenType.CONTROL
    path = tmp_path / "model.gguf"
    write_gguf(make_tiny(), path, eos_token_id=2, tokens=tokens, token_types=types)
    assert open_checkpoint(path).eos_token_ids == (2, 7)


def test_sampling_defaults_are_read(
    tmp_path: Path, make_tiny: Callable[..., Any], write_gguf: Callable[..., None]
) -> None:
    write_gguf(
        make_tiny(),
        tmp_path / "model.gguf",
        sampling_temp=0.7,
        sampling_top_p=0.95,
        sampling_top_k=20,
        sampling_min_p=0.0,
        sampling_penalty_repeat=1.05,
        sampling_mirostat=0,
    )
    assert open_checkpoint(tmp_path / "model.gguf").default_sampling == {
        "temperature": 0.7,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
    }


@pytest.mark.parametrize(("type", "dtype"), [("F32", "float32"), ("F16", "float16")])
def test_unquantized_files_say_their_dtype(
    type: str,
    dtype: str,
    tmp_path: Path,
    make_tiny: Callable[..., Any],
    write_gguf: Callable[..., None],
) -> None:
    write_gguf(make_tiny(), tmp_path / "model.gguf", type)
    spec = open_checkpoint(tmp_path / "model.gguf").spec
    assert (spec.dtype, spec.is_quantized, spec.quantization) == (dtype, False, None)


def test_read_gives_private_bytes(
    tmp_path: Path, make_tiny: Callable[..., Any], write_gguf: Callable[..., None]
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(make_tiny(), path)
    file, before = GGUFFile.open(path), path.read_bytes()
    data = file.read("output_norm.weight")
    assert data.nbytes == file.tensors["output_norm.weight"].num_bytes == 64 * 4
    data[:] = 0
    assert path.read_bytes() == before
