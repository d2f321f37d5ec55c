"""Numbers of GGUF blocks equal the gguf package's, bit for bit, whatever the blocks hold and become."""

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
from octavo.engine.checkpoint.inventory import Machine, list_models
from octavo.engine.checkpoint.memory_blocks import BLOCK_BYTES, KEPT_AS, kept_bytes
from octavo.engine.models.dequantize import CHUNK_NUMBERS, dequantize
from octavo.engine.models.loader import load_model, open_weights
from octavo.engine.models.reblock import reblock
from octavo.engine.models.weights import Weights
from octavo.kernels import cpu_linear
from octavo.kernels.cpu_linear import RowKind
from octavo.kernels.ops import Ops, QuantizedRows
from octavo.kernels.select import select_ops

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


def numbers_in_memory(blocks: torch.Tensor, type: str) -> torch.Tensor:
    """What ``blocks [num_blocks, bytes]`` of a type in memory stand for, in float32 as :class:`QuantizedRows` says."""
    if type not in ("Q4_F32", "Q8_F32"):
        return dequantize(blocks.ravel(), type, torch.float32)
    num_scales = 1 if type == "Q4_F32" else 2
    end = 4 * (num_scales + 1)
    factors, stored = blocks[:, :end].clone().view(torch.float32), blocks[:, end:]
    is_bytes = type == "Q8_F32"
    q = stored.view(torch.int8) if is_bytes else torch.cat([stored & 15, stored >> 4], dim=1)
    scales = factors[:, :num_scales].repeat_interleave(32 // num_scales, dim=1)
    return (q * scales + factors[:, -1:]).ravel()


def test_blocks_in_memory_are_those_of_the_kernels() -> None:
    assert {kind.name: size for kind, size in cpu_linear.BLOCK_BYTES.items()} == BLOCK_BYTES
    assert set(KEPT_AS) == set(QUANTIZED_TYPES) - {"Q2_K"}
    for type, memory_types in KEPT_AS.items():
        sizes = [BLOCK_BYTES[memory_type] for memory_type in memory_types]
        assert sizes == sorted(sizes)
        assert kept_bytes(type, 512) == 16 * sizes[0]
    assert kept_bytes("Q2_K", 512) is None


@pytest.mark.parametrize(
    ("type", "memory_type"),
    [(type, memory_type) for type, memory_types in KEPT_AS.items() for memory_type in memory_types],
)
def test_blocks_in_memory_hold_the_same_numbers(type: str, memory_type: str) -> None:
    """Over more than one chunk, the last of which is not full."""
    num_numbers = 5 * CHUNK_NUMBERS // 2
    blocks = random_blocks(type, num_numbers // BLOCK_LAYOUTS[type][0])
    got = reblock(torch.from_numpy(blocks.ravel()), type, memory_type)
    assert got.shape == (num_numbers // 32, BLOCK_BYTES[memory_type])
    assert np.array_equal(numbers_in_memory(got, memory_type).numpy(), theirs(blocks, type))


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


def logits_in_bfloat16(
    path: Path, ops: Ops, feed: Callable[..., Any], keep_quantized: bool
) -> torch.Tensor:
    checkpoint = open_checkpoint(path)
    model = load_model(
        checkpoint, ops, dtype=torch.bfloat16, device=CPU, keep_quantized=keep_quantized
    )
    logits: torch.Tensor = feed(model, ops, TOKENS, [7])
    return logits


@pytest.mark.native
@pytest.mark.parametrize("rounds_activations", [False, True], ids=["best", "integers"])
@pytest.mark.parametrize(
    "types",
    [
        {"": "Q4_K", "v_proj": "Q6_K", "down_proj": "Q6_K", "lm_head": "Q6_K"},
        {"": "Q5_K", "v_proj": "Q6_K", "down_proj": "Q6_K"},
        {"": "Q3_K", "v_proj": "Q5_K", "down_proj": "Q4_K"},
        {"": "IQ4_XS", "v_proj": "Q5_1", "down_proj": "Q5_1"},
    ],
    ids=["Q4_K_M", "Q5_K_M", "Q3_K_M", "IQ4_XS and Q5_1"],
)
def test_logits_of_models_that_stay_in_blocks(
    types: dict[str, str],
    rounds_activations: bool,
    write_blocks: Callable[..., Any],
    feed: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As the files of these names mix them. Where there is AMX, they are those of widened matrices, bit for bit."""
    _, path = write_blocks(types)
    ops: Any = select_ops("cpu", CPU, rounds_activations=rounds_activations)
    widened = logits_in_bfloat16(path, ops, feed, keep_quantized=False)
    caplog.clear()
    with caplog.at_level("INFO"):
        kept = logits_in_bfloat16(path, ops, feed, keep_quantized=True)
    storage = next(m for m in caplog.messages if m.startswith("Matrices of"))
    assert "widened" not in storage.replace(f"widened 1 {types['']}", "")  # the embedding alone
    row_kind = ops.pack_linear(
        QuantizedRows(torch.zeros(1, 44, dtype=torch.uint8), "Q8_F32")
    ).row_kind
    if row_kind == RowKind.INT8:
        assert 0 < (kept - widened).norm() < 0.1 * widened.norm()
    else:
        assert torch.equal(kept.view(torch.int32), widened.view(torch.int32))


@pytest.mark.parametrize(("type", "bits"), [("Q4_K", 6), ("Q6_K", 11), ("Q2_K", 16)])
def test_the_list_of_models_says_what_blocks_take_in_memory(
    type: str, bits: int, write_blocks: Callable[..., Any], tmp_path: Path
) -> None:
    _, path = write_blocks({"": type})
    kept, widened = (
        list_models(Machine("cpu", 10**9, keeps_blocks=keeps), [path], cache_dir=str(tmp_path))
        for keeps in (True, False)
    )
    assert kept[0].weight_bytes is not None
    assert widened[0].weight_bytes is not None
    num_weights = (
        2 * 6 * 256 * 256 + 96 * 256
    )  # two layers, k and v half as many as others, and the head
    assert widened[0].weight_bytes - kept[0].weight_bytes == num_weights * (16 - bits) // 8


def test_a_product_of_several_types_stays_in_blocks_that_hold_them_all(
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
