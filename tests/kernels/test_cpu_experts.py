"""Native experts: the bits of ordinary products, for every kind of weight, in any company, and when replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels import huge_pages
from octavo.kernels.cpu_experts import PackedExperts
from octavo.kernels.cpu_ops import CpuOps
from octavo.kernels.ops import AttentionMetadata, QuantizedRows
from octavo.kernels.select import select_ops

pytestmark = pytest.mark.native

CPU = torch.device("cpu")
KINDS = ["float32", "bfloat16", "Q4_0", "Q4_1", "Q8_0"]
BLOCK_BYTES = {"Q4_0": (2, 16), "Q4_1": (4, 16), "Q8_0": (2, 32)}  # factors, numbers
HIDDEN, MLP, NUM_EXPERTS = 96, 64, 11


@pytest.fixture(scope="module", params=[False, True], ids=["best", "integers"])
def ops(request: pytest.FixtureRequest) -> CpuOps:
    ops = select_ops("cpu", CPU, rounds_activations=request.param)
    assert isinstance(ops, CpuOps)
    return ops


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draw_weight(kind: str, num_out: int, num_in: int, seed: int) -> Tensor | QuantizedRows:
    if kind not in BLOCK_BYTES:
        weight: Tensor = draw(num_out, num_in, seed=seed) / num_in**0.5
        return weight.bfloat16() if kind == "bfloat16" else weight
    factor_bytes, number_bytes = BLOCK_BYTES[kind]
    random = torch.Generator().manual_seed(seed)
    shape = (num_out, num_in // 32, factor_bytes + number_bytes)
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
    factors = draw(num_out, num_in // 32, factor_bytes // 2, seed=seed) * 0.01
    blocks[:, :, :factor_bytes] = factors.half().view(torch.uint8)
    return QuantizedRows(blocks.flatten(1), kind)


def draw_experts(
    kinds: tuple[str, str], hidden: int = HIDDEN, mlp: int = MLP, count: int = NUM_EXPERTS
) -> tuple[list[Any], list[Any]]:
    gate_up = [draw_weight(kinds[0], 2 * mlp, hidden, seed) for seed in range(count)]
    return gate_up, [draw_weight(kinds[1], hidden, mlp, 100 + seed) for seed in range(count)]


def pack(ops: CpuOps, kind: str) -> PackedExperts:
    return ops.pack_experts(*draw_experts((kind, kind)), NUM_EXPERTS)


@pytest.mark.parametrize("kinds", [*zip(KINDS, KINDS, strict=True), ("Q4_0", "Q8_0")])
@pytest.mark.parametrize(("hidden", "mlp"), [(96, 64), (32, 160)])
def test_one_expert_each_gives_the_bits_of_linear_layers(
    ops: CpuOps, kinds: tuple[str, str], hidden: int, mlp: int
) -> None:
    """A lone expert's weight is 1, renormalised: nothing is rounded beside the products."""
    gate_up, down = draw_experts(kinds, hidden, mlp)
    packed = ops.pack_experts(gate_up, down, NUM_EXPERTS)
    x, logits = draw(70, hidden), draw(70, NUM_EXPERTS, seed=5)
    out = ops.routed_experts(x, logits, packed, top_k=1, renormalise=True)
    for expert in range(NUM_EXPERTS):
        rows = (logits.argmax(1) == expert).nonzero().flatten()
        gated = ops.silu_and_mul(ops.linear(x[rows], ops.pack_linear(gate_up[expert])))
        assert torch.equal(out[rows], ops.linear(gated, ops.pack_linear(down[expert])))


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_odd_sizes(ops: CpuOps, kind: str) -> None:
    for hidden, mlp in [(1, 1), (7, 33), (65, 31), (100, 15)]:
        gate_up, down = draw_experts((kind, kind), hidden, mlp, 3)
        packed = ops.pack_experts(gate_up, down, 3)
        x = draw(9, hidden)
        for expert in range(3):
            logits = torch.zeros(9, 3)
            logits[:, expert] = 5.0
            out = ops.routed_experts(x, logits, packed, top_k=1, renormalise=True)
            gated = ops.silu_and_mul(ops.linear(x, ops.pack_linear(gate_up[expert])))
            assert torch.equal(out, ops.linear(gated, ops.pack_linear(down[expert])))


@pytest.mark.parametrize("kind", KINDS)
@given(
    num_tokens=st.integers(1, 90),
    top_k=st.integers(1, NUM_EXPERTS),
    renormalise=st.booleans(),
    crowd=st.floats(0, 8),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=30)
def test_a_row_is_bit_equal_in_any_company(
    ops: CpuOps,
    kind: str,
    num_tokens: int,
    top_k: int,
    renormalise: bool,
    crowd: float,
    seed: int,
) -> None:
    """However many tokens go where it goes, and in whatever order."""
    packed = packed_once(ops, kind)
    x, logits = draw(num_tokens, HIDDEN, seed=seed), draw(num_tokens, NUM_EXPERTS, seed=seed + 1)
    logits[:, seed % NUM_EXPERTS] += crowd

    def mix(rows: Tensor) -> Tensor:
        return ops.routed_experts(
            x[rows], logits[rows], packed, top_k=top_k, renormalise=renormalise
        )

    together = mix(torch.arange(num_tokens))
    order = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(mix(order), together[order])
    some = order[: 1 + seed % num_tokens]
    assert torch.equal(mix(some), together[some])
    row = order[:1]
    assert torch.equal(mix(row), together[row])


