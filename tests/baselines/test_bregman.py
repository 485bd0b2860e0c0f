"""LinBreg and AdaBreg against loops in NumPy."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from dessilbi import param_groups, transposed_filters
from dessilbi.baselines import AdaBreg, LinBreg, sparse_start
from dessilbi.coupling import channels
from dessilbi.groups import Labels

SHAPE = (4, 3, 2)
LAM = 0.4
ADAM = {"betas": (0.8, 0.95), "eps": 1e-3}
OPTIMIZERS = {
    "linbreg": lambda params, **options: LinBreg(params, 0.1, lam=LAM, momentum=0.9, **options),
    "adabreg": lambda params, **options: AdaBreg(params, 0.05, lam=LAM, **ADAM, **options),
}


def gradients(steps: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """Around a mean of their own for every weight, so that some come in and some leave; the first group stays out."""
    rng = np.random.default_rng(1)
    grads = rng.standard_normal(shape) + 0.3 * rng.standard_normal((steps, *shape))
    grads[:, 0] *= 1e-5
    return grads  # type: ignore[no-any-return]


def initial(shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    w = np.random.default_rng(0).standard_normal(shape)
    w[0] = 0.0  # a group of zeros
    w.flat[-1] = 0.0
    return w


def shrink(v: np.ndarray, kind: str | None) -> np.ndarray:
    if kind is None:
        return v
    if kind == "weight":
        return np.sign(v) * np.maximum(np.abs(v) - LAM, 0)
    norms = np.sqrt((v**2).sum(axis=(1, 2), keepdims=True))
    return v * np.maximum(1 - LAM / np.maximum(norms, 1e-300), 0)


def direction(w: np.ndarray, kind: str | None) -> np.ndarray:
    """A subgradient of the norm."""
    if kind is None:
        return np.zeros_like(w)
    if kind == "weight":
        return np.sign(w)
    norms = np.sqrt((w**2).sum(axis=(1, 2), keepdims=True))
    return np.divide(w, norms, out=np.zeros_like(w), where=norms > 0)


def expected(name: str, kind: str | None, delta: float, grads: np.ndarray) -> np.ndarray:
    w = initial()
    v = w / delta + LAM * direction(w, kind)
    m, s = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(grads, 1):
        if name == "linbreg":
            m = 0.9 * m + 0.1 * g
            v = v - 0.1 * m
        else:
            (a, b), eps = ADAM["betas"], ADAM["eps"]  # type: ignore[misc]
            m, s = a * m + (1 - a) * g, b * s + (1 - b) * g**2
            v = v - 0.05 * m / (1 - a**t) / (np.sqrt(s / (1 - b**t)) + eps)
        w = delta * shrink(v, kind)
    return w


def trained(name: str, kind: object, delta: float, grads: np.ndarray) -> torch.Tensor:
    p = nn.Parameter(torch.from_numpy(initial()))
    optimizer = OPTIMIZERS[name]([{"params": [p], "group": kind}], delta=delta)
    for g in grads:
        p.grad = torch.from_numpy(g)
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("delta", [1.0, 2.5])
@pytest.mark.parametrize("kind", ["weight", "filter", None])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_is_the_loop(name: str, kind: str | None, delta: float) -> None:
    grads = gradients(30)
    found, w = trained(name, kind, delta, grads).numpy(), expected(name, kind, delta, grads)
    np.testing.assert_allclose(found, w, rtol=1e-10, atol=1e-13)
    assert ((found == 0) == (w == 0)).all()
    assert (kind is None) or 0 < (w == 0).mean() < 1


def test_any_partition() -> None:
    """Filters written out as labels, and those of a transposed convolution, are the same groups."""
    grads = gradients(20)
    filters = trained("linbreg", "filter", 1.0, grads)
    labels = Labels(torch.arange(4).view(4, 1, 1).expand(SHAPE))
    torch.testing.assert_close(trained("linbreg", labels, 1.0, grads), filters)
    p = nn.Parameter(torch.from_numpy(initial()).transpose(0, 1).contiguous())
    optimizer = OPTIMIZERS["linbreg"]([{"params": [p], "group": transposed_filters(1)}])
    for g in grads:
        p.grad = torch.from_numpy(g).transpose(0, 1)
        optimizer.step()
    torch.testing.assert_close(p.detach().transpose(0, 1), filters)


def test_larger_groups_need_more_where_sizes_count() -> None:
    p = nn.Parameter(torch.zeros(1, 2, 2))
    for normalised, left in ((False, 3.0), (True, 2.0)):
        optimizer = LinBreg([{"params": [p], "group": "filter", "size_normalised": normalised}], 1.0, lam=1.0)
        p.data.zero_()
        p.grad = -torch.full((1, 2, 2), 2.0)  # v has norm 4
        optimizer.step()
        assert float(p.detach().norm()) == pytest.approx(left)


def test_without_gradients_a_weight_stays() -> None:
    p = nn.Parameter(torch.tensor([[0.5, 0.0, -2.0]]))
    optimizer = LinBreg([p], 0.1, lam=LAM)
    optimizer.step()
    assert optimizer.state == {}
    p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.tensor([[0.5, 0.0, -2.0]]))


def test_step_sizes_may_change() -> None:
    p = nn.Parameter(torch.zeros(1, 2))
    optimizer = LinBreg([p], 1.0, lam=1.0)
    p.grad = torch.tensor([[-1.0, 0.25]])
    found = []
    for lr in (1.0, 1.0, 0.5, 4.0):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        found.append(p.detach().flatten().tolist())
    assert found == [[0, 0], [1, 0], [1.5, 0], [5.5, -0.625]]  # v: (1, −¼), (2, −½), (2½, −⅝), (6½, −1⅝)


def test_passes_the_loss_on() -> None:
    p = nn.Parameter(torch.ones(1, 1))
    optimizer = LinBreg([p], 0.1, lam=0.0)

    def closure() -> float:
        optimizer.zero_grad()
        loss = p.sum() ** 2
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 1.0
    assert float(p.detach()) == pytest.approx(0.8)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.ConvTranspose2d(6, 4, 2, groups=2), nn.Flatten(),
                         nn.Linear(196, 3))  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_goes_on_from_its_state(name: str) -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, which: range) -> None:
        for k in which:
            torch.manual_seed(k)
            optimizer.zero_grad()
            model(torch.rand(5, 1, 8, 8)).square().sum().backward()
            optimizer.step()

    def build(model: nn.Module) -> torch.optim.Optimizer:
        return OPTIMIZERS[name](param_groups(model, "filter", "weight"))

    whole = network()
    steps(whole, build(whole), range(6))
    first = network()
    optimizer = build(first)
    steps(first, optimizer, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    assert all(isinstance(g["group"], (str, dict, type(None))) for g in state["param_groups"])
    second = network()
    second.load_state_dict(first.state_dict())
    optimizer = build(second)
    optimizer.load_state_dict(state)
    steps(second, optimizer, range(3, 6))
    assert all(map(torch.equal, second.parameters(), whole.parameters()))
    other = OPTIMIZERS[name](param_groups(second, "weight", "weight"))
    with pytest.raises(ValueError, match="build it with the same groups"):
        other.load_state_dict({**state, "param_groups": state["param_groups"][: len(other.param_groups)]})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, "lr must be a finite number ≥ 0, got -1.0"),
        ({"lam": float("nan")}, "lam must be a finite number ≥ 0, got nan"),
        ({"delta": 0.0}, "delta must be a finite number > 0, got 0.0"),
    ],
)
def test_bad_arguments(options: dict, words: str) -> None:
    p = nn.Parameter(torch.zeros(2, 2))
    for kind in (LinBreg, AdaBreg):
        with pytest.raises(ValueError, match=words):
            kind([p], **{"lr": 0.1, "lam": 0.1, **options})
    with pytest.raises(ValueError, match=r"momentum must be a number in \[0, 1\), got 1.0"):
        LinBreg([p], 0.1, lam=0.1, momentum=1.0)
    with pytest.raises(ValueError, match=r"betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"):
        AdaBreg([p], 0.1, lam=0.1, betas=(0.9, 1.0))
    with pytest.raises(TypeError, match=r"lam must be a finite number ≥ 0, got '1' \(str\)"):
        LinBreg([p], 0.1, lam="1")  # type: ignore[arg-type]


def test_what_it_does_not_take() -> None:
    p = nn.Parameter(torch.zeros(2, 2))
    joined = channels([((2, 2), None, torch.tensor([0, 1]))])
    with pytest.raises(ValueError, match="choose 'filter'"):
        LinBreg([{"params": [p], "group": joined}], 0.1, lam=0.1)
    table = nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"the gradient of a parameter of shape \(3, 2\) is sparse"):
        LinBreg(table.parameters(), 0.1, lam=0.1).step()


# -- the start -----------------------------------------------------------------------------------------------------


def test_few_weights_of_the_same_variance() -> None:
    model = nn.Sequential(nn.Linear(400, 300), nn.ReLU(), nn.Linear(300, 20))
    before = [p.detach().clone() for p in model.parameters()]
    sparse_start(model, 0.05, seed=1)
    for p, old in zip(model.parameters(), before, strict=True):
        if p.ndim == 1:
            assert torch.equal(p, old)
            continue
        left = p != 0
        assert int(left.sum()) == 0.05 * p.numel()
        torch.testing.assert_close(p[left], old[left] * 20**0.5)
        # Of a sample of 300 or 6000 squares of uniform numbers: five standard deviations of the mean, 0.9/√n each.
        assert float(p.detach().var() / old.var()) == pytest.approx(1, abs=5 * 0.9 / int(left.sum()) ** 0.5)


def test_whole_filters_and_at_least_one() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 3), nn.Linear(4, 3))
    before = model[0].weight.detach().clone()
    sparse_start(model, 0.25, conv="filter", linear=None, seed=0)
    assert [int(m.weight.flatten(1).any(1).sum()) for m in model[:2]] == [2, 1]
    assert model[2].weight.all()
    left = model[0].weight.flatten(1).any(1)
    torch.testing.assert_close(model[0].weight[left], 2 * before[left])


def test_a_seed_decides_or_the_random_numbers_of_torch() -> None:
    def start(seed: int | None) -> torch.Tensor:
        layer = nn.Linear(30, 20)
        sparse_start(layer, 0.1, seed=seed)
        return layer.weight != 0

    state = torch.get_rng_state()
    assert torch.equal(start(4), start(4))
    assert not torch.equal(start(4), start(5))
    torch.set_rng_state(state)
    first = start(None)
    torch.set_rng_state(state)
    assert torch.equal(start(None), first)
    with pytest.raises(ValueError, match="keep must be a fraction from 0 to 1, got 2"):
        sparse_start(nn.Linear(2, 2), 2)
