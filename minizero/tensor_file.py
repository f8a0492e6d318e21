"""How do N ranks write one safetensors file, each its own part, and read it on any other number of ranks?

    8 bytes: length of the head | head, JSON: dtype, shape and place of each tensor | the tensors, back to back

Where each element stands follows from the names, dtypes and shapes alone. So a rank puts what it holds of a unit to
its place in the file, and reads it from there. Nothing is gathered, and padding is left out:

    unit's vector   [ weight ............... | bias ...... | padding ]       rank 1 of 3 holds   [ ........... ]
    file            ... weight ..............., ... bias ......, ...         and writes                 ^^^^^^ ^^^^
                                                                             to weight's place and to bias's

The format is Hugging Face's; its own library reads these files, and so does everything that is built on it.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from .backend import Array, fill, to_host
from .flat import Unit

BLOCK = 1 << 20  # bytes that are read at once, and that have one checksum
CODES = {"float32": "F32", "float64": "F64", "bfloat16": "BF16"}  # dtypes, as safetensors calls them

Tensors = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]  # dtype and shape, by name
Vector = tuple[str, Unit, slice, Array]  # what stands before the names; a unit; a part of its vector; its elements


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or that is not what is needed. Raised on every rank alike."""


class TensorFile:
    """One safetensors file with exactly these tensors, in this order (but wider dtypes first, so that all are aligned).

    Attributes:
        head: all bytes before the first tensor. size, blocks: bytes, and blocks, of the whole file.
        start: the byte at which each tensor begins.
    """

    def __init__(self, path: Path, tensors: Tensors) -> None:
        if "__metadata__" in tensors:
            raise ValueError("a parameter cannot be called __metadata__: safetensors keeps that name for itself")
        self.path = path
        self.tensors = dict(sorted(tensors.items(), key=lambda item: -item[1][0].itemsize))
        table, starts, end = {}, {}, 0
        for name, (dtype, shape) in self.tensors.items():
            begin, end = end, end + dtype.itemsize * math.prod(shape)
            starts[name] = begin
            table[name] = {"dtype": CODES[dtype.name], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.head = len(text).to_bytes(8, "little") + text
        self.start = {name: len(self.head) + begin for name, begin in starts.items()}
        self.size = len(self.head) + end
        self.blocks = -(-self.size // BLOCK)

    def create(self) -> None:
        """Make the file: its head, and room for the tensors. For one rank."""
        with open(self.path, "wb") as file:
            file.write(self.head)
            file.truncate(self.size)

    def write(self, vectors: Iterable[Vector]) -> None:
        """Put elements to their places, and wait until they are on the disk."""
        with open(self.path, "r+b") as file:
            for at, block in self._blocks(vectors):
                file.seek(at)
                file.write(to_host(block).data)
            file.flush()
            os.fsync(file.fileno())

    def read(self, vectors: Iterable[Vector]) -> None:
        """Fill elements from their places; padding becomes zero."""
        vectors = list(vectors)
        for _, unit, part, array in vectors:
            array[max(unit.size - part.start, 0) :] = 0
        with open(self.path, "rb") as file:
            for at, block in self._blocks(vectors):
                file.seek(at)
                data = file.read(block.size)
                if len(data) != block.size:
                    raise CheckpointError(f"{self.path} became shorter while it was read")
                fill(block, np.frombuffer(data, np.uint8))

    def _blocks(self, vectors: Iterable[Vector]) -> Iterator[tuple[int, Array]]:
        """Byte by byte: where in the file a block belongs, and the block, as a view (n,) of uint8, n <= BLOCK."""
        for prefix, unit, part, array in vectors:
            for parameter, span in unit.spans.items():
                first, last = max(part.start, span.start), min(part.stop, span.stop)
                if first < last:
                    piece = array[first - part.start : last - part.start].view(np.uint8)
                    at = self.start[prefix + parameter.name] + (first - span.start) * array.dtype.itemsize
                    for begin in range(0, piece.size, BLOCK):
                        yield at + begin, piece[begin : begin + BLOCK]

    def checksums(self, rank: int, ranks: int) -> np.ndarray[Any, Any]:
        """The CRC-32 of each BLOCK in this rank's share of the file; a few zeros at the end where it is shorter."""
        each = -(-self.blocks // ranks)
        with open(self.path, "rb") as file:
            file.seek(rank * each * BLOCK)
            return np.array([zlib.crc32(file.read(BLOCK)) for _ in range(each)], np.uint32)

    def check(self) -> None:
        """Raise CheckpointError, with the names that differ, for a file that does not hold exactly these tensors."""
        theirs = read_table(self.path)
        mine = {name: (CODES[dtype.name], shape) for name, (dtype, shape) in self.tensors.items()}
        refuse_differences(self.path, mine, theirs)
        with open(self.path, "rb") as file:
            if file.read(len(self.head)) != self.head:
                raise CheckpointError(f"{self.path} has the right tensors, but was not written by engine.save: "
                                      "load_weights takes it")  # fmt: skip


def read_table(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What is in a safetensors file: dtype and shape by name. Raises CheckpointError where it is none, or torn."""
    try:
        with safe_open(path, "np") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
            return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from None


def refuse_differences(path: Path, mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Raise CheckpointError where two tables of tensors differ, naming them."""
    found = {
        "lacks": [name for name in mine if name not in theirs],
        "also has": [name for name in theirs if name not in mine],
        "differs in": [f"{name} ({' '.join(map(str, theirs[name]))}, here {' '.join(map(str, mine[name]))})"
                          for name in mine if name in theirs and mine[name] != theirs[name]],
    }  # fmt: skip
    if any(found.values()):
        parts = [
            f"{verb} {', '.join(names[:5])}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            for verb, names in found.items()
            if names
        ]
        raise CheckpointError(f"{path} does not fit: it {'; it '.join(parts)}")
