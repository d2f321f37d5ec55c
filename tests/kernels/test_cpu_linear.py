"""Native products: against float64, and a row against itself in other company."""

from __future__ import annotations

import ctypes
import math
from ctypes import addressof, c_int64
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels import cpu_build
from octavo.kernels.cpu_linear import (
    BLOCK_BYTES,
    PackedWeight,
    RowKind,
    WeightKind,
    pack_gguf_weight,
    pack_weight,
)
from octavo.kernels.cpu_structs import (
    Args,
    LikeliestArgs,
    LinearArgs,
    PackRowsArgs,
    declare,
    run,
)
from octavo.kernels.torch_sampling import likeliest as likeliest_of_logits

pytestmark = pytest.mark.native

GROUP = 32
KINDS = list(WeightKind)
GROUPED = list(BLOCK_BYTES)
NUM_HALVES = {WeightKind.Q4_0: 1, WeightKind.Q4_1: 2, WeightKind.Q8_0: 1}  # a block's factors
NUM_FLOATS = {WeightKind.Q4_F32: 2, WeightKind.Q8_F32: 3}
BYTES = [WeightKind.Q8_0, WeightKind.Q8_F32]  # whose numbers have 8 bits, not 4
SIZES = [1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 99, 100]
MODEL_SHAPES = [(960, 576), (576, 1536), (100, 2048)]  # out_features, in_features


THIS_PROCESSOR = "native"
TARGETS = {target.name: target for target in cpu_build.portable_targets()}


@pytest.fixture(
    scope="module",
    params=[THIS_PROCESSOR, *(pytest.param(name, marks=pytest.mark.slow) for name in TARGETS)],
)
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The library for this processor, then for the older ones that it can stand in for."""
    compiler = cpu_build.find_compiler()
    assert compiler is not None
    if request.param == THIS_PROCESSOR:
        result = cpu_build.load_library()
        assert result.library is not None, result.detail
        return declare(result.library)
    target = TARGETS[request.param]
    if not target.needs <= _features():
        pytest.skip(f"no {target.name}")
    scratch = tmp_path_factory.mktemp(target.name)
    entry = cpu_build.build(compiler, target, cpu_build.SOURCES, scratch)
    return declare(ctypes.CDLL(str(entry / "octavo_cpu.so")))


def _features() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {word for line in lines if line.startswith("flags") for word in line.split()}


@pytest.fixture(scope="module", params=[None, RowKind.INT8], ids=["best", "integers"], autouse=True)
def rows_of_groups(request: pytest.FixtureRequest) -> None:
    """How rows reach products with GGUF's groups: as the processor likes them best, or as integers."""
    global _row_kind
    _row_kind = request.param


_row_kind: RowKind | None = None


def pack_groups(
    native: ctypes.CDLL, blocks: Tensor, kind: WeightKind, bias: Tensor | None = None
) -> PackedWeight:
    return pack_gguf_weight(native, blocks, kind, bias, _row_kind)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draw_blocks(kind: WeightKind, out_features: int, in_features: int) -> Tensor:
    """Random GGUF blocks: any numbers, and scales as models have them."""
    random = torch.Generator().manual_seed(out_features * 1000 + in_features)
    groups = in_features // GROUP
    shape = (out_features, groups, BLOCK_BYTES[kind])
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
    num_factors = NUM_FLOATS.get(kind) or NUM_HALVES[kind]
    factors = torch.randn((out_features, groups, num_factors), generator=random) * 0.02
    if kind in NUM_HALVES:
        stored = factors.half().view(torch.uint8)
    else:  # as a K-quant's: a float16 times a whole number, which has more bits than a float16
        whole = torch.randint(-127, 128, factors.shape, generator=random)
        stored = ((factors / 64).half().float() * whole).view(torch.uint8)
    blocks[:, :, : stored.shape[2]] = stored
    return blocks.view(out_features, -1)


def dequantise(kind: WeightKind, blocks: Tensor) -> Tensor:
    """What the blocks stand for, in float64, as cpu_linear.h says."""
    blocks = blocks.view(blocks.shape[0], -1, BLOCK_BYTES[kind])
    if kind in NUM_HALVES:
        factors = blocks[:, :, : 2 * NUM_HALVES[kind]].view(torch.float16).double()
    else:
        factors = blocks[:, :, : 4 * NUM_FLOATS[kind]].clone().view(torch.float32).double()
    if kind in BYTES:
        q = blocks[:, :, -GROUP:].view(torch.int8).double()
    else:
        q = torch.cat([blocks[:, :, -16:] & 15, blocks[:, :, -16:] >> 4], dim=2).double()
    if kind == WeightKind.Q4_0:
        q -= 8
    scales = (
        factors[:, :, :2].repeat_interleave(16, 2)
        if kind == WeightKind.Q8_F32
        else factors[:, :, :1]
    )
    has_offset = factors.shape[2] > 1
    return (scales * q + factors[:, :, -1:] if has_offset else scales * q).flatten(1)


