"""What a family of models declares, with Llama's answers: a family's file overrides what differs.

Read by the front end too, for configurations: torch comes in with :meth:`Family.build` only. The docstring
of a family's class is its line in ``docs/models.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ..checkpoint.fields import Fields
from ..checkpoint.spec import ModelSpec
from .names import GGUF_NAMES, GGUF_NORMS, LAYER_NAME, rename
from .shapes import HEAD, decoder_shapes

if TYPE_CHECKING:
    from torch import Tensor

    from ...kernels.ops import Ops
    from .model import Model
    from .weights import Weights


class Family:
    """A family of models. Tensors go by the names that transformers' Llama gives them."""

    architectures: ClassVar[tuple[str, ...]]
    """transformers' class names."""

    models: ClassVar[str]
    """The models that people know it by, for the documentation."""

    defaults: ClassVar[Mapping[str, Any]] = {}
    """What transformers' configuration class takes for keys that ``config.json`` lacks."""

    names: ClassVar[Mapping[str, str]] = {}
    """Tensors that a folder calls otherwise: octavo's module name (of a layer: without
    ``model.layers.N.``) to the folder's, with ``{layer}`` for N."""

    gguf_architecture: ClassVar[str | None] = None
    """``general.architecture`` of GGUF files; ``None``: octavo reads none of this family."""

    gguf_names: ClassVar[Mapping[str, str]] = {}
    """As ``names``, for GGUF files, beyond those of :mod:`.names`."""

    has_gguf_pairs: ClassVar[bool] = False
    """GGUF files hold the rows of q and k so that neighbours rotate together, as llama.cpp's Llama does."""

    has_partial_rotary: ClassVar[bool] = False
    """``partial_rotary_factor`` counts; in other families one that is not 1 is refused."""

    has_rope_by_kind: ClassVar[bool] = False
    """``rope_parameters`` may hold an object for each kind of layer; in other families that is refused."""

    # --- configuration -------------------------------------------------------------------------
    def read_config(self, config: Fields, spec: ModelSpec) -> ModelSpec:
        """``spec`` has what all families read alike from ``config.json``; add the rest.

        Raises:
            CheckpointError: a value is missing, senseless, or asks for what is not computed.
        """
        return self.complete(spec)

    def read_gguf(self, metadata: Fields, spec: ModelSpec) -> ModelSpec:
        """As :meth:`read_config`, from a GGUF file's keys without the architecture's prefix."""
        return self.complete(spec)

    def accepts_gguf(self, metadata: Fields) -> bool:
        """Whether a file of ``gguf_architecture`` is this family's: several may share the name."""
        return not metadata.size_or_none("expert_count")

    def complete(self, spec: ModelSpec) -> ModelSpec:
        """What holds for every model of the family, whatever file describes it."""
        return spec

    # --- tensors -------------------------------------------------------------------------------
    def tensor_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Every tensor that the model needs."""
        return decoder_shapes(spec)

    def is_ignored(self, spec: ModelSpec, name: str) -> bool:
        """Whether a file's tensor may stay unread: frequencies that old ones saved, and a tied head."""
        tied = (self.folder_name(HEAD), self.gguf_name(spec, HEAD))
        return name.endswith("rotary_emb.inv_freq") or (spec.tie_word_embeddings and name in tied)

    def folder_name(self, name: str) -> str:
        """A Hugging Face folder's name for octavo's."""
        return rename(name, self.names, "model.layers.{layer}.")

    def gguf_name(self, spec: ModelSpec, name: str) -> str:
        """A GGUF file's name for octavo's."""
        names = {**GGUF_NAMES, **GGUF_NORMS[spec.norms], **self.gguf_names}
        return rename(name, names, "blk.{layer}.")

    def arrange(self, spec: ModelSpec, name: str, rows: Tensor) -> Tensor:
        """A folder's tensor ``[rows, ...]`` in the order of rows that the model wants."""
        return rows

    def arrange_gguf(self, spec: ModelSpec, name: str, rows: Tensor) -> Tensor:
        """As :meth:`arrange` for a GGUF file's tensor, numbers or rows of bytes."""
        if not self.has_gguf_pairs or (match := LAYER_NAME.fullmatch(name)) is None:
            return rows
        num_heads = {"q_proj": spec.num_q_heads, "k_proj": spec.num_kv_heads}
        heads = num_heads.get(match["module"].split(".")[-1])
        return rows if heads is None else halves_from_pairs(rows, heads)

    # --- computation ---------------------------------------------------------------------------
    def build(self, spec: ModelSpec, weights: Weights, ops: Ops) -> Model:
        """The model with its weights."""
        from .decoder import Decoder

        return Decoder(spec, weights, ops)


def halves_from_pairs(rows: Tensor, num_heads: int) -> Tensor:
    """Put the rows of q or k, ``[num_heads * head_dim, ...]``, from neighbours into halves."""
    pairs = rows.view(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
