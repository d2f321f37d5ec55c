"""Ops over ``cpu_elementwise.cpp``, which treats every row by itself: embedding, norms, sums, gates, rotary."""

from __future__ import annotations

from torch import Tensor

from .cpu_calls import FLOAT_TYPES, NativeCalls, address_of, require
from .cpu_structs import (
    AddArgs,
    ClampArgs,
    EmbedArgs,
    GateArgs,
    GeluArgs,
    LayerNormArgs,
    RmsNormArgs,
    RotaryArgs,
)

SILU, GELU = 0, 1


class ElementwiseOps(NativeCalls):
    """The ops of rows; contracts in :class:`~.ops.Ops`."""

    def pack_vector(self, vector: Tensor) -> Tensor:
        return vector.float().contiguous()

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Rows ``token_ids [num_tokens] int64`` of ``table [vocab_size, hidden]`` → ``[num_tokens, hidden]`` float32.

        Raises:
            ValueError: the table, float32 or bfloat16, is not contiguous.
        """
        require(table.is_contiguous(), f"a table with strides {table.stride()}")
        out = self._empty((len(token_ids), table.shape[1]))
        self._do(
            EmbedArgs(
                num_tokens=self._tokens(token_ids),
                token_ids=token_ids.data_ptr(),
                table=table.data_ptr(),
                dtype=FLOAT_TYPES[table.dtype],
                hidden=table.shape[1],
                out=out.data_ptr(),
                out_stride=out.stride(0),
            )
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self._norm(x, residual, weight, eps), residual

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        require(len(weight) == x.shape[1], f"a norm of {len(weight)} for rows of {x.shape[1]}")
        out = self._empty(x.shape)
        self._do(
            RmsNormArgs(
                num_tokens=self._tokens(x),
                x=address_of(x),
                x_stride=x.stride(0),
                residual=None if residual is None else address_of(residual),
                residual_stride=0 if residual is None else residual.stride(0),
                weight=weight.data_ptr(),
                eps=eps,
                size=x.shape[1],
                num_heads=1,
                out=out.data_ptr(),
                out_stride=out.stride(0),
            )
        )
        return out

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return self._layer_norm(x, None, weight, bias, eps)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self._layer_norm(x, residual, weight, bias, eps), residual

    def _layer_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        for vector in (weight,) if bias is None else (weight, bias):
            require(len(vector) == x.shape[1], f"a norm of {len(vector)} for rows of {x.shape[1]}")
        out = self._empty(x.shape)
        self._do(
            LayerNormArgs(
                num_tokens=self._tokens(x),
                x=address_of(x),
                x_stride=x.stride(0),
                residual=None if residual is None else address_of(residual),
                residual_stride=0 if residual is None else residual.stride(0),
                weight=weight.data_ptr(),
                bias=None if bias is None else bias.data_ptr(),
                eps=eps,
                size=x.shape[1],
                out=out.data_ptr(),
                out_stride=out.stride(0),
            )
        )
        return out

    def qk_norm(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        self._norm_heads(q, q_weight, eps)
        self._norm_heads(k, k_weight, eps)
        return q, k

    def _norm_heads(self, heads: Tensor, weight: Tensor, eps: float) -> None:
        """In place, so that the keys stay as far apart as the values are."""
        num_heads, dim = heads.shape[1:]
        is_whole = len(weight) == num_heads * dim
        require(
            (is_whole and heads.stride(1) == dim) or len(weight) == dim,
            f"a norm of {len(weight)} for {num_heads} heads of {dim}",
        )
        self._do(
            RmsNormArgs(
                num_tokens=self._tokens(heads),
                x=address_of(heads),
                x_stride=heads.stride(0),
                weight=weight.data_ptr(),
                eps=eps,
                size=len(weight),
                num_heads=1 if is_whole else num_heads,
                head_stride=heads.stride(1),
                out=heads.data_ptr(),
                out_stride=heads.stride(0),
            )
        )

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return self._add(x, factor, None, x)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._add(x, 1.0, residual, residual)

    def _add(self, x: Tensor, factor: float, residual: Tensor | None, out: Tensor) -> Tensor:
        require(x.shape == out.shape, f"the sum of {tuple(x.shape)} and {tuple(out.shape)}")
        self._do(
            AddArgs(
                num_tokens=self._tokens(x),
                x=address_of(x),
                x_stride=x.stride(0),
                factor=factor,
                size=x.shape[1],
                residual=None if residual is None else address_of(residual),
                out=address_of(out),
                out_stride=out.stride(0),
            )
        )
        return out

    def clamp(self, x: Tensor, limit: float) -> Tensor:
        num_heads, dim = x.shape[1:]
        require(num_heads == 1 or x.stride(1) == dim, f"heads {x.stride(1)} apart within a limit")
        self._do(
            ClampArgs(
                num_tokens=self._tokens(x),
                x=address_of(x),
                x_stride=x.stride(0),
                size=num_heads * dim,
                limit=limit,
            )
        )
        return x

    def gelu(self, x: Tensor, *, is_tanh: bool) -> Tensor:
        self._do(
            GeluArgs(
                num_tokens=self._tokens(x),
                x=address_of(x),
                x_stride=x.stride(0),
                size=x.shape[1],
                is_tanh=is_tanh,
                out=address_of(x),
                out_stride=x.stride(0),
            )
        )
        return x

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return self._gate(x, SILU, self._tokens(x))

    def gelu_and_mul(self, x: Tensor) -> Tensor:
        return self._gate(x, GELU, self._tokens(x))

    def _gate(self, x: Tensor, kind: int, num_tokens: int) -> Tensor:
        out = self._empty((x.shape[0], x.shape[1] // 2))
        self._do(
            GateArgs(
                num_tokens=num_tokens,
                x=address_of(x),
                x_stride=x.stride(0),
                size=out.shape[1],
                kind=kind,
                out=out.data_ptr(),
                out_stride=out.stride(0),
            )
        )
        return out

    def rotary(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Turn the first ``rotary_dim`` numbers of each head, in place.

        Args:
            q: ``[num_tokens, num_q_heads, head_dim]`` float32.
            k: ``[num_tokens, num_kv_heads, head_dim]`` float32; behind q in memory, it takes no op of its own.
            positions: ``[num_tokens]`` int64.
            cos_sin: ``[max_position, rotary_dim]`` float32.

        Raises:
            ValueError: ``rotary_dim`` is odd or more than ``head_dim``, or the heads differ in size.
        """
        head_dim, rotary_dim = q.shape[2], cos_sin.shape[1]
        is_possible = rotary_dim <= head_dim == k.shape[2] and rotary_dim % 2 == 0
        require(is_possible, f"{rotary_dim} of heads of {head_dim} and {k.shape[2]} rotated")
        for heads, num_heads in _joined(q, k):
            self._do(
                RotaryArgs(
                    num_tokens=self._tokens(q),
                    heads=address_of(heads),
                    token_stride=heads.stride(0),
                    head_stride=heads.stride(1),
                    num_heads=num_heads,
                    head_dim=heads.shape[2],
                    rotary_dim=cos_sin.shape[1],
                    positions=positions.data_ptr(),
                    cos_sin=cos_sin.data_ptr(),
                )
            )
        return q, k


def _joined(q: Tensor, k: Tensor) -> list[tuple[Tensor, int]]:
    """Heads to rotate, as one tensor where k follows q in memory."""
    num_q_heads, num_k_heads = q.shape[1], k.shape[1]
    is_adjacent = (
        q.stride() == k.stride()
        and k.data_ptr() == q.data_ptr() + num_q_heads * q.stride(1) * q.element_size()
    )
    return [(q, num_q_heads + num_k_heads)] if is_adjacent else [(q, num_q_heads), (k, num_k_heads)]
