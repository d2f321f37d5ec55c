"""Numbers of GGUF blocks equal the gguf package's, bit for bit, whatever the blocks hold."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from octavo.engine.checkpoint.checkpoint import open_checkpoint
from octavo.engine.checkpoint.gguf_file import BLOCK_LAYOUTS, QUANTIZED_TYPES
from octavo.engine.models.dequantize import AS_Q8_0, CHUNK_NUMBERS, dequantize, to_q8_0
from octavo.engine.models.loader import open_weights
from octavo.engine.models.weights import Weights
from octavo.kernels.ops import Ops, QuantizedRows

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 96, (45,), generator=torch.Generator().manual_seed(3)).tolist()
SCALES = {  # bytes at which a block's float16 numbers lie
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}


def random_blocks(type: str, num_blocks: int, seed: int = 5) -> NDArray[np.uint8]:
    """``[num_blocks, block_bytes]``: any numbers, under scales that make them weights of about 0.1."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (num_blocks, BLOCK_LAYOUTS[type][1]), dtype=np.uint8)
    scales = random.uniform(-1, 1, (num_blocks, len(SCALES[type])))
    set_scales(blocks, type, 1e-3 * scales)
    set_scales(blocks, type, 1e-4 / theirs(blocks, type).std() * scales)
    return blocks


def set_scales(blocks: NDArray[np.uint8], type: str, scales: NDArray[np.float64]) -> None:
    for start, numbers in zip(SCALES[type], scales.T, strict=True):
        stored = numbers.astype(np.float16).view(np.uint8)
        blocks[:, start : start + 2] = stored.reshape(-1, 2)


def theirs(blocks: NDArray[np.uint8], type: str) -> NDArray[np.float32]:
    with np.errstate(all="ignore"):
        numbers = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[type])
    return numbers.astype(np.float32).ravel()


def assert_same_bits(got: torch.Tensor, expected: NDArray[np.float32]) -> None:
    is_nan = np.isnan(expected)
    assert np.array_equal(np.isnan(got.numpy()), is_nan)
    assert np.array_equal(got.numpy().view(np.int32)[~is_nan], expected.view(np.int32)[~is_nan])


def test_every_type_of_blocks_is_known_by_its_size() -> None:
    for type in QUANTIZED_TYPES:
        assert BLOCK_LAYOUTS[type] == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]
    assert set(SCALES) == set(QUANTIZED_TYPES)


@pytest.mark.parametrize("type", QUANTIZED_TYPES)
def test_numbers_of_blocks_over_more_than_one_chunk(type: str) -> None:
    blocks = random_blocks(type, 5 * CHUNK_NUMBERS // 2 // BLOCK_LAYOUTS[type][0])
    got = dequantize(torch.from_numpy(blocks.ravel()), type, torch.float32)
    assert_same_bits(got, theirs(blocks, type))


@given(data=st.data(), type=st.sampled_from(QUANTIZED_TYPES), num_blocks=st.integers(1, 3))
def test_numbers_of_any_bytes(data: st.DataObject, type: str, num_blocks: int) -> None:
    """Scales that are infinite or no numbers too."""
    size = num_blocks * BLOCK_LAYOUTS[type][1]
    stored = data.draw(st.binary(min_size=size, max_size=size))
    blocks = np.frombuffer(stored, np.uint8).reshape(num_blocks, -1)
    got = dequantize(torch.from_numpy(blocks.copy().ravel()), type, torch.float32)
    assert_same_bits(got, theirs(blocks, type))


@pytest.mark.parametrize("type", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_numbers_that_the_gguf_package_stored(type: str) -> None:
    kind = gguf.GGMLQuantizationType[type]
    values = np.random.default_rng(5).normal(size=(5, CHUNK_NUMBERS // 2)).astype(np.float32)
    stored = gguf.quants.quantize(values, kind)
    got = dequantize(torch.from_numpy(stored.view(np.uint8).ravel()), type, torch.float32)
    assert np.array_equal(got.numpy(), gguf.quants.dequantize(stored, kind).ravel())


def test_rounds_once_to_the_wanted_type() -> None:
    block = struct.pack("<e", 0.25) + bytes(range(32))
    data = torch.frombuffer(bytearray(block), dtype=torch.uint8)
    got = dequantize(data, "Q8_0", torch.bfloat16)
    assert got.dtype == torch.bfloat16
    assert got.tolist() == [0.25 * number for number in range(32)]


@pytest.mark.parametrize("type", sorted(AS_Q8_0))
def test_blocks_of_q8_0_hold_the_same_numbers(type: str) -> None:
    blocks = torch.from_numpy(random_blocks(type, 3 * CHUNK_NUMBERS // 32).ravel())
    as_q8_0 = to_q8_0(blocks, type)
    assert as_q8_0.shape == (3 * CHUNK_NUMBERS // 32, 34)
    got = dequantize(as_q8_0.ravel(), "Q8_0", torch.float32)
    assert torch.equal(got, dequantize(blocks, type, torch.float32))


@pytest.fixture
def write_blocks(
    tmp_path: Path, make_tiny: Callable[..., Any], write_gguf: Callable[..., None]
) -> Callable[..., Any]:
    """Writes a Llama whose matrices are random blocks; gives transformers' with the same numbers."""

    def write(types: dict[str, str]) -> tuple[Any, Path]:
        """``types``: by what a matrix's name ends in; "" for all others."""
        model = make_tiny(hidden_size=256, intermediate_size=256)
        path, blocks = tmp_path / "model.gguf", {}
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            if parameter.ndim < 2:
                continue
            module = name.split(".")[-2]
            type = types.get(module, types[""])
            rows = random_blocks(type, parameter.numel() // BLOCK_LAYOUTS[type][0], seed)
            blocks[name] = (type, rows.reshape(parameter.shape[0], -1))
            parameter.data.copy_(torch.from_numpy(theirs(rows, type)).view(parameter.shape))
        write_gguf(model, path, blocks=blocks)
        return model, path

    return write


@pytest.mark.parametrize("type", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_logits_of_models_in_blocks(
    type: str,
    write_blocks: Callable[..., Any],
    load: Callable[..., Any],
    feed: Callable[..., Any],
    transformers_logits: Callable[..., Any],
    assert_close: Callable[..., None],
    ops: Ops,
) -> None:
    expected, path = write_blocks({"": type})
    ours = load(path, ops)
    assert_close(feed(ours, ops, TOKENS, [7]), transformers_logits(expected, TOKENS))
    assert open_checkpoint(path).spec.quantization == type


def test_a_product_of_several_types_stays_in_blocks_if_q8_0_holds_them(
    write_blocks: Callable[..., Any],
) -> None:
    model, path = write_blocks(
        {"": "Q8_0", "q_proj": "Q5_0", "k_proj": "IQ4_NL", "down_proj": "Q6_K"}
    )
    source = open_weights(open_checkpoint(path))
    weights = Weights(source, torch.float32, CPU, quantized_types=frozenset({"Q8_0"}))
    names = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"]
    rows = weights.read_linear(names)
    assert isinstance(rows, QuantizedRows)
    assert rows.type == "Q8_0"
    expected = torch.cat([model.get_parameter(name).detach() for name in names])
    got = dequantize(rows.blocks.ravel(), "Q8_0", torch.float32).view(expected.shape)
    assert torch.equal(got, expected)
    assert not isinstance(
        weights.read_linear(["model.layers.1.mlp.down_proj.weight"]), QuantizedRows
    )
    assert not weights.keeps_blocks("model.layers.1.mlp.down_proj.weight")
    assert weights.keeps_blocks("model.embed_tokens.weight")
