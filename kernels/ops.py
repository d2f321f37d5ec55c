"""The set of ops that a model and a sampler are made of, and the tensors that describe a batch.

An op set implements :class:`Ops`; ``reference.py`` is the oracle for every other. A model calls these
with everything as arguments, so that one step's calls can be recorded and replayed. An op set owns the
layout of its KV cache: everything above knows blocks by id, and that one block of one layer is
contiguous memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape of one layer's KV cache."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer, keys and values."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class LayerKVCache(NamedTuple):
    """One layer's keys and values. The shape is the op set's own; dimension 0 is the block.

    Default: ``[num_blocks, block_size, num_kv_heads, head_dim]`` each.
    """

    key: Tensor
    value: Tensor


class KVScales(NamedTuple):
    """What the numbers in one layer's cache are multiplied by; the cache holds ``k / key``, ``v / value``."""

    key: float
    value: float


class QuantizedRows(NamedTuple):
    """A weight ``[out_features, in_features]`` in blocks of 32 along in_features.

    Types are GGUF's, or what holds the numbers of GGUF's others in fewer kinds of blocks: a block of

    * ``Q4_F32`` is a float32 scale, a float32 offset, and 16 bytes of numbers in Q4_1's order:
      ``scale * number + offset``;
    * ``Q8_F32`` is two float32 scales, of its first and its last 16 numbers, a float32 offset, and 32 signed bytes.
    """

    blocks: Tensor  # [out_features, bytes of a row] uint8
    type: str  # "Q4_0", "Q4_1", "Q8_0", "Q4_F32" or "Q8_F32"


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """A flat batch of variable-length queries over paged keys and values.

    Row r owns query tokens ``query_start_loc[r] .. query_start_loc[r + 1] - 1``, which are the last
    ones of its ``seq_lens[r]`` tokens. The host twins hold the same numbers, so that no op needs a
    device-to-host copy to know them.
    """

    query_start_loc: Tensor  # [num_rows + 1] int32
    seq_lens: Tensor  # [num_rows] int32, computed tokens including this step's
    block_tables: Tensor  # [num_rows, max_num_blocks] int32; past a row's last block: its last id
    slot_mapping: Tensor  # [num_tokens] int64; -1: do not store
    query_lens_host: Sequence[int]
    seq_lens_host: Sequence[int]
    max_query_len: int
    max_seq_len: int
    num_decode_rows: int = 0  # the first rows with one query token each


Forward = Callable[[Tensor, Tensor, Sequence[AttentionMetadata]], Tensor]
"""Token ids and positions ``[num_tokens] int64``, metadata → hidden states ``[num_tokens, hidden_size]``.

There is one metadata for each KV group. All describe the same rows: they differ in ``slot_mapping`` and in the
numbers, not in the shape, of ``block_tables``.
"""


def dense(weight: Tensor | QuantizedRows) -> Tensor:
    """For op sets whose products take numbers only.

    Raises:
        TypeError: the weight is quantised.
    """
    if isinstance(weight, QuantizedRows):
        raise TypeError(f"these kernels do not take {weight.type} weights as they are")
    return weight


def refuse_extras(name: str, sinks: Tensor | None, kv_scales: KVScales | None) -> None:
    """For op sets whose attention has neither sinks nor scaled caches.

    Raises:
        ValueError: one of them is asked for.
    """
    if sinks is not None:
        raise ValueError(f"The {name} kernels do not compute attention sinks.")
    if kv_scales is not None:
        raise ValueError(f"The {name} kernels do not take a scaled KV cache.")


class SamplingTensors(NamedTuple):
    """Per-row sampling parameters for one call of :meth:`Ops.sample`. All ``[num_rows]``."""

    temperature: Tensor  # float32; 0: greedy
    top_k: Tensor  # int64; 0: off
    top_p: Tensor  # float32; 1: off
    min_p: Tensor  # float32; 0: off
    seed: Tensor  # int64
    position: Tensor  # int64, index in the sequence of the token being drawn


class SamplingSummary(NamedTuple):
    """What any row of a :class:`SamplingTensors` asks for, known on the host: so that a GPU's op set need not
    wait for the numbers to know which work to enqueue."""

    has_random: bool  # temperature > 0
    has_top_k: bool
    has_top_p: bool
    has_min_p: bool


