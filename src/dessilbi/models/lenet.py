"""LeNet-5 (LeCun et al., Gradient-based learning applied to document recognition, 1998)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dessilbi.models.common import check_size, check_widths, he_init

__all__ = ["LeNet5"]

_SIDE = 32


class LeNet5(nn.Module):
    """conv 6@5x5, pool, conv 16@5x5, pool, conv 120@5x5, fc 84, fc classes; on 32x32 images.

    Smaller images, such as the 28x28 of MNIST, are centred in 32x32 zeros. As is usual today, the
    non-linearity is ReLU, the pooling takes the maximum, and every filter of the second convolution sees all
    maps of the first. 61 706 parameters and 0.42 M MACs with one channel and ten classes.

    `widths`: conv1, conv2, conv3, fc.
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 1, widths: Sequence[int] = (6, 16, 120, 84)) -> None:
        super().__init__()
        check_size("num_classes", num_classes)
        check_size("in_channels", in_channels)
        conv1, conv2, conv3, hidden = check_widths(widths, ("conv1", "conv2", "conv3", "fc"))
        # The pool comes before the ReLU, as in the original: the result is the same and the ReLU sees a
        # quarter.
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, conv1, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(conv1, conv2, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(conv2, conv3, 5),
            nn.ReLU(),
        )
        self.classifier = nn.Sequential(nn.Linear(conv3, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(_centred(x))
        return self.classifier(torch.flatten(x, 1))  # type: ignore[no-any-return]


def _centred(x: Tensor) -> Tensor:
    """`x` in the middle of `_SIDE` x `_SIDE` zeros."""
    # F.pad would crop a larger image without a word. Under torch.fx, x is not a Tensor and has no size to
    # check.
    if isinstance(x, Tensor) and max(x.shape[-2:]) > _SIDE:
        raise ValueError(
            f"LeNet5 takes images of at most {_SIDE}x{_SIDE}, not {x.shape[-2]}x{x.shape[-1]}:"
            " make them smaller, or take a larger network"
        )
    high, wide = _SIDE - x.shape[-2], _SIDE - x.shape[-1]
    return F.pad(x, (wide // 2, wide - wide // 2, high // 2, high - high // 2))
