"""The native elementwise ops against the oracle, and against themselves in other company."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.cpu_build import load_library
from octavo.kernels.cpu_structs import (
    AddArgs,
    Args,
    EmbedArgs,
    GateArgs,
    GeluArgs,
    LayerNormArgs,
    PackRowsArgs,
    RmsNormArgs,
    RotaryArgs,
    run,
)
from octavo.kernels.reference import ReferenceOps

pytestmark = pytest.mark.native

REFERENCE = ReferenceOps()
SIZES = [1, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 576, 1001, 1536]
INF, NAN = math.inf, math.nan


@pytest.fixture(scope="module")
def native() -> ctypes.CDLL:
    result = load_library()
    assert result.library is not None, result.detail
    return result.library


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def wide(x: Tensor) -> Tensor:
    """The same rows with NaN between them."""
    padded = torch.full((x.shape[0], x.shape[1] + 5), NAN)
    padded[:, : x.shape[1]] = x
    return padded[:, : x.shape[1]]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def assert_same_bits(one: Tensor, other: Tensor) -> None:
    assert torch.equal(bits(one), bits(other))


class Caller:
    """Calls ops on tensors. Output rows have NaN between them, which must stay."""

    def __init__(self, library: ctypes.CDLL, num_threads: int = 2) -> None:
        self.library, self.num_threads = library, num_threads

    def _run(self, make: Callable[..., Args], num_tokens: int, **fields: Any) -> None:
        count = ctypes.c_int64(num_tokens)
        step = make(num_tokens=ctypes.addressof(count), **fields)
        run(self.library, [step], self.num_threads)

    def _out(self, num_tokens: int, size: int) -> tuple[Tensor, Tensor]:
        whole = torch.full((num_tokens + 1, size + 3), NAN)
        return whole, whole[:num_tokens, :size]

    def _checked(self, whole: Tensor, out: Tensor) -> Tensor:
        assert whole[-1].isnan().all()
        assert whole[:, out.shape[1] :].isnan().all()
        return out

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        whole, out = self._out(len(token_ids), table.shape[1])
        self._run(
            EmbedArgs,
            len(token_ids),
            token_ids=token_ids.data_ptr(),
            table=table.data_ptr(),
            dtype=int(table.dtype == torch.bfloat16),
            hidden=table.shape[1],
            out=out.data_ptr(),
            out_stride=out.stride(0),
        )
        return self._checked(whole, out)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        whole, out = self._out(*x.shape)
        self._run(
            RmsNormArgs,
            len(x),
            x=x.data_ptr(),
            x_stride=x.stride(0),
            residual=None if residual is None else residual.data_ptr(),
            residual_stride=0 if residual is None else residual.stride(0),
            weight=weight.data_ptr(),
            eps=eps,
            size=x.shape[1],
            num_heads=1,
            out=out.data_ptr(),
            out_stride=out.stride(0),
        )
        return self._checked(whole, out)

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        residual: Tensor | None = None,
    ) -> Tensor:
        whole, out = self._out(*x.shape)
        self._run(
            LayerNormArgs,
            len(x),
            x=x.data_ptr(),
            x_stride=x.stride(0),
            residual=None if residual is None else residual.data_ptr(),
            residual_stride=0 if residual is None else residual.stride(0),
            weight=weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            eps=eps,
            size=x.shape[1],
            out=out.data_ptr(),
            out_stride=out.stride(0),
        )
        return self._checked(whole, out)

    def gelu(self, x: Tensor, is_tanh: bool) -> Tensor:
        whole, out = self._out(*x.shape)
        self._run(
            GeluArgs,
            len(x),
            x=x.data_ptr(),
            x_stride=x.stride(0),
            size=x.shape[1],
            is_tanh=is_tanh,
            out=out.data_ptr(),
            out_stride=out.stride(0),
        )
        return self._checked(whole, out)

    def norm_heads(self, heads: Tensor, weight: Tensor, eps: float) -> None:
        self._run(
            RmsNormArgs,
            len(heads),
            x=heads.data_ptr(),
            x_stride=heads.stride(0),
            weight=weight.data_ptr(),
            eps=eps,
            size=heads.shape[2],
            num_heads=heads.shape[1],
            head_stride=heads.stride(1),
            out=heads.data_ptr(),
            out_stride=heads.stride(0),
        )

    def add(self, x: Tensor, factor: float, residual: Tensor | None = None) -> Tensor:
        """In place, as the op set does: in ``residual``, or in ``x`` if there is none."""
        out = x if residual is None else residual
        self._run(
            AddArgs,
            len(x),
            x=x.data_ptr(),
            x_stride=x.stride(0),
            factor=factor,
            size=x.shape[1],
            residual=None if residual is None else residual.data_ptr(),
            out=out.data_ptr(),
            out_stride=out.stride(0),
        )
        return out

    def gate(self, x: Tensor, kind: int) -> Tensor:
        whole, out = self._out(x.shape[0], x.shape[1] // 2)
        self._run(
            GateArgs,
            len(x),
            x=x.data_ptr(),
            x_stride=x.stride(0),
            size=x.shape[1] // 2,
            kind=kind,
            out=out.data_ptr(),
            out_stride=out.stride(0),
        )
        return self._checked(whole, out)

    def rotary(self, heads: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        self._run(
            RotaryArgs,
            len(heads),
            heads=heads.data_ptr(),
            token_stride=heads.stride(0),
            head_stride=heads.stride(1),
            num_heads=heads.shape[1],
            head_dim=heads.shape[2],
            rotary_dim=cos_sin.shape[1],
            positions=positions.data_ptr(),
            cos_sin=cos_sin.data_ptr(),
        )

    def pack_rows(self, x: Tensor, kind: int, capacity: int) -> Tensor:
        size = self.library.octavo_packed_rows_size(kind, capacity, x.shape[1])
        out = torch.full((size + 64,), 0x55, dtype=torch.uint8)
        self._run(
            PackRowsArgs,
            len(x),
            x=x.data_ptr(),
            x_stride=x.stride(0),
            size=x.shape[1],
            kind=kind,
            capacity=capacity,
            out=out.data_ptr(),
        )
        assert (out[size:] == 0x55).all()
        return out[:size]

    def pack_bf16(self, x: Tensor, capacity: int) -> Tensor:
        padded = -(-x.shape[1] // 32) * 32
        out = self.pack_rows(x, 1, capacity)
        return out[: capacity * padded * 2].view(torch.bfloat16).view(capacity, padded)[: len(x)]

    def pack_int8(self, x: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows [n, padded] int8, scales and scaled sums [n, groups], as cpu_ops.h lays them out."""
        groups = -(-x.shape[1] // 32)
        out = self.pack_rows(x, 2, capacity)
        at_scales = -(-capacity * groups * 32 // 64) * 64
        at_sums = at_scales + -(-capacity * groups * 4 // 64) * 64
        assert len(out) == 2 * at_sums - at_scales
        q = out[: capacity * groups * 32].view(torch.int8).view(capacity, -1)
        scales, sums = (
            out[at : at + capacity * groups * 4].view(torch.float32).view(capacity, groups)
            for at in (at_scales, at_sums)
        )
        return q[: len(x)], scales[: len(x)], sums[: len(x)]


@pytest.fixture
def call(native: ctypes.CDLL) -> Caller:
    return Caller(native)


# --- embedding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", SIZES)
def test_embed(hidden: int, dtype: torch.dtype, call: Caller) -> None:
    table = draw(11, hidden).to(dtype)
    table[3, 0], table[4, -1] = NAN, -INF
    ids = torch.tensor([10, 0, 3, 3, 4])
    assert_same_bits(call.embed(ids, table), table[ids].float())


# --- norm ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1e-4, 3e4])
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(size: int, scale: float, call: Caller) -> None:
    x, weight = wide(draw(5, size, scale=scale)), draw(size, seed=1)
    expected = REFERENCE.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(call.rms_norm(x, weight, 1e-5), expected, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm(size: int, call: Caller) -> None:
    x, residual, weight = wide(draw(5, size)), wide(draw(5, size, seed=2)), draw(size, seed=1)
    total = x + residual
    before = x.clone()
    out = call.rms_norm(x, weight, 1e-6, residual)
    assert_same_bits(residual, total)
    assert_same_bits(x, before)
    torch.testing.assert_close(out, REFERENCE.rms_norm(total, weight, 1e-6), rtol=2e-6, atol=1e-30)


def test_rms_norm_of_zeros_and_of_what_is_no_number(call: Caller) -> None:
    x = draw(4, 70)
    x[0], x[1, 69], x[2, 3] = 0.0, NAN, INF
    out = call.rms_norm(x, torch.ones(70), 1e-5)
    assert torch.equal(out[0], torch.zeros(70))
    assert out[1].isnan().all()
    assert out[2, 3].isnan()
    assert torch.equal(out[2, :3], torch.zeros(3))
    assert out[3].isfinite().all()


def test_rms_norm_in_place(native: ctypes.CDLL) -> None:
    x, weight = draw(3, 77), draw(77, seed=1)
    expected = Caller(native).rms_norm(x, weight, 1e-5)
    count = ctypes.c_int64(3)
    step = RmsNormArgs(
        num_tokens=ctypes.addressof(count),
        x=x.data_ptr(),
        x_stride=77,
        weight=weight.data_ptr(),
        eps=1e-5,
        size=77,
        num_heads=1,
        out=x.data_ptr(),
        out_stride=77,
    )
    run(native, [step], 2)
    assert_same_bits(x, expected)


def expected_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """In float64."""
    bias = None if bias is None else bias.double()
    layer_norm = torch.nn.functional.layer_norm
    return layer_norm(x.double(), (x.shape[1],), weight.double(), bias, eps).float()


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("centre", [0.0, 100.0])
@pytest.mark.parametrize("size", SIZES[1:])
def test_layer_norm(size: int, centre: float, has_bias: bool, call: Caller) -> None:
    """Also far from zero, where the mean of the squares less the mean's square has no digits left."""
    x, weight = wide(draw(5, size) + centre), draw(size, seed=1)
    bias = draw(size, seed=3) if has_bias else None
    out = call.layer_norm(x, weight, bias, 1e-5)
    expected = expected_layer_norm(x, weight, bias, 1e-5)
    tolerance = 3e-6 if centre == 0.0 else 1e-4
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", SIZES)
def test_add_layer_norm(size: int, call: Caller) -> None:
    x, residual = wide(draw(5, size)), wide(draw(5, size, seed=2))
    weight, bias = draw(size, seed=1), draw(size, seed=3)
    total = x + residual
    out = call.layer_norm(x, weight, bias, 1e-5, residual)
    assert_same_bits(residual, total)
    assert_same_bits(out, call.layer_norm(total, weight, bias, 1e-5))


# --- GELU ------------------------------------------------------------------------------------------


def expected_gelu(x: Tensor, is_tanh: bool) -> Tensor:
    """In float64."""
    approximate = "tanh" if is_tanh else "none"
    return torch.nn.functional.gelu(x.double(), approximate=approximate).float()


@pytest.mark.parametrize("is_tanh", [False, True])
@pytest.mark.parametrize("size", [*SIZES, 511, 512, 513])
def test_gelu(size: int, is_tanh: bool, call: Caller) -> None:
    x = wide(draw(5, size, scale=3.0))
    torch.testing.assert_close(
        call.gelu(x, is_tanh), expected_gelu(x, is_tanh), rtol=2e-6, atol=1e-7
    )


def test_gelu_of_every_magnitude(call: Caller) -> None:
    """To its last digits even where it is nearly nothing, as erfc has them and 1 + erf has not."""
    x = torch.linspace(-11, 11, 100001)[None]
    expected = (0.5 * x.double() * torch.erfc(x.double() / -math.sqrt(2))).float()
    torch.testing.assert_close(call.gelu(x, False), expected, rtol=2e-6, atol=1e-35)


@pytest.mark.parametrize("is_tanh", [False, True])
def test_gelu_far_from_zero(is_tanh: bool, call: Caller) -> None:
    x = torch.tensor([[0.0, -0.0, 1e-30, 87.5, -87.5, 500.0, -500.0, 1e30, -1e30, INF]])
    torch.testing.assert_close(
        call.gelu(x, is_tanh), expected_gelu(x, is_tanh), rtol=1e-6, atol=1e-30
    )


@pytest.mark.parametrize("is_tanh", [False, True])
def test_gelu_keeps_nan(is_tanh: bool, call: Caller) -> None:
    x = draw(1, 40)
    x[0, 3] = x[0, 27] = NAN
    assert call.gelu(x, is_tanh)[0].isnan().nonzero().flatten().tolist() == [3, 27]


@pytest.mark.parametrize("head_dim", [1, 16, 24, 64, 65, 128])
def test_norm_of_heads(head_dim: int, call: Caller) -> None:
    whole, weight = draw(4, 5, head_dim), draw(head_dim, seed=1)
    before = whole.clone()
    heads = whole[:, 1:4]  # as q and k lie in qkv
    expected = REFERENCE.rms_norm(heads, weight, 1e-5)
    call.norm_heads(heads, weight, 1e-5)
    torch.testing.assert_close(heads, expected, rtol=2e-6, atol=1e-30)
    assert_same_bits(whole[:, ::4], before[:, ::4])
    alone = [call.rms_norm(before[:, head].clone(), weight, 1e-5) for head in (1, 2, 3)]
    assert_same_bits(heads, torch.stack(alone, dim=1))


# --- sums ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_scale(size: int, call: Caller) -> None:
    x = wide(draw(5, size))
    expected = x * 0.22
    assert_same_bits(call.add(x, 0.22), expected)


@pytest.mark.parametrize("size", SIZES)
def test_add(size: int, call: Caller) -> None:
    x, residual = wide(draw(5, size)), wide(draw(5, size, seed=2))
    before, expected = x.clone(), x + residual
    assert_same_bits(call.add(x, 1.0, residual), expected)
    assert_same_bits(x, before)


# --- gates -----------------------------------------------------------------------------------------


def expected_gate(x: Tensor, kind: int) -> Tensor:
    """In float64: the oracle's own error is larger than what is allowed here."""
    gate, up = x.double().chunk(2, dim=-1)
    gelu, silu = torch.nn.functional.gelu, torch.nn.functional.silu
    return ((gelu(gate, approximate="tanh") if kind else silu(gate)) * up).float()


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("size", [*SIZES, 511, 512, 513])
def test_gate(size: int, kind: int, call: Caller) -> None:
    x = wide(draw(5, 2 * size, scale=3.0))
    out = call.gate(x, kind)
    torch.testing.assert_close(out, expected_gate(x, kind), rtol=2e-6, atol=1e-7)
    oracle = REFERENCE.gelu_and_mul(x) if kind else REFERENCE.silu_and_mul(x)
    torch.testing.assert_close(out, oracle, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", [0, 1])
def test_gate_far_from_zero(kind: int, call: Caller) -> None:
    gates = torch.tensor([0.0, -0.0, 87.5, -87.5, 88.5, -88.5, 500.0, -500.0, 1e30, -1e30, INF])
    x = torch.cat((gates, torch.full((11,), 2.0)))[None]
    torch.testing.assert_close(call.gate(x, kind), expected_gate(x, kind), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("kind", [0, 1])
def test_gate_keeps_nan(kind: int, call: Caller) -> None:
    x = draw(1, 40)
    x[0, 3] = x[0, 20 + 7] = NAN
    assert call.gate(x, kind)[0].isnan().nonzero().flatten().tolist() == [3, 7]


# --- rotary ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    [(64, 64), (2, 2), (6, 4), (66, 66), (80, 32), (96, 96), (128, 126), (256, 256), (7, 6)],
)
def test_rotary(head_dim: int, rotary_dim: int, call: Caller) -> None:
    angles = draw(50, rotary_dim // 2, seed=3)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.tensor([49, 0, 7, 7])
    whole = draw(4, 5, head_dim)
    before = whole.clone()
    heads = whole[:, 1:4]  # as q and k lie in qkv
    expected, _ = REFERENCE.rotary(heads, heads, positions, cos_sin)
    call.rotary(heads, positions, cos_sin)
    assert_same_bits(heads, expected)
    assert_same_bits(whole[:, ::4], before[:, ::4])


# --- packed rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_pack_rows_bf16(size: int, call: Caller) -> None:
    x = wide(draw(3, size, scale=100.0))
    x[0, 0], x[1, -1], x[2, 0] = 1.00390625, 3.0e38, -INF  # a tie, then what nearly overflows
    rows = call.pack_bf16(x, capacity=5)
    assert torch.equal(rows[:, :size].view(torch.int16), x.bfloat16().view(torch.int16))
    assert (rows[:, size:].view(torch.int16) == 0).all()


def test_pack_rows_bf16_keeps_nan(call: Caller) -> None:
    x = torch.tensor([[1.0, NAN, 2.0] * 11])
    assert torch.equal(call.pack_bf16(x, 1)[0, :33].isnan(), x[0].isnan())


@pytest.mark.parametrize("size", SIZES)
def test_pack_rows_int8(size: int, call: Caller) -> None:
    x = wide(draw(4, size, scale=5.0))
    x[1] = 0.0
    q, scales, sums = call.pack_int8(x, capacity=7)
    groups = torch.nn.functional.pad(x, (0, -size % 32)).view(4, -1, 32)
    most = groups.abs().amax(dim=-1)
    assert_same_bits(scales, most / 127)
    expected = torch.nan_to_num(groups / scales.unsqueeze(-1)).round()  # ties to even
    assert torch.equal(q.float().view(groups.shape), expected)
    assert torch.equal(sums, scales * expected.sum(dim=-1))
    assert (q[1] == 0).all()


def test_pack_rows_int8_divides(call: Caller) -> None:
    """Multiplying by the inverse would round two of these million values elsewhere."""
    x = draw(250, 4096, seed=1)
    q, scales, _ = call.pack_int8(x, 250)
    quotients = x.view(250, -1, 32) / scales.unsqueeze(-1)
    assert torch.equal(q.float().view(quotients.shape), quotients.round())


def test_pack_rows_int8_rounds_ties_to_even(call: Caller) -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -126.5]])
    q, scales, sums = call.pack_int8(x, 1)
    assert q[0, :9].tolist() == [127, 0, 2, 2, 0, -2, -2, 126, -126]
    assert (scales.item(), sums.item()) == (1.0, 127.0)


def test_pack_rows_int8_of_denormals_stays_in_range(call: Caller) -> None:
    least = 2.0**-149
    x = torch.tensor([[180 * least, -180 * least], [50 * least, 0.0]])
    q, scales, _ = call.pack_int8(x, 2)
    assert q[0, :2].tolist() == [127, -127]
    assert scales.isfinite().all()
    assert (q[1] == 0).all()


@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF])
def test_pack_rows_int8_says_what_is_no_number(bad: float, call: Caller) -> None:
    """A product with such a row is NaN, as it must be seen, and its neighbours are not."""
    x = draw(2, 100)
    x[0, 40] = bad
    clean = call.pack_int8(draw(2, 100), 2)
    q, scales, sums = call.pack_int8(x, 2)
    assert scales[0].isnan().tolist() == sums[0].isnan().tolist() == [False, True, False, False]
    assert (q[0, 32:64] == 0).all()
    assert torch.equal(q[1], clean[0][1])
    assert torch.equal(scales[0, 2:], clean[1][0, 2:])


# --- the same answer in any company ----------------------------------------------------------------


def all_ops(caller: Caller, x: Tensor, order: list[int]) -> list[Tensor]:
    """What every op makes of some rows of ``x [n, 2 * 333]``."""
    rows, size = x[order], 333
    weight, angles = draw(size, seed=1), draw(99, 15, seed=3)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    heads = rows[:, :320].reshape(-1, 10, 32).clone()
    caller.rotary(heads, torch.tensor(order), cos_sin)
    residual, centred = (rows[:, size:].clone() for _ in range(2))
    normed = rows[:, :320].reshape(-1, 10, 32).clone()
    caller.norm_heads(normed, weight[:32], 1e-5)
    return [
        normed,
        caller.add(rows[:, :size].clone(), 0.3),
        caller.add(rows[:, :size], 1.0, rows[:, size:].clone()),
        caller.rms_norm(rows[:, :size], weight, 1e-5),
        caller.rms_norm(rows[:, :size], weight, 1e-5, residual),
        residual,
        caller.layer_norm(rows[:, :size], weight, weight, 1e-5),
        caller.layer_norm(rows[:, :size], weight, None, 1e-5, centred),
        centred,
        caller.gelu(rows, False),
        caller.gelu(rows, True),
        caller.gate(rows, 0),
        caller.gate(rows, 1),
        heads,
        caller.embed(torch.tensor(order), x),
        caller.embed(torch.tensor(order), x.bfloat16()),
        caller.pack_bf16(rows[:, :size], len(order)).float(),
        *(part.float() for part in caller.pack_int8(rows[:, :size], len(order) + 3)),
    ]


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_rows_are_bit_equal_in_any_company(num_threads: int, native: ctypes.CDLL) -> None:
    x = draw(19, 666, scale=2.0)
    alone = [all_ops(Caller(native, 1), x, [row]) for row in range(19)]
    for order in ([4, 18, 0], list(range(19)), list(reversed(range(19)))):
        together = all_ops(Caller(native, num_threads), x, order)
        for place, row in enumerate(order):
            for mine, theirs in zip(together, alone[row], strict=True):
                assert_same_bits(mine[place], theirs[0])


def test_no_rows(call: Caller) -> None:
    empty = torch.empty(0, 64)
    assert call.rms_norm(empty, torch.ones(64), 1e-5).shape == (0, 64)
    assert call.gate(empty, 0).shape == (0, 32)
    assert call.layer_norm(empty, torch.ones(64), None, 1e-5).shape == (0, 64)
    assert call.gelu(empty, False).shape == (0, 64)
    assert call.pack_bf16(empty, 0).shape == (0, 64)
    assert call.embed(torch.empty(0, dtype=torch.int64), draw(3, 64)).shape == (0, 64)
