"""``read``: a data set by its name."""

from collections.abc import Callable
from os import PathLike
from pathlib import Path

from . import cifar, digits, idx, svhn
from .catalog import Entry, describe
from .images import ImageSet

_READERS: dict[str, Callable[[Entry, Path, str], ImageSet]] = {
    "mnist": idx.read,
    "fashion-mnist": idx.read,
    "cifar10": cifar.read,
    "cifar100": cifar.read,
    "svhn": svhn.read,
    "digits": digits.read,
}


def read(name: str, root: str | PathLike[str] = ".", split: str = "train") -> ImageSet:
    """A split of the data set ``name`` (one of :func:`~dessilbi.data.names`) from the files under ``root``.

    ``root`` is the folder given to :func:`~dessilbi.data.get` (the files are then in ``root/NAME``), or the
    folder that holds the files; the standard sub-folders (``cifar-10-batches-py``, ``MNIST/raw``, ...) are
    looked into as well, and CIFAR's archives need no unpacking. ``digits`` needs no files.
    """
    entry = describe(name)
    if split not in entry.counts:
        raise ValueError(f"split={split!r}: {name} has {' and '.join(map(repr, entry.counts))}")
    return _READERS[name](entry, Path(root), split)
