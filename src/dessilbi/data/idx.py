"""MNIST's idx files, plain or gzipped.

An idx file of ``uint8`` is: two zero bytes, the type code ``0x08``, the number of dimensions, each dimension
as a big-endian ``uint32``, then the values, the last dimension fastest. Images have three dimensions (count,
rows, columns), labels one. Nothing may follow.
"""

import gzip
import hashlib
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from .catalog import CATALOG, Entry
from .images import ImageSet, check_labels
from .locate import locate, missing

_INNER = {"mnist": ("raw", "MNIST/raw"), "fashion-mnist": ("raw", "FashionMNIST/raw")}


def read(entry: Entry, root: Path, split: str) -> ImageSet:
    """MNIST or a set in its form: ``train-images-idx3-ubyte`` and its three companions, each also with
    ``.gz``."""
    prefix = "train" if split == "train" else "t10k"
    files = (f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte")
    found = locate(entry, root, [_variants(file) for file in files], _INNER[entry.name])
    if not found:
        raise missing(entry, root, files)
    images, labels = read_idx(found[0], 3), read_idx(found[1], 1)
    if len(images) != len(labels):
        raise ValueError(f"{found[1]}: {len(labels)} labels for the {len(images)} images of {found[0].name}")
    _check_owner(entry, files[1], found[1], labels)
    numbers = torch.from_numpy(labels).long()
    check_labels(numbers, len(entry.classes), found[1])
    return ImageSet(entry.name, torch.from_numpy(images[:, None]), numbers, entry.classes, entry.mean, entry.std)


def read_idx(path: Path, ndim: int) -> NDArray[np.uint8]:
    """The array in one idx file, which must have ``ndim`` dimensions."""
    with path.open("rb") as plain:
        packed = plain.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path) if packed else path.open("rb") as stream:
            magic = stream.read(4)
            if magic != bytes((0, 0, 8, ndim)):
                raise ValueError(
                    f"{path}: not an idx file of {ndim}-dimensional uint8 (starts with "
                    f"{magic.hex() or 'nothing'}, expected {bytes((0, 0, 8, ndim)).hex()}): get it again"
                )
            header = stream.read(4 * ndim)
            shape = struct.unpack(f">{ndim}I", header) if len(header) == 4 * ndim else (0,)
            size = math.prod(shape)
            values = stream.read()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: broken gzip file ({error}): get it again") from error
    if len(values) != size or size == 0:
        raise ValueError(
            f"{path}: the header announces {' x '.join(map(str, shape))} values, the file "
            f"{'goes on after them' if len(values) > size else 'ends before'}: get it again"
        )
    return np.frombuffer(bytearray(values), np.uint8).reshape(shape)


def _variants(file: str) -> list[str]:
    dotted = file.replace("-idx", ".idx")
    return [file, f"{file}.gz", dotted, f"{dotted}.gz"]


def _check_owner(entry: Entry, file: str, path: Path, labels: NDArray[np.uint8]) -> None:
    """Refuse the labels of another set, known by their checksum: all sets in this form use the same names."""
    content = bytes((0, 0, 8, 1)) + struct.pack(">I", len(labels)) + labels.tobytes()
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    for other in CATALOG.values():
        for name, known in other.files.items():
            if md5 == known and (other.name, name) != (entry.name, file):
                raise ValueError(
                    f"{path}: this is {name} of {other.name}, not {file} of {entry.name}: give the root of {entry.name}"
                )
