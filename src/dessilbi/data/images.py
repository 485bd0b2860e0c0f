"""``ImageSet``: a whole split of a data set in memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
