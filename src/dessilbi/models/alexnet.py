"""AlexNet with one tower (Krizhevsky, One weird trick for parallelizing convolutional networks, 2014)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dessilbi.models.common import check_size, check_widths, he_init

__all__ = ["AlexNet"]

_GRID = 6


class AlexNet(nn.Module):
    """Convolutions 64-M-192-M-384-256-256-M, average to 6x6, fc 4096, fc 4096, fc classes; dropout 1/2.

    The layers and their names are torchvision's, whose weights can be loaded. 61.1 M parameters and 714 M
    MACs at 224x224 with 1000 classes. Images have to be at least 63x63.

    `widths`: conv1 to conv5, fc1, fc2.
    """

    def __init__(
        self,
        num_classes: int = 1000,
        in_channels: int = 3,
        widths: Sequence[int] = (64, 192, 384, 256, 256, 4096, 4096),
    ) -> None:
        super().__init__()
        check_size("num_classes", num_classes)
        check_size("in_channels", in_channels)
        conv1, conv2, conv3, conv4, conv5, fc1, fc2 = check_widths(
            widths, ("conv1", "conv2", "conv3", "conv4", "conv5", "fc1", "fc2")
        )
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, conv1, 11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(conv1, conv2, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(conv2, conv3, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(conv3, conv4, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(conv4, conv5, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(_GRID)
        self.classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(conv5 * _GRID * _GRID, fc1),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(fc1, fc2),
            nn.ReLU(),
            nn.Linear(fc2, num_classes),
        )
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))  # type: ignore[no-any-return]
