"""Data sets of a handful of noise images in the standard forms, for runs that only have to get through."""

from pathlib import Path

import numpy as np
import torch
from tests.data.files import cifar_binary, pixels, write_idx


def network(num_classes: int = 10, in_channels: int = 3) -> torch.nn.Module:
    """Found by runs as ``tests.applications.tinydata:network``: five convolutions, two of them behind a shortcut."""
    return _Network(num_classes, in_channels)


class _Network(torch.nn.Module):
    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.first = _block(in_channels, 8, 4)
        self.second = _block(8, 8, 1)
        self.third = _block(8, 8, 1)
        self.last = _block(8, 12, 2)
        self.head = torch.nn.Linear(12, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.last(x + self.third(self.second(x)))
        return self.head(x.mean((2, 3)))


def _block(before: int, after: int, stride: int) -> torch.nn.Module:
    nn = torch.nn
    return nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU())


def labels(count: int, classes: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint8) % classes


def write_cifar(root: Path, classes: int = 10, count: int = 20) -> None:
    """`count` images a file: five files of training and one of testing, or one and one."""
    place = root / f"cifar{classes}"
    place.mkdir(parents=True)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"] if classes == 10 else ["train", "test"]
    for seed, name in enumerate(names):
        columns = [labels(count, classes)] * (1 if classes == 10 else 2)
        (place / f"{name}.bin").write_bytes(cifar_binary(pixels(count, seed=seed), *columns))


def write_digits(root: Path, name: str, count: int = 40) -> None:
    """In the form of MNIST."""
    for split, seed in (("train", 0), ("test", 1)):
        write_idx(root / name, split, pixels(count, 1, 28, seed), labels(count, 10))


def write_folders(root: Path, classes: int = 1000, side: int = 24) -> None:
    """An ImageFolder with one image a class and split."""
    from PIL import Image

    for number, split in enumerate(("train", "val")):
        noise = np.random.default_rng(number).integers(0, 256, (classes, side, side, 3), dtype=np.uint8)
        for k in range(classes):
            place = root / "imagenet" / split / f"n{k:08d}"
            place.mkdir(parents=True)
            Image.fromarray(noise[k]).save(place / "0.png", compress_level=0)
