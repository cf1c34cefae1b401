"""Metadata and tensor table of a GGUF model; the tensors stay in the mapped files.

The `gguf` package is used for its type tables only: its reader makes an array of every string of
the vocabulary, which takes seconds, and trusts the sizes in the file."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
)

from penstock.engine.models.checkpoint import GGUF_MAGIC, CheckpointError, part_names

_VERSIONS = (2, 3)
"""Supported versions of the format."""
_MAX_DIMENSIONS = 4
"""Limit of the format (ggml's GGML_MAX_DIMS)."""
_FORMATS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Place of a tensor.

    kind: ggml's type name; shape: rows first; mapped: the file; start: offset in it"""

    name: str
    kind: str
    shape: tuple[int, ...]
    mapped: mmap.mmap
    start: int
    num_bytes: int


def open_gguf(path: Path) -> GgufFile:
    """Open a model by its file, or by any part of a split one.

    The metadata are the first part's, the tensors those of all. Raises CheckpointError."""
    names = part_names(path)
    missing = next((name for name in names if not name.exists()), None)
    if missing is not None and path.exists():
        raise CheckpointError(
            f"{path}: is one of {len(names)} parts of a model; {missing.name} is missing beside it"
        )
    first, *others = [GgufFile(name) for name in names]
    for number, part in enumerate((first, *others)):
        place = (part.metadata.get("split.no", 0), part.metadata.get("split.count") or 1)
        if place != (number, len(names)):
            raise part.error(
                f"split.no is {place[0]!r} and split.count {place[1]!r}; its name asks for "
                f"{number} and {len(names)} (parts are named MODEL-00001-of-00003.gguf)"
            )
    for part in others:
        if twice := first.tensors.keys() & part.tensors.keys():
            raise part.error(f"tensor {min(twice)} is also in another part")
        first.tensors |= part.tensors
    expected = first.metadata.get("split.tensors.count", len(first.tensors))
    if expected != len(first.tensors):
        raise first.error(
            f"split.tensors.count is {expected!r}; all parts have {len(first.tensors)}"
        )
    return first


class GgufFile:
    """A mapped file. metadata: values by key; `strings` reads arrays of strings.

    Raises CheckpointError for a file that is unreadable, truncated or not GGUF."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # A private copy of written pages, though none are written: tensors of PyTorch
                # cannot be read-only.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise CheckpointError(f"{path}: is empty; a GGUF file is expected") from error
        self.metadata: dict[str, Any] = {}
        self._strings: dict[str, tuple[int, int]] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        cursor = _Cursor(self._map, path)
        num_tensors, num_keys = cursor.begin()
        for _ in range(num_keys):
            key = self._read_key(cursor)
            start = cursor.at
            self._read_value(cursor, key)
            self._spans[key] = (start, cursor.at)
        self.tensors = self._read_table(cursor, num_tensors)

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self._spans if key.startswith(prefix)]

    def raw(self, key: str) -> bytes:
        """Return a metadata value with its type, as raw bytes."""
        start, end = self._spans[key]
        return self._map[start:end]

    def strings(self, key: str) -> list[str]:
        """Return an array of strings; empty where there is none."""
        start, count = self._strings.get(key, (0, 0))
        found = []
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(self._map, start)
            found.append(self._map[start + 8 : start + 8 + length].decode(errors="replace"))
            start += 8 + length
        return found

    def data(self, entry: TensorEntry) -> npt.NDArray[np.uint8]:
        """Return a tensor's bytes as stored: [rows, bytes of a row], mapped."""
        raw = np.frombuffer(entry.mapped, np.uint8, entry.num_bytes, entry.start)
        return raw.reshape(math.prod(entry.shape[:-1]), -1)

    def drop_pages(self, entry: TensorEntry | None = None) -> None:
        """Release the memory of pages that were read, of one tensor or of all.

        Reading them again maps them anew."""
        if hasattr(mmap, "MADV_DONTNEED"):
            if entry is None:
                for mapped in {self._map, *(tensor.mapped for tensor in self.tensors.values())}:
                    mapped.madvise(mmap.MADV_DONTNEED)
                return
            start = entry.start // mmap.PAGESIZE * mmap.PAGESIZE
            size = entry.start + entry.num_bytes - start
            entry.mapped.madvise(mmap.MADV_DONTNEED, start, size)

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def _read_key(self, cursor: _Cursor) -> str:
        cursor.what = "metadata"
        key = cursor.string()
        cursor.what = f"metadata key {key}"
        if key in self._spans:
            raise self.error(f"metadata key {key} is there twice")
        return key

    def _read_value(self, cursor: _Cursor, key: str) -> None:
        kind = cursor.value_type()
        if kind == GGUFValueType.STRING:
            self.metadata[key] = cursor.string()
        elif kind != GGUFValueType.ARRAY:
            (self.metadata[key],) = cursor.numbers(_FORMATS[kind], 1)
        else:
            element, count = cursor.value_type(), cursor.length()
            if element == GGUFValueType.STRING:
                self._strings[key] = (cursor.at, count)
                cursor.skip_strings(count)
            elif element == GGUFValueType.ARRAY:
                raise self.error(f"metadata key {key} is an array of arrays, which is not read")
            else:
                self.metadata[key] = cursor.numbers(_FORMATS[element], count)

    def _read_table(self, cursor: _Cursor, count: int) -> dict[str, TensorEntry]:
        found: list[TensorEntry] = []
        for _ in range(count):
            cursor.what = "the table of tensors"
            name = cursor.string()
            cursor.what = f"tensor {name}"
            (dimensions,) = cursor.numbers("I", 1)
            if not 1 <= dimensions <= _MAX_DIMENSIONS:
                raise self.error(
                    f"tensor {name} has {dimensions} dimensions; allowed: 1 to {_MAX_DIMENSIONS}"
                )
            shape = cursor.numbers("Q", dimensions)[::-1]
            (kind,) = cursor.numbers("I", 1)
            (start,) = cursor.numbers("Q", 1)
            found.append(self._entry(name, kind, shape, start))
        alignment = self.metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.error(f"general.alignment is {alignment!r}; must be a power of two")
        begin = -(-cursor.at // alignment) * alignment
        return {entry.name: self._placed(entry, begin) for entry in found}

    def _entry(self, name: str, kind: int, shape: tuple[int, ...], start: int) -> TensorEntry:
        try:
            known = GGMLQuantizationType(kind)
            block, block_bytes = GGML_QUANT_SIZES[known]
        except (ValueError, KeyError):
            raise self.error(f"tensor {name} is of the unknown ggml type {kind}") from None
        if shape[-1] % block or 0 in shape:
            raise self.error(
                f"tensor {name} has shape {shape}; rows of {known.name} are whole blocks of {block}"
            )
        num_bytes = math.prod(shape) // block * block_bytes
        return TensorEntry(name, known.name, shape, self._map, start, num_bytes)

    def _placed(self, entry: TensorEntry, begin: int) -> TensorEntry:
        """Return `entry` with its place in the file, whose tensors begin at `begin`."""
        start = begin + entry.start
        if start + entry.num_bytes > len(self._map):
            raise self.error(
                f"is cut off: tensor {entry.name} ends at byte {start + entry.num_bytes} of "
                f"{len(self._map)}"
            )
        return replace(entry, start=start)


class _Cursor:
    """Reader at position `at`. what: name of the part being read, for errors."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.at = 0
        self.what = "the header"
        self._data = data
        self._path = path

    def begin(self) -> tuple[int, int]:
        """Read the header; return the counts of tensors and of metadata keys."""
        if self._data[:4] != GGUF_MAGIC:
            raise CheckpointError(f"{self._path}: is not a GGUF file: it does not begin with GGUF")
        self.at = 4
        (version,) = self.numbers("I", 1)
        if version not in _VERSIONS:
            allowed = " or ".join(map(str, _VERSIONS))
            raise CheckpointError(
                f"{self._path}: is GGUF version {version}; allowed: {allowed}, little-endian"
            )
        return self.length(), self.length()

    def numbers(self, letter: str, count: int) -> tuple[Any, ...]:
        size = count * struct.calcsize(f"<{letter}")
        self._require(size)
        values = struct.unpack_from(f"<{count}{letter}", self._data, self.at)
        self.at += size
        return values

    def length(self) -> int:
        (length,) = self.numbers("Q", 1)
        return int(length)

    def value_type(self) -> GGUFValueType:
        (number,) = self.numbers("I", 1)
        try:
            return GGUFValueType(number)
        except ValueError:
            raise CheckpointError(
                f"{self._path}: {self.what} is of the unknown type {number}"
            ) from None

    def string(self) -> str:
        length = self.length()
        self._require(length)
        text = self._data[self.at : self.at + length]
        self.at += length
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path}: {self.what} is not UTF-8") from error

    def skip_strings(self, count: int) -> None:
        data, at, end = self._data, self.at, len(self._data)
        self._require(8 * count)
        for _ in range(count):
            if at + 8 > end:
                break
            at += 8 + _LENGTH.unpack_from(data, at)[0]
        self._require(at - self.at)
        self.at = at

    def _require(self, size: int) -> None:
        if self.at + size > len(self._data):
            raise CheckpointError(
                f"{self._path}: is cut off in {self.what}, at byte {len(self._data)}"
            )
