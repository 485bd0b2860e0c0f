"""Magnitude pruning at once, in rounds and gradually."""

import pytest
import torch
from torch import nn

from dessilbi import Selection
from dessilbi.baselines import Gradual, iterative, ladder, magnitude, rounds_to


def row(*weights: float) -> nn.Linear:
    layer = nn.Linear(len(weights), 1, bias=False)
    layer.weight.data = torch.tensor([weights], dtype=torch.float32)
    return layer


def two_layers() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].weight.data = torch.tensor([[0.1, -0.4], [0.3, 0.2]])
    model[1].weight.data = torch.tensor([[-5.0, 0.05]])
    return model


# -- at once -------------------------------------------------------------------------------------------------------


def test_the_largest_weights_stay() -> None:
    found = magnitude(two_layers(), 0.5)
    assert found["0.weight"].tolist() == [[False, True], [True, False]]
    assert found["1.weight"].tolist() == [[True, False]]
    assert found.level == "weight"
    assert found.source == {"method": "magnitude", "keep": 0.5, "allocation": "global"}


def test_filters_go_by_their_l1_norm() -> None:
    conv = nn.Conv2d(1, 3, (1, 2))
    # l1: 3, 4, 2.5; l2 would prefer the first.
    conv.weight.data = torch.tensor([[3.0, 0.0], [-2.0, 2.0], [-2.5, 0.0]]).view(3, 1, 1, 2)
    assert magnitude(conv, 1 / 3, conv="filter")["weight"].tolist() == [False, True, False]
    assert magnitude(conv, 2 / 3, conv="filter")["weight"].tolist() == [True, True, False]


def test_only_within_another_selection() -> None:
    model = two_layers()
    within = magnitude(model, 0.5)
    model[0].weight.data = torch.tensor([[90.0, -0.4], [0.3, 80.0]])
    assert magnitude(model, 0.34, within=within)["0.weight"].tolist() == [[False, True], [False, False]]
    with pytest.raises(ValueError, match="only 3 are not out already"):
        magnitude(model, 0.67, within=within)
    with pytest.raises(ValueError, match=r"within selects from \['0.weight', '1.weight'\], this from \['0.weight'\]"):
        magnitude(model, 0.1, exclude="1", within=within)


def test_what_is_pruned() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    assert list(magnitude(model, 0.5)) == ["0.weight", "3.weight"]
    assert list(magnitude(model, 0.5, linear=None)) == ["0.weight"]
    assert list(magnitude(model, 0.5, exclude=["0"])) == ["3.weight"]
    with pytest.raises(ValueError, match="nothing to prune: with conv=None, linear=None"):
        magnitude(model, 0.5, conv=None, linear=None)
    with pytest.raises(ValueError, match="conv must be 'weight', 'filter', 'neuron' or None, got 'channel'"):
        magnitude(model, 0.5, conv="channel")


# -- in rounds -----------------------------------------------------------------------------------------------------


def test_ladder() -> None:
    assert ladder(0.5) == pytest.approx([0.8, 0.64, 0.512, 0.5])
    assert ladder(0.8) == [0.8]
    assert ladder(0.64) == pytest.approx([0.8, 0.64])
    assert ladder(0.3, 0.5) == [0.5, 0.3]
    # 0.8¹⁰ = 0.107, 0.8¹¹ = 0.086
    assert [rounds_to(keep) for keep in (1.0, 0.9, 0.8, 0.11, 0.1, 0.086)] == [1, 1, 1, 10, 11, 11]
    with pytest.raises(ValueError, match="keep must be above 0"):
        ladder(0.0)
    with pytest.raises(ValueError, match="rate must be a fraction between 0 and 1, got 1"):
        ladder(0.5, 1)


class Training:
    """Returns other weights in every round, and remembers what it was given."""

    def __init__(self, *weights: list[float]) -> None:
        self.weights = list(weights)
        self.given: list[Selection | None] = []

    def __call__(self, left: Selection | None) -> nn.Module:
        self.given.append(left)
        return row(*self.weights[len(self.given) - 1])


