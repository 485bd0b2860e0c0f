"""``ImageSet``: a whole split of a data set in memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import parts


@dataclass(frozen=True, eq=False, repr=False)
class ImageSet:
    """Images and labels of one split, as they are on disk: no float copy, nothing normalised.

    Args:
        name: what the set is called in messages.
        images: ``uint8``, (count, channels, height, width).
        labels: ``int64``, (count,), each below the number of classes.
        classes: the names of the classes, or how many there are.
        mean, std: per channel, on the scale 0 to 1, of the *training* split. Left out, they are computed from
            ``images``; give a test split those of its training split.
    """

    name: str
    images: Tensor
    labels: Tensor
    classes: Sequence[str] | int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise ValueError(
                f"{self.name}: images must be uint8 of shape (count, channels, height, width), "
                f"got {self.images.dtype} {tuple(self.images.shape)}"
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            raise ValueError(
                f"{self.name}: labels must be int64 of shape ({len(self.images)},), one an image, "
                f"got {self.labels.dtype} {tuple(self.labels.shape)}"
            )
        if self.images.numel() == 0:
            raise ValueError(f"{self.name}: no images, shape {tuple(self.images.shape)}")
        check_labels(self.labels, self.num_classes, self.name)
        if not self.mean and not self.std:
            mean, std = statistics(self.images)
            object.__setattr__(self, "mean", mean)
            object.__setattr__(self, "std", std)
        channels = self.images.shape[1]
        if len(self.mean) != channels or len(self.std) != channels or not all(0 < s < math.inf for s in self.std):
            raise ValueError(
                f"{self.name}: mean and std must hold {channels} numbers, one a channel, and std above 0, "
                f"got mean={self.mean}, std={self.std}"
            )

    @property
    def num_classes(self) -> int:
        return self.classes if isinstance(self.classes, int) else len(self.classes)

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.classes))) if isinstance(self.classes, int) else tuple(self.classes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    def only(self, classes: Sequence[int]) -> "ImageSet":
        """The images of these classes, which are numbered 0, 1, ... in the order in which they were.

        Mean and standard deviation stay those of the whole set.
        """
        chosen = parts.sorted_classes(classes, self.num_classes, f"{self.name}: classes={list(classes)}")
        numbers = torch.full((self.num_classes,), -1)
        numbers[list(chosen)] = torch.arange(len(chosen))
        labels = numbers[self.labels]
        there = labels >= 0
        if not there.any():
            raise ValueError(f"{self.name}: classes={list(classes)}: none of the {len(self)} images is of these")
        names = len(chosen) if isinstance(self.classes, int) else tuple(self.classes[number] for number in chosen)
        return replace(self, images=self.images[there], labels=labels[there], classes=names)

    def first(self, count: int) -> "ImageSet":
        """The first ``count`` images; mean and standard deviation stay those of the whole set."""
        if not 1 <= count <= len(self):
            raise ValueError(f"{self.name}: count={count}: there are {len(self)} images, give a number from 1 to that")
        return replace(self, images=self.images[:count].clone(), labels=self.labels[:count].clone())

    def fitted(self, shape: Sequence[int], mean: tuple[float, ...] = (), std: tuple[float, ...] = ()) -> "ImageSet":
        """The images brought to ``shape``, for a network that was made for other data; still ``uint8``.

        Smaller ones stand in the middle of zeros, the odd row or column of which is below or to the right. Gray ones
        are repeated in three channels, with their mean and standard deviation. Coloured ones are made gray by
        ITU-R BT.601's luma, 0.299 R + 0.587 G + 0.114 B, rounded half up.

        Args:
            shape: channels, height, width.
            mean, std: of the training split so converted. Left out where colours become gray, they are computed from
                these images, before the zeros; give a test split those of its training split::

                    train = train.fitted((1, 32, 32))
                    test = test.fitted((1, 32, 32), train.mean, train.std)
        """
        if len(shape) != 3:
            raise ValueError(f"{self.name}: shape={tuple(shape)}: give channels, height and width")
        channels, height, width = shape
        rows, columns = height - self.shape[1], width - self.shape[2]
        if rows < 0 or columns < 0:
            raise ValueError(
                f"{self.name}: shape={tuple(shape)}: the images are {self.shape[1]} x {self.shape[2]} and are padded, "
                "never cut: give at least that height and width"
            )
        images = self.images
        if (self.shape[0], channels) == (1, 3):
            images, own = images.repeat(1, 3, 1, 1), (self.mean * 3, self.std * 3)
        elif (self.shape[0], channels) == (3, 1):
            images = luma(images)
            own = (mean, std) if mean and std else statistics(images)
        elif self.shape[0] == channels:
            own = self.mean, self.std
        else:
            raise ValueError(
                f"{self.name}: shape={tuple(shape)}: the images have {self.shape[0]} channels, "
                "and only 1 becomes 3, or 3 become 1"
            )
        if rows or columns:
            images = pad(images, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
        return replace(self, images=images, mean=mean or own[0], std=std or own[1])

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        size = "x".join(map(str, self.shape))
        return f"ImageSet({self.name!r}, {len(self)} images of {size}, {self.num_classes} classes)"


def check_labels(labels: Tensor, classes: int, where: object) -> None:
    """Raise ``ValueError`` naming ``where`` if a label is not a class number."""
    bad = labels[(labels < 0) | (labels >= classes)]
    if len(bad):
        found = ", ".join(map(str, sorted(set(bad.tolist()))[:5]))
        raise ValueError(
            f"{where}: {len(bad)} labels outside 0..{classes - 1} ({found}), too many for {classes} classes"
        )


def statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of ``uint8`` images, on the scale 0 to 1, exactly.

    A channel that is constant gets standard deviation 1, so that normalising it gives zeros.
    """
    counts = torch.zeros(images.shape[1], 256, dtype=torch.float64)
    for block in torch.split(images, 4096):
        for channel, histogram in enumerate(counts):
            histogram.add_(torch.bincount(block[:, channel].flatten().int(), minlength=256))
    levels = torch.arange(256, dtype=torch.float64) / 255
    weights = counts / counts.sum(1, keepdim=True)
    mean = weights @ levels
    std = (weights * (levels - mean[:, None]) ** 2).sum(1).sqrt()
    return tuple(mean.tolist()), tuple(s or 1.0 for s in std.tolist())


def luma(images: Tensor) -> Tensor:
    """Gray of ``uint8`` images of three channels by ITU-R BT.601, in whole numbers: the same everywhere."""
    gray = torch.empty_like(images[:, :1])
    for block, out in zip(torch.split(images, 4096), torch.split(gray, 4096), strict=True):
        red, green, blue = block.int().unbind(1)
        out[:, 0] = (299 * red + 587 * green + 114 * blue + 500) // 1000
    return gray
