import numpy as np
import pytest
import torch

from dessilbi.data import describe, read
from dessilbi.data.images import statistics

load_digits = pytest.importorskip("sklearn.datasets").load_digits


def test_the_split_is_a_stratified_partition() -> None:
    train, test = read("digits"), read("digits", split="test")
    assert (len(train), len(test)) == (1442, 355) == tuple(describe("digits").counts.values())
    for label in range(10):
        inside, outside = ((part.labels == label).sum().item() for part in (train, test))
        assert outside == (inside + outside) // 5

    def keys(images: torch.Tensor) -> list[bytes]:
        return sorted(image.numpy().tobytes() for image in images)

    values = np.rint(load_digits().images * 255 / 16).astype(np.uint8)
    assert keys(torch.cat((train.images, test.images))) == keys(torch.from_numpy(values))
    assert train.images.max() == 255


def test_every_fifth_image_of_a_class_is_for_testing() -> None:
    test = read("digits", split="test")
    source = load_digits()
    zeros = source.images[source.target == 0][4::5]
    np.testing.assert_array_equal(test.images[test.labels == 0][:, 0], np.rint(zeros * 255 / 16))


def test_the_statistics_are_those_of_the_training_part() -> None:
    train = read("digits")
    mean, std = statistics(train.images)
    assert mean == pytest.approx(train.mean, abs=1e-4)
    assert std == pytest.approx(train.std, abs=1e-4)
    assert read("digits", split="test").mean == train.mean
