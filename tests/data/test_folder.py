import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.data.files import pixels
from torch import Tensor

from dessilbi.data import ImageFolder, Stream

Image = pytest.importorskip("PIL.Image")

CLASSES = ("ant", "bee", "cat")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three classes of 5, 4 and 4 noise images in two splits; one in a sub-folder, one grey, one with a palette."""
    for split in ("train", "val"):
        for number, name in enumerate(CLASSES):
            (tmp_path / split / name / "more").mkdir(parents=True)
            for i, noise in enumerate(pixels(4, 3, 24, seed=number)):
                image = Image.fromarray(noise.transpose(1, 2, 0))
                image.save(tmp_path / split / name / f"{i}.{'PNG' if i else 'jpeg'}")
        image.save(tmp_path / split / "ant" / "more" / "last.png")
        image.convert("L").save(tmp_path / split / "bee" / "1.PNG")
        image.convert("P").save(tmp_path / split / "bee" / "2.PNG")
        (tmp_path / split / "cat" / "notes.txt").write_text("not an image")
        (tmp_path / split / "list.txt").write_text("not a class")
    return tmp_path


def same(a: list[tuple[Tensor, Tensor]], b: list[tuple[Tensor, Tensor]]) -> bool:
    return all(torch.equal(x[0], y[0]) and torch.equal(x[1], y[1]) for x, y in zip(a, b, strict=True))


def epoch(stream: Stream, number: int = 0, start: int = 0) -> list[tuple[Tensor, Tensor]]:
    stream.set_epoch(number)
    return list(stream.iterate(start))


def test_classes_are_folders_and_items_are_squares(root: Path) -> None:
    folder = ImageFolder(root, "train", size=16)
    assert (folder.classes, folder.num_classes, folder.shape) == (CLASSES, 3, (3, 16, 16))
    assert folder.labels.tolist() == [0] * 5 + [1] * 4 + [2] * 4
    for i in range(len(folder)):
        image, label = folder[i]
        assert (image.dtype, image.shape, label) == (torch.uint8, (3, 16, 16), folder.labels[i])


def test_evaluation_takes_the_centre(root: Path) -> None:
    folder = ImageFolder(root, "val", size=21)  # 24 = 21 * 256 / 224: nothing to resize
    expected = pixels(4, 3, 24, seed=2)[3][:, 1:22, 1:22]
    np.testing.assert_array_equal(folder[12][0], expected)


def test_crops_follow_from_seed_epoch_and_index(root: Path) -> None:
    folder = ImageFolder(root, "train", size=16)
    first = folder[3][0]
    assert torch.equal(first, folder[3][0])
    assert not torch.equal(first, ImageFolder(root, "train", size=16, seed=1)[3][0])
    folder.set_epoch(1)
    assert not torch.equal(first, folder[3][0])
    folder.set_epoch(0)
    assert torch.equal(first, folder[3][0])
    assert torch.equal(
        ImageFolder(root, "train", size=21, augment=False)[12][0], ImageFolder(root, "val", size=21)[12][0]
    )


def test_half_of_the_crops_are_mirrored(root: Path) -> None:
    ramp = np.broadcast_to(np.arange(0, 240, 10, dtype=np.uint8), (24, 24))
    Image.fromarray(ramp).save(root / "train" / "cat" / "3.PNG")
    folder = ImageFolder(root, "train", size=8)
    mirrored = 0
    for number in range(200):
        folder.set_epoch(number)
        image = folder[12][0].int()
        mirrored += int(image[0, 0, 0] > image[0, 0, -1])
    assert 70 < mirrored < 130


def test_stream_delivers_the_normalised_items(root: Path) -> None:
    folder = ImageFolder(root, "val", size=16)
    stream = Stream(folder, 4, workers=0, dtype=torch.float64)
    found = epoch(stream)
    assert len(stream) == len(found) == 4
    images, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
    assert labels.tolist() == folder.labels.tolist()
    raw = np.stack([folder[i][0] for i in range(13)])
    expected = (raw / 255 - np.reshape(folder.mean, (3, 1, 1))) / np.reshape(folder.std, (3, 1, 1))
    np.testing.assert_allclose(images, expected, atol=1e-12)


def test_stream_is_the_same_from_any_batch_and_over_ranks(root: Path) -> None:
    folder = ImageFolder(root, "train", size=8, seed=5)
    single = Stream(folder, 4, workers=0, shuffle=True)
    whole = epoch(single, 3)
    assert not same(whole, epoch(single, 2))
    for start in range(5):
        assert same(whole[start:], epoch(single, 3, start))
    with pytest.raises(ValueError, match="start=5"):
        single.iterate(5)
    ranks = [epoch(Stream(folder, 4, workers=0, shuffle=True, rank=rank, world_size=2), 3) for rank in (0, 1)]
    joined = [tuple(torch.cat(parts) for parts in zip(*pair, strict=True)) for pair in zip(*ranks, strict=True)]
    assert same(whole, joined)  # type: ignore[arg-type]


def test_stream_is_the_same_with_workers_and_leaves_the_global_generator_alone(root: Path) -> None:
    alone = Stream(ImageFolder(root, "train", size=8), 4, workers=0, shuffle=True)
    shared = Stream(ImageFolder(root, "train", size=8), 4, workers=2, shuffle=True)
    state = torch.get_rng_state()
    assert same(epoch(alone, 0), epoch(shared, 0))
    shared.set_epoch(7)
    next(iter(shared))  # given up after one batch, with more under way
    assert same(epoch(alone, 1), epoch(shared, 1))  # the same workers, told of the new epoch
    assert same(epoch(alone, 1, 2), epoch(shared, 1, 2))
    assert torch.equal(state, torch.get_rng_state())


def test_broken_images_are_named(root: Path) -> None:
    path = root / "train" / "ant" / "1.PNG"
    whole = path.read_bytes()
    for content in (b"", b"nonsense", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"1.PNG: not a readable image .*: replace or remove it") as caught:
            ImageFolder(root, "train")[1]
        assert str(caught.value).startswith(str(path))


def test_wrong_folders_say_what_is_wrong(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"images are expected in .*CLASS"):
        ImageFolder(root / "nowhere")
    with pytest.raises(FileNotFoundError, match="test: no such folder"):
        ImageFolder(root, "test")
    (root / "flat").mkdir()
    with pytest.raises(ValueError, match="flat: no class folders"):
        ImageFolder(root, "flat")
    with pytest.raises(ValueError, match="size=0"):
        ImageFolder(root, size=0)
    (root / "val" / "dog").mkdir()
    with pytest.raises(ValueError, match="val: 4 classes where the training split has 3, only in one of them: dog"):
        ImageFolder(root, "val")
    (root / "train" / "dog").mkdir()
    with pytest.raises(ValueError, match="no images for the class dog"):
        ImageFolder(root, "train")
    monkeypatch.setitem(sys.modules, "PIL", None)
    (root / "train" / "dog").rmdir()
    with pytest.raises(ModuleNotFoundError, match="pip install pillow"):
        ImageFolder(root, "train")[0]
