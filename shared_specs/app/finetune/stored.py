"""Arrays that stay in their file until they are asked for, so that a process reads no more of a model than it keeps."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Any, Protocol

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy, which safetensors needs to read it)
import numpy as np
from safetensors import safe_open

Index = EllipsisType | tuple[slice, ...]


class Array(Protocol):
    """The weights that a trainer is given: a NumPy array, or one that lies in a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, index: Any, /) -> Any: ...


@dataclass(frozen=True)
class StoredArray:
    """An array in a file.

    Attributes:
        shape: of the whole.
        read: returns a new array of what the index selects.
    """

    shape: tuple[int, ...]
    read: Callable[[Index], np.ndarray]

    def __getitem__(self, index: Index) -> np.ndarray:
        """Return the part that a slice of every axis selects, or the whole (`...`), read anew at every call and in one
        piece.
        """
        return np.asarray(self.read(index), order="C")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[...].astype(dtype or self[...].dtype, copy=False)


def stored_arrays(file: Path, dtype: Any = None) -> dict[str, StoredArray]:
    """Return the arrays of a safetensors file by name; only its header is read now.

    Args:
        dtype: of what is read from them; None leaves each as it is stored.

    Raises:
        OSError, SafetensorError: it is not there, or it is no whole safetensors file.
    """
    with safe_open(file, framework="np") as opened:
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}
    return {name: StoredArray(shape, partial(_read, file, name, dtype)) for name, shape in shapes.items()}


def stored_kinds(file: Path) -> dict[str, str]:
    """Return how each array of a safetensors file is stored, in that format's words, such as BF16."""
    with safe_open(file, framework="np") as opened:
        return {name: opened.get_slice(name).get_dtype() for name in opened.keys()}


def _read(file: Path, name: str, dtype: Any, index: Index) -> np.ndarray:
    # Opened for each part: the pages that an open file was read through count as memory of the process.
    with safe_open(file, framework="np") as opened:
        found = opened.get_slice(name)[index]
    return found if dtype is None else found.astype(dtype, copy=False)


def write_arrays(
    file: Path, shapes: Mapping[str, tuple[int, ...]], arrays: Iterable[tuple[str, Array]], **metadata: str
) -> None:
    """Write a safetensors file of arrays that come one at a time, in any order: float32, and int64 for a scalar.

    The library's own writer takes them all at once, and makes a file that nobody but its owner may read.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + (4 * int(np.prod(shape)) if shape else 8)
        header[name] = {"dtype": "F32" if shape else "I64", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    left = dict(shapes)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for name, array in arrays:
            if left.pop(name, None) != array.shape:
                raise ValueError(f"{name} of shape {array.shape} is no array of this file")
            opened.seek(8 + len(text) + header[name]["data_offsets"][0])
            opened.write(np.asarray(array[...], dtype="<f4" if array.shape else "<i8", order="C").data)
    if left:
        raise ValueError(f"no {min(left)} came")
