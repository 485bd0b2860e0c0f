"""Parts of a data set, by name: some of its classes, the first of its images.

    cifar10[0-4]         the images of classes 0 to 4
    cifar10[1,3,5-7]     of classes 1, 3, 5, 6 and 7
    mnist[:5000]         the first 5000 images of the training split, the whole test split
    mnist[:4000:1000]    the first 4000 of the training split, the first 1000 of the test split
    mnist[0-4][:2000]    classes 0 to 4, and the first 2000 of their images

The chosen classes are numbered 0, 1, ... in the order in which they were.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

_NAME = re.compile(r"[^\[\]]*((?:\[[^\[\]]*\])*)")
_CLASSES = re.compile(r"[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*")
_LIMIT = re.compile(r":([0-9]+)(?::([0-9]+))?")
_SPLITS = ("train", "test")


@dataclass(frozen=True)
class Part:
    """What a name chooses of the whole set; the whole of it by default."""

    classes: tuple[int, ...] | None = None
    """Numbers in the whole set, ascending."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """How many images of a split, where not all."""

    def per_class(self, whole: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        """Images of each class before any limit, given those of the ``whole`` set."""
        chosen = self.classes
        return {split: tuple(n) if chosen is None else tuple(n[c] for c in chosen) for split, n in whole.items()}


def base(name: str) -> str:
    """The whole set's name: ``base("cifar10[0-4]")`` is ``"cifar10"``."""
    return name.partition("[")[0]


def parse(name: str, whole: Mapping[str, Sequence[int]]) -> Part:
    """What ``name`` chooses of a set that has, for each split, these numbers of images of its classes."""
    found = _NAME.fullmatch(name)
    if not found:
        raise ValueError(f"data set {name!r}: every bracket that opens closes, and nothing follows the last")
    brackets = re.findall(r"\[([^\[\]]*)\]", found[1])
    classes: tuple[int, ...] | None = None
    if brackets and _CLASSES.fullmatch(brackets[0]):
        text = brackets.pop(0)
        classes = sorted_classes(_numbers(name, text, len(whole["train"])), len(whole["train"]), _where(name, text))
    part = Part(classes)
    if brackets and (limit := _LIMIT.fullmatch(brackets[0])):
        text = brackets.pop(0)
        limits = {split: int(value) for split, value in zip(_SPLITS, limit.groups(), strict=True) if value is not None}
        for split, value in limits.items():
            there = sum(part.per_class(whole)[split])
            if not 1 <= value <= there:
                raise _wrong(name, text, f"{value} images of {split!r}, give a number from 1 to {there}")
        part = Part(classes, limits)
    if brackets:
        form = "classes such as [0-4] or [1,3,5-7], then a limit such as [:5000] or [:4000:1000], each at most once"
        raise _wrong(name, brackets[0], f"not understood, give {form}")
    return part


def sorted_classes(classes: Iterable[int], count: int, where: str) -> tuple[int, ...]:
    """Class numbers in ascending order, if they are at least two different ones of ``count``; otherwise a
    ``ValueError`` that begins with ``where``."""
    chosen = sorted(classes)
    for number in chosen:
        if not 0 <= number < count:
            raise ValueError(f"{where}: there is no class {number}, give numbers from 0 to {count - 1}")
        if chosen.count(number) > 1:
            raise ValueError(f"{where}: class {number} is there {chosen.count(number)} times, name each once")
    if len(chosen) < 2:
        raise ValueError(f"{where}: a choice of {len(chosen)} class{'es' * (not chosen)}, give at least 2")
    return tuple(chosen)


def _numbers(name: str, text: str, count: int) -> list[int]:
    numbers: list[int] = []
    for item in text.split(","):
        first, _, last = item.partition("-")
        low, high = int(first), int(last or first)
        if low > high:
            raise _wrong(name, text, f"{item} runs backwards, write {high}-{low}")
        # One number outside is enough to be refused: 0-999999999 is not written out.
        numbers.extend(range(low, min(high, max(low, count)) + 1))
    return numbers


def _where(name: str, text: str) -> str:
    return f"data set {name!r}, [{text}]"


def _wrong(name: str, text: str, what: str) -> ValueError:
    return ValueError(f"{_where(name, text)}: {what}")
