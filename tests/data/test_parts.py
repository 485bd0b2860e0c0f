"""Parts of a data set by name: against NumPy on the arrays that were written."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.data.files import cifar_binary, pixels, write_idx

from dessilbi.data import ImageSet, base, describe, get, names, read

COUNT = 40
TRAIN, TEST = pixels(COUNT, 1, 28, seed=1), pixels(COUNT, 1, 28, seed=2)
TRAIN_LABELS = np.random.default_rng(3).integers(0, 10, COUNT, dtype=np.uint8)
TEST_LABELS = np.random.default_rng(4).integers(0, 10, COUNT, dtype=np.uint8)


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write_idx(root / "mnist", "train", TRAIN, TRAIN_LABELS)
    write_idx(root / "mnist", "test", TEST, TEST_LABELS)
    return root


def expected(
    images: np.ndarray, labels: np.ndarray, classes: list[int] | None, limit: int | None
) -> tuple[np.ndarray, list[int]]:
    rows = [i for i, label in enumerate(labels) if classes is None or label in classes][:limit]
    return images[rows], [int(labels[i]) if classes is None else classes.index(labels[i]) for i in rows]


@pytest.mark.parametrize(
    ("name", "classes", "train", "test"),
    [
        ("mnist[0-4]", [0, 1, 2, 3, 4], None, None),
        ("mnist[5-9]", [5, 6, 7, 8, 9], None, None),
        ("mnist[1,3,5-7]", [1, 3, 5, 6, 7], None, None),
        ("mnist[7,2-2,0]", [0, 2, 7], None, None),
        ("mnist[:9]", None, 9, None),
        ("mnist[:11:6]", None, 11, 6),
        ("mnist[0-4][:8]", [0, 1, 2, 3, 4], 8, None),
        ("mnist[8,2-4][:5:7]", [2, 3, 4, 8], 5, 7),
    ],
)
def test_reads_what_numpy_chooses(
    mnist: Path, name: str, classes: list[int] | None, train: int | None, test: int | None
) -> None:
    for split, images, labels, limit in (("train", TRAIN, TRAIN_LABELS, train), ("test", TEST, TEST_LABELS, test)):
        found = read(name, mnist, split)
        wanted, numbers = expected(images, labels, classes, limit)
        np.testing.assert_array_equal(found.images, wanted)
        assert found.labels.tolist() == numbers
        assert found.class_names == tuple("0123456789"[c] for c in (classes or range(10)))
        assert (found.name, found.mean, found.std) == (name, (0.1307,), (0.3081,))
        # What is not chosen is not held in memory either.
        assert found.images.untyped_storage().nbytes() == wanted.size


def test_two_halves_of_cifar10_are_the_whole(tmp_path: Path) -> None:
    labels = np.arange(30) % 10
    whole = pixels(30)
    for i in range(5):
        rows = slice(6 * i, 6 * i + 6)
        (tmp_path / f"data_batch_{i + 1}.bin").write_bytes(cifar_binary(whole[rows], labels[rows]))
    low, high = read("cifar10[0-4]", tmp_path), read("cifar10[5-9]", tmp_path)
    np.testing.assert_array_equal(low.images, whole[labels < 5])
    np.testing.assert_array_equal(high.images, whole[labels >= 5])
    assert low.labels.tolist() == high.labels.tolist() == [0, 1, 2, 3, 4] * 3
    assert low.classes == ("airplane", "automobile", "bird", "cat", "deer")
    assert high.classes == ("dog", "frog", "horse", "ship", "truck")
    assert low.mean == high.mean == describe("cifar10").mean


def test_a_description_needs_no_files() -> None:
    whole, part = describe("cifar10"), describe("cifar10[1,3,5-7]")
    assert part.name == "cifar10[1,3,5-7]"
    assert part.classes == ("automobile", "cat", "dog", "frog", "horse")
    assert (part.shape, part.mean, part.std, part.files) == (whole.shape, whole.mean, whole.std, whole.files)
    assert part.counts == {"train": 25_000, "test": 5_000}
    assert describe("mnist[:5000]").counts == {"train": 5000, "test": 10_000}
    assert describe("mnist[:4000:1000]").counts == {"train": 4000, "test": 1000}
    # 5923 + 6742 zeros and ones are published, and 980 + 1135.
    assert describe("mnist[0-1]").counts == {"train": 12_665, "test": 2115}
    assert describe("mnist[0-1][:2000]").counts == {"train": 2000, "test": 2115}
    assert base("cifar10[0-4][:10]") == base("cifar10") == "cifar10"
    assert not any("[" in name for name in names())


@pytest.mark.parametrize("name", ["digits", "digits[0-4]", "digits[1,8][:30:7]"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_digits_has_as_many_as_described(name: str, split: str) -> None:
    pytest.importorskip("sklearn")
    found, entry = read(name, split=split), describe(name)
    assert len(found) == entry.counts[split]
    assert found.class_names == entry.classes
    if not entry.limits:
        assert torch.bincount(found.labels).tolist() == list(entry.per_class[split])


TOTALS = {
    "mnist": (60_000, 10_000),
    "fashion-mnist": (60_000, 10_000),
    "cifar10": (50_000, 10_000),
    "cifar100": (50_000, 10_000),
    "svhn": (73_257, 26_032),
    "digits": (1_442, 355),
}


@pytest.mark.parametrize("name", names())
def test_the_classes_add_up_to_the_published_numbers(name: str) -> None:
    entry = describe(name)
    assert tuple(entry.counts.values()) == TOTALS[name]
    assert all(len(each) == len(entry.classes) for each in entry.per_class.values())


@pytest.mark.network
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_the_real_sets_have_as_many_of_each_class(tmp_path: Path, name: str) -> None:
    get(name, tmp_path)
    for split, each in describe(name).per_class.items():
        assert torch.bincount(read(name, tmp_path, split).labels).tolist() == list(each)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifra10[0-4]", "unknown data set 'cifra10[0-4]': did you mean 'cifar10[0-4]'?"),
        ("qqq[0-4]", "choose one of mnist, fashion-mnist"),
        ("imagenet[0-4]", "ImageFolder"),
        ("cifar10[0-12]", "'cifar10[0-12]', [0-12]: there is no class 10, give numbers from 0 to 9"),
        ("cifar10[0-99999999999]", "there is no class 10"),
        ("cifar10[3,88]", "there is no class 88"),
        ("cifar10[4]", "[4]: a choice of 1 class, give at least 2"),
        ("cifar10[1,2,1]", "[1,2,1]: class 1 is there 2 times, name each once"),
        ("cifar10[0-3,2]", "class 2 is there 2 times"),
        ("cifar10[4-0]", "[4-0]: 4-0 runs backwards, write 0-4"),
        ("mnist[:0]", "[:0]: 0 images of 'train', give a number from 1 to 60000"),
        ("mnist[:60001]", "60001 images of 'train', give a number from 1 to 60000"),
        ("mnist[:5:0]", "0 images of 'test', give a number from 1 to 10000"),
        ("mnist[0-1][:12666]", "12666 images of 'train', give a number from 1 to 12665"),
        *((f"mnist{rest}", f"{last}: not understood, give classes such as [0-4]") for rest, last in (
            ("[]", "[]"), ("[a]", "[a]"), ("[-1]", "[-1]"), ("[1,]", "[1,]"), ("[0 - 4]", "[0 - 4]"), ("[:]", "[:]"),
            ("[::5]", "[::5]"), ("[:5:]", "[:5:]"), ("[:-5]", "[:-5]"), ("[٣-٥]", "[٣-٥]"), ("[0-4][5-9]", "[5-9]"),
            ("[:5][0-4]", "[0-4]"), ("[:5][:4]", "[:4]"), ("[0-4][:5][:4]", "[:4]"),
        )),
        *((f"mnist{rest}", f"data set 'mnist{rest}': every bracket that opens closes") for rest in (
            "[0-4", "[0-4]x", "[0-4]]", "[[0-4]]", "[0-4] ", "[0-4]\n",
        )),
    ],
)  # fmt: skip
def test_what_is_no_part_is_refused(name: str, message: str) -> None:
    if "\n" in name:
        message = "every bracket that opens closes"
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        describe(name)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=re.escape(message)):
        read(name)


def test_files_of_a_smaller_set_are_named(mnist: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^mnist\[:41\]: count=41: there are 40 images"):
        read("mnist[:41]", mnist)
    write_idx(tmp_path, "train", TRAIN[:3], np.array([1, 2, 2], np.uint8))
    assert read("mnist[0-2]", tmp_path).labels.tolist() == [1, 2, 2]
    with pytest.raises(ValueError, match=r"^mnist\[8-9\]: classes=\[8, 9\]: none of the 3 images"):
        read("mnist[8-9]", tmp_path)
    with pytest.raises(FileNotFoundError, match="run `dessilbi data get mnist --root"):
        read("mnist[0-4]", tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"split='val': mnist\[0-4\] has 'train' and 'test'"):
        read("mnist[0-4]", mnist, "val")


def test_only_and_first_of_any_set() -> None:
    counted = ImageSet("x", torch.from_numpy(pixels(6, 3, 5)), torch.tensor([0, 1, 2, 3, 3, 0]), 4)
    part = counted.only([3, 0])
    np.testing.assert_array_equal(part.images, counted.images[[0, 3, 4, 5]])
    assert (part.labels.tolist(), part.classes) == ([0, 1, 1, 0], 2)
    assert (part.mean, part.std) == (counted.mean, counted.std)
    assert counted.first(6).labels.tolist() == counted.labels.tolist()
    for classes, message in (([1], "a choice of 1 class"), ([], "0 classes"), ([0, 4], "no class 4"), ([-1, 0], "-1")):
        with pytest.raises(ValueError, match=re.escape(f"x: classes={classes}: ") + f".*{message}"):
            counted.only(classes)
    for count in (0, -1, 7):
        with pytest.raises(ValueError, match=f"x: count={count}: there are 6 images"):
            counted.first(count)


def test_of_a_part_the_whole_is_got(tmp_path: Path) -> None:
    assert get("digits[0-4]", tmp_path).name == "digits"
    with pytest.raises(ValueError, match="there is no class 10"):
        get("mnist[0-10]", tmp_path)
    assert not list(tmp_path.iterdir())
