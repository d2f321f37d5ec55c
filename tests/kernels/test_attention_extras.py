"""Sinks and scaled caches: what the oracle computes, and that other sets refuse what they lack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from octavo.kernels.cpu_build import load_library
from octavo.kernels.cpu_ops import CpuOps
from octavo.kernels.ops import KVCacheSpec, KVScales, LayerKVCache, Ops
from octavo.kernels.reference import ReferenceOps
from octavo.kernels.torch_ops import TorchOps

ROWS = [(12, 1), (9, 9), (33, 1), (12, 4)]


def _attend(batch: Any, **options: Any) -> torch.Tensor:
    ops = ReferenceOps()
    cache, metadata = batch.filled_cache(ops), batch.metadata()
    k = torch.cat([key[n - c :] for key, (n, c) in zip(batch.keys, batch.rows, strict=True)])
    v = torch.cat([val[n - c :] for val, (n, c) in zip(batch.values, batch.rows, strict=True)])
    ops.store_kv(k, v, cache, metadata.slot_mapping)
    return ops.attention(batch.q, cache, metadata, scale=0.25, **options)


def test_a_sink_is_a_key_whose_value_is_zero(make_batch: Any, make_shape: Any) -> None:
    """gpt-oss: softmax over the scores and the sink's logit, which is then dropped."""
    batch = make_batch(ROWS, make_shape())
    sinks = torch.tensor([-1.0, 0.0, 2.0, 50.0])
    out = _attend(batch, sinks=sinks, soft_cap=3.0).double().numpy()
    expected = []
    for row, (seq_len, count) in enumerate(ROWS):
        q, k, v = (x[row].double().numpy() for x in (batch.queries, batch.keys, batch.values))
        k, v = np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1)
        scores = 3.0 * np.tanh(np.einsum("qhd,khd->hqk", q, k) * 0.25 / 3.0)
        later = np.arange(seq_len)[None, :] > np.arange(seq_len - count, seq_len)[:, None]
        weights = np.where(later, 0.0, np.exp(scores))
        sink = np.exp(sinks.double().numpy())[:, None, None]
        weights /= weights.sum(axis=-1, keepdims=True) + sink
        expected.append(np.einsum("hqk,khd->qhd", weights, v))
    np.testing.assert_allclose(out, np.concatenate(expected), atol=2e-5)


def test_a_scaled_cache_holds_quotients() -> None:
    spec = KVCacheSpec(1, 4, 1, 2, torch.float8_e4m3fn)
    ops = ReferenceOps()
    cache = ops.allocate_kv_cache(spec, torch.device("cpu"))
    k = torch.tensor([[[1.0, -3.0]], [[1e6, float("nan")]]])
    ops.store_kv(k, -k, cache, torch.tensor([1, 2]), KVScales(0.5, 4.0))
    assert cache.key[0, 1].float().tolist() == [[2.0, -6.0]]
    assert cache.value[0, 1].float().tolist() == [[-0.25, 0.75]]
    assert cache.key[0, 2, 0, 0].float() == 448.0
    assert cache.value[0, 2, 0, 0].float() == -448.0
    assert cache.key[0, 2, 0, 1].float().isnan()


def test_scales_are_multiplied_back(make_batch: Any, make_shape: Any) -> None:
    batch = make_batch(ROWS, make_shape())
    ops = ReferenceOps()
    cache, metadata = batch.filled_cache(ops), batch.metadata()
    k = torch.cat([key[n - c :] for key, (n, c) in zip(batch.keys, batch.rows, strict=True)])
    v = torch.cat([val[n - c :] for val, (n, c) in zip(batch.values, batch.rows, strict=True)])
    ops.store_kv(k, v, cache, metadata.slot_mapping)
    divided = LayerKVCache(cache.key / 8, cache.value / 0.25)
    out = ops.attention(batch.q, divided, metadata, scale=0.25, kv_scales=KVScales(8.0, 0.25))
    assert torch.equal(out, _attend(batch))


@pytest.fixture(params=["torch", pytest.param("cpu", marks=pytest.mark.native)])
def lacking(request: pytest.FixtureRequest) -> Ops:
    if request.param == "torch":
        return TorchOps()
    library = load_library().library
    assert library is not None
    return CpuOps(library)


def test_what_a_set_lacks_it_refuses(lacking: Ops, make_batch: Any, make_shape: Any) -> None:
    batch = make_batch([(3, 1)], make_shape())
    spec = KVCacheSpec(batch.num_blocks, 4, 2, 16, torch.float32)
    cache = lacking.allocate_kv_cache(spec, torch.device("cpu"))
    metadata, scales = batch.metadata(), KVScales(1.0, 1.0)
    name = lacking.name
    with pytest.raises(ValueError, match=f"The {name} kernels do not compute attention sinks"):
        lacking.attention(batch.q, cache, metadata, scale=1.0, sinks=torch.zeros(4))
    with pytest.raises(ValueError, match=f"The {name} kernels do not take a scaled KV cache"):
        lacking.attention(batch.q, cache, metadata, scale=1.0, kv_scales=scales)
    k = torch.zeros(1, 2, 16)
    with pytest.raises(ValueError, match=f"The {name} kernels do not take a scaled KV cache"):
        lacking.store_kv(k, k, cache, metadata.slot_mapping, scales)
