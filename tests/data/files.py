"""Files in the standard forms, written from the descriptions of the formats with nothing of the readers."""

import gzip
import io
import struct
import tarfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]


def pixels(count: int, channels: int = 3, side: int = 32, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (count, channels, side, side), dtype=np.uint8)


def idx(array: NDArray[np.uint8]) -> bytes:
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx(folder: Path, split: str, images: Pixels, labels: NDArray[np.uint8], suffix: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pack = gzip.compress if suffix == ".gz" else bytes
    prefix = "train" if split == "train" else "t10k"
    (folder / f"{prefix}-images-idx3-ubyte{suffix}").write_bytes(pack(idx(images[:, 0])))
    (folder / f"{prefix}-labels-idx1-ubyte{suffix}").write_bytes(pack(idx(labels)))


def cifar_binary(images: Pixels, *label_columns: NDArray[np.integer]) -> bytes:
    rows = []
    for i, image in enumerate(images):
        rows.append(bytes(int(column[i]) for column in label_columns) + image.tobytes())
    return b"".join(rows)


def cifar_pickle(images: Pixels, **labels: list[int]) -> bytes:
    """A batch as Python 2 pickled it: protocol 2, text as byte strings, the array through _reconstruct."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value

    def integers(values: list[int]) -> bytes:
        return b"](" + b"".join(b"K" + bytes([value]) for value in values) + b"e"

    data = images.reshape(len(images), -1)
    shape = b"M" + struct.pack("<H", data.shape[0]) + b"M" + struct.pack("<H", data.shape[1]) + b"\x86"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87Rq\x03"
        b"(K\x01" + shape + b"cnumpy\ndtype\nq\x04U\x02u1K\x00K\x01\x87Rq\x05"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89" + text(data.tobytes()) + b"tb"
    )
    items = text(b"batch_label") + text(b"training batch 1 of 5")
    for key, values in labels.items():
        items += text(key.encode()) + integers(values)
    names = b"](" + b"".join(text(b"image_%d.png" % i) for i in range(len(images))) + b"e"
    return b"\x80\x02}q\x00(" + items + text(b"data") + array + text(b"filenames") + names + b"u."


def write_tar(path: Path, folder: str, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
