"""What a checkpoint's files hold beside what its model needs, compared by their headers alone.

A tensor of three dimensions in a GGUF file, the experts' matrices in one, counts as so many matrices: that
of expert 3 in ``blk.0.ffn_up_exps.weight`` is ``blk.0.ffn_up_exps[3].weight``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..errors import CheckpointError
from .checkpoint import Checkpoint
from .families import family_of
from .fused_experts import split_experts
from .gguf_config import ROPE_TENSORS
from .gguf_file import GGUFFile
from .safetensors_files import tensor_headers
from .spec import MAX_EXPERTS, ModelSpec

Shapes = Mapping[str, tuple[int, ...]]

FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
MAX_NAMED = 5  # tensors listed in one message


def tensor_shapes(checkpoint: Checkpoint) -> Shapes:
    """Of every tensor in the files, by the files' own names; of each expert's matrices, if they are fused.

    Raises:
        CheckpointError: a file cannot be read, or a tensor that is not ignored does not hold
            floating-point numbers.
    """
    if checkpoint.gguf is not None:
        return _gguf_shapes(checkpoint.gguf)
    spec, files = checkpoint.spec, checkpoint.tensor_files
    is_own = spec.implementation == "octavo"
    shapes: dict[str, tuple[int, ...]] = {}
    for path in dict.fromkeys(files.values()):
        for name, (shape, dtype) in tensor_headers(path).items():
            if files.get(name) != path:
                continue
            if is_own and dtype not in FLOAT_TYPES and not _is_ignored(spec, name):
                raise CheckpointError(
                    f"{path}: tensor {name} has type {dtype}; octavo reads {', '.join(FLOAT_TYPES)}."
                )
            shapes[name] = shape
    if not is_own:
        return shapes
    return split_experts(shapes, family_of(spec.architecture).folder_name, str(checkpoint.path))


def _is_ignored(spec: ModelSpec, name: str) -> bool:
    return family_of(spec.architecture).is_ignored(spec, name)


def _gguf_shapes(file: GGUFFile) -> Shapes:
    for name in file.tensors:
        if "[" in name:  # a name that stands for one matrix of several
            raise CheckpointError(f"{file.path} is damaged: a tensor is called {name!r}.")
    return {
        part: shape
        for name, tensor in file.tensors.items()
        if name not in ROPE_TENSORS
        for part, shape in matrices(name, tensor.shape)
    }


def matrices(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A tensor, or the matrices that it consists of, with their shapes."""
    if len(shape) != 3 or shape[0] > MAX_EXPERTS:
        yield name, shape
        return
    module, dot, kind = name.rpartition(".")
    yield from ((f"{module}[{index}]{dot}{kind}", shape[1:]) for index in range(shape[0]))


def check_tensors(checkpoint: Checkpoint, shapes: Shapes) -> None:
    """Compare what the files hold with what the model needs, before anything is read.

    Args:
        shapes: by the files' own names, as :func:`tensor_shapes` gives them.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape; the message names them.
    """
    path, spec = checkpoint.path, checkpoint.spec
    family = family_of(spec.architecture)
    is_gguf = checkpoint.gguf is not None
    own = {
        family.gguf_name(spec, name) if is_gguf else family.folder_name(name): shape
        for name, shape in family.tensor_shapes(spec).items()
    }
    missing = [name for name in own if name not in shapes]
    if missing:
        raise CheckpointError(f"{path} lacks {listed(missing)}.")
    unexpected = [name for name in shapes if name not in own and not family.is_ignored(spec, name)]
    if unexpected:
        raise CheckpointError(
            f"{path} holds {listed(sorted(unexpected))}, which the model has no place for."
        )
    for name, shape in own.items():
        if shapes[name] != shape:
            raise CheckpointError(
                f"{path}: tensor {name} has shape {list(shapes[name])}, "
                f"the model needs {list(shape)}."
            )


def listed(names: list[str]) -> str:
    """Tensors in words, the first few by name."""
    shown = ", ".join(name if name.isprintable() else repr(name) for name in names[:MAX_NAMED])
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"the tensor{'s' if len(names) > 1 else ''} {shown}{more}"
