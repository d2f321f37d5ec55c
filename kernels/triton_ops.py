"""The op set for GPUs: Triton kernels, and the vendor's library for products. Enqueues, never waits.

Uses the default KV layout ``[num_blocks, block_size, num_kv_heads, head_dim]``. With ``TRITON_INTERPRET=1``
it runs on a CPU, for tests.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from . import (
    sync_free_sampling,
    torch_linear,
    torch_sampling,
    triton_activation,
    triton_experts,
    triton_kv_store,
    triton_norm,
)
from .kv_store import allocate_kv_cache, move_blocks, neighbours
from .ops import (
    AttentionMetadata,
    Forward,
    KVCacheSpec,
    KVScales,
    LayerKVCache,
    QuantizedRows,
    SamplingSummary,
    SamplingTensors,
    dense,
)
from .triton_attention import TritonAttention
from .triton_blocks import BlockMover
from .triton_device import reads_registered_memory
from .triton_gpu import Gpu

COPY_ENGINE_BYTES = 1 << 20
"""Runs of neighbouring blocks that are at least this long, a layer, move to and from the host by copies; shorter
ones, each of which would cost a launch of its own, by one kernel."""


class TritonOps:
    """Implements :class:`~.ops.Ops`; see there for every contract."""

    name = "triton"
    quantized_types: frozenset[str] = frozenset()

    def __init__(self, device: torch.device, gpu: Gpu) -> None:
        self._device = device
        self._mover = BlockMover()
        self.reads_host = reads_registered_memory(device)
        """Whether kernels move blocks to and from pinned host memory; else copies do."""
        self._attention = TritonAttention(gpu)
        self._mixture = triton_experts.TritonMixture(gpu, warms_up=device.type == "cuda")
        self._warmed_up: set[object] = set()

    def check(self) -> None:
        """Compile and run a small kernel.

        Raises:
            ValueError: that does not work here, as where Triton finds no C compiler.
        """
        x = torch.ones((1, 16), device=self._device)
        try:
            triton_norm.rms_norm(x, x[0], 0.0)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            raise ValueError(f"a kernel does not start ({error})") from error

    # --- weights -------------------------------------------------------------------------------

    def pack_linear(self, weight: Tensor | QuantizedRows, bias: Tensor | None = None) -> Any:
        return torch_linear.pack_linear(dense(weight), bias)

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        return torch_linear.linear(x, packed)

    def pack_head(self, weight: Tensor | QuantizedRows) -> Any:
        return torch_linear.pack_head(dense(weight))

    def logits(self, x: Tensor, packed: Any) -> Tensor:
        return torch_linear.logits(x, packed)

    def likeliest(self, x: Tensor, packed: Any) -> Tensor:
        return torch_sampling.likeliest(self.logits(x, packed))

    def pack_experts(
        self,
        gate_up: Iterable[Tensor | QuantizedRows],
        down: Iterable[Tensor | QuantizedRows],
        num_experts: int,
    ) -> Any:
        return triton_experts.pack_experts(gate_up, down)

    def routed_experts(
        self, x: Tensor, router_logits: Tensor, packed: Any, *, top_k: int, renormalise: bool
    ) -> Tensor:
        return self._mixture(x, router_logits, packed, top_k, renormalise)

    def pack_vector(self, vector: Tensor) -> Tensor:
        return vector.contiguous()

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return functional.embedding(token_ids, table)

    # --- elementwise ---------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return triton_norm.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return triton_norm.add_rms_norm(x, residual, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return triton_norm.layer_norm(x, weight, bias, eps)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        return triton_norm.add_layer_norm(x, residual, weight, bias, eps)

    def qk_norm(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        triton_norm.norm_heads(q, q_weight, eps)
        triton_norm.norm_heads(k, k_weight, eps)
        return q, k

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x.mul_(factor)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual.add_(x)

    def clamp(self, x: Tensor, limit: float) -> Tensor:
        return x.clamp_(-limit, limit)

    def gelu(self, x: Tensor, *, is_tanh: bool) -> Tensor:
        return triton_activation.gelu(x, is_tanh=is_tanh)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return triton_activation.silu_and_mul(x)

    def gelu_and_mul(self, x: Tensor) -> Tensor:
        return triton_activation.gelu_and_mul(x)

    def rotary(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        return triton_kv_store.rotary(q, k, positions, cos_sin)

    # --- KV cache and attention ----------------------------------------------------------------

    def allocate_kv_cache(self, spec: KVCacheSpec, device: torch.device) -> LayerKVCache:
        return allocate_kv_cache(spec, device)

    def store_kv(
        self,
        k: Tensor,
        v: Tensor,
        cache: LayerKVCache,
        slot_mapping: Tensor,
        kv_scales: KVScales | None = None,
    ) -> None:
        triton_kv_store.store_kv(k, v, cache, slot_mapping, kv_scales)

    def rotary_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        cache: LayerKVCache,
        slot_mapping: Tensor,
        kv_scales: KVScales | None = None,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        return triton_kv_store.rotary_store(
            q, k, v, positions, cos_sin, cache, slot_mapping,
            kv_scales=kv_scales, q_norm=q_norm, k_norm=k_norm, eps=eps,
        )  # fmt: skip

    def attention(
        self,
        q: Tensor,
        cache: LayerKVCache,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        kv_scales: KVScales | None = None,
    ) -> Tensor:
        options: dict[str, Any] = {
            "scale": scale,
            "window": window,
            "soft_cap": soft_cap,
            "sinks": sinks,
            "kv_scales": kv_scales,
        }
        self._warm_up_attention(q, cache, options)
        return self._attention(q, cache, metadata, **options)

    def _warm_up_attention(self, q: Tensor, cache: LayerKVCache, options: dict[str, Any]) -> None:
        """Compile what any batch may need of a layer when the first comes, which is when the engine starts."""
        used = tuple(value is not None for value in options.values())
        kind = (q.shape[1:], q.dtype, cache.key.shape[1:], cache.key.dtype, used)
        if self._device.type == "cuda" and kind not in self._warmed_up:
            self._warmed_up.add(kind)
            self._attention.warm_up(q, cache, **options)

    def copy_blocks(self, caches: Sequence[LayerKVCache], src: Tensor, dst: Tensor) -> None:
        self._mover.move(caches, caches, src, dst)

    def swap_blocks(
        self,
        src_caches: Sequence[LayerKVCache],
        dst_caches: Sequence[LayerKVCache],
        src: Tensor,
        dst: Tensor,
    ) -> None:
        if self.reads_host and not _moves_in_long_runs(src_caches[0].key, src, dst):
            self._mover.move(src_caches, dst_caches, self._upload(src), self._upload(dst))
            return
        for source_cache, target_cache in zip(src_caches, dst_caches, strict=True):
            for source, target in zip(source_cache, target_cache, strict=True):
                move_blocks(source, target, src, dst)

    def _upload(self, ids: Tensor) -> Tensor:
        pinned = ids.pin_memory() if self._device.type == "cuda" else ids
        return pinned.to(self._device, non_blocking=True)

    def record_step(self, forward: Forward) -> Forward:
        """``forward``, after which the attention plans of its step are forgotten."""

        def step(
            token_ids: Tensor, positions: Tensor, metadata: Sequence[AttentionMetadata]
        ) -> Tensor:
            try:
                return forward(token_ids, positions, metadata)
            finally:
                self._attention.forget_plans()

        return step

    # --- logits --------------------------------------------------------------------------------

    def sample(
        self, logits: Tensor, params: SamplingTensors, summary: SamplingSummary | None = None
    ) -> Tensor:
        return sync_free_sampling.sample(logits, params, summary)


def _moves_in_long_runs(blocks: Tensor, src: Tensor, dst: Tensor) -> bool:
    """Whether neighbours join to copies so long that launching them costs nothing beside the copying."""
    num_runs = sum(1 for _ in neighbours(src.tolist(), dst.tolist()))
    block_bytes = blocks.stride(0) * blocks.element_size()
    return len(src) * block_bytes >= num_runs * COPY_ENGINE_BYTES
