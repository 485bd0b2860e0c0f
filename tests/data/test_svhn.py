import sys
from pathlib import Path

import numpy as np
import pytest
from tests.data.files import pixels

from dessilbi.data import read

savemat = pytest.importorskip("scipy.io").savemat

IMAGES = pixels(12)
DIGITS = np.arange(12) % 10


def write(root: Path, split: str = "train", **change: object) -> Path:
    path = root / "svhn" / f"{split}_32x32.mat"
    path.parent.mkdir(exist_ok=True)
    labels = np.where(DIGITS == 0, 10, DIGITS).astype(np.uint8)[:, None]
    savemat(path, {"X": IMAGES.transpose(2, 3, 1, 0), "y": labels} | change, do_compression=True)
    return path


@pytest.mark.parametrize("split", ["train", "test"])
def test_reads_what_was_written(tmp_path: Path, split: str) -> None:
    write(tmp_path, split)
    found = read("svhn", tmp_path, split)
    np.testing.assert_array_equal(found.images, IMAGES)
    np.testing.assert_array_equal(found.labels, DIGITS)
    assert found.images.is_contiguous()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"X": np.zeros((32, 32, 1, 12), np.uint8)}, r"X is not uint8 of shape \(32, 32, 3, count\)"),
        ({"X": np.zeros((32, 32, 3, 12))}, "X is not uint8"),
        ({"y": np.ones((11, 1), np.uint8)}, "y has 11 labels for the 12 images"),
        ({"y": np.full((12, 1), 11, np.uint8)}, "12 labels outside"),
        ({"y": np.zeros((12, 1), np.uint8)}, "12 labels outside"),
    ],
)
def test_wrong_content_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = write(tmp_path, **change)
    with pytest.raises(ValueError, match=message) as caught:
        read("svhn", tmp_path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("keep", [0, 60, 5000, -100])
def test_truncated_files_are_named(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"train_32x32.mat: not a readable MATLAB 5 file"):
        read("svhn", tmp_path)


def test_missing_file_and_missing_scipy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"train_32x32.mat not found: run `dessilbi data get svhn"):
        read("svhn", tmp_path)
    write(tmp_path)
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(ModuleNotFoundError, match="pip install scipy"):
        read("svhn", tmp_path)
