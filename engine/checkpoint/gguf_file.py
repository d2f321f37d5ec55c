"""The GGUF container: metadata and tensors of one file, checked against its length.

Owns the binary format (version 2 and 3, little-endian). Must not know what the metadata or the
tensors mean.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32

BLOCK_LAYOUTS = {  # type -> (numbers in a block, bytes of a block)
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
}
"""The tensor types that octavo reads."""

QUANTIZED_TYPES = tuple(name for name, (numbers, _) in BLOCK_LAYOUTS.items() if numbers > 1)

_TYPE_NAMES = {
    **dict(enumerate(("F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0"))),
    **dict(enumerate(("Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K"), start=9)),
    **dict(enumerate(("IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S"), start=16)),
    **dict(enumerate(("IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64", "F64", "IQ1_M"), start=22)),
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
_SCALARS = {  # value type -> struct format, which numpy reads too
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies."""

    path: Path  # of the file
    name: str
    shape: tuple[int, ...]  # row-major: the last dimension is contiguous
    type: str  # a key of BLOCK_LAYOUTS
    offset: int  # bytes from the start of the file
    num_bytes: int


class GGUFFile:
    """The header of a GGUF file; tensor bytes are mapped only while somebody holds them.

    One that :mod:`.gguf_split` put together has tensors in several files.

    ``metadata`` maps keys to ``int``, ``float``, ``bool``, ``str``, a list of ``str``, or a numpy
    array of numbers. Bytes that are not UTF-8 are replaced by U+FFFD.
    """

    def __init__(self, path: Path, metadata: dict[str, Any], tensors: dict[str, GGUFTensor]):
        self.path = path
        self.metadata = metadata
        self.tensors = tensors

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Parse the header.

        Raises:
            CheckpointError: the file cannot be read, is not GGUF, is damaged, shorter than its
                header says, or holds a tensor of a type that octavo does not read.
        """
        path = Path(path)
        try:
            with path.open("rb") as file:
                if file.read(4) != MAGIC:
                    raise CheckpointError(
                        f"{path} is not a GGUF file: it does not start with GGUF."
                    )
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    return cls(path, *_Header(data, path).parse())
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error

    def read(self, name: str) -> NDArray[np.uint8]:
        """The bytes of one tensor, mapped privately from the file.

        Raises:
            CheckpointError: the file can no longer be mapped.
        """
        tensor = self.tensors[name]
        if tensor.num_bytes == 0:
            return np.empty(0, np.uint8)
        try:
            return np.memmap(
                tensor.path, np.uint8, mode="c", offset=tensor.offset, shape=(tensor.num_bytes,)
            )
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{tensor.path}: tensor {name} cannot be read: {error}."
            ) from error


class _Header:
    """One pass over the header. Every count is met by bytes before anything is allocated for it."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._size = len(data)
        self._path = path
        self._at = len(MAGIC)

    def parse(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        self._check_version(self._number("<I"))
        num_tensors, num_values = self._number("<Q"), self._number("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            if key in metadata:
                self._fail(f"the metadata key {key} occurs twice")
            metadata[key] = self._value(key, self._number("<I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        return metadata, self._place(infos, self._alignment(metadata))

    def _fail(self, what: str) -> None:
        raise CheckpointError(f"{self._path} is damaged: {what}.")

    def _need(self, num_bytes: int) -> None:
        if num_bytes > self._size - self._at:
            self._fail("the file ends inside its header")

    def _number(self, format: str) -> Any:
        self._need(struct.calcsize(format))
        (value,) = struct.unpack_from(format, self._data, self._at)
        self._at += struct.calcsize(format)
        return value

    def _string(self) -> str:
        length = self._number("<Q")
        self._need(length)
        start, self._at = self._at, self._at + length
        return self._data[start : self._at].decode("utf-8", "replace")

    def _strings(self, count: int) -> list[str]:
        """``_string`` in a tight loop: a vocabulary has a hundred thousand of them."""
        self._need(8 * count)
        data, at, size = self._data, self._at, self._size
        unpack = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            if at > size - 8:
                self._fail("the file ends inside its header")
            start = at + 8
            at = start + unpack(data, at)[0]
            strings.append(data[start:at].decode("utf-8", "replace"))
        if at > size:
            self._fail("the file ends inside its header")
        self._at = at
        return strings

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            self._fail(f"the metadata key {key} has the unknown type {kind}")
        return self._number(_SCALARS[kind])

    def _array(self, key: str) -> Any:
        kind, count = self._number("<I"), self._number("<Q")
        if kind == _STRING:
            return self._strings(count)
        if kind not in _SCALARS:
            self._fail(f"the metadata key {key} is an array of the unreadable type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        self._need(count * dtype.itemsize)
        start, self._at = self._at, self._at + count * dtype.itemsize
        return np.frombuffer(self._data[start : self._at], dtype)

    def _check_version(self, version: int) -> None:
        if version & 0xFFFF == 0 and version:
            raise CheckpointError(
                f"{self._path} is a big-endian GGUF file; octavo reads little-endian ones."
            )
        if version not in VERSIONS:
            raise CheckpointError(
                f"{self._path} has GGUF version {version}; octavo reads versions 2 and 3."
            )

    def _alignment(self, metadata: dict[str, Any]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if isinstance(value, int) and value > 0 and value % 8 == 0:
            return value
        raise CheckpointError(
            f"{self._path} is damaged: general.alignment is {value!r}, not a multiple of 8."
        )

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._string(), self._number("<I")
        if num_dims > MAX_DIMS:
            self._fail(f"tensor {name} has {num_dims} dimensions, more than {MAX_DIMS}")
        dims = [self._number("<Q") for _ in range(num_dims)]
        return name, tuple(reversed(dims)), self._number("<I"), self._number("<Q")

    def _place(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], alignment: int
    ) -> dict[str, GGUFTensor]:
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_id, offset in infos:
            if name in tensors:
                self._fail(f"tensor {name} occurs twice")
            type_name, num_bytes = self._num_bytes(name, shape, type_id)
            if start + offset + num_bytes > self._size:
                raise CheckpointError(
                    f"{self._path} is too short: tensor {name} ends at byte "
                    f"{start + offset + num_bytes}, the file at {self._size}."
                )
            tensors[name] = GGUFTensor(
                self._path, name, shape, type_name, start + offset, num_bytes
            )
        return tensors

    def _num_bytes(self, name: str, shape: tuple[int, ...], type_id: int) -> tuple[str, int]:
        type_name = _TYPE_NAMES.get(type_id, f"number {type_id}")
        if type_name not in BLOCK_LAYOUTS:
            raise CheckpointError(
                f"{self._path}: tensor {name} has type {type_name}; octavo reads "
                f"{', '.join(BLOCK_LAYOUTS)}."
            )
        numbers, block_bytes = BLOCK_LAYOUTS[type_name]
        row = shape[-1] if shape else 1
        if row % numbers:
            self._fail(f"the rows of tensor {name} are no multiple of {numbers} numbers")
        return type_name, math.prod(shape) // numbers * block_bytes
