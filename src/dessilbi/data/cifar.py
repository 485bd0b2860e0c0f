"""CIFAR-10 and CIFAR-100, python and binary version, unpacked or still in the archive.

Binary version: records of one label byte (CIFAR-100: coarse, then fine label) and 3072 pixel bytes, red,
green and blue plane of 32 x 32 each, row by row. CIFAR-10 has ``data_batch_1.bin`` to ``data_batch_5.bin``
and ``test_batch.bin``, CIFAR-100 ``train.bin`` and ``test.bin``.

Python version: the same file names without ``.bin``; each a pickled dict with ``data`` (``uint8``, count x
3072, planes as above) and ``labels`` (CIFAR-100: ``fine_labels``), read by an unpickler that runs nothing
(``pickles.py``).

CIFAR-100 is read with its 100 fine labels.
"""

import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from . import pickles
from .catalog import Entry
from .images import ImageSet, check_labels
from .locate import locate, missing

_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class _Layout:
    splits: dict[str, tuple[str, ...]]
    label_bytes: int
    label_key: str
    folder: str
    """What the binary version unpacks to; its archive is named alike."""
    python_folder: str


_LAYOUTS = {
    "cifar10": _Layout(
        splits={"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)},
        label_bytes=1,
        label_key="labels",
        folder="cifar-10-batches-bin",
        python_folder="cifar-10-batches-py",
    ),
    "cifar100": _Layout(
        splits={"train": ("train",), "test": ("test",)},
        label_bytes=2,
        label_key="fine_labels",
        folder="cifar-100-binary",
        python_folder="cifar-100-python",
    ),
}


def read(entry: Entry, root: Path, split: str) -> ImageSet:
    """Whichever version is there; the binary one, which is quicker to read, if both are."""
    layout = _LAYOUTS[entry.name]
    stem = "-".join(layout.folder.split("-")[:2])
    for suffix, folder, kind in ((".bin", layout.folder, "binary"), ("", layout.python_folder, "python")):
        files = [f"{name}{suffix}" for name in layout.splits[split]]
        if found := locate(entry, root, [[file] for file in files], [folder]):
            parts = [(str(path), path.read_bytes()) for path in found]
        elif archive := locate(entry, root, [[f"{stem}-{kind}.tar.gz"]], []):
            parts = _members(archive[0], files)
        else:
            continue
        decoded = [_binary(*part, layout) if suffix else _python(*part, layout) for part in parts]
        for (where, _), (_, labels) in zip(parts, decoded, strict=True):
            check_labels(torch.from_numpy(labels), len(entry.classes), where)
        images = np.concatenate([pixels.reshape(-1, 3, 32, 32) for pixels, _ in decoded])
        labels = np.concatenate([labels for _, labels in decoded])
        return ImageSet(
            entry.name,
            torch.from_numpy(images),
            torch.from_numpy(labels),
            entry.classes,
            entry.mean,
            entry.std,
        )
    raise missing(entry, root, [file for file in entry.files if PurePosixPath(file).stem in layout.splits[split]])


def _members(archive: Path, files: list[str]) -> list[tuple[str, bytes]]:
    """The wanted members, read in one pass and never written to disk."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                stream = tar.extractfile(member) if name in files else None
                if stream is not None:
                    found[name] = stream.read()
                if len(found) == len(files):
                    break
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{archive}: broken archive ({error}): get it again") from error
    if absent := [file for file in files if file not in found]:
        raise ValueError(f"{archive}: {', '.join(absent)} not in the archive: get it again")
    return [(f"{archive}:{file}", found[file]) for file in files]


def _binary(where: str, raw: bytes, layout: _Layout) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    record = layout.label_bytes + _PIXELS
    if not raw or len(raw) % record:
        raise ValueError(f"{where}: {len(raw)} bytes is not a whole number of records of {record} bytes: get it again")
    rows = np.frombuffer(raw, np.uint8).reshape(-1, record)
    return rows[:, layout.label_bytes :], rows[:, layout.label_bytes - 1].astype(np.int64)


def _python(where: str, raw: bytes, layout: _Layout) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    content: Any = pickles.loads(raw, where)
    if isinstance(content, dict):
        content = {key.decode() if isinstance(key, bytes) else key: value for key, value in content.items()}
    if not isinstance(content, dict) or not {"data", layout.label_key} <= content.keys():
        raise ValueError(f"{where}: no pickled dict with 'data' and {layout.label_key!r}: not a batch of this data set")
    data, labels = content["data"], content[layout.label_key]
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != _PIXELS:
        raise ValueError(f"{where}: 'data' is not uint8 of shape (count, {_PIXELS}): get it again")
    if len(labels) != len(data) or not all(isinstance(label, (int, np.integer)) for label in labels):
        raise ValueError(f"{where}: {layout.label_key!r} is not a list of {len(data)} integers: get it again")
    return data, np.array(labels, np.int64)
