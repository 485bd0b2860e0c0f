"""Residual networks for 32x32 images.

He et al., Deep residual learning for image recognition, CVPR 2016, section 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dessilbi.models.common import check_size, he_init, residual_widths
from dessilbi.models.resnet import BasicBlock

__all__ = ["CifarResNet", "OptionA", "resnet20", "resnet32", "resnet44", "resnet50", "resnet56", "resnet110"]

_STAGES = ("layer1", "layer2", "layer3")
_STREAMS = (16, 32, 64)


class OptionA(nn.Module):
    """The shortcut without parameters: every second pixel, and zeros for the channels that are new.

    The channels of the old stream become the first ones of the new stream; the zeros come after them.
    """

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.new_channels = after - before

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.new_channels))

    def extra_repr(self) -> str:
        return f"new_channels={self.new_channels}"


class CifarResNet(nn.Module):
    """3x3 convolution, three stages of n basic blocks, 16, 32 and 64 wide, global average, fc: depth 6n+2.

    The second and third stage begin with stride 2 and the shortcut `OptionA`; every other shortcut is the
    identity.

    `widths`: the 3 residual streams (the first convolution writes the first), then the inner width of each of
    the 3n blocks; or the streams alone, and the blocks are as wide inside. No stream may be narrower than the
    one before it, whose channels it takes over.
    """

    def __init__(
        self, depth: int, num_classes: int = 10, in_channels: int = 3, widths: Sequence[int] = _STREAMS
    ) -> None:
        super().__init__()
        check_size("num_classes", num_classes)
        check_size("in_channels", in_channels)
        n, rest = divmod(depth - 2, 6)
        if n < 1 or rest:
            raise ValueError(f"depth = {depth}: give 6n+2 with n at least 1, such as 20, 56 or 110")
        layers = [(f"{name}.{block}.conv1", stage) for stage, name in enumerate(_STAGES) for block in range(n)]
        streams, inner = residual_widths(widths, _STAGES, layers)
        first, second, third = streams
        if not first <= second <= third:
            raise ValueError(
                f"widths[:3] = {list(streams)}: the option-A shortcut adds channels and cannot drop any, so give"
                " stream widths that do not decrease"
            )
        self.conv1 = nn.Conv2d(in_channels, first, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(first)
        self.layer1 = nn.Sequential(*(BasicBlock(first, width, first) for width in inner[:n]))
        self.layer2 = _halving_stage(first, second, inner[n : 2 * n])
        self.layer3 = _halving_stage(second, third, inner[2 * n :])
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(third, num_classes)
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(self.avgpool(x), 1))  # type: ignore[no-any-return]


def _halving_stage(before: int, after: int, inner: Sequence[int]) -> nn.Sequential:
    return nn.Sequential(
        BasicBlock(before, inner[0], after, 2, OptionA(before, after)),
        *(BasicBlock(after, width, after) for width in inner[1:]),
    )


def resnet20(num_classes: int = 10, in_channels: int = 3, widths: Sequence[int] = _STREAMS) -> CifarResNet:
    """Three blocks a stage: 0.27 M parameters, 41 M MACs."""
    return CifarResNet(20, num_classes, in_channels, widths)


def resnet32(num_classes: int = 10, in_channels: int = 3, widths: Sequence[int] = _STREAMS) -> CifarResNet:
    """Five blocks a stage: 0.46 M parameters, 69 M MACs."""
    return CifarResNet(32, num_classes, in_channels, widths)


def resnet44(num_classes: int = 10, in_channels: int = 3, widths: Sequence[int] = _STREAMS) -> CifarResNet:
    """Seven blocks a stage: 0.66 M parameters, 97 M MACs."""
    return CifarResNet(44, num_classes, in_channels, widths)


def resnet50(num_classes: int = 10, in_channels: int = 3, widths: Sequence[int] = _STREAMS) -> CifarResNet:
    """Eight blocks a stage: 0.76 M parameters, 111 M MACs.

    What the paper calls ResNet-50; the ImageNet network of that name is `resnet50_imagenet`.
    """
    return CifarResNet(50, num_classes, in_channels, widths)


def resnet56(num_classes: int = 10, in_channels: int = 3, widths: Sequence[int] = _STREAMS) -> CifarResNet:
    """Nine blocks a stage: 0.85 M parameters, 125.5 M MACs, or 126 M with the additions of the shortcuts."""
    return CifarResNet(56, num_classes, in_channels, widths)


def resnet110(num_classes: int = 10, in_channels: int = 3, widths: Sequence[int] = _STREAMS) -> CifarResNet:
    """Eighteen blocks a stage: 1.73 M parameters, 253 M MACs."""
    return CifarResNet(110, num_classes, in_channels, widths)
