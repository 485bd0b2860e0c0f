"""Data sets: obtained once, checked, read into memory as ``uint8``, turned into batches on the device.

    get("cifar10", "data")                        # files with the published checksums under data/cifar10
    train = read("cifar10", "data", "train")      # an ImageSet
    batches = Batches(train, 128, device="cuda", shuffle=True, crop=4, flip=True, seed=0)
    for epoch in range(100):
        batches.set_epoch(epoch)
        for images, labels in batches: ...

Parts of a set have names too: ``read("cifar10[0-4]", "data")`` is half of its classes, ``mnist[:5000]`` its first
images (``parts.py``).

ImageNet does not fit in memory: ``Stream(ImageFolder("imagenet", "train"), 256)`` makes them from files.

A new data set in a known form is an entry in ``catalog.py``; a new form is one more reader and its line in
``registry.py``. Nothing here imports torch before a name that needs it is used: the command line lists data
sets at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .catalog import base, describe, names

if TYPE_CHECKING:
    from .batches import Batches, Draw
    from .folder import ImageFolder
    from .images import ImageSet
    from .pixels import Normalise, augment
    from .registry import read
    from .sources import Obtained, get
    from .stream import Stream

__all__ = [
    "Batches",
    "Draw",
    "ImageFolder",
    "ImageSet",
    "Normalise",
    "Obtained",
    "Stream",
    "augment",
    "base",
    "describe",
    "get",
    "names",
    "read",
]

_HOMES = {
    "Batches": "batches",
    "Draw": "batches",
    "ImageFolder": "folder",
    "ImageSet": "images",
    "Normalise": "pixels",
    "Obtained": "sources",
    "Stream": "stream",
    "augment": "pixels",
    "get": "sources",
    "read": "registry",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