ROUNDS = (
    [10.0, 9, 8, 7, 6, 5, 4, 3, 2, 1],
    [1.0, 2, 3, 4, 5, 6, 7, 8, 99, 99],  # the last two are out
    [1.0, 2, 3, 5, 4, 6, 7, 8, 99, 99],
    [1.0, 2, 3, 5, 4, 6, 7, 8, 99, 99],
)


def places(sel: Selection) -> list[int]:
    return sel["weight"].flatten().nonzero().flatten().tolist()


def test_rounds() -> None:
    train = Training(*ROUNDS)
    found = list(iterative(train, 0.5))
    # ⌊8⌋, ⌊6.4⌋, ⌊5.12⌋, 5 of 10
    assert [places(sel) for sel in found] == [
        [0, 1, 2, 3, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7], [3, 4, 5, 6, 7], [3, 4, 5, 6, 7]
    ]  # fmt: skip
    assert train.given == [None, *found[:-1]]
    assert [sel.source["round"] for sel in found] == [1, 2, 3, 4]
    assert found[1].source["keep"] == pytest.approx(0.64)


def test_rounds_go_on_where_they_stopped() -> None:
    whole = list(iterative(Training(*ROUNDS), 0.5))
    rest = list(iterative(Training(*ROUNDS[2:]), 0.5, after=whole[1]))
    assert [places(sel) for sel in rest] == [places(sel) for sel in whole[2:]]
    assert [sel.source for sel in rest] == [sel.source for sel in whole[2:]]


def test_nothing_is_trained_before_it_is_asked_for() -> None:
    train = Training(*ROUNDS)
    rounds = iterative(train, 0.5)
    assert train.given == []
    next(rounds)
    assert train.given == [None]
    with pytest.raises(ValueError, match="allocation must be one of"):
        iterative(train, 0.5, allocation="all")


def test_rounds_of_filters() -> None:
    conv = nn.Conv1d(1, 5, 1)
    conv.weight.data = torch.tensor([3.0, -5.0, 1.0, 4.0, 2.0]).view(5, 1, 1)
    first, second = iterative(lambda left: conv, 0.6, 0.25, conv="filter")
    assert first["weight"].tolist() == [True, True, False, True, False]
    assert torch.equal(first["weight"], second["weight"])  # ⌊0.75·5⌋ = ⌊0.6·5⌋ = 3
    assert first.level == "filter"


# -- gradually -----------------------------------------------------------------------------------------------------


def gradual(model: nn.Module, **options: object) -> tuple[torch.optim.Optimizer, Gradual]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return optimizer, Gradual(model, optimizer, **options)  # type: ignore[arg-type]


def test_cubic_schedule() -> None:
    _, companion = gradual(row(1.0, 2, 3, 4, 5, 6, 7, 8, 9, 10), keep=0.1, begin=0.2, end=0.6)
    # 0.1 + 0.9·(1 − x)³ at x = 0, 1/4, 1/2, 3/4, 1 of the way
    at = {0.0: 1.0, 0.2: 1.0, 0.3: 0.4796875, 0.4: 0.2125, 0.5: 0.1140625, 0.6: 0.1, 1.0: 0.1}
    assert {x: companion.target(x) for x in at} == pytest.approx(at)
    with pytest.raises(ValueError, match="fraction_done must be a number ≥ 0, got nan"):
        companion.target(float("nan"))


def run(model: nn.Linear, optimizer: torch.optim.Optimizer, companion: Gradual, steps: range) -> list[int]:
    """Every weight is pulled towards 100: what is out would be back after one step, and momentum has its own will."""
    counts = []
    for k in steps:
        optimizer.zero_grad()
        ((model.weight - 100) ** 2).sum().mul(1e-3).backward()
        optimizer.step()
        companion.step((k + 1) / 10)
        counts.append(int((model.weight != 0).sum()))
    return counts


