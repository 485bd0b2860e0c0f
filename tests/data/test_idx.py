import gzip
from pathlib import Path

import numpy as np
import pytest
from tests.data.files import idx, pixels, write_idx

from dessilbi.data import read

IMAGES = pixels(20, 1, 28)
LABELS = np.arange(20, dtype=np.uint8) % 10


def packed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)  # the time would make test names differ between pytest's workers


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(("name", "inner"), [("mnist", "mnist"), ("fashion-mnist", "FashionMNIST/raw"), ("mnist", ".")])
def test_reads_what_was_written(tmp_path: Path, name: str, inner: str, split: str, suffix: str) -> None:
    write_idx(tmp_path / inner, split, IMAGES, LABELS, suffix)
    found = read(name, tmp_path, split)
    np.testing.assert_array_equal(found.images, IMAGES)
    np.testing.assert_array_equal(found.labels, LABELS)
    assert (found.name, found.num_classes, found.mean) == (name, 10, (0.1307,) if name == "mnist" else (0.2860,))


def test_reads_the_names_with_a_dot(tmp_path: Path) -> None:
    (tmp_path / "train-images.idx3-ubyte").write_bytes(idx(IMAGES[:, 0]))
    (tmp_path / "train-labels.idx1-ubyte.gz").write_bytes(gzip.compress(idx(LABELS)))
    np.testing.assert_array_equal(read("mnist", tmp_path).images, IMAGES)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("images-idx3", b"", "starts with nothing, expected 00000803"),
        ("images-idx3", b"<html>", "starts with 3c68746d"),
        ("images-idx3", idx(LABELS), "not an idx file of 3-dimensional uint8"),
        ("images-idx3", idx(IMAGES[:, 0])[:9], "the file ends before"),
        ("images-idx3", idx(IMAGES[:, 0])[:-1], "20 x 28 x 28 values, the file ends before"),
        ("images-idx3", idx(IMAGES[:, 0]) + b"x", "goes on after them"),
        ("images-idx3", idx(IMAGES[:0, 0]), "0 x 28 x 28 values"),
        ("images-idx3", b"\0\0\x08\x03" + b"\xff" * 12, "the file ends before"),
        ("images-idx3", packed(b"\0\0\x08\x03" + b"\xff" * 12), "the file ends before"),
        ("images-idx3", packed(idx(IMAGES[:, 0]))[:-20], "broken gzip file"),
        ("images-idx3", packed(idx(IMAGES[:, 0]))[:-8] + b"\1" * 8, "broken gzip file"),
        ("images-idx3", b"\x1f\x8bnonsense", "broken gzip file"),
        ("labels-idx1", idx(LABELS[:-1]), "19 labels for the 20 images"),
        ("labels-idx1", idx(LABELS + 1), r"2 labels outside 0\.\.9 \(10\)"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, file: str, content: bytes, message: str) -> None:
    write_idx(tmp_path / "mnist", "train", IMAGES, LABELS)
    path = tmp_path / "mnist" / f"train-{file}-ubyte"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read("mnist", tmp_path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_missing_files_say_how_to_get_them(tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist", "train", IMAGES, LABELS)
    (tmp_path / "mnist" / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"mnist: train-labels-idx1-ubyte not found: run `dessilbi data get mnist"
    ):
        read("mnist", tmp_path)
    with pytest.raises(FileNotFoundError, match="t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte not found"):
        read("mnist", tmp_path, "test")


def test_the_labels_of_another_set_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses
    import hashlib

    from dessilbi.data.catalog import CATALOG

    known = {"train-labels-idx1-ubyte": hashlib.md5(idx(LABELS)).hexdigest()}
    monkeypatch.setitem(CATALOG, "fashion-mnist", dataclasses.replace(CATALOG["fashion-mnist"], files=known))
    write_idx(tmp_path, "train", IMAGES, LABELS)
    assert len(read("fashion-mnist", tmp_path)) == 20
    with pytest.raises(ValueError, match="this is train-labels-idx1-ubyte of fashion-mnist"):
        read("mnist", tmp_path)
    write_idx(tmp_path, "test", IMAGES, LABELS)
    with pytest.raises(ValueError, match="not t10k-labels-idx1-ubyte of fashion-mnist"):
        read("fashion-mnist", tmp_path, "test")
