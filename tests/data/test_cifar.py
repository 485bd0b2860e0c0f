import pickle
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.data.files import cifar_binary, cifar_pickle, pixels, write_tar

from dessilbi.data import ImageSet, read

COUNT = 8
TRAIN = {10: [f"data_batch_{i}" for i in range(1, 6)], 100: ["train"]}
TEST = {10: ["test_batch"], 100: ["test"]}
FOLDER = {
    (10, "binary"): "cifar-10-batches-bin",
    (10, "python"): "cifar-10-batches-py",
    (100, "binary"): "cifar-100-binary",
    (100, "python"): "cifar-100-python",
}


def batch(classes: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return pixels(COUNT, seed=seed), rng.integers(0, classes, COUNT), rng.integers(0, 20, COUNT)


def content(classes: int, version: str, seed: int) -> bytes:
    images, fine, coarse = batch(classes, seed)
    if version == "binary":
        return cifar_binary(images, fine) if classes == 10 else cifar_binary(images, coarse, fine)
    if classes == 10:
        return cifar_pickle(images, labels=fine.tolist())
    return cifar_pickle(images, coarse_labels=coarse.tolist(), fine_labels=fine.tolist())


def files(classes: int, version: str) -> dict[str, bytes]:
    suffix = ".bin" if version == "binary" else ""
    names = TRAIN[classes] + TEST[classes]
    return {f"{name}{suffix}": content(classes, version, seed) for seed, name in enumerate(names)}


def write(root: Path, classes: int, version: str, place: str) -> Path:
    folder = root / f"cifar{classes}"
    if place == "archive":
        path = folder / f"cifar-{classes}-{version}.tar.gz"
        write_tar(path, FOLDER[classes, version], {"readme.html": b"<p>"} | files(classes, version))
        return path
    folder = {"flat": folder, "unpacked": root / FOLDER[classes, version]}[place]
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files(classes, version).items():
        (folder / name).write_bytes(data)
    return folder


def check(found: ImageSet, classes: int, seeds: range) -> None:
    batches = [batch(classes, seed) for seed in seeds]
    np.testing.assert_array_equal(found.images, np.concatenate([images for images, _, _ in batches]))
    np.testing.assert_array_equal(found.labels, np.concatenate([fine for _, fine, _ in batches]))
    assert (found.name, found.num_classes) == (f"cifar{classes}", classes)


@pytest.mark.parametrize("place", ["flat", "unpacked", "archive"])
@pytest.mark.parametrize("version", ["binary", "python"])
@pytest.mark.parametrize("classes", [10, 100])
def test_reads_what_was_written(tmp_path: Path, classes: int, version: str, place: str) -> None:
    write(tmp_path, classes, version, place)
    count = len(TRAIN[classes])
    check(read(f"cifar{classes}", tmp_path, "train"), classes, range(count))
    check(read(f"cifar{classes}", tmp_path, "test"), classes, range(count, count + 1))


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("labels", [list, np.array])
def test_reads_pickles_of_python_3(tmp_path: Path, protocol: int, labels: Callable[[object], object]) -> None:
    images, fine, _ = batch(100, 0)
    data = {"data": np.asfortranarray(images.reshape(COUNT, -1)), "fine_labels": labels(fine.tolist())}
    (tmp_path / "train").write_bytes(pickle.dumps(data, protocol))
    check(read("cifar100", tmp_path), 100, range(1))


def test_missing_files_say_how_to_get_them(tmp_path: Path) -> None:
    folder = write(tmp_path, 10, "binary", "flat")
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"cifar10: data_batch_3.bin not found: run `dessilbi data get cifar10 --"
    ):
        read("cifar10", tmp_path)
    with pytest.raises(FileNotFoundError, match="cifar100: train not found"):
        read("cifar100", tmp_path)


def change(raw: bytes, old: bytes, new: bytes) -> bytes:
    assert old in raw
    return raw.replace(old, new, 1)


@pytest.mark.parametrize(
    ("version", "broken", "message"),
    [
        ("binary", lambda raw: raw[:-1], "not a whole number of records of 3073 bytes"),
        ("binary", lambda raw: b"", "0 bytes is not a whole number"),
        ("binary", lambda raw: b"\x63" + raw[1:], r"1 labels outside 0\.\.9 \(99\)"),
        ("python", lambda raw: raw[:-50], "not a readable pickle"),
        ("python", lambda raw: b"", "not a readable pickle"),
        ("python", lambda raw: b"\x1f\x8b\x08" + raw, "not a readable pickle"),
        ("python", lambda raw: change(raw, b"U\x06labels", b"U\x06lapels"), "no pickled dict with 'data' and 'labels'"),
        ("python", lambda raw: b"\x80\x02](K\x01e.", "no pickled dict"),
        ("python", lambda raw: change(raw, b"U\x02u1", b"U\x02i1"), "'data' is not uint8"),
        ("python", lambda raw: change(raw, b"U\x02u1", b"U\x02O8"), "refused, the pickle holds an array of type 'O8'"),
        ("python", lambda raw: change(raw, b"M\x08\x00M", b"M\x07\x00M"), "not a readable pickle"),
        ("python", lambda raw: change(raw, b"U\x06labels](", b"U\x06labels](K\x01"), "not a list of 8 integers"),
        ("python", lambda raw: re.sub(rb"(labels\]\()K.", b"\\1U\x01x", raw, flags=re.S), "not a list of 8 integers"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, version: str, broken: Callable[[bytes], bytes], message: str) -> None:
    folder = write(tmp_path, 10, version, "flat")
    path = folder / ("data_batch_2.bin" if version == "binary" else "data_batch_2")
    path.write_bytes(broken(path.read_bytes()))
    with pytest.raises(ValueError, match=message) as caught:
        read("cifar10", tmp_path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_python_labels_out_of_range_are_named(tmp_path: Path) -> None:
    images, _, coarse = batch(100, 0)
    path = tmp_path / "train"
    path.write_bytes(cifar_pickle(images, fine_labels=[100] * COUNT, coarse_labels=coarse.tolist()))
    with pytest.raises(ValueError, match=r"train: 8 labels outside 0\.\.99 \(100\)"):
        read("cifar100", tmp_path)


def test_broken_archives_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, 10, "binary", "archive")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cifar-10-binary.tar.gz: broken archive"):
        read("cifar10", tmp_path)
    path.write_bytes(b"<html>")
    with pytest.raises(ValueError, match="broken archive"):
        read("cifar10", tmp_path)
    write_tar(path, "x", {"test_batch.bin": content(10, "binary", 0)})
    with pytest.raises(ValueError, match=r"data_batch_1.bin, .* not in the archive"):
        read("cifar10", tmp_path)
    check(read("cifar10", tmp_path, "test"), 10, range(1))