def test_cuts_come_when_due_and_hold() -> None:
    model = row(10.0, -9, 8, -7, 6, -5, 4, -3, 2, -1)
    optimizer, companion = gradual(model, keep=0.2, end=0.8, every=2)
    # After 2, 4, 6, 8 of 10 steps x = 1/4, 1/2, 3/4, 1: 0.2 + 0.8·(27, 8, 1, 0)/64 of 10.
    assert run(model, optimizer, companion, range(10)) == [10, 5, 5, 3, 3, 2, 2, 2, 2, 2]
    assert torch.equal(companion.selection["weight"], model.weight != 0)
    assert companion.selection.source["method"] == "gradual"
    companion.remove()
    assert run(model, optimizer, companion, range(1)) == [10]


def test_what_is_cut_is_the_smallest_of_what_is_left() -> None:
    model = row(1.0, 2, 3, 4)
    _, companion = gradual(model, keep=0.25, every=1, end=1.0)
    companion.step(0.2)  # 0.25 + 0.75·0.8³ = 0.634: 2 of 4
    assert model.weight.tolist() == [[0, 0, 3, 4]]
    model.weight.data = torch.tensor([[50.0, 60.0, 5.0, 4.0]])
    companion.step(1.0)
    assert model.weight.tolist() == [[0, 0, 5, 0]]


def test_the_last_cut_is_not_missed() -> None:
    model = row(1.0, 2, 3, 4)
    optimizer, companion = gradual(model, keep=0.5, every=1000)
    assert run(model, optimizer, companion, range(10)) == [4] * 7 + [2] * 3


def test_filters_go_with_what_follows_them() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    model[0].weight.data = torch.arange(1.0, 5).view(4, 1, 1, 1).expand(4, 1, 3, 3).clone()
    _, companion = gradual(model, keep=0.5, every=1, end=0.5, conv="filter")
    companion.step(0.5)
    for p in model.parameters():
        assert not p[:2].any()
    assert companion.selection["0.weight"].tolist() == [False, False, True, True]
    assert model[1].weight.tolist() == [0, 0, 1, 1]


def test_gradual_goes_on_from_its_state() -> None:
    weights = (10.0, -9, 8, -7, 6, -5, 4, -3, 2, -1)
    whole = row(*weights)
    counts = run(whole, *gradual(whole, keep=0.2, every=3), range(10))
    first = row(*weights)
    optimizer, companion = gradual(first, keep=0.2, every=3)
    begun = run(first, optimizer, companion, range(4))
    state, moved = companion.state_dict(), optimizer.state_dict()
    companion.remove()
    second = row(*first.weight.flatten().tolist())
    optimizer, companion = gradual(second, keep=0.2, every=3)
    optimizer.load_state_dict(moved)
    companion.load_state_dict(state)
    assert begun + run(second, optimizer, companion, range(4, 10)) == counts
    assert torch.equal(second.weight, whole.weight)
    with pytest.raises(ValueError, match=r"the state prunes \['weight'\], this companion \['0.weight', '1.weight'\]"):
        gradual(two_layers(), keep=0.5)[1].load_state_dict(state)


def test_a_run_that_was_made_longer_keeps_what_is_cut() -> None:
    model = row(*range(1, 11))
    _, companion = gradual(model, keep=0.1, every=1, end=1.0)
    companion.step(1.0)
    state = companion.state_dict()
    _, companion = gradual(model, keep=0.1, every=1, end=1.0)
    companion.load_state_dict(state)
    companion.step(0.5)  # 0.2125 should be left by now: more than there is
    assert places(companion.selection) == [9]


def test_gradual_says_what_is_wrong() -> None:
    for options, words in (
        ({"keep": 2.0}, "keep must be a fraction from 0 to 1, got 2.0"),
        ({"keep": 0.5, "begin": 0.6, "end": 0.4}, "begin and end must be fractions .* got 0.6 and 0.4"),
        ({"keep": 0.5, "every": 0}, "every must be a whole number of steps ≥ 1, got 0"),
        ({"keep": 0.1, "allocation": "uniform"}, "fewer than there are tensors"),
    ):
        with pytest.raises(ValueError, match=words):
            gradual(two_layers(), **options)
    with pytest.raises(ValueError, match="weight is not one of the optimizer's parameters"):
        Gradual(row(1.0), torch.optim.SGD(row(1.0).parameters(), 0.1), 0.5)
