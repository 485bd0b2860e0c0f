"""Penalties by proximal steps, network slimming, and soft filter pruning."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from dessilbi.baselines import L1, Slimming, SoftFilters, slim


def soft(x: np.ndarray, threshold: float) -> np.ndarray:
    return np.sign(x) * np.maximum(np.abs(x) - threshold, 0)


def linear(w: np.ndarray) -> nn.Linear:
    layer = nn.Linear(w.shape[1], w.shape[0], bias=False).double()
    layer.weight.data = torch.from_numpy(w.copy())
    return layer


# -- l1 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_soft_threshold_after_momentum(momentum: float) -> None:
    rng = np.random.default_rng(3)
    w, u = rng.standard_normal((3, 4)), 0.0
    model = linear(w)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    companion = L1(model, optimizer, lam=3 * (1 - momentum))  # αλ/(1 − μ) = 0.3
    for _ in range(5):
        g = rng.standard_normal((3, 4))
        u = momentum * u + g
        w = soft(w - 0.1 * u, 0.3)
        model.weight.grad = torch.from_numpy(g)
        optimizer.step()
    np.testing.assert_allclose(model.weight.detach(), w, rtol=1e-12, atol=1e-15)
    assert 0 < (w == 0).sum() < 12
    assert (companion.selection["weight"].numpy() == (w != 0)).all()


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "dampening": 0.5}]
)
def test_rests_at_the_minimum_of_loss_and_penalty(options: dict) -> None:
    """That of ½‖w − a‖² + λ‖w‖₁ is a, soft-thresholded by λ: whatever the momentum."""
    a = np.random.default_rng(3).standard_normal((4, 5))
    model = linear(np.zeros((4, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    L1(model, optimizer, lam=0.7)
    for _ in range(400):
        model.weight.grad = model.weight.detach() - torch.from_numpy(a)
        optimizer.step()
    np.testing.assert_allclose(model.weight.detach(), soft(a, 0.7), atol=1e-9)
    assert ((model.weight == 0).numpy() == (np.abs(a) <= 0.7)).all()


def test_filters_shrink_as_a_whole() -> None:
    model = nn.Conv2d(1, 3, (1, 2), bias=False)
    model.weight.data = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]]).view(3, 1, 1, 2)
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    companion = L1(model, optimizer, lam=1.0, conv="filter")
    optimizer.step()  # norms 5, 0.5, 0 become 4, 0, 0
    assert model.weight.flatten().tolist() == pytest.approx([2.4, 3.2, 0, 0, 0, 0])
    assert companion.selection["weight"].tolist() == [True, False, False]


def test_decoupled_beside_adam() -> None:
    model = linear(np.array([[1.0, -2.0, 0.01]]))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    L1(model, optimizer, lam=0.5)
    model.weight.grad = torch.tensor([[1.0, 1.0, 1.0]], dtype=torch.float64)
    optimizer.step()  # the first step of Adam is −α·sign(g); then α·λ = 0.05
    np.testing.assert_allclose(model.weight.detach(), [[0.85, -2.05, -0.04]], rtol=1e-6)


def test_without_gradient_nothing_moves_and_removed_it_is_gone() -> None:
    model = nn.Sequential(linear(np.ones((1, 1))), linear(np.ones((1, 1))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    companion = L1(model, optimizer, lam=0.25)
    model[0].weight.grad = torch.zeros(1, 1, dtype=torch.float64)
    optimizer.step()
    assert [float(p.detach()) for p in model.parameters()] == [0.75, 1.0]
    companion.remove()
    optimizer.step()
    assert float(model[0].weight.detach()) == 0.75


@pytest.mark.parametrize("lam", [-1.0, math.inf, math.nan])
def test_bad_lam(lam: float) -> None:
    model = linear(np.ones((1, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match="lam must be a finite number ≥ 0"):
        L1(model, optimizer, lam=lam)
    with pytest.raises(TypeError, match=r"lam must be .*, got '1' \(str\)"):
        L1(model, optimizer, lam="1")  # type: ignore[arg-type]


# -- slimming ------------------------------------------------------------------------------------------------------


def normalised() -> nn.Sequential:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 1, 1)
    )
    model[1].weight.data = torch.tensor([0.5, -0.9, 0.1, 0.7])
    model[4].weight.data = torch.tensor([0.01, 0.02])
    return model


def test_only_scales_are_penalised() -> None:
    model = normalised()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    Slimming(model, optimizer, lam=0.4)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert model[1].weight.tolist() == pytest.approx([0.3, -0.7, 0.0, 0.5])
    assert model[4].weight.tolist() == [0, 0]
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (name not in ("1.weight", "4.weight"))


def test_slim_takes_the_smallest_scales_of_all_but_leaves_one_a_layer() -> None:
    found = slim(normalised(), 0.5)
    assert found.level == "filter"
    assert found["0.weight"].tolist() == [False, True, False, True]
    assert found["3.weight"].tolist() == [False, True]
    assert slim(normalised(), 5 / 6)["0.weight"].all()
    assert list(slim(normalised(), 0.5, exclude=["3"])) == ["0.weight"]


def test_slim_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"keep=0.2 of 6 filters is fewer than one for each of 2 layers: .* to 0.3333"):
        slim(normalised(), 0.2)
    with pytest.raises(ValueError, match="no layer of the model is followed by a normalisation"):
        slim(nn.Conv2d(1, 2, 3), 0.5)


# -- soft filters --------------------------------------------------------------------------------------------------


def test_filters_that_were_cut_may_come_back() -> None:
    model = nn.Conv2d(1, 4, (1, 2))
    # l2 norms 3, 2.83, 1, 2: the last two go. By l1 norms, 3, 4, 1, 2, it would be the same.
    model.weight.data = torch.tensor([[3.0, 0], [2, 2], [1, 0], [0, 2]]).view(4, 1, 1, 2)
    bias = model.bias.detach().clone()  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    companion = SoftFilters(model, optimizer, keep=0.5)
    companion.end_epoch()
    assert model.weight.view(4, 2).tolist() == [[3, 0], [2, 2], [0, 0], [0, 0]]
    assert torch.equal(model.bias.detach(), bias)  # type: ignore[union-attr]
    model.weight.grad = torch.tensor([[1.0, 0], [0, 0], [-9, 0], [0, 0]]).view(4, 1, 1, 2)
    optimizer.step()
    companion.end_epoch()
    assert model.weight.view(4, 2).tolist() == [[0, 0], [2, 2], [9, 0], [0, 0]]
    assert companion.selection["weight"].tolist() == [False, True, True, False]
    assert companion.state_dict() == {}


def test_the_largest_by_the_euclidean_norm() -> None:
    model = nn.Conv2d(1, 2, (1, 2))
    model.weight.data = torch.tensor([[3.0, 0.0], [2.0, 2.0]]).view(2, 1, 1, 2)  # by l1 it would be the second
    companion = SoftFilters(model, torch.optim.SGD(model.parameters(), lr=1.0), keep=0.5)
    assert companion.selection["weight"].tolist() == [True, False]


def test_the_same_part_of_every_layer() -> None:
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.Conv2d(6, 4, 3), nn.Linear(5, 3))
    model[1].weight.data *= 100
    companion = SoftFilters(model, torch.optim.SGD(model.parameters(), lr=1.0), keep=0.5)
    assert companion.selection.per_layer() == {"0.weight": 0.5, "1.weight": 0.5}


def test_soft_filters_are_filters() -> None:
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match="linear='weight': soft filter pruning takes whole filters"):
        SoftFilters(model, optimizer, 0.5, linear="weight")
    with pytest.raises(ValueError, match="fewer than there are tensors"):
        SoftFilters(model, optimizer, 0.1)
