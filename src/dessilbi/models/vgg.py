"""VGG for 32x32 images (Simonyan and Zisserman, Very deep convolutional networks, ICLR 2015)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dessilbi.models.common import check_size, check_widths, he_init

__all__ = ["VGG", "vgg16", "vgg19"]

_WIDTHS_16 = (64, 64, 128, 128, *[256] * 3, *[512] * 6, 512)
_WIDTHS_19 = (64, 64, 128, 128, *[256] * 4, *[512] * 8, 512)


class VGG(nn.Module):
    """Stages of 3x3 convolutions, each closed by a 2x2 maximum pool; then fc 512, fc classes.

    Batch normalisation follows every convolution, which therefore has no bias. On 32x32 images the fifth pool
    leaves one pixel, so the first linear layer reads one value a channel.

    `stages`: how many convolutions in each stage. `widths`: one a convolution, then the hidden linear layer.
    """

    def __init__(self, stages: Sequence[int], num_classes: int, in_channels: int, widths: Sequence[int]) -> None:
        super().__init__()
        check_size("num_classes", num_classes)
        check_size("in_channels", in_channels)
        *convs, hidden = check_widths(widths, [*(f"conv{i + 1}" for i in range(sum(stages))), "fc"])
        layers: list[nn.Module] = []
        before = in_channels
        remaining = iter(convs)
        for stage in stages:
            for _ in range(stage):
                width = next(remaining)
                conv = nn.Conv2d(before, width, 3, padding=1, bias=False)
                layers += [conv, nn.BatchNorm2d(width), nn.ReLU()]
                before = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Linear(before, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        return self.classifier(torch.flatten(x, 1))  # type: ignore[no-any-return]


def vgg16(num_classes: int = 10, in_channels: int = 3, widths: Sequence[int] = _WIDTHS_16) -> VGG:
    """64-64-M-128-128-M-256x3-M-512x3-M-512x3-M (configuration D): 15.0 M parameters, 313 M MACs.

    `widths`: the 13 convolutions, then the hidden linear layer.
    """
    return VGG((2, 2, 3, 3, 3), num_classes, in_channels, widths)


def vgg19(num_classes: int = 10, in_channels: int = 3, widths: Sequence[int] = _WIDTHS_19) -> VGG:
    """64-64-M-128-128-M-256x4-M-512x4-M-512x4-M (configuration E): 20.3 M parameters, 398 M MACs.

    `widths`: the 16 convolutions, then the hidden linear layer.
    """
    return VGG((2, 2, 4, 4, 4), num_classes, in_channels, widths)
