"""The native op set for CPUs: thin calls into the C++ of ``cpu_*.cpp``.

Activations are float32 whatever the weights are; keys and values have the model's type. A row's results are
bit-equal in any company. Must not decide anything about numbers: what an op computes is said in ``ops.py``
and in the sources.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cpu_attention import AttentionOps
from .cpu_calls import address_of
from .cpu_mixture import MixtureOps
from .cpu_structs import SampleArgs
from .ops import SamplingSummary, SamplingTensors


class CpuOps(MixtureOps, AttentionOps):
    """Implements :class:`~.ops.Ops`; see there for every contract.

    Its bases are its parts, so that an op which is not recorded costs no call of a part.

    Args:
        library: from :func:`~.cpu_build.load_library`.
        rounds_activations: products with GGUF's blocks always take activations of 8 bits, in groups of 32.
    """

    def sample(
        self, logits: Tensor, params: SamplingTensors, summary: SamplingSummary | None = None
    ) -> Tensor:
        """One token a row of ``logits [num_rows, vocab_size]`` float32 → ``[num_rows]`` int64. No part of a recorded step.

        Raises:
            ValueError: the logits are not float32, or a row of them is not contiguous.
            MemoryError: there is none for a row's probabilities.
        """
        out = torch.empty(len(logits), dtype=torch.int64)
        self._cells.set(0, len(logits))
        self._do(
            SampleArgs(
                num_rows=self._cells.num_rows,
                logits=address_of(logits),
                logits_stride=logits.stride(0),
                vocab_size=logits.shape[1],
                temperature=params.temperature.data_ptr(),
                top_k=params.top_k.data_ptr(),
                top_p=params.top_p.data_ptr(),
                min_p=params.min_p.data_ptr(),
                seed=params.seed.data_ptr(),
                position=params.position.data_ptr(),
                out=out.data_ptr(),
            )
        )
        return out
