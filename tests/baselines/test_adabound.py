"""AdaBound against its authors' formulas in NumPy."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from dessilbi.baselines import AdaBound

SHAPES = ((3, 4), (5,))


def gradients(steps: int) -> list[list[np.ndarray]]:
    """Of all sizes, so that both bounds are met."""
    rng = np.random.default_rng(0)
    return [[10.0 ** rng.uniform(-4, 1, s) * rng.standard_normal(s) for s in SHAPES] for _ in range(steps)]


def parameters() -> list[nn.Parameter]:
    rng = np.random.default_rng(1)
    return [nn.Parameter(torch.from_numpy(rng.standard_normal(s))) for s in SHAPES]


def expected(
    lrs: list[float], final_lr: float, gamma: float, wd: float, amsbound: bool, sign: float = 1.0
) -> tuple[list[np.ndarray], set[str]]:
    """The weights after these steps, and which bounds were met."""
    found, met = [], set()
    a, b, eps = 0.8, 0.9, 1e-6
    for place, p in enumerate(parameters()):
        w, m, v, largest = p.detach().numpy().copy(), 0.0, 0.0, 0.0
        for t, (lr, grads) in enumerate(zip(lrs, gradients(len(lrs)), strict=True), 1):
            g = sign * grads[place] + wd * w
            m, v = a * m + (1 - a) * g, b * v + (1 - b) * g**2
            largest = np.maximum(largest, v) if amsbound else v
            step = lr * np.sqrt(1 - b**t) / (1 - a**t) / (np.sqrt(largest) + eps)
            final = final_lr * lr / lrs[0]
            low, high = final * (1 - 1 / (gamma * t + 1)), final * (1 + 1 / (gamma * t))
            met |= {"low"} if (step < low).any() else set()
            met |= {"high"} if (step > high).any() else set()
            met |= {"none"} if ((step > low) & (step < high)).any() else set()
            w = w - np.clip(step, low, high) * m
        found.append(w)
    return found, met


@pytest.mark.parametrize("amsbound", [False, True])
@pytest.mark.parametrize("wd", [0.0, 0.1])
def test_is_the_loop(wd: float, amsbound: bool) -> None:
    lrs = [0.01] * 10 + [0.001] * 5
    params = parameters()
    optimizer = AdaBound(
        params, lr=0.01, betas=(0.8, 0.9), final_lr=0.2, gamma=0.1, eps=1e-6, weight_decay=wd, amsbound=amsbound
    )
    for lr, grads in zip(lrs, gradients(15), strict=True):
        optimizer.param_groups[0]["lr"] = lr
        for p, g in zip(params, grads, strict=True):
            p.grad = torch.from_numpy(g)
        optimizer.step()
    weights, met = expected(lrs, 0.2, 0.1, wd, amsbound)
    assert met == {"low", "high", "none"}
    for p, w in zip(params, weights, strict=True):
        np.testing.assert_allclose(p.detach(), w, rtol=1e-11, atol=1e-14)


def test_maximize_is_the_other_way() -> None:
    params = parameters()
    optimizer = AdaBound(params, lr=0.01, betas=(0.8, 0.9), final_lr=0.2, gamma=0.1, eps=1e-6, maximize=True)
    for grads in gradients(5):
        for p, g in zip(params, grads, strict=True):
            p.grad = torch.from_numpy(g)
        optimizer.step()
    for p, w in zip(params, expected([0.01] * 5, 0.2, 0.1, 0.0, False, -1.0)[0], strict=True):
        np.testing.assert_allclose(p.detach(), w, rtol=1e-11, atol=1e-14)


def test_bounds_by_hand() -> None:
    """Gradients of 1: after t steps m is 1 − β₁ᵗ and η what bounds it."""
    low, high = (nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))
    beta = {"betas": (0.5, 0.5), "gamma": 0.25, "eps": 0.0}
    slow = AdaBound([low], lr=1e-9, final_lr=0.2, **beta)  # type: ignore[arg-type]
    fast = AdaBound([high], lr=1e9, final_lr=0.2, **beta)  # type: ignore[arg-type]
    found = []
    for _ in range(3):
        low.grad, high.grad = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        slow.step()
        fast.step()
        found.append((-float(low.detach()), -float(high.detach())))
    # Lower bounds 0.2·(1/5, 1/3, 3/7), upper ones 0.2·(5, 3, 7/3), times 1/2, 3/4, 7/8.
    steps = np.array([[0.02, 0.5], [0.05, 0.45], [0.075, 0.2 * 7 / 3 * 7 / 8]])
    np.testing.assert_allclose(found, steps.cumsum(0), rtol=1e-12)


def test_loose_bounds_are_adam() -> None:
    ours, theirs = parameters(), parameters()
    # The upper bound is 1e6 at first, the lower one 1e-12.
    bound, adam = AdaBound(ours, lr=0.01, final_lr=1e-3, gamma=1e-9), torch.optim.Adam(theirs, lr=0.01)
    for grads in gradients(8):
        for p, q, g in zip(ours, theirs, grads, strict=True):
            p.grad, q.grad = torch.from_numpy(g), torch.from_numpy(g)
        bound.step()
        adam.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-3, atol=1e-6)  # ε is not at quite the same place


def test_goes_on_from_its_state() -> None:
    def steps(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, which: slice) -> None:
        for grads in gradients(6)[which]:
            for p, g in zip(params, grads, strict=True):
                p.grad = torch.from_numpy(g)
            optimizer.step()

    whole, first, second = parameters(), parameters(), parameters()
    steps(whole, AdaBound(whole, amsbound=True), slice(6))
    before = AdaBound(first, amsbound=True)
    steps(first, before, slice(3))
    before.param_groups[0]["lr"] /= 2  # base_lr is saved, too
    before.param_groups[0]["lr"] *= 2
    after = AdaBound(second, lr=1.0, amsbound=True)
    for p, q in zip(second, first, strict=True):
        p.data.copy_(q.data)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    steps(second, after, slice(3, 6))
    assert all(map(torch.equal, second, whole))


def test_parameters_without_gradient_are_passed_over() -> None:
    params = parameters()
    params[0].grad = torch.ones(SHAPES[0], dtype=torch.float64)
    before = params[1].detach().clone()
    AdaBound(params).step()
    assert torch.equal(params[1], before)
    assert not torch.equal(params[0], parameters()[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": 0.0}, "lr must be a finite number > 0"),
        ({"final_lr": -0.1}, "final_lr must be a finite number ≥ 0, got -0.1"),
        ({"gamma": 0.0}, r"gamma must be a number in \(0, 1\), got 0.0"),
        ({"eps": float("inf")}, "eps must be a finite number ≥ 0, got inf"),
        ({"weight_decay": -1}, "weight_decay must be a finite number ≥ 0, got -1"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\)"),
    ],
)
def test_bad_arguments(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AdaBound(parameters(), **options)
    with pytest.raises(TypeError, match=r"gamma must be .*, got '1' \(str\)"):
        AdaBound(parameters(), gamma="1")  # type: ignore[arg-type]
