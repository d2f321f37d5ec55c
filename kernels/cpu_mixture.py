"""Mixtures of experts over ``cpu_experts.cpp``: rows sorted by expert, so that each expert is one product."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .cpu_calls import address_of, require
from .cpu_elementwise import SILU, ElementwiseOps
from .cpu_experts import PackedExperts, stack_packed
from .cpu_products import ProductOps
from .cpu_structs import CombineArgs, RouteArgs, SortExpertsArgs
from .ops import QuantizedRows


class MixtureOps(ProductOps, ElementwiseOps):
    """The ops of mixtures of experts; contracts in :class:`~.ops.Ops`."""

    def pack_experts(
        self,
        gate_up: Iterable[Tensor | QuantizedRows],
        down: Iterable[Tensor | QuantizedRows],
        num_experts: int,
    ) -> PackedExperts:
        first, second = (
            stack_packed(weights, lambda one, room: self._packed(one, None, room), num_experts)
            for weights in (gate_up, down)
        )
        packed = PackedExperts(first, second, num_experts)
        _require_fitting(packed)
        return packed

    def routed_experts(
        self,
        x: Tensor,
        router_logits: Tensor,
        packed: PackedExperts,
        *,
        top_k: int,
        renormalise: bool,
    ) -> Tensor:
        """Each row goes through its ``top_k`` experts; the rows of one expert are one product.

        Args:
            x: ``[num_tokens, hidden]`` float32.
            router_logits: ``[num_tokens, num_experts]`` float32.
            packed: from :meth:`pack_experts`.

        Returns:
            ``[num_tokens, hidden]`` float32.

        Raises:
            ValueError: shapes do not fit, or ``top_k`` is not in ``1 .. num_experts``.
        """
        _require_experts(x, router_logits, packed, top_k)
        experts, weights = self._route(router_logits, top_k, renormalise)
        num_rows, starts, tokens, rows = self._sort(experts, packed.num_experts)
        cell = num_rows.data_ptr()
        gate_up = self._multiply(x, packed.gate_up, cell, sources=tokens, starts=starts)
        gated = self._gate(gate_up, SILU, cell)
        return self._combine(self._multiply(gated, packed.down, cell, starts=starts), rows, weights)

    def _route(self, logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
        """Each token's experts and their weights, ``[num_tokens, top_k]`` int32 and float32."""
        shape = (logits.shape[0], top_k)
        experts, weights = self._empty(shape, torch.int32), self._empty(shape)
        self._do(
            RouteArgs(
                num_tokens=self._tokens(logits),
                logits=address_of(logits),
                logits_stride=logits.stride(0),
                num_experts=logits.shape[1],
                top_k=top_k,
                is_renormalised=int(renormalise),
                experts=experts.data_ptr(),
                weights=weights.data_ptr(),
            )
        )
        return experts, weights

    def _sort(self, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows by expert: their number, each expert's first, each row's token, each token's rows."""
        num_rows = self._empty((1,), torch.int64)
        starts = self._empty((num_experts + 1,), torch.int32)
        tokens = self._empty((experts.numel(),), torch.int32)
        rows = self._empty(experts.shape, torch.int32)
        self._do(
            SortExpertsArgs(
                num_tokens=self._tokens(experts),
                experts=experts.data_ptr(),
                num_experts=num_experts,
                top_k=experts.shape[1],
                num_rows=num_rows.data_ptr(),
                starts=starts.data_ptr(),
                tokens=tokens.data_ptr(),
                rows=rows.data_ptr(),
            )
        )
        return num_rows, starts, tokens, rows

    def _combine(self, x: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """Each token's ``rows [num_tokens, top_k]`` of x, weighed and added up."""
        out = self._empty((rows.shape[0], x.shape[1]))
        self._do(
            CombineArgs(
                num_tokens=self._tokens(rows),
                x=address_of(x),
                x_stride=x.stride(0),
                rows=rows.data_ptr(),
                weights=weights.data_ptr(),
                top_k=rows.shape[1],
                size=x.shape[1],
                out=out.data_ptr(),
                out_stride=out.stride(0),
            )
        )
        return out


def _require_fitting(packed: PackedExperts) -> None:
    hidden, mlp = packed.gate_up.in_features, packed.down.in_features
    is_fitting = packed.gate_up.out_features == 2 * mlp and packed.down.out_features == hidden
    shapes = [(half.out_features, half.in_features) for half in packed[:2]]
    require(is_fitting, f"experts of {shapes[0]} before {shapes[1]}")


def _require_experts(x: Tensor, logits: Tensor, packed: PackedExperts, top_k: int) -> None:
    size, num_experts = packed.gate_up.in_features, packed.num_experts
    require(x.shape[1] == size, f"rows of {x.shape[1]} times experts of {size} in_features")
    require(logits.shape == (x.shape[0], num_experts), f"{tuple(logits.shape)} router logits")
    require(1 <= top_k <= num_experts, f"{top_k} of {num_experts} experts")