def multiplies_integers(packed: PackedWeight) -> bool:
    """Else the processor has AMX, and the values of groups are rounded to bfloat16."""
    return packed.row_kind == RowKind.INT8


def as_multiplied(packed: PackedWeight, values: Tensor) -> Tensor:
    return values if multiplies_integers(packed) else values.float().bfloat16().double()


def make(
    native: ctypes.CDLL, kind: WeightKind, out_features: int, in_features: int, bias: Tensor | None
) -> tuple[PackedWeight, Tensor]:
    """A packed weight, and the same in float64."""
    if kind in GROUPED:
        blocks = draw_blocks(kind, out_features, in_features)
        packed, values = pack_groups(native, blocks, kind, bias), dequantise(kind, blocks)
        return packed, as_multiplied(packed, values)
    weight = draw(out_features, in_features, seed=1)
    if kind == WeightKind.BFLOAT16:
        weight = weight.bfloat16()
    return pack_weight(native, weight, bias), weight.double()


def pack_rows(native: ctypes.CDLL, x: Tensor, kind: RowKind, num_threads: int) -> Tensor:
    count = c_int64(x.shape[0])
    size = native.octavo_packed_rows_size(kind, x.shape[0], x.shape[1])
    rows = torch.empty(size, dtype=torch.uint8)
    args = PackRowsArgs(
        num_tokens=addressof(count),
        x=x.data_ptr(),
        x_stride=x.stride(0),
        size=x.shape[1],
        kind=kind,
        capacity=x.shape[0],
        out=rows.data_ptr(),
    )
    run(native, [args], num_threads)
    return rows


def linear(
    native: ctypes.CDLL,
    x: Tensor,
    packed: PackedWeight,
    *,
    num_threads: int = 2,
    out: Tensor | None = None,
) -> Tensor:
    """The native product; rows of x and out may be strided."""
    if packed.row_kind == RowKind.FLOAT32:
        rows = x
    else:
        rows = pack_rows(native, x, packed.row_kind, num_threads)
    out = torch.empty(x.shape[0], packed.out_features) if out is None else out
    count = c_int64(x.shape[0])
    args = product_of(x, rows, packed, count)
    args.out, args.out_stride = out.data_ptr(), out.stride(0)
    run(native, [args], num_threads)
    return out


def product_of(x: Tensor, rows: Tensor, packed: PackedWeight, count: c_int64) -> LinearArgs:
    return LinearArgs(
        num_tokens=addressof(count),
        x=rows.data_ptr(),
        x_stride=x.stride(0),
        capacity=x.shape[0],
        row_kind=packed.row_kind,
        weight=packed.data.data_ptr(),
        kind=packed.kind,
        in_features=packed.in_features,
        out_features=packed.out_features,
        bias=None if packed.bias is None else packed.bias.data_ptr(),
    )


def likeliest(native: ctypes.CDLL, x: Tensor, packed: PackedWeight, num_threads: int) -> Tensor:
    """Each row's likeliest column, as the native product finds it."""
    num_rows, count = x.shape[0], c_int64(x.shape[0])
    is_packed = packed.row_kind != RowKind.FLOAT32
    rows = pack_rows(native, x, packed.row_kind, num_threads) if is_packed else x
    num_bytes = native.octavo_likeliest_size(num_threads, num_rows)
    seen = torch.full((num_bytes,), 127, dtype=torch.uint8)
    out = torch.empty(num_rows, dtype=torch.int64)
    product = product_of(x, rows, packed, count)
    product.likeliest = seen.data_ptr()
    last = LikeliestArgs(
        num_rows=addressof(count),
        likeliest=seen.data_ptr(),
        capacity=num_rows,
        out=out.data_ptr(),
    )
    steps: list[Args] = [product, last]
    run(native, steps, num_threads)
    return out


