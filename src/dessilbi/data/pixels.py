"""Image operations on ``uint8`` tensors: crop, flip, resize and normalise. Pure functions, randomness comes
in as data.

``augment`` and ``Normalise`` take whole batches, keep to fixed shapes and never wait for the device, so that
they can be captured in a CUDA graph or compiled together with the step.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional


def augment(images: Tensor, offsets: Tensor, flips: Tensor, padding: int = 4) -> Tensor:
    """Random crop with padding and horizontal flip of a batch, as one gather.

    Args:
        images: (batch, channels, height, width), any type.
        offsets: ``int64``, (batch, 2): row and column, 0 to 2·padding, where the crop of the zero-padded
        image starts. flips: ``bool``, (batch,): which crops to mirror.

    Returns:
        A new tensor like ``images``.
    """
    batch, channels, height, width = images.shape
    padded = functional.pad(images, (padding, padding, padding, padding))
    column = torch.arange(width, device=images.device)
    rows = offsets[:, 0, None] + torch.arange(height, device=images.device)
    columns = offsets[:, 1, None] + torch.where(flips[:, None], width - 1 - column, column)
    index = rows[:, :, None] * (width + 2 * padding) + columns[:, None, :]
    index = index.view(batch, 1, height * width).expand(batch, channels, height * width)
    return padded.flatten(2).gather(2, index).view(batch, channels, height, width)


class Normalise:
    """``(x / 255 − mean) / std`` of batches of ``uint8`` images, on one device.

    Args:
        mean, std: per channel, on the scale 0 to 1.
        dtype, channels_last: of the result. The arithmetic is in float32 at least.
    """

    def __init__(
        self,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
    ) -> None:
        if not dtype.is_floating_point:
            raise ValueError(f"dtype={dtype}: normalised images need a floating-point type")
        centre, spread = (torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1) for values in (mean, std))
        precision = torch.promote_types(dtype, torch.float32)
        self.dtype, self.channels_last = dtype, channels_last
        self._scale = (1 / (255 * spread)).to(device, precision)
        self._shift = (-centre / spread).to(device, precision)

    def __call__(self, images: Tensor) -> Tensor:
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        values = images.to(self._scale.dtype, memory_format=layout)
        return values.mul_(self._scale).add_(self._shift).to(self.dtype)


def resize(image: Tensor, height: int, width: int) -> Tensor:
    """One ``uint8`` image (channels, height, width), resized with antialiased bilinear interpolation."""
    size = (height, width)
    return functional.interpolate(image[None], size, mode="bilinear", antialias=True, align_corners=False)[0]


def random_resized_crop(image: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """ImageNet's training crop: 8 to 100 % of the area, aspect ratio 3/4 to 4/3, resized to a square."""
    height, width = image.shape[1:]
    low, high = math.log(3 / 4), math.log(4 / 3)
    for _ in range(10):
        area, ratio, top, left = torch.rand(4, generator=generator).tolist()
        area = height * width * (0.08 + 0.92 * area)
        ratio = math.exp(low + (high - low) * ratio)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            y, x = int(top * (height - h + 1)), int(left * (width - w + 1))
            return resize(image[:, y : y + h, x : x + w], size, size)
    # Too long an image for any such crop: the largest central part within the ratios.
    h, w = min(height, round(width * 4 / 3)), min(width, round(height * 4 / 3))
    return resize(_centre(image, h, w), size, size)


def resized_centre(image: Tensor, size: int) -> Tensor:
    """ImageNet's evaluation crop: the shorter side to ``size``·256/224, then the central square."""
    height, width = image.shape[1:]
    factor = size * 256 / 224 / min(height, width)
    return _centre(resize(image, max(size, round(height * factor)), max(size, round(width * factor))), size, size)


def _centre(image: Tensor, height: int, width: int) -> Tensor:
    top, left = (image.shape[1] - height) // 2, (image.shape[2] - width) // 2
    return image[:, top : top + height, left : left + width]
