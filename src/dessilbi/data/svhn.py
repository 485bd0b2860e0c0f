"""SVHN, cropped digits: MATLAB 5 files ``train_32x32.mat`` and ``test_32x32.mat``.

Each holds ``X``, ``uint8`` of shape (32, 32, 3, count), and ``y``, (count, 1), with the digit 0 written as
10. Reading them needs SciPy.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from .catalog import Entry
from .images import ImageSet, check_labels
from .locate import locate, missing


def read(entry: Entry, root: Path, split: str) -> ImageSet:
    """The split from ``SPLIT_32x32.mat``."""
    file = f"{split}_32x32.mat"
    found = locate(entry, root, [[file]], ["SVHN"])
    if not found:
        raise missing(entry, root, [file])
    content = _load(found[0])
    pixels, labels = (np.asarray(content.get(key, ())) for key in "Xy")
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3):
        raise ValueError(f"{found[0]}: X is not uint8 of shape (32, 32, 3, count) but {pixels.dtype} {pixels.shape}")
    if labels.size != pixels.shape[3]:
        raise ValueError(f"{found[0]}: y has {labels.size} labels for the {pixels.shape[3]} images of X")
    numbers = torch.from_numpy(labels.reshape(-1).astype(np.int64))
    check_labels(numbers - 1, 10, f"{found[0]} (digits 1 to 10, counted from 1)")
    images = torch.from_numpy(np.ascontiguousarray(pixels.transpose(3, 2, 0, 1)))
    return ImageSet(entry.name, images, numbers % 10, entry.classes, entry.mean, entry.std)


def _load(path: Path) -> dict[str, Any]:
    try:
        from scipy.io import loadmat
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{path}: reading SVHN needs SciPy: pip install scipy", name="scipy") from error
    try:
        content: dict[str, Any] = loadmat(str(path), variable_names=["X", "y"])
    except Exception as error:  # SciPy raises a dozen kinds for a broken file
        raise ValueError(f"{path}: not a readable MATLAB 5 file ({error}): get it again") from error
    return content
