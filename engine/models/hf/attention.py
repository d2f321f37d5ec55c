"""What transformers calls in place of its own attention: octavo's, over paged keys and values.

transformers hands a registered attention function the module that calls it, queries, keys and values, and
what the layer wants of them. The module knows its model's :class:`PagedAttention`, and that knows the step
which is under way; nothing is kept that two models could share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from ....kernels.ops import AttentionMetadata, LayerKVCache, Ops

NAME = "octavo"
"""Of the attention function. There is no mask function of that name: so transformers makes no masks."""

PLACE = "octavo_attention"
"""The attribute of a model's modules that holds its attention."""

IGNORED = frozenset(("position_ids", "cache_position", "dropout", "use_cache", "output_attentions"))
"""What attention over paged keys and values does without: dropout is 0 outside training."""


@dataclass(frozen=True)
class AttentionCall:
    """What one layer asked for. Windows count the query's own token, as octavo's do."""

    layer: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Tensor | None  # [num_q_heads]


class PagedAttention:
    """The attention of one model: each layer's call stores keys and values, then attends.

    Outside of a step, when there are no caches, calls are noted and answered with zeros: a model is asked so
    what its layers are like.
    """

    def __init__(self, ops: Ops) -> None:
        self.calls: list[AttentionCall] = []
        self._ops = ops
        self._step: tuple[Sequence[LayerKVCache], Sequence[AttentionMetadata]] | None = None

    def attach(self, model: nn.Module) -> None:
        """Make it the attention of all of ``model``'s layers."""
        for module in model.modules():
            if getattr(module, "layer_idx", None) is not None:
                setattr(module, PLACE, self)

    @contextmanager
    def step(
        self, caches: Sequence[LayerKVCache], metadata: Sequence[AttentionMetadata]
    ) -> Iterator[None]:
        """Within, layer i stores to ``caches[i]`` and attends as ``metadata[i]`` says."""
        self._step = caches, metadata
        try:
            yield
        finally:
            self._step = None

    def __call__(
        self,
        call: AttentionCall,
        q: Tensor,  # [num_tokens, num_q_heads, head_dim]
        k: Tensor,  # [num_tokens, num_kv_heads, head_dim]
        v: Tensor,  # [num_tokens, num_kv_heads, value_dim]
    ) -> Tensor:  # [num_tokens, num_q_heads, value_dim]
        if self._step is None:
            self.calls.append(call)
            return q.new_zeros(*q.shape[:2], call.value_dim)
        caches, metadata = self._step
        cache, rows = caches[call.layer], metadata[call.layer]
        self._ops.store_kv(k, v, cache, rows.slot_mapping)
        return self._ops.attention(
            q,
            cache,
            rows,
            scale=call.scale,
            window=call.window,
            soft_cap=call.soft_cap,
            sinks=call.sinks,
        )


def attend(
    module: Any,
    query: Tensor,  # [1, num_q_heads, num_tokens, head_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:  # [1, num_tokens, num_q_heads, value_dim]
    """The attention function that transformers knows as ``octavo``.

    Raises:
        NotImplementedError: the layer asks for what is not computed.
    """
    _refuse(module, attention_mask, is_causal, options)
    paged: PagedAttention = getattr(module, PLACE)
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    call = AttentionCall(
        layer=module.layer_idx,
        num_q_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[2],
        value_dim=v.shape[2],
        scale=1 / math.sqrt(q.shape[2]) if scaling is None else float(scaling),
        window=sliding_window,
        soft_cap=softcap,
        sinks=s_aux,
    )
    return paged(call, q.contiguous(), k.contiguous(), v.contiguous())[None], None


def _refuse(
    module: Any, mask: Tensor | None, is_causal: bool | None, options: dict[str, Any]
) -> None:
    wrong = [name for name in options if name not in IGNORED and options[name] is not None]
    if mask is not None:
        wrong.append("attention_mask")
    if is_causal is False or not getattr(module, "is_causal", True):
        wrong.append("attention to later tokens")
    if not hasattr(module, PLACE):
        wrong.append("attention outside the numbered layers")
    if wrong:
        raise NotImplementedError(f"{type(module).__name__} asks for {', '.join(wrong)}")


AttentionInterface.register(NAME, attend)
