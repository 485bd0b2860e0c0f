"""SNIP against the closed form of a linear model: g = (softmax(Wx) − onehot)·xᵀ, averaged."""

import numpy as np
import pytest
import torch
from torch import nn

from dessilbi.baselines import snip


def problem() -> tuple[nn.Linear, torch.Tensor, torch.Tensor, np.ndarray]:
    """A linear model, images, labels and |g ⊙ w| by NumPy."""
    rng = np.random.default_rng(0)
    w, x, y = rng.standard_normal((4, 6)), rng.standard_normal((10, 6)), rng.integers(0, 4, 10)
    logits = x @ w.T
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    p[np.arange(10), y] -= 1
    model = nn.Linear(6, 4, bias=False).double()
    model.weight.data = torch.from_numpy(w)
    return model, torch.from_numpy(x), torch.from_numpy(y), np.abs(p.T @ x / 10 * w)


def largest(scores: np.ndarray, count: int) -> np.ndarray:
    return scores >= np.sort(scores, axis=None)[-count]  # type: ignore[no-any-return]


@pytest.mark.parametrize("batch", [256, 3])
def test_closed_form(batch: int) -> None:
    model, x, y, scores = problem()
    for count in (1, 5, 12, 23):
        found = snip(model, x, y, count / 24, batch=batch)["weight"]
        assert (found.numpy() == largest(scores, count)).all()


def test_neurons_go_by_the_sum() -> None:
    model, x, y, scores = problem()
    found = snip(model, x, y, 0.5, linear="neuron")
    assert (found["weight"].numpy() == largest(scores.sum(1), 2)).all()


def test_weights_that_the_loss_does_not_feel_go_first() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model[0].bias.data[:2] = -100  # these two neurons are off
    found = snip(model, torch.rand(8, 3), torch.zeros(8, dtype=torch.long), 10 / 20)
    assert not found["0.weight"][:2].any()
    assert not found["2.weight"][:, :2].any()


def test_the_model_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)).eval()
    model[1].train()
    model[0].weight.grad = torch.ones(4, 3)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    images = torch.rand(8, 3)
    modes, random = [m.training for m in model.modules()], torch.get_rng_state()
    sel = snip(model, images, torch.tensor([0, 1] * 4), 0.5)
    assert sel.source == {"method": "snip", "keep": 0.5, "allocation": "global", "images": 8}
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(model[0].weight.grad, torch.ones(4, 3))
    assert model[3].weight.grad is None


def test_normalisation_is_that_of_training() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    x, y = torch.randn(10, 6), torch.arange(10) % 4
    expected = snip(model, x, y, 0.3)
    model[1].running_var *= torch.logspace(-4, 4, 8)
    found = snip(model.eval(), x, y, 0.3)
    assert all(torch.equal(found[name], mask) for name, mask in expected.items())


def test_bad_arguments() -> None:
    model, x, y, _ = problem()
    with pytest.raises(ValueError, match="images and labels must be as many, at least one, got 10 and 9"):
        snip(model, x, y[:9], 0.5)
    with pytest.raises(ValueError, match="batch must be a whole number ≥ 1, got 0"):
        snip(model, x, y, 0.5, batch=0)
