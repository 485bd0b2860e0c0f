"""How much every tensor gets: against numbers worked out by hand, and the definitions in NumPy."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from dessilbi.baselines import ALLOCATIONS, allocate

A, B = torch.tensor([[1.0, 4.0], [3.0, 2.0]]), torch.tensor([5.0, 6.0, 7.0, 1.0, 0.0, 4.0])


def kept(masks: dict[str, Tensor]) -> dict[str, int]:
    return {name: int(mask.sum()) for name, mask in masks.items()}


def test_global_takes_the_largest_and_of_equals_the_first() -> None:
    four = allocate({"a": A, "b": B}, 0.4)
    assert four["a"].tolist() == [[False, True], [False, False]]
    assert four["b"].tolist() == [True, True, True, False, False, False]  # its 4 comes after the other
    five = allocate({"a": A, "b": B}, 0.5)
    assert five["b"].tolist() == [True, True, True, False, False, True]
    assert torch.equal(five["a"], four["a"])


def test_ties_within_a_tensor_go_by_position() -> None:
    assert allocate({"a": torch.tensor([2.0, 1.0, 2.0, 1.0, 1.0])}, 0.8)["a"].tolist() == [
        True,
        True,
        True,
        True,
        False,
    ]
    assert allocate({"a": torch.zeros(5)}, 0.4)["a"].tolist() == [True, True, False, False, False]


def test_global_may_empty_a_tensor() -> None:
    assert kept(allocate({"a": A / 100, "b": B}, 0.3)) == {"a": 0, "b": 3}
    assert not any(mask.any() for mask in allocate({"a": A}, 0.0).values())
    assert all(mask.all() for mask in allocate({"a": A}, 1.0).values())


def test_uniform() -> None:
    half = allocate({"a": A, "b": B}, 0.5, "uniform")
    assert half["a"].tolist() == [[False, True], [True, False]]
    assert half["b"].tolist() == [True, True, True, False, False, False]
    # 7 of 10: 2.8 and 4.2, hence 3 and 4. 2 of 10: 0.8 and 1.2, hence 1 and 1.
    assert kept(allocate({"a": A, "b": B}, 0.7, "uniform")) == {"a": 3, "b": 4}
    assert kept(allocate({"a": A, "b": B}, 0.2, "uniform")) == {"a": 1, "b": 1}


def test_erk_by_hand() -> None:
    # Sums of the shapes: 4+2+3+3 = 12 and 10+6 = 16. A quarter of 72+60 is 33: 33·12/28 = 14.14 and 18.86.
    scores = {"conv": torch.rand(4, 2, 3, 3), "linear": torch.rand(10, 6)}
    assert kept(allocate(scores, 0.25, "erk")) == {"conv": 14, "linear": 19}


def test_erk_never_exceeds_a_layer() -> None:
    # Half of 1006 is 503. 503·5/115 = 21.9 of the 6 in the small one: it is kept whole, and 497 are left.
    scores = {"wide": torch.rand(10, 100), "small": torch.rand(2, 3)}
    assert kept(allocate(scores, 0.5, "erk")) == {"wide": 497, "small": 6}


@pytest.mark.parametrize("keep", [0.02, 0.3, 0.9])
def test_erk_is_its_definition(keep: float) -> None:
    shapes = [(6, 1, 5, 5), (16, 6, 5, 5), (120, 400), (84, 120), (10, 84)]
    sizes = np.array([math.prod(s) for s in shapes])
    density = np.array([sum(s) / math.prod(s) for s in shapes])
    count = int(keep * sizes.sum())
    low, high = 0.0, 1e6  # Σ n·min(1, ε·density) grows with ε
    for _ in range(200):
        mid = (low + high) / 2
        low, high = (mid, high) if (sizes * np.minimum(1, mid * density)).sum() < count else (low, mid)
    expected = sizes * np.minimum(1, low * density)
    found = kept(allocate({str(i): torch.rand(s) for i, s in enumerate(shapes)}, keep, "erk"))
    assert sum(found.values()) == count
    assert np.abs(np.array(list(found.values())) - expected).max() < 1


def test_erk_of_filters_goes_by_the_shapes_of_the_weights() -> None:
    # One score a filter: 4 and 12 of them. Filters of 4·12/72 to 12·17/60: of 8 filters 0.667/4.067·8 = 1.31, 6.69.
    scores, shapes = {"a": torch.rand(4), "b": torch.rand(12)}, {"a": (4, 2, 3, 3), "b": (12, 5)}
    assert kept(allocate(scores, 0.5, "erk", shapes)) == {"a": 1, "b": 7}
    with pytest.raises(ValueError, match="needs the shape of the weight a"):
        allocate(scores, 0.5, "erk")


def test_lamp_by_hand() -> None:
    # Squares from the top: 9, 4, 1 score 1, 4/13, 1/14; 400, 100 score 1, 1/5.
    scores = {"a": torch.tensor([1.0, 2.0, 3.0]), "b": torch.tensor([10.0, 20.0])}
    three = allocate(scores, 0.6, "lamp")
    assert three["a"].tolist() == [False, True, True]
    assert three["b"].tolist() == [False, True]
    assert kept(allocate(scores, 0.8, "lamp")) == {"a": 2, "b": 2}
    assert kept(allocate(scores, 0.6)) == {"a": 1, "b": 2}  # unlike plain magnitudes


@pytest.mark.parametrize("keep", [0.05, 0.5, 0.95])
def test_lamp_is_its_definition(keep: float) -> None:
    rng = np.random.default_rng(0)
    weights = [np.abs(rng.standard_normal(n)) * s for n, s in ((40, 1.0), (100, 1e-3), (60, 50.0))]
    scores = [np.array([u**2 / (w[w >= u] ** 2).sum() for u in w]) for w in weights]
    ranked = np.sort(np.concatenate(scores))[::-1]
    threshold = ranked[int(keep * ranked.size) - 1]
    found = allocate({str(i): torch.from_numpy(w) for i, w in enumerate(weights)}, keep, "lamp")
    for mask, score in zip(found.values(), scores, strict=True):
        assert (mask.numpy() == (score >= threshold)).all()


def test_lamp_keeps_one_of_a_tensor_of_zeros() -> None:
    assert kept(allocate({"a": torch.zeros(4), "b": torch.tensor([1.0, 2.0])}, 0.5, "lamp")) == {"a": 1, "b": 2}


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_what_is_out_never_comes_back(allocation: str) -> None:
    a = torch.full((4, 3), -math.inf)
    a[2, 1] = a[0, 0] = 1e-3
    b = torch.rand(5, 3) + 1
    masks = allocate({"a": a, "b": b}, 16 / 27, allocation)
    assert kept(masks) == ({"a": 1, "b": 15} if allocation == "global" else {"a": 2, "b": 14})
    assert not masks["a"][a == -math.inf].any()


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_the_count_is_exact(allocation: str) -> None:
    scores = {str(i): torch.rand(shape) for i, shape in enumerate([(7, 3), (1, 2), (11, 5, 3, 3), (4, 4)])}
    total = sum(x.numel() for x in scores.values())
    for keep in (0.013, 0.1, 1 / 3, 0.8, 1.0):
        assert sum(kept(allocate(scores, keep, allocation)).values()) == int(keep * total + 1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"keep": 1.5}, "keep must be a fraction from 0 to 1, got 1.5"),
        ({"keep": math.nan}, "keep must be a fraction from 0 to 1, got nan"),
        ({"allocation": "local"}, "allocation must be one of global, uniform, erk, lamp, got 'local'"),
        ({"scores": {}}, "scores is empty"),
        ({"scores": {"a": torch.tensor([1.0, math.nan])}}, "the scores of a contain NaN"),
        ({"keep": 0.1, "allocation": "uniform"}, "keeps 1 entries, fewer than there are tensors"),
        ({"scores": {"a": torch.tensor([1.0, -math.inf])}, "keep": 1.0}, "only 1 are not out already"),
    ],
)
def test_bad_arguments(change: dict, words: str) -> None:
    arguments = {"scores": {"a": A, "b": B}, "keep": 0.5, "allocation": "global", **change}
    with pytest.raises(ValueError, match=words):
        allocate(**arguments)
    with pytest.raises(TypeError, match="keep must be a fraction"):
        allocate({"a": A}, "0.5")  # type: ignore[arg-type]