def as_product_sees(native: ctypes.CDLL, x: Tensor, packed: PackedWeight) -> Tensor:
    """x in float64, after what rounding its packing does."""
    num_rows, size = x.shape
    if packed.row_kind == RowKind.FLOAT32:
        return x.double()
    if packed.row_kind == RowKind.BFLOAT16:
        return x.bfloat16().double()
    rows = pack_rows(native, x, RowKind.INT8, 1)
    num_groups = size // GROUP
    scales_at = -(-num_rows * size // 64) * 64
    q = rows[: num_rows * size].view(torch.int8).view(num_rows, num_groups, GROUP)
    scales = rows[scales_at : scales_at + num_rows * num_groups * 4].view(torch.float32)
    return (q.double() * scales.view(num_rows, num_groups, 1)).flatten(1)


def assert_matches(native: ctypes.CDLL, x: Tensor, packed: PackedWeight, weight: Tensor) -> None:
    """Only float32's rounding of sums is left: a few units in the last place of the sum of |terms|."""
    seen = as_product_sees(native, x, packed)
    expected, size = seen @ weight.T, seen.abs() @ weight.abs().T
    if packed.bias is not None:
        expected, size = expected + packed.bias, size + packed.bias.abs()
    steps = max(packed.in_features / (8 if multiplies_integers(packed) else 1), 16)
    bound = size * (4 * 2.0**-24 * math.sqrt(steps)) + 1e-30
    if multiplies_integers(packed):  # offsets cancel: d * q + m is smaller than its parts
        bound = bound + seen.abs().sum(1, keepdim=True) * weight.abs().max() * 4 * 2.0**-24
    error = (linear(native, x, packed).double() - expected).abs()
    assert (error <= bound).all(), (error / bound).max()


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def bias_for(out_features: int, has_bias: bool) -> Tensor | None:
    return draw(out_features, seed=2) if has_bias else None


@pytest.mark.parametrize("kind", [WeightKind.FLOAT32, WeightKind.BFLOAT16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_odd_shapes(native: ctypes.CDLL, kind: WeightKind, has_bias: bool) -> None:
    for out_features in SIZES:
        for in_features in SIZES:
            bias = bias_for(out_features, has_bias)
            packed, weight = make(native, kind, out_features, in_features, bias)
            assert_matches(native, draw(5, in_features), packed, weight)


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("has_bias", [False, True])
def test_odd_shapes_of_groups(native: ctypes.CDLL, kind: WeightKind, has_bias: bool) -> None:
    for out_features in SIZES:
        for in_features in [32, 64, 96, 160]:
            bias = bias_for(out_features, has_bias)
            packed, weight = make(native, kind, out_features, in_features, bias)
            assert_matches(native, draw(5, in_features), packed, weight)


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("num_rows", [1, 17, 33, 700])
def test_groups_give_the_bits_of_bfloat16_where_there_is_amx(
    native: ctypes.CDLL, kind: WeightKind, num_rows: int
) -> None:
    blocks = draw_blocks(kind, 100, 1536)
    packed = pack_groups(native, blocks, kind)
    if multiplies_integers(packed):
        pytest.skip("no AMX, or integers are asked for")
    rounded = pack_weight(native, dequantise(kind, blocks).float().bfloat16())
    x = draw(num_rows, 1536)
    assert torch.equal(bits(linear(native, x, packed)), bits(linear(native, x, rounded)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("out_features", "in_features"), MODEL_SHAPES)
@pytest.mark.parametrize("num_rows", [1, 8, 37, 700])
def test_model_shapes(
    native: ctypes.CDLL, kind: WeightKind, out_features: int, in_features: int, num_rows: int
) -> None:
    packed, weight = make(native, kind, out_features, in_features, None)
    assert_matches(native, draw(num_rows, in_features), packed, weight)


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_rows_gives_the_same_bits(native: ctypes.CDLL, kind: WeightKind) -> None:
    for out_features, in_features in [(100, 96), (33, 544)]:
        packed, _ = make(native, kind, out_features, in_features, None)
        x = draw(70, in_features)
        alone = torch.cat([linear(native, row[None], packed) for row in x])
        for num_rows in range(1, 71):
            together = linear(native, x[:num_rows], packed)
            assert torch.equal(bits(together), bits(alone[:num_rows])), num_rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_threads_and_bias_do_not_change_bits(
    native: ctypes.CDLL, kind: WeightKind, num_threads: int
) -> None:
    for out_features, in_features in MODEL_SHAPES:
        bias = draw(out_features, seed=2)
        packed, _ = make(native, kind, out_features, in_features, bias)
        x = draw(1000, in_features)
        few = linear(native, x[-3:], packed, num_threads=1)
        many = linear(native, x, packed, num_threads=num_threads)
        assert torch.equal(bits(many[-3:]), bits(few))
        plain = linear(native, x, packed._replace(bias=None), num_threads=num_threads)
        assert torch.equal(bits(plain + bias), bits(many))


@pytest.mark.parametrize("kind", KINDS)
@given(
    out_features=st.integers(1, 130),
    num_groups=st.integers(1, 20),
    num_rows=st.integers(1, 90),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 100),
)
def test_any_row_in_any_company(
    native: ctypes.CDLL,
    kind: WeightKind,
    out_features: int,
    num_groups: int,
    num_rows: int,
    num_threads: int,
    seed: int,
) -> None:
    packed, _ = make(native, kind, out_features, num_groups * GROUP, None)
    x = draw(num_rows, num_groups * GROUP, seed=seed)
    row = seed % num_rows
    together = linear(native, x, packed, num_threads=num_threads)
    alone = linear(native, x[row : row + 1], packed, num_threads=1)
    assert torch.equal(bits(together[row]), bits(alone[0]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_strided_rows(native: ctypes.CDLL, kind: WeightKind, has_bias: bool) -> None:
    for out_features, in_features in [(64, 96), (45, 64)]:
        bias = bias_for(out_features, has_bias)
        packed, _ = make(native, kind, out_features, in_features, bias)
        x = draw(41, in_features + 7)[:, 3 : in_features + 3]
        whole = torch.full((43, out_features + 9), math.nan)
        out = whole[1:42, 5 : out_features + 5]
        linear(native, x, packed, out=out)
        assert torch.equal(bits(out), bits(linear(native, x.contiguous(), packed)))
        out.fill_(math.nan)
        assert whole.isnan().all()  # nothing was written beside the view


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_stays_alone(
    native: ctypes.CDLL, kind: WeightKind, value: float
) -> None:
    packed, _ = make(native, kind, 70, 96, None)
    x = draw(37, 96)
    clean = linear(native, x, packed)
    x[18, 40] = value
    out = linear(native, x, packed)
    assert not out[18].isfinite().any()
    others = [row for row in range(37) if row != 18]
    assert torch.equal(bits(out[others]), bits(clean[others]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_the_likeliest_is_that_of_the_logits(
    native: ctypes.CDLL, kind: WeightKind, num_threads: int
) -> None:
    for out_features, num_rows in [(1, 3), (31, 1), (33, 40), (100, 7), (4000, 70)]:
        bias = bias_for(out_features, out_features == 100)
        packed, _ = make(native, kind, out_features, 96, bias)
        x = draw(num_rows, 96)
        x[0, 5], x[-1, 7] = float("nan"), float("inf")
        expected = likeliest_of_logits(linear(native, x, packed))
        assert torch.equal(likeliest(native, x, packed, num_threads), expected)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_of_equals_the_first_is_the_likeliest(native: ctypes.CDLL, num_threads: int) -> None:
    weight = draw(700, 96)
    x = draw(40, 96)
    for first, second in [(3, 4), (20, 650), (0, 699), (31, 32)]:
        weight[first] = weight[second] = x[0] * 9
        packed = pack_weight(native, weight)
        assert likeliest(native, x, packed, num_threads)[0] == first
        weight[first] = weight[second] = 0


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-20, 1e12, 1e19, 3e37])
@pytest.mark.parametrize("in_features", [1, 95, 320])
def test_the_likeliest_of_float32_is_found_among_near_equals(
    native: ctypes.CDLL, in_features: int, scale: float
) -> None:
    """Columns differ from each other by less than bfloat16 rounds off, or by more."""
    likely = draw(1, in_features)
    x = torch.cat([likely + 0.3 * draw(20, in_features), draw(20, in_features)]) * scale
    x[7] = 0
    for spread in [0.3, 2.0**-8, 2.0**-16]:
        weight = likely * (1 + spread * draw(1001, in_features)) / scale**0.5
        packed = pack_weight(native, weight)
        expected = likeliest_of_logits(linear(native, x, packed))
        assert torch.equal(likeliest(native, x, packed, 2), expected)


_JUST_ABOVE = 1 + 2.0**-8 - 2.0**-20  # rounded to bfloat16, it is 1


def _spread(size: int, first: float, *more: tuple[int, float]) -> Tensor:
    numbers = torch.zeros(size)
    numbers[0] = first
    for place, number in more:
        numbers[place] = number
    return numbers


_MANY = torch.full((4098,), _JUST_ABOVE)
_MANY[:2] *= 256
_HARD_TO_SCREEN = {
    "roundings": (
        torch.full((96,), _JUST_ABOVE),
        torch.full((96,), _JUST_ABOVE),
        torch.full((96,), _JUST_ABOVE * (1 - 2.0**-16)),
    ),
    "additions": (_MANY, _MANY, _MANY * (1 - 2.0**-19)),
    "denormals": (torch.full((32,), 2.0**-70), torch.full((32,), 2.0**-79), torch.zeros(32)),
    "overflow": (
        torch.full((64,), 1e20),
        _spread(64, 3.3e18, (1, -3e18), (3, -3e18), (32, 3e18)),
        _spread(64, 1e17),
    ),
}


@pytest.mark.parametrize("name", _HARD_TO_SCREEN)
def test_the_likeliest_of_float32_is_not_ruled_out(native: ctypes.CDLL, name: str) -> None:
    """Each case needs one of the constants by which bfloat16's products may be off."""
    row, winner, first = _HARD_TO_SCREEN[name]
    weight = torch.zeros(64, len(row))
    weight[0], weight[40] = first, winner
    x = row.repeat(16, 1)
    packed = pack_weight(native, weight)
    assert likeliest_of_logits(linear(native, x, packed)).tolist() == [40] * 16
    assert likeliest(native, x, packed, 1).tolist() == [40] * 16


def test_the_likeliest_takes_strided_rows(native: ctypes.CDLL) -> None:
    packed = pack_weight(native, draw(700, 96))
    x = draw(40, 200)[:, 50:146]
    expected = likeliest_of_logits(linear(native, x.contiguous(), packed))
    assert torch.equal(likeliest(native, x, packed, 2), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows(native: ctypes.CDLL, kind: WeightKind) -> None:
    packed, _ = make(native, kind, 70, 96, None)
    assert linear(native, draw(0, 96), packed).shape == (0, 70)


@pytest.mark.parametrize("kind", GROUPED)
def test_the_largest_numbers_do_not_overflow(native: ctypes.CDLL, kind: WeightKind) -> None:
    """All weights at one end of their range, all activations at one end of theirs."""
    blocks = draw_blocks(kind, 40, 64).view(40, 2, -1)
    num_bytes = GROUP if kind in BYTES else GROUP // 2
    for number in [0x7F, 0x80] if kind in BYTES else [0xFF, 0x00]:
        blocks[:, :, -num_bytes:] = number
        packed = pack_groups(native, blocks.view(40, -1), kind)
        signs = torch.tensor([1.0, -1.0, 0.0])[:, None]
        x = signs.expand(3, 64).contiguous()
        assert_matches(native, x, packed, as_multiplied(packed, dequantise(kind, blocks)))


def test_grouped_weights_keep_extreme_scales(native: ctypes.CDLL) -> None:
    """float16's smallest denormal and largest number come out as they are."""
    blocks = torch.zeros(3, BLOCK_BYTES[WeightKind.Q8_0], dtype=torch.uint8)
    d = torch.tensor([2.0**-24, 65504.0, -(2.0**-14)])
    blocks[:, :2] = d.half()[:, None].view(torch.uint8)
    blocks[:, 2] = 1
    x = torch.zeros(1, GROUP)
    x[0, 0] = 127.0
    packed = pack_groups(native, blocks, WeightKind.Q8_0)
    assert torch.equal(linear(native, x, packed)[0].double(), as_multiplied(packed, d) * 127)


def test_a_packed_weight_takes_strided_sources(native: ctypes.CDLL) -> None:
    weight = draw(40, 90)
    x = draw(3, 33)
    for view in [weight[:, 5:38], weight.T[:33].T, weight[:, :66:2]]:
        packed = pack_weight(native, view)
        same = pack_weight(native, view.contiguous())
        assert torch.equal(linear(native, x, packed), linear(native, x, same))


def test_half_precision_weights_become_float32(native: ctypes.CDLL) -> None:
    weight = draw(40, 33).half()
    packed = pack_weight(native, weight)
    assert packed.kind == WeightKind.FLOAT32
    assert_matches(native, draw(3, 33), packed, weight.double())


def test_broken_blocks_are_refused(native: ctypes.CDLL) -> None:
    with pytest.raises(ValueError, match="whole blocks of 20 bytes"):
        pack_gguf_weight(native, torch.zeros(2, 41, dtype=torch.uint8), WeightKind.Q4_1)
