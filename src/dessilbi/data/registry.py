"""``read``: a data set, or a part of one, by its name."""

from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from pathlib import Path

from . import cifar, digits, idx, parts, svhn
from .catalog import Entry, base, describe
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

    A part of a set is read by its name too: ``cifar10[0-4]`` is the images of these classes, ``mnist[:5000]``
    the first of the training split (see ``parts.py``).
    """
    entry, whole = describe(name), describe(base(name))
    if split not in entry.counts:
        raise ValueError(f"split={split!r}: {name} has {' and '.join(map(repr, entry.counts))}")
    images = _READERS[whole.name](whole, Path(root), split)
    if name == whole.name:
        return images
    part = parts.parse(name, whole.per_class)
    images = replace(images, name=name)
    if part.classes is not None:
        images = images.only(part.classes)
    return images.first(part.limits[split]) if split in part.limits else images
