"""Networks that train in milliseconds, found by the runs under test as ``tests.training.nets:NAME``."""

import torch
from torch import nn


def tiny(num_classes: int = 10, in_channels: int = 1) -> nn.Module:
    """With all that has a state of its own: batch normalisation, and dropout that draws random numbers."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 6, 3, stride=2),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(54, num_classes),
    )


def seed(num_classes: int = 10, in_channels: int = 1) -> nn.Module:
    """A handful of filters, for networks that grow; normalised, so that none is dead from the beginning."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=2, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, num_classes),
    )


def plain(num_classes: int = 10, in_channels: int = 1) -> nn.Module:
    """Without anything that couples the images of a batch."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64 * in_channels, 16), nn.Tanh(), nn.Linear(16, num_classes))


def pooled(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """For images of any size."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(8), *plain(num_classes, in_channels))  # type: ignore[misc]


def wrong_classes() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7))


def exploding(num_classes: int = 10, in_channels: int = 1) -> nn.Module:
    """The loss becomes NaN in training, from the 30th forward pass on."""

    class Explodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training:
                return x
            self.count += 1
            return x * torch.where(self.count >= 30, torch.nan, 1.0)

    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes), Explodes())
