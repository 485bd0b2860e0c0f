"""The subset of MNIST that lies beside the tests."""

from pathlib import Path

import numpy as np
import pytest

from dessilbi.data import get, read

HERE = Path(__file__).parent / "mnist-5000"
# Of the first images of the published set, as every tutorial prints them.
FIRST = {"train": [5, 0, 4, 1, 9, 2, 1, 3, 1, 4], "test": [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]}


@pytest.mark.parametrize(("split", "count"), [("train", 4000), ("test", 1000)])
def test_it_is_read_as_mnist(split: str, count: int) -> None:
    found = read("mnist", HERE, split)
    assert (len(found), found.shape, found.num_classes) == (count, (1, 28, 28), 10)
    assert found.labels[:10].tolist() == FIRST[split]
    assert set(found.labels.tolist()) == set(range(10))
    scaled = found.images.numpy() / np.float64(255)
    assert scaled.mean() == pytest.approx(found.mean[0], abs=0.01)
    assert scaled.std() == pytest.approx(found.std[0], abs=0.01)


def test_the_files_are_small_and_say_nothing_of_where_they_were_made() -> None:
    files = sorted(HERE.glob("*.gz"))
    assert len(files) == 4
    assert sum(file.stat().st_size for file in files) < 850_000
    for file in files:  # gzip's flags (no name), then its time
        assert file.read_bytes()[3:8] == bytes(5)


@pytest.mark.network
def test_it_is_the_beginning_of_the_whole(tmp_path: Path) -> None:
    get("mnist", tmp_path)
    for split, count in (("train", 4000), ("test", 1000)):
        part, whole = read("mnist", HERE, split), read("mnist", tmp_path, split)
        np.testing.assert_array_equal(part.images, whole.images[:count])
        np.testing.assert_array_equal(part.labels, whole.labels[:count])
