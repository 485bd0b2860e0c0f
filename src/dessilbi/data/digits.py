"""scikit-learn's handwritten digits: 1797 images of 8 x 8, no files needed. For tests and first steps.

Values 0..16 become 0..255. Of each class every fifth image, in the order of the set, is for testing: the same
split everywhere, with the classes in the same proportions. The same writers are in both parts, as in most
uses of this set: do not read the accuracy as that on new writers.
"""

from pathlib import Path

import numpy as np
import torch

from .catalog import Entry
from .images import ImageSet


def read(entry: Entry, root: Path, split: str) -> ImageSet:
    """The split of scikit-learn's digits; ``root`` is not used."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the data set digits comes with scikit-learn: pip install scikit-learn", name="sklearn"
        ) from error
    values, labels = load_digits(return_X_y=True)
    rank = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        rank[labels == label] = np.arange(np.count_nonzero(labels == label))
    chosen = (rank % 5 == 4) == (split == "test")
    images = np.rint(values[chosen] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    numbers = labels[chosen].astype(np.int64)
    return ImageSet(
        entry.name, torch.from_numpy(images), torch.from_numpy(numbers), entry.classes, entry.mean, entry.std
    )
