"""Residual networks for ImageNet (He et al., Deep residual learning for image recognition, CVPR 2016).

The layers and their names are torchvision's, whose weights can be loaded. As there, and unlike the paper, a
bottleneck has its stride in the 3x3 convolution.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dessilbi.models.common import check_size, he_init, residual_widths

__all__ = ["BasicBlock", "Bottleneck", "ResNet", "resnet18", "resnet50_imagenet"]

_STAGES = ("layer1", "layer2", "layer3", "layer4")


def _conv(before: int, after: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, size, stride=stride, padding=size // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is the identity unless `downsample` is given.

    y = relu(bn2(conv2(relu(bn1(conv1(x))))) + downsample(x)), with `inner` filters in conv1.
    """

    def __init__(
        self, before: int, inner: int, after: int, stride: int = 1, downsample: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.conv1 = _conv(before, inner, 3, stride)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = _conv(inner, after, 3)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample = nn.Identity() if downsample is None else downsample

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.downsample(x))


class Bottleneck(nn.Module):
    """Convolutions 1x1, 3x3, 1x1 beside a shortcut, which is the identity unless `downsample` is given.

    y = relu(bn3(conv3(relu(bn2(conv2(relu(bn1(conv1(x)))))))) + downsample(x)), with `inner1` filters in
    conv1 and `inner2` in conv2.
    """

    def __init__(
        self,
        before: int,
        inner1: int,
        inner2: int,
        after: int,
        stride: int = 1,
        downsample: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.conv1 = _conv(before, inner1, 1)
        self.bn1 = nn.BatchNorm2d(inner1)
        self.conv2 = _conv(inner1, inner2, 3, stride)
        self.bn2 = nn.BatchNorm2d(inner2)
        self.conv3 = _conv(inner2, after, 1)
        self.bn3 = nn.BatchNorm2d(after)
        self.downsample = nn.Identity() if downsample is None else downsample

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return F.relu(out + self.downsample(x))


class ResNet(nn.Module):
    """7x7 convolution of stride 2, 3x3 maximum pool of stride 2, four stages of blocks, global average, fc.

    `stem` is the width of the first convolution and `stages` are the stages, the last of which ends `after`
    wide.
    """

    def __init__(
        self, stem: int, stages: Sequence[nn.Sequential], after: int, num_classes: int, in_channels: int
    ) -> None:
        super().__init__()
        check_size("num_classes", num_classes)
        check_size("in_channels", in_channels)
        self.conv1 = _conv(in_channels, stem, 7, stride=2)
        self.bn1 = nn.BatchNorm2d(stem)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(after, num_classes)
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))  # type: ignore[no-any-return]


def _projection(before: int, after: int, stride: int) -> nn.Sequential:
    """Option B of the paper: a 1x1 convolution from one residual stream to the next."""
    return nn.Sequential(_conv(before, after, 1, stride), nn.BatchNorm2d(after))


# Where a projection stands follows from the place in the network, never from the widths: two streams that are
# equally wide after pruning still have the one between them.


def resnet18(num_classes: int = 1000, in_channels: int = 3, widths: Sequence[int] = (64, 128, 256, 512)) -> ResNet:
    """Two basic blocks a stage: 11.7 M parameters and 1.8 G MACs at 224x224 with 1000 classes.

    `widths`: the 4 residual streams (the stem writes the first), then the inner width of each of the 8
    blocks; or the streams alone, and the blocks are as wide inside.
    """
    layers = [(f"{name}.{block}.conv1", stage) for stage, name in enumerate(_STAGES) for block in range(2)]
    streams, inner = residual_widths(widths, _STAGES, layers)
    stages = []
    before = streams[0]
    for stage, after in enumerate(streams):
        first, second = inner[2 * stage : 2 * stage + 2]
        if stage == 0:
            block = BasicBlock(before, first, after)
        else:
            block = BasicBlock(before, first, after, 2, _projection(before, after, 2))
        stages.append(nn.Sequential(block, BasicBlock(after, second, after)))
        before = after
    return ResNet(streams[0], stages, before, num_classes, in_channels)


def resnet50_imagenet(
    num_classes: int = 1000, in_channels: int = 3, widths: Sequence[int] = (64, 256, 512, 1024, 2048)
) -> ResNet:
    """3, 4, 6 and 3 bottlenecks: 25.6 M parameters and 4.1 G MACs at 224x224 with 1000 classes.

    `widths`: the stem and the 4 residual streams, then the two inner widths of each of the 16 blocks; or the
    first five alone, and the blocks are a quarter as wide inside.
    """
    blocks = (3, 4, 6, 3)
    layers = [
        (f"{name}.{block}.{conv}", stage + 1)
        for stage, name in enumerate(_STAGES)
        for block in range(blocks[stage])
        for conv in ("conv1", "conv2")
    ]
    (stem, *streams), inner = residual_widths(widths, ("conv1", *_STAGES), layers, expansion=4)
    remaining = iter(inner)
    stages = []
    before = stem
    for stage, after in enumerate(streams):
        stride = 1 if stage == 0 else 2
        projection = _projection(before, after, stride)
        layer = nn.Sequential(Bottleneck(before, next(remaining), next(remaining), after, stride, projection))
        for _ in range(1, blocks[stage]):
            layer.append(Bottleneck(after, next(remaining), next(remaining), after))
        stages.append(layer)
        before = after
    return ResNet(stem, stages, before, num_classes, in_channels)
