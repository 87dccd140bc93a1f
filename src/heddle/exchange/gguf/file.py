"""A GGUF file's keys and tensors. Each count and length is checked against the file's size before it is used.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package `gguf` knows the sizes of ggml's
types; its own reader has no bounds, so it is not used.
"""

import contextlib
import hashlib
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from heddle.errors import CheckpointError
from heddle.storage import file_io

VERSIONS = (2, 3)  # the first one had lengths of 32 bits
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # struct's codes
STRING, ARRAY = 8, 9
MIN_STRING, MIN_KEY, MIN_TENSOR = 8, 8 + 4 + 1, 8 + 4 + 8 + 4 + 8  # bytes
MAX_VALUES = 2**23  # in all arrays together; the largest tokenizers have 2^21 merges
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


# A GGUF that heddle writes holds the SHA-256 of its own bytes, hashed with zeros in place of the digits.
HASH_KEY, NO_DIGITS = "heddle.sha256", "0" * 64
_HASH_FIELD = struct.pack("<Q", len(HASH_KEY)) + HASH_KEY.encode() + struct.pack("<IQ", STRING, len(NO_DIGITS))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file. kind: ggml's name of its type. shape: in torch's order. data: the stored bytes or numbers.

    Of quantized types, and of BF16, `data` are bytes, with the last dim of `shape` packed.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: npt.NDArray[Any]


@dataclass(frozen=True)
class Contents:
    """The contents of a file."""

    keys: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_contents(file: Path) -> Contents:
    """Read the keys, and map the tensors into memory. Raises CheckpointError for a damaged file or another format."""
    with file_io.open_regular_file(file, file_io.READ_FLAGS_FOLLOWING_LINKS) as (descriptor, size):
        if size < 24:
            raise CheckpointError(f"{file}: is not a GGUF: it has only {size} bytes; download it again")
        mapped = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
    return _Reader(mapped, file).contents()


def seal(file: Path) -> None:
    """Write the hash of a file into its key HASH_KEY, in place of NO_DIGITS."""
    with open(file, "r+b") as stream, mmap.mmap(stream.fileno(), 0) as mapped:
        start = mapped.find(_HASH_FIELD) + len(_HASH_FIELD)
        mapped[start : start + len(NO_DIGITS)] = hashlib.sha256(mapped).hexdigest().encode()
        mapped.flush()


def check_seal(file: Path) -> bool:
    """Whether a file holds its own hash. Raises CheckpointError if its bytes do not match it."""
    flags = file_io.READ_FLAGS_FOLLOWING_LINKS
    with file_io.open_regular_file(file, flags) as (descriptor, size), contextlib.ExitStack() as stack:
        if not size:
            return False
        mapped = stack.enter_context(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ))
        start = mapped.find(_HASH_FIELD) + len(_HASH_FIELD)
        if start < len(_HASH_FIELD):
            return False
        view = stack.enter_context(memoryview(mapped))
        digest = hashlib.sha256(stack.enter_context(view[:start]))
        digest.update(NO_DIGITS.encode())
        digest.update(stack.enter_context(view[start + len(NO_DIGITS) :]))
        if bytes(view[start : start + len(NO_DIGITS)]) != digest.hexdigest().encode():
            raise CheckpointError(f"{file}: was changed after heddle wrote it (by SHA-256); export it again")
    return True