_packed: dict[tuple[int, str], PackedExperts] = {}


def packed_once(ops: CpuOps, kind: str) -> PackedExperts:
    key = (id(ops), kind)
    if key not in _packed:
        _packed[key] = pack(ops, kind)
    return _packed[key]


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_nothing(ops: CpuOps, kind: str) -> None:
    packed = pack(ops, kind)
    x, logits = draw(300, HIDDEN), draw(300, NUM_EXPERTS, seed=5)
    num_threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            results.append(ops.routed_experts(x, logits, packed, top_k=4, renormalise=False))
    finally:
        torch.set_num_threads(num_threads)
    for other in results[1:]:
        assert torch.equal(other, results[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_is_the_calls_one_by_one(ops: CpuOps, kind: str) -> None:
    """One program for batches of any size up to its capacity: the number of rows is a live cell."""
    packed, table = pack(ops, kind), draw(50, HIDDEN, seed=8)
    router = ops.pack_linear(draw(NUM_EXPERTS, HIDDEN, seed=9))
    norm = torch.ones(HIDDEN)

    def forward(
        token_ids: Tensor, positions: Tensor, metadata: Sequence[AttentionMetadata]
    ) -> Tensor:
        residual = ops.embed(token_ids, table)
        x = ops.rms_norm(residual, norm, 1e-5)
        for _ in range(3):  # memory is reused between layers
            logits = ops.linear(x, router)
            mixed = ops.routed_experts(x, logits, packed, top_k=3, renormalise=True)
            x, residual = ops.add_rms_norm(mixed, residual, norm, 1e-5)
        return x

    replayed = ops.record_step(forward)
    for num_tokens in (5, 64, 1, 33, 100, 7):
        ids = torch.randint(
            0, 50, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens)
        )
        empty = torch.zeros(1, dtype=torch.int32)
        metadata = [AttentionMetadata(empty, empty[:0], empty[None], ids, (), (), 0, 0)]
        expected = forward(ids, ids, metadata)
        assert torch.equal(replayed(ids, ids, metadata), expected)


def test_a_row_that_is_not_finite_stays_alone(ops: CpuOps) -> None:
    packed = pack(ops, "bfloat16")
    x, logits = draw(40, HIDDEN), draw(40, NUM_EXPERTS, seed=5)
    clean = ops.routed_experts(x, logits, packed, top_k=3, renormalise=False)
    x[7], logits[9] = torch.nan, torch.nan
    logits[11, 4] = torch.inf
    out = ops.routed_experts(x, logits, packed, top_k=3, renormalise=False)
    assert not out[[7, 9, 11]].isfinite().any()
    others = [row for row in range(40) if row not in (7, 9, 11)]
    assert torch.equal(out[others], clean[others])


def test_experts_take_no_more_of_the_memory_of_weights_than_they_are(
    ops: CpuOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "_last", None)  # a mapping with room for all of it
    before = huge_pages.empty_bytes(64)
    packed = pack(ops, "bfloat16")
    after = huge_pages.empty_bytes(64)
    size = packed.gate_up.data.numel() + packed.down.data.numel()
    assert after.data_ptr() - before.data_ptr() == 64 + size


def test_experts_that_are_not_alike_are_refused(ops: CpuOps) -> None:
    gate_up, down = draw_experts(("bfloat16", "bfloat16"))
    with pytest.raises(ValueError, match="10 experts where 11 were to come"):
        ops.pack_experts(gate_up[1:], down, NUM_EXPERTS)
    with pytest.raises(ValueError, match="12 experts where 11 were to come"):
        ops.pack_experts(gate_up, [*down, down[0]], NUM_EXPERTS)
    with pytest.raises(ValueError, match="0 experts where 11 were to come"):
        ops.pack_experts([], down, NUM_EXPERTS)
    gate_up[3] = gate_up[3].float()
    with pytest.raises(ValueError, match="of one shape and type"):
        ops.pack_experts(gate_up, down, NUM_EXPERTS)


@pytest.mark.parametrize(
    ("x_size", "logits_shape", "top_k", "message"),
    [
        (95, (4, 11), 2, "rows of 95 times experts of 96 in_features"),
        (96, (4, 10), 2, r"\(4, 10\) router logits"),
        (96, (3, 11), 2, r"\(3, 11\) router logits"),
        (96, (4, 11), 12, "12 of 11 experts"),
        (96, (4, 11), 0, "0 of 11 experts"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    ops: CpuOps, x_size: int, logits_shape: tuple[int, int], top_k: int, message: str
) -> None:
    packed = pack(ops, "float32")
    with pytest.raises(ValueError, match=message):
        ops.routed_experts(
            torch.ones(4, x_size), torch.ones(logits_shape), packed, top_k=top_k, renormalise=True
        )
