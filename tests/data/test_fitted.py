"""Images brought to another shape: against NumPy."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.data.files import pixels

from dessilbi.data import ImageSet


def a_set(count: int = 6, channels: int = 3, side: int = 5, seed: int = 0) -> ImageSet:
    return ImageSet("x", torch.from_numpy(pixels(count, channels, side, seed)), torch.arange(count) % 3, 3)


def luma(images: np.ndarray) -> np.ndarray:
    weighted = sum(weight * images[:, i].astype(np.int64) for i, weight in enumerate((299, 587, 114)))
    return np.floor_divide(2 * weighted + 1000, 2000)[:, None]  # half up


@pytest.mark.parametrize(
    ("shape", "widths"),
    [
        ((3, 7, 9), ((1, 1), (2, 2))),
        ((3, 6, 8), ((0, 1), (1, 2))),
        ((3, 5, 6), ((0, 0), (0, 1))),
        ((3, 5, 5), ((0, 0), (0, 0))),
    ],
)
def test_zeros_all_round(shape: tuple[int, int, int], widths: tuple[tuple[int, int], ...]) -> None:
    images = a_set()
    found = images.fitted(shape)
    assert found.shape == shape
    assert found.images.dtype == torch.uint8
    np.testing.assert_array_equal(found.images, np.pad(images.images.numpy(), ((0, 0), (0, 0), *widths)))
    assert (found.mean, found.std, found.labels.tolist()) == (images.mean, images.std, images.labels.tolist())


def test_gray_is_repeated() -> None:
    images = a_set(channels=1)
    found = images.fitted((3, 6, 6))
    expected = np.pad(np.repeat(images.images.numpy(), 3, axis=1), ((0, 0), (0, 0), (0, 1), (0, 1)))
    np.testing.assert_array_equal(found.images, expected)
    assert found.mean == images.mean * 3
    assert found.std == images.std * 3


def test_colours_become_luma_with_the_statistics_of_training() -> None:
    train, test = a_set(5000, seed=1), a_set(20, seed=2)  # more than one block
    found = train.fitted((1, 7, 7))
    gray = luma(train.images.numpy())
    np.testing.assert_array_equal(found.images[:, :, 1:-1, 1:-1], gray)
    assert found.images.dtype == torch.uint8
    assert found.images.sum().item() == gray.sum()
    # Of the images, not of the zeros around them.
    np.testing.assert_allclose(found.mean, [(gray / 255).mean()], rtol=1e-12)
    np.testing.assert_allclose(found.std, [(gray / 255).std()], rtol=1e-9)
    held_out = test.fitted((1, 7, 7), found.mean, found.std)
    assert (held_out.mean, held_out.std) == (found.mean, found.std)
    np.testing.assert_array_equal(held_out.images[:, :, 1:-1, 1:-1], luma(test.images.numpy()))


def test_luma_by_hand() -> None:
    colours = torch.tensor(
        [[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255], [0, 0, 0], [0, 0, 250], [1, 2, 3]], dtype=torch.uint8
    )
    images = replace(a_set(7, side=1), images=colours[:, :, None, None])
    # 76.245, 149.685, 29.07, 255, 0, 28.5 (half up), 1.815
    assert images.fitted((1, 1, 1)).images.flatten().tolist() == [76, 150, 29, 255, 0, 29, 2]


@pytest.mark.parametrize(
    ("channels", "shape", "message"),
    [
        (3, (3, 4, 5), r"shape=\(3, 4, 5\): the images are 5 x 5 and are padded, never cut"),
        (1, (3, 6, 4), "give at least that height and width"),
        (3, (2, 5, 5), r"shape=\(2, 5, 5\): the images have 3 channels, and only 1 becomes 3, or 3 become 1"),
        (1, (0, 5, 5), "the images have 1 channels"),
        (4, (3, 5, 5), "the images have 4 channels"),
        (3, (5, 5), r"shape=\(5, 5\): give channels, height and width"),
    ],
)
def test_what_cannot_be_fitted_says_why(channels: int, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        a_set(channels=channels).fitted(shape)