class Ops(Protocol):
    """One implementation of every op. ``num_tokens`` is the flat batch; tensors are contiguous."""

    name: str
    """As chosen by ``--attention-backend``."""

    quantized_types: frozenset[str]
    """Types of :class:`QuantizedRows` that products take as they are."""

    # --- weights -------------------------------------------------------------------------------
    def pack_linear(self, weight: Tensor | QuantizedRows, bias: Tensor | None = None) -> Any:
        """Prepare ``weight [out_features, in_features]`` for :meth:`linear`, once.

        Returns an opaque handle. The caller drops ``weight`` afterwards unless it needs it elsewhere.
        """

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        """``x [num_tokens, in_features]`` → ``[num_tokens, out_features]``, x's dtype."""

    def pack_head(self, weight: Tensor | QuantizedRows) -> Any:
        """Prepare the output projection ``weight [vocab_size, hidden_size]`` for :meth:`logits`, once."""

    def logits(self, x: Tensor, packed: Any) -> Tensor:
        """``x [num_rows, hidden_size]`` → ``[num_rows, vocab_size]`` float32.

        Summed and returned in float32 whatever x's dtype is: rounded to bfloat16, a logit of 25 moves by
        up to 1/16, and near ties between tokens become exact ones.
        """

    def pack_experts(
        self,
        gate_up: Iterable[Tensor | QuantizedRows],
        down: Iterable[Tensor | QuantizedRows],
        num_experts: int,
    ) -> Any:
        """Prepare one layer's experts for :meth:`routed_experts`, once.

        Each argument is gone through once, ``gate_up`` first, so that weights may be read one by one.

        Args:
            gate_up: of each expert by id, ``[2 * mlp, hidden]``: the gate's rows, then the up projection's.
            down: of each expert by id, ``[hidden, mlp]``.
            num_experts: how many either gives; all that one of them gives are alike in type and shape.
        """

    def routed_experts(
        self, x: Tensor, router_logits: Tensor, packed: Any, *, top_k: int, renormalise: bool
    ) -> Tensor:
        """A mixture of experts: each token's ``top_k`` likeliest, weighed (Shazeer et al., 2017, section 2.1).

        An expert computes ``down(silu(gate(x)) * up(x))``. A token goes to the experts with its ``top_k``
        largest logits, the lowest ids where logits are equal; their results are weighed by the softmax over
        all logits, in float32, and added up.

        Args:
            x: ``[num_tokens, hidden]``.
            router_logits: ``[num_tokens, num_experts]``.
            packed: from :meth:`pack_experts`.
            renormalise: a token's weights are divided by their sum, which is the softmax over the chosen.

        Returns:
            ``[num_tokens, hidden]``, x's dtype.
        """

    def pack_vector(self, vector: Tensor) -> Tensor:
        """Prepare a norm's weight or bias ``[size]``, once.

        It may be float32 beside narrower activations: one that is close to 1 loses digits when rounded.
        """

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Rows ``token_ids [num_tokens] int64`` of ``table [vocab_size, hidden_size]``.

        This op decides the type of the activations: the table's, or float32 where the op set computes
        everything in float32.
        """

    # --- elementwise ---------------------------------------------------------------------------
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last dimension, in float32 (Zhang & Sennrich, 2019)."""

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """``(rms_norm(x + residual), x + residual)``; ``residual`` may be overwritten."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Layer norm over the last dimension, in float32 (Ba et al., 2016)."""

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """``(layer_norm(x + residual), x + residual)``; ``residual`` may be overwritten."""

    def qk_norm(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """RMS norm of queries and keys; both may be overwritten.

        Args:
            q: ``[num_tokens, num_q_heads, head_dim]``.
            k: ``[num_tokens, num_kv_heads, head_dim]``.
            q_weight: ``[head_dim]``: each head by itself (Qwen3), or ``[num_q_heads * head_dim]``: all
                heads of a token together (OLMo 2). From :meth:`pack_vector`.
            k_weight: so for the keys.
        """

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """``x * factor`` in x's dtype; ``x [num_tokens, size]`` may be overwritten."""

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``x + residual``, both ``[num_tokens, size]``; ``residual`` may be overwritten."""

    def clamp(self, x: Tensor, limit: float) -> Tensor:
        """``x [num_tokens, num_heads, head_dim]`` within ``-limit .. limit``; NaN stays. May be overwritten."""

    def gelu(self, x: Tensor, *, is_tanh: bool) -> Tensor:
        """GELU without a gate (Hendrycks & Gimpel, 2016): the normal distribution's, or with ``is_tanh`` its
        tanh approximation. ``x [num_tokens, size]`` may be overwritten."""

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """``x [num_tokens, 2 * d]`` → ``silu(x[:, :d]) * x[:, d:]  [num_tokens, d]``."""

    def gelu_and_mul(self, x: Tensor) -> Tensor:
        """As :meth:`silu_and_mul` with tanh-approximated GELU."""

    def rotary(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rotate in halves (NeoX layout; Su et al., RoFormer, 2021). ``q`` and ``k`` may be overwritten.

        Args:
            q: ``[num_tokens, num_q_heads, head_dim]``.
            k: ``[num_tokens, num_kv_heads, head_dim]``.
            positions: ``[num_tokens]`` int64.
            cos_sin: ``[max_position, rotary_dim]`` float32, cosines then sines of rotary_dim / 2
                angles. Only the first ``rotary_dim`` of a head are rotated.
        """

    # --- KV cache and attention ----------------------------------------------------------------
    def allocate_kv_cache(self, spec: KVCacheSpec, device: torch.device) -> LayerKVCache:
        """Memory for one layer, zero-filled; on a CPU, pages are touched only when used."""

    def store_kv(
        self,
        k: Tensor,
        v: Tensor,
        cache: LayerKVCache,
        slot_mapping: Tensor,
        kv_scales: KVScales | None = None,
    ) -> None:
        """Write ``k, v [num_tokens, num_kv_heads, head_dim]`` to their slots; skip slot -1.

        With ``kv_scales``, what is written is divided by them. What does not fit into a float8 cache becomes
        the largest number that does; NaN stays NaN.

        What slots past a row's end hold must never reach its attention, not even as 0 * NaN: a set either
        clears a block when a token at offset 0 is written, or selects instead of multiplying.
        """

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
        """:meth:`rotary`, then :meth:`store_kv` of the turned keys and the values.

        Args:
            q_norm: ``[head_dim]``: each head is normed before it is turned, as by :meth:`qk_norm`.
            k_norm: so for the keys; both or none.
            eps: of these norms.

        Returns:
            The turned queries, ``[num_tokens, num_q_heads, head_dim]``; all three inputs may be overwritten.
        """

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
        """Causal grouped-query attention over paged KV (Kwon et al., 2023, section 4.3).

        Args:
            q: ``[num_tokens, num_q_heads, head_dim]``.
            scale: multiplies ``q · k``.
            window: a query sees itself and the ``window - 1`` tokens before it. Blocks that no query
                of a row sees may be another's by now, and hold anything: they are not read.
            soft_cap: scores become ``soft_cap * tanh(score / soft_cap)`` (Gemma 2).
            sinks: ``[num_q_heads]`` logits that join each head's softmax, with no value behind them
                (gpt-oss; Xiao et al., 2023, arXiv 2309.17453). Neither scaled nor capped.
            kv_scales: what the cache's numbers are multiplied by.

        Returns:
            ``[num_tokens, num_q_heads, head_dim]``, q's dtype.

        Raises:
            ValueError: this op set does not compute sinks, or not with scales.
        """

    def copy_blocks(self, caches: Sequence[LayerKVCache], src: Tensor, dst: Tensor) -> None:
        """Copy blocks ``src [n] int64`` to ``dst [n] int64`` in every layer."""

    def swap_blocks(
        self,
        src_caches: Sequence[LayerKVCache],
        dst_caches: Sequence[LayerKVCache],
        src: Tensor,
        dst: Tensor,
    ) -> None:
        """Copy blocks ``src`` of one memory to blocks ``dst`` of another, in every layer.

        One of the memories is the host's. Copies to and from a GPU are only enqueued, in order with
        whatever else its stream has to do.

        Args:
            src_caches: one per layer; none is in ``dst_caches``.
            dst_caches: one per layer, with blocks of the same shape and dtype.
            src: ``[n]`` int64 on the CPU.
            dst: ``[n]`` int64 on the CPU, no id twice.
        """

    def record_step(self, forward: Forward) -> Forward:
        """A forward pass that may be recorded once and replayed: its ops must depend on nothing but the
        arguments. The result may be overwritten by the next call. A set that does not record gives
        ``forward`` back.
        """

    # --- logits --------------------------------------------------------------------------------
    def likeliest(self, x: Tensor, packed: Any) -> Tensor:
        """What :meth:`sample` draws at temperature 0 from ``logits(x, packed)`` → ``[num_rows]`` int64.

        A set need not have the logits in memory for it. Not recorded.
        """

    def sample(
        self, logits: Tensor, params: SamplingTensors, summary: SamplingSummary | None = None
    ) -> Tensor:
        """Draw one token per row from ``logits [num_rows, vocab_size]`` float32 → ``[num_rows]`` int64.

        A pure function: one uniform from Philox4x32-10 (Salmon et al., SC 2011) keyed by
        (seed, position), then the inverse CDF in token-id order over the tokens that temperature,
        top-k, top-p and min-p leave. Temperature 0 takes the most likely token, the lowest id on a tie.
        A row with a NaN, +inf or nothing but -inf gives -1.

        Args:
            summary: what no row asks for need not be computed; ``None``: anything may be asked for.
        """
