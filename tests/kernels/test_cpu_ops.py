"""The native op set from Python: what it refuses, and who may call it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.cpu_ops import CpuOps
from octavo.kernels.cpu_recording import Capacity
from octavo.kernels.ops import AttentionMetadata, KVCacheSpec, LayerKVCache
from octavo.kernels.select import select_ops

pytestmark = pytest.mark.native

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    ops = select_ops("cpu", CPU)
    assert isinstance(ops, CpuOps)
    return ops


def cache_of(ops: CpuOps, num_kv_heads: int, head_dim: int) -> LayerKVCache:
    return ops.allocate_kv_cache(KVCacheSpec(2, 4, num_kv_heads, head_dim, torch.float32), CPU)


def multiply(ops: CpuOps) -> None:
    ops.linear(torch.ones(2, 9), ops.pack_linear(torch.ones(4, 8)))


def embed(ops: CpuOps) -> None:
    ops.embed(torch.tensor([0]), torch.ones(4, 6).T)


def normalise(ops: CpuOps) -> None:
    ops.rms_norm(torch.ones(2, 9), torch.ones(8), 1e-5)


def centre(ops: CpuOps) -> None:
    ops.layer_norm(torch.ones(2, 9), torch.ones(8), None, 1e-5)


def offset(ops: CpuOps) -> None:
    ops.layer_norm(torch.ones(2, 9), torch.ones(9), torch.ones(8), 1e-5)


def rotate(ops: CpuOps) -> None:
    ops.rotary(torch.ones(1, 2, 8), torch.ones(1, 1, 8), torch.tensor([0]), torch.ones(4, 10))


def normalise_heads(ops: CpuOps) -> None:
    q, k = torch.ones(1, 2, 8), torch.ones(1, 1, 8)
    ops.qk_norm(q, k, torch.ones(8), torch.ones(7), 1e-5)


def add(ops: CpuOps) -> None:
    ops.add(torch.ones(2, 8), torch.ones(2, 9))


def store(ops: CpuOps) -> None:
    ops.store_kv(torch.ones(1, 2, 8), torch.ones(1, 2, 8), cache_of(ops, 1, 8), torch.tensor([0]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (multiply, "rows of 9 times a weight of 8 in_features"),
        (embed, r"a table with strides \(1, 6\)"),
        (normalise, "a norm of 8 for rows of 9"),
        (centre, "a norm of 8 for rows of 9"),
        (offset, "a norm of 8 for rows of 9"),
        (normalise_heads, "a norm of 7 for 1 heads of 8"),
        (add, r"the sum of \(2, 8\) and \(2, 9\)"),
        (rotate, "10 of heads of 8 and 8 rotated"),
        (store, r"keys of \(2, 8\) with a cache of \(1, 8\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    call: Callable[[CpuOps], None], message: str, ops: CpuOps
) -> None:
    with pytest.raises(ValueError, match=message):
        call(ops)


@pytest.mark.parametrize(
    ("heads", "message"), [((3, 8), "3 heads over 2"), ((4, 9), r"queries of 9 with a cache of")]
)
def test_attention_over_another_cache_is_refused(
    heads: tuple[int, int], message: str, ops: CpuOps, make_batch: Any, make_shape: Any
) -> None:
    metadata = make_batch([(1, 1)], make_shape()).metadata()
    with pytest.raises(ValueError, match=message):
        ops.attention(torch.ones(1, *heads), cache_of(ops, 2, 8), metadata, scale=1.0)


def test_any_thread_may_call(ops: CpuOps, make_batch: Any, make_shape: Any) -> None:
    """Tiles are asked for once a process and set up in each thread."""
    packed = ops.pack_linear(torch.randn(70, 96).bfloat16())
    rows = torch.randn(5, 96)
    batch = make_batch([(40, 40), (7, 1)], make_shape(head_dim=64, block_size=16))
    batch.shape = make_shape(head_dim=64, block_size=16, dtype=torch.bfloat16)

    def compute() -> list[Tensor]:
        return [ops.linear(rows, packed), batch.run(ops)]

    expected = compute()
    for _ in range(3):
        with ThreadPoolExecutor(1) as pool:
            computed = pool.submit(compute).result()
        assert all(map(torch.equal, computed, expected))


# The logits leave room for no second row of that size.
STARVED = """
import resource
from pathlib import Path
import torch
from octavo.kernels.ops import SamplingTensors
from octavo.kernels.select import select_ops

ops = select_ops("cpu", torch.device("cpu"))
logits = torch.zeros(1, 1 << 26)
one = torch.ones(1, dtype=torch.int64)
params = SamplingTensors(one.float(), one * 0, one.float(), one.float() * 0, one, one)
assert 0 <= ops.sample(logits[:, :1000], params) < 1000
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 26), -1))
try:
    ops.sample(logits, params)
except MemoryError as error:
    print(error)
assert 0 <= ops.sample(logits[:, :1000], params) < 1000
"""


@pytest.mark.slow
def test_memory_that_is_not_to_be_had_is_an_error() -> None:
    done = subprocess.run([sys.executable, "-c", STARVED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The native ops found no memory for their own use.\n"


def test_keys_that_lie_otherwise_than_values_are_not_recorded(ops: CpuOps) -> None:
    """To copy them is no op, so a replay would store what they were when it was recorded."""

    def forward(
        token_ids: Tensor, positions: Tensor, metadata: Sequence[AttentionMetadata]
    ) -> Tensor:
        x, slots = ops.embed(token_ids, torch.ones(4, 16)).view(-1, 2, 8), metadata[0].slot_mapping
        ops.store_kv(x[:, :1], torch.ones(len(x), 1, 8), cache_of(ops, 1, 8), slots)
        return x

    with pytest.raises(ValueError, match="lie differently, recorded"):
        ops.record(forward, Capacity(1, 1, 1), num_groups=1)
