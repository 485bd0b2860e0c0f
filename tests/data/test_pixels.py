import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data.files import pixels

from dessilbi.data import Normalise, augment
from dessilbi.data.order import generator
from dessilbi.data.pixels import random_resized_crop, resized_centre


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 7), st.integers(1, 7)),
    padding=st.integers(0, 4),
    seed=st.integers(0, 1000),
)
def test_augment_is_pad_crop_mirror(shape: tuple[int, int, int, int], padding: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, shape, dtype=np.uint8)
    offsets = rng.integers(0, 2 * padding + 1, (shape[0], 2))
    flips = rng.random(shape[0]) < 0.5
    found = augment(*map(torch.from_numpy, (images, offsets, flips)), padding=padding)
    height, width = shape[2:]
    for image, (top, left), flip, result in zip(images, offsets, flips, found.numpy(), strict=True):
        padded = np.zeros((shape[1], height + 2 * padding, width + 2 * padding), np.uint8)
        padded[:, padding : padding + height, padding : padding + width] = image
        crop = padded[:, top : top + height, left : left + width]
        np.testing.assert_array_equal(result, crop[:, :, ::-1] if flip else crop)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)]
)
def test_normalise(dtype: torch.dtype, error: float, channels_last: bool) -> None:
    images, mean, std = pixels(4, 3, 5), (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    found = Normalise(mean, std, dtype=dtype, channels_last=channels_last)(torch.from_numpy(images))
    expected = (images / 255 - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    assert found.dtype == dtype
    assert found.is_contiguous(memory_format=torch.channels_last) == channels_last
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=error, atol=error)


def test_normalise_wants_a_float_type() -> None:
    with pytest.raises(ValueError, match=r"dtype=torch.uint8"):
        Normalise((0.5,), (0.5,), dtype=torch.uint8)


@pytest.mark.parametrize(("height", "width"), [(300, 400), (257, 256), (100, 90), (500, 60)])
def test_evaluation_crop_agrees_with_pillow(height: int, width: int) -> None:
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    found = resized_centre(torch.from_numpy(noise).permute(2, 0, 1), 224).permute(1, 2, 0).numpy()
    factor = 256 / min(height, width)
    resized = Image.fromarray(noise).resize((round(width * factor), round(height * factor)), Image.Resampling.BILINEAR)
    left, top = (resized.width - 224) // 2, (resized.height - 224) // 2
    expected = np.asarray(resized.crop((left, top, left + 224, top + 224)))
    assert np.abs(found.astype(int) - expected).max() <= 2


def test_training_crops_are_inside_with_the_right_areas_and_ratios() -> None:
    height, width = 120, 200
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    image = torch.stack((rows, columns, torch.zeros_like(rows))).to(torch.uint8)  # pixels tell where they come from
    areas = []
    for seed in range(300):
        crop = random_resized_crop(image, 32, generator(seed)).double()
        assert crop.shape == (3, 32, 32)
        assert torch.equal(crop, random_resized_crop(image, 32, generator(seed)).double())
        # From the distance of the outer pixels' centres to the extent of the box.
        h, w = ((crop[i].max() - crop[i].min()).item() * 32 / 31 for i in (0, 1))
        areas.append(h * w / (height * width))
        assert 0.7 < w / h < 1.43
    assert 0.05 < min(areas) < 0.15
    assert 0.7 < max(areas) <= 1.05


@pytest.mark.parametrize(("height", "width"), [(3, 300), (300, 3), (1, 1)])
def test_training_crop_of_extreme_images(height: int, width: int) -> None:
    image = torch.full((3, height, width), 7, dtype=torch.uint8)
    assert (random_resized_crop(image, 8, generator(0)) == 7).all()
