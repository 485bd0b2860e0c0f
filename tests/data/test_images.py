import numpy as np
import pytest
import torch
from tests.data.files import pixels

from dessilbi.data import ImageSet

IMAGES = torch.from_numpy(pixels(6, 3, 5))
LABELS = torch.tensor([0, 1, 2, 2, 1, 0])


def test_statistics_are_computed_from_the_images() -> None:
    images = pixels(5000, 2, 3)  # more than one block
    found = ImageSet("x", torch.from_numpy(images), torch.zeros(5000, dtype=torch.int64), 1)
    scaled = images.astype(np.float64) / 255
    np.testing.assert_allclose(found.mean, scaled.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(found.std, scaled.std((0, 2, 3)), rtol=1e-9)


def test_a_constant_channel_can_be_normalised() -> None:
    found = ImageSet("x", torch.full((2, 1, 3, 3), 51, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), 1)
    assert found.mean == pytest.approx((0.2,))
    assert found.std == (1.0,)


def test_classes_are_names_or_a_count() -> None:
    named = ImageSet("x", IMAGES, LABELS, ["a", "b", "c"])
    counted = ImageSet("x", IMAGES, LABELS, 3)
    assert (named.num_classes, named.class_names) == (3, ("a", "b", "c"))
    assert (counted.num_classes, counted.class_names) == (3, ("0", "1", "2"))
    assert len(named) == 6
    assert named.shape == (3, 5, 5)
    assert repr(named) == "ImageSet('x', 6 images of 3x5x5, 3 classes)"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": IMAGES.float()}, "images must be uint8"),
        ({"images": IMAGES[0]}, "images must be uint8 of shape"),
        ({"labels": LABELS.int()}, "labels must be int64"),
        ({"labels": LABELS[:5]}, r"labels must be int64 of shape \(6,\)"),
        ({"labels": LABELS + 1}, r"x: 2 labels outside 0\.\.2 \(3\)"),
        ({"labels": LABELS - 1}, r"2 labels outside 0\.\.2 \(-1\)"),
        ({"images": IMAGES[:0], "labels": LABELS[:0]}, "no images"),
        ({"mean": (0.5,), "std": (0.5,)}, r"3 numbers.*mean=\(0.5,\)"),
        ({"mean": (0.5,) * 3}, r"std=\(\)"),
        ({"mean": (0.5,) * 3, "std": (0.5, 0.5, 0.0)}, "std above 0"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    given = {"name": "x", "images": IMAGES, "labels": LABELS, "classes": 3} | change
    with pytest.raises(ValueError, match=message):
        ImageSet(**given)  # type: ignore[arg-type]