class _Reader:
    """Reads forward. Raises CheckpointError for anything wrong in the file."""

    def __init__(self, mapped: mmap.mmap, file: Path) -> None:
        self.mapped, self.file = mapped, file
        self.position, self.values_left = 0, MAX_VALUES

    def contents(self) -> Contents:
        if self.mapped[:4] != file_io.GGUF_MAGIC:
            start = self.mapped[:40]
            remedy = "run `git lfs pull` for the file itself" if start.startswith(b"version https://git-lfs") else ""
            raise CheckpointError(f"{self.file}: is not a GGUF; {remedy or 'download it again'}")
        self.position = 4
        version = self._number("I", "its version")
        if version not in VERSIONS:
            big = version.to_bytes(4, "little") in {v.to_bytes(4, "big") for v in VERSIONS}
            what = "big-endian" if big else f"version {version}"
            raise CheckpointError(f"{self.file}: is a {what} GGUF; heddle reads little-endian versions 2 and 3")
        tensor_count = self._number("Q", "its count of tensors")
        key_count = self._number("Q", "its count of keys")
        self._check_room(
            key_count * MIN_KEY + tensor_count * MIN_TENSOR, f"{tensor_count} tensors and {key_count} keys"
        )
        keys: dict[str, Any] = {}
        for _ in range(key_count):
            name = self._string("the name of a key")
            if name in keys:
                raise self._damaged(f"key '{name}' appears twice")
            keys[name] = self._value(self._number("I", f"key '{name}'"), f"key '{name}'")
        return Contents(keys, self._tensors(tensor_count, keys))

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: is damaged: {what}; download it again")

    def _check_room(self, size: int, what: str) -> None:
        if size > len(self.mapped) - self.position:
            raise self._damaged(f"it ends before {what}")

    def _number(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        self._check_room(size, what)
        (number,) = struct.unpack_from("<" + code, self.mapped, self.position)
        self.position += size
        return number

    def _string(self, what: str) -> str:
        length = self._number("Q", what)
        self._check_room(length, what)
        text = self.mapped[self.position : self.position + length]
        self.position += length
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError:
            raise self._damaged(f"{what} is not UTF-8") from None

    def _value(self, kind: int, what: str) -> Any:
        if kind in SCALARS:
            return self._number(SCALARS[kind], what)
        if kind == STRING:
            return self._string(what)
        if kind != ARRAY:
            raise self._damaged(f"{what} is of the unknown type {kind}")
        inner, count = self._number("I", what), self._number("Q", what)
        if inner not in (*SCALARS, STRING):  # llama.cpp reads no nested arrays either
            raise self._damaged(f"{what} is an array of type {inner}")
        self._check_room(count * (MIN_STRING if inner == STRING else struct.calcsize(SCALARS[inner])), what)
        self.values_left -= count
        if self.values_left < 0:
            raise CheckpointError(f"{self.file}: {what}: the arrays of all keys hold more than {MAX_VALUES:,} values")
        if inner == STRING:
            return [self._string(what) for _ in range(count)]
        code = f"<{count}{SCALARS[inner]}"
        values = struct.unpack_from(code, self.mapped, self.position)
        self.position += struct.calcsize(code)
        return list(values)

    def _tensors(self, count: int, keys: dict[str, Any]) -> dict[str, StoredTensor]:
        entries: dict[str, tuple[str, tuple[int, ...], int]] = {}
        for _ in range(count):
            name = self._string("the name of a tensor")
            if name in entries:
                raise self._damaged(f"tensor '{name}' appears twice")
            what = f"tensor '{name}'"
            if (dims := self._number("I", what)) > MAX_DIMS:
                raise self._damaged(f"{what} has {dims} dims")
            shape = tuple(self._number("Q", what) for _ in range(dims))[::-1]
            entries[name] = (_type_name(self._number("I", what)), shape, self._number("Q", what))
        alignment = keys.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"key 'general.alignment' is {alignment!r}")
        start = self._aligned(self.position, alignment)
        tensors, expected = {}, 0
        for name, (kind, shape, offset) in entries.items():
            if offset != expected:
                raise self._damaged(f"tensor '{name}' does not begin where the one before it ends")
            row_bytes = _row_bytes(kind, shape)
            if row_bytes is None:
                raise CheckpointError(
                    f"{self.file}: tensor '{name}' of type {kind} and shape {list(shape)} is not supported"
                )
            size = math.prod(shape[:-1]) * row_bytes
            if start + offset + size > len(self.mapped):
                raise self._damaged(f"it ends before the numbers of tensor '{name}'")
            dtype = np.dtype(FLOATS.get(kind, np.uint8))
            data = np.frombuffer(self.mapped, dtype, size // dtype.itemsize, start + offset)
            packed = shape if kind in FLOATS else (*shape[:-1], row_bytes)
            tensors[name] = StoredTensor(name, kind, shape, data.reshape(packed))
            expected = self._aligned(offset + size, alignment)
        return tensors

    @staticmethod
    def _aligned(position: int, alignment: int) -> int:
        return -(-position // alignment) * alignment


def _type_name(number: int) -> str:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(number).name if number in set(GGMLQuantizationType) else str(number)


def _row_bytes(kind: str, shape: tuple[int, ...]) -> int | None:
    """Bytes of the last dim; None for an unknown type, or a dim that its blocks do not fill."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if kind not in GGMLQuantizationType.__members__ or not shape or 0 in shape:
        return None
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return None if shape[-1] % block else shape[-1] // block * size
