"""Runs on parts of a data set, and on images brought to a shape."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.data.files import cifar_binary, pixels, write_idx
from tests.training.runs import SMALL

from dessilbi.data import read
from dessilbi.training import Config, datasets, train
from dessilbi.training.opening import open_network
from dessilbi.training.run import Run

CPU = torch.device("cpu")


def first(feed: datasets.Feed) -> tuple[np.ndarray, list[int]]:
    images, labels = feed.load(next(feed.tickets(0)))
    return images.numpy(), labels.tolist()


def test_a_run_on_five_classes(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    train(SMALL.replace(data="digits[0-4]", epochs=1), tmp_path / "run")
    run = Run.open(tmp_path / "run")
    assert run.config.data == "digits[0-4]"
    state = run.latest()
    assert state is not None
    assert len(list(state["model"].values())[-1]) == 5
    network, shape, _ = open_network(tmp_path / "run")
    assert shape == (1, 8, 8)
    assert network(torch.zeros(2, 1, 8, 8)).shape == (2, 5)


def test_a_run_on_images_brought_to_a_shape(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    wide = SMALL.replace(
        data="digits[1,8][:200:40]", input_shape=(3, 9, 9), epochs=1, model="tests.training.nets:pooled"
    )
    train(wide, tmp_path / "run")
    network, shape, _ = open_network(tmp_path / "run")
    assert shape == (3, 9, 9)
    assert network(torch.zeros(2, *shape)).shape == (2, 2)
    data = datasets.build(wide, CPU, torch.float64)
    assert (data.shape, data.num_classes) == ((3, 9, 9), 2)
    assert (data.train.order.count, data.test.order.count) == (200, 40)
    images, labels = first(data.test)
    whole = read("digits", split="test")
    chosen = np.isin(whole.labels, (1, 8))
    gray = np.pad(whole.images.numpy()[chosen][:40], ((0, 0), (0, 0), (0, 1), (0, 1))) / 255
    np.testing.assert_allclose(images, np.repeat((gray - whole.mean[0]) / whole.std[0], 3, 1), atol=1e-6)
    assert labels == [int(label == 8) for label in whole.labels[chosen][:40]]


def test_gray_test_images_are_normalised_like_those_of_training(tmp_path: Path) -> None:
    labels = np.arange(8) % 10
    for i in range(5):
        (tmp_path / f"data_batch_{i + 1}.bin").write_bytes(cifar_binary(pixels(8, seed=i), labels))
    (tmp_path / "test_batch.bin").write_bytes(cifar_binary(pixels(8, seed=9) // 2, labels))
    gray = Config(data="cifar10", data_root=str(tmp_path), input_shape=(1, 32, 32), batch=8)
    images, _ = first(datasets.build(gray, CPU, torch.float64).test)
    weights = np.array([0.299, 0.587, 0.114])
    seen = np.rint(np.einsum("nchw,c->nhw", np.concatenate([pixels(8, seed=i) for i in range(5)]), weights)) / 255
    held_out = np.einsum("nchw,c->nhw", pixels(8, seed=9) // 2, weights) / 255
    # Rounding to uint8 moves a pixel by half a level at most.
    np.testing.assert_allclose(images[:, 0], (held_out - seen.mean()) / seen.std(), atol=0.51 / 255 / seen.std())


@pytest.mark.parametrize(("part", "mirrored"), [("mnist[0-4]", False), ("fashion-mnist[0-4]", True)])
def test_parts_are_mirrored_like_the_whole(tmp_path: Path, part: str, mirrored: bool) -> None:
    for split in ("train", "test"):
        write_idx(tmp_path, split, pixels(64, 1, 28), np.arange(64, dtype=np.uint8) % 10)
    data = datasets.build(Config(data=part, data_root=str(tmp_path), batch=8), CPU, torch.float32)
    flips = torch.cat([ticket[2] for ticket in data.train.tickets(0)])
    assert flips.any().item() == mirrored


def test_names_that_are_wrong(tmp_path: Path) -> None:
    for name, message in (
        ("cifra10[0-4]", r"data='cifra10\[0-4\]': did you mean 'cifar10'"),
        ("cifar10[0-10]", "there is no class 10, give numbers from 0 to 9"),
    ):
        with pytest.raises(ValueError, match=message):
            datasets.build(Config(data=name, data_root=str(tmp_path)), CPU, torch.float32)
    with pytest.raises(ValueError, match=r"digits: shape=\(1, 7, 8\): the images are 8 x 8 and are padded, never cut"):
        datasets.build(Config(data="digits", input_shape=(1, 7, 8)), CPU, torch.float32)
