"""``ImageFolder``: images in one folder a class, such as ImageNet, decoded when they are asked for.

    root/train/n01440764/n01440764_10026.JPEG       root/SPLIT/CLASS/FILE, sub-folders of CLASS included
    root/val/n01440764/ILSVRC2012_val_00000293.JPEG

Classes are numbered in the order of their names. ImageNet's validation archive has all images in one folder:
sort them into folders by class first. Decoding needs Pillow.
"""

import os
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .order import generator
from .pixels import random_resized_crop, resized_centre

_SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff", ".gif")


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """One split of an image folder as ``uint8`` squares, for :class:`~dessilbi.data.Stream` or any
    ``DataLoader``.

    Item i is (image, label): (3, size, size) ``uint8``, left to be normalised with ``mean`` and ``std`` on
    the device, a batch at a time. With ``augment`` it is a random resized crop, mirrored half of the time,
    decided by (seed, epoch, i) alone, whichever worker process does it; otherwise the shorter side is resized
    to size·256/224 and the centre taken.

    Args:
        root: the folder of the splits.
        split: ``"train"``, ``"val"``, or whatever folder of ``root``.
        size: side of the images delivered.
        augment: random crops and flips; by default for ``"train"`` only.
        seed: of the crops and flips (and of the order, in a :class:`~dessilbi.data.Stream`).
    """

    mean = (0.485, 0.456, 0.406)
    std = (0.229, 0.224, 0.225)

    def __init__(
        self,
        root: str | PathLike[str],
        split: str = "train",
        *,
        size: int = 224,
        augment: bool | None = None,
        seed: int = 0,
    ) -> None:
        if size < 1:
            raise ValueError(f"size={size}: must be at least 1")
        self.folder = Path(root) / split
        self.classes = _classes(self.folder)
        if split != "train" and (Path(root) / "train").is_dir():
            _check_same(self.folder, self.classes, _classes(Path(root) / "train"))
        self.size = size
        self.augment = split == "train" if augment is None else augment
        self.seed = seed
        files = [_files(self.folder / name) for name in self.classes]
        if empty := [name for name, found in zip(self.classes, files, strict=True) if not found]:
            raise ValueError(f"{self.folder}: no images for the class {_few(empty)}: add them or remove the folder")
        # Arrays, not lists: workers then share the memory instead of copying it by counting references.
        self._files = np.array([file for found in files for file in found], dtype=np.bytes_)
        self.labels = torch.arange(len(files)).repeat_interleave(torch.tensor([len(found) for found in files]))
        # In shared memory, so that workers kept from one epoch to the next see set_epoch.
        self._epoch = torch.zeros((), dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return 3, self.size, self.size

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose crops and flips are drawn, in running worker processes as well."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = int(self.labels[index])
        image = _decode(self.folder / self.classes[label] / os.fsdecode(self._files[index]))
        if not self.augment:
            return resized_centre(image, self.size), label
        source = generator(self.seed, int(self._epoch), index)
        image = random_resized_crop(image, self.size, source)
        return (image.flip(2) if torch.rand((), generator=source) < 0.5 else image), label


def _classes(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder: images are expected in {folder / 'CLASS' / 'FILE'}")
    found = tuple(sorted(entry.name for entry in os.scandir(folder) if entry.is_dir()))
    if not found:
        raise ValueError(f"{folder}: no class folders: sort the images into one folder a class")
    return found


def _check_same(folder: Path, found: tuple[str, ...], expected: tuple[str, ...]) -> None:
    if odd := sorted(set(found) ^ set(expected)):
        raise ValueError(
            f"{folder}: {len(found)} classes where the training split has {len(expected)}, "
            f"only in one of them: {_few(odd)}: use the same class folders in both"
        )


def _files(folder: Path) -> list[bytes]:
    found = [
        os.fsencode(os.path.relpath(os.path.join(place, file), folder))
        for place, _, files in os.walk(folder)
        for file in files
        if file.lower().endswith(_SUFFIXES)
    ]
    return sorted(found)


def _few(values: list[str]) -> str:
    return ", ".join(values[:3]) + (f" and {len(values) - 3} more" if len(values) > 3 else "")


def _decode(path: Path) -> Tensor:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{path}: decoding images needs Pillow: pip install pillow", name="PIL") from error
    try:
        with Image.open(path) as image:
            pixels = np.array(image.convert("RGB"))
    except FileNotFoundError:
        raise
    except (OSError, SyntaxError, ValueError) as error:  # what Pillow raises for a broken file
        raise ValueError(f"{path}: not a readable image ({error}): replace or remove it") from error
    return torch.from_numpy(pixels).permute(2, 0, 1)
