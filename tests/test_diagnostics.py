import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dessilbi import DessiAdamW, DessiLBI, Labels, param_groups
from dessilbi.cli import main
from dessilbi.diagnostics import StepSizeMonitor, lipschitz, lyapunov, max_step_size, stationarity
from dessilbi.training import Config, TrainingDiverged, train
from tests.oracles import iteration as oracle
from tests.oracles.lyapunov import Lyapunov
from tests.toy import GROUPS
from tests.training.runs import SMALL, final_state, numbers, same

# -- the Lyapunov function ---------------------------------------------------------------------------------------

KINDS = [kind for kind in GROUPS if kind != "none"]


@pytest.mark.parametrize("size_normalised", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_function_is_that_of_its_definition(kind: str, size_normalised: bool) -> None:
    shape, group, index = GROUPS[kind]
    if kind == "labels":  # groups of 16, 4 and 4, so that λ√|g| is exact in the float32 of Labels
        index = np.repeat([0, 1, 2], [16, 4, 4]).reshape(shape)
        group = Labels(torch.from_numpy(index))
    rng = np.random.default_rng(1)
    starts = [rng.standard_normal(shape), rng.standard_normal((3,))]
    targets = [rng.standard_normal(shape), rng.standard_normal((3,))]
    options: dict[str, Any] = {"lr": 0.3, "kappa": 2.0, "nu": 1.5, "lam": 0.25, "weight_decay": 0.1}
    params = [torch.tensor(w, requires_grad=True) for w in starts]
    groups = [{"params": [params[0]], "group": group, "size_normalised": size_normalised},
              {"params": [params[1]], "group": None}]  # fmt: skip
    opt = DessiLBI(groups, **options)
    plain = [oracle.Oracle(w, i, **options, size_normalised=size_normalised)
             for w, i in zip(starts, (index, None), strict=True)]  # fmt: skip
    expected = Lyapunov(plain)
    state, last, entered = None, math.nan, 0
    for k in range(25):
        opt.zero_grad()
        loss = sum(((p - torch.tensor(t)) ** 2).sum() for p, t in zip(params, targets, strict=True)) / 2
        loss.backward()  # type: ignore[union-attr]
        value, moved = expected(sum(((o.W - t) ** 2).sum() for o, t in zip(plain, targets, strict=True)) / 2)
        state = lyapunov(opt, loss, state)
        assert state.value == pytest.approx(value, rel=1e-10)
        if k:
            assert state.moved == pytest.approx(moved, rel=1e-9)
            assert state.drop == pytest.approx(last - value, rel=1e-6, abs=1e-12)
        else:
            assert math.isnan(state.drop)
            assert math.isnan(state.moved)
        last = value
        entered = max(entered, int(opt.support(params[0]).sum()))
        opt.step()
        for o, t in zip(plain, targets, strict=True):
            o.step(o.W - t)
    assert entered > 0  # or B_Ω would not have been seen


def descent(model: nn.Module, batch: tuple[Tensor, Tensor], alpha: float, steps: int, rho: float,
            **options: Any) -> tuple[list[float], DessiLBI]:  # fmt: skip
    """What F fell by beyond ρ‖P' − P‖², and the optimizer at the end."""
    linear = options.pop("linear")
    opt = DessiLBI(param_groups(model, linear=linear), lr=alpha, **options)
    state, margins = None, []
    for _ in range(steps):
        opt.zero_grad()
        loss = F.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        state = lyapunov(opt, loss, state)
        if not math.isnan(state.drop):
            margins.append(state.drop - rho * state.moved)
        opt.step()
    return margins, opt


def gradient_norm(model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    grads = torch.autograd.grad(F.mse_loss(model(batch[0]), batch[1]), list(model.parameters()))
    return math.sqrt(sum(float(g.square().sum()) for g in grads))


def smooth(activation: type[nn.Module]) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A network with more weights than three images need, so that there is a solution near every start."""
    torch.manual_seed(0)
    x = torch.eye(3, dtype=torch.float64) * 2
    model = nn.Sequential(nn.Linear(3, 16), activation(), nn.Linear(16, 2)).double()
    return model, (x, torch.sin(x[:, :2]))


def spectrum(model: nn.Module, batch: tuple[Tensor, Tensor], loss: Any = F.mse_loss) -> np.ndarray[Any, Any]:
    """All eigenvalues of the Hessian over all parameters, by NumPy."""
    params = dict(model.named_parameters())
    sizes = [p.numel() for p in params.values()]

    def of(flat: Tensor) -> Tensor:
        parts = {name: x.view(p.shape) for (name, p), x in zip(params.items(), flat.split(sizes), strict=True)}
        value: Tensor = loss(torch.func.functional_call(model, parts, (batch[0],)), batch[1])
        return value

    flat = torch.cat([p.detach().flatten() for p in params.values()])
    return np.linalg.eigvalsh(torch.autograd.functional.hessian(of, flat).numpy())


@pytest.mark.parametrize(("activation", "linear", "kappa"), [(nn.Tanh, "neuron", 1.0), (nn.Softplus, "weight", 2.0)])
def test_below_the_bound_every_step_descends_and_the_gradient_vanishes(
    activation: type[nn.Module], linear: str, kappa: float
) -> None:
    model, batch = smooth(activation)
    nu, lip = 5.0, 2 * np.abs(spectrum(model, batch)).max()  # of all points on the way, as is checked below
    alpha = 0.9 * 2 / (kappa * (lip + 2 / nu))
    assert alpha == pytest.approx(0.9 * max_step_size(kappa, nu, lip))
    rho = 1 / kappa - alpha * (lip + 2 / nu) / 2
    assert rho == pytest.approx(0.1 / kappa)
    options = {"linear": linear, "kappa": kappa, "nu": nu, "lam": 0.02}
    first = gradient_norm(*smooth(activation))
    margins, opt = descent(model, batch, alpha, 900, rho, **options)
    assert len(margins) == 899
    assert min(margins) > -1e-13  # of terms of the order of 1
    assert sum(m > 1e-10 for m in margins) > 150
    assert gradient_norm(model, batch) < 1e-3 * first  # ‖∇L̂(W)‖
    found = stationarity(opt)
    assert found.gradient < 2e-3 * first
    assert found.gap < 2e-3 * math.sqrt(sum(float(p.detach().square().sum()) for p, _ in opt.penalised()))
    assert np.abs(spectrum(model, batch)).max() < lip


def quadratic(curvature: float, nu: float, alpha: float, steps: int, *, lam: float = 1e-3,
              **options: Any) -> tuple[list[float], list[bool], list[float]]:  # fmt: skip
    """‖(∇L̄, W − Γ)‖ along a run on c·w²/2 and whether each step was a good one, by the library and by hand."""
    w = torch.tensor([1.0, -0.5], dtype=torch.float64, requires_grad=True)
    opt = DessiLBI([{"params": [w], "group": "weight"}], lr=alpha, nu=nu, lam=lam, **options)
    state, sizes, good, margins = None, [], [], []
    for _ in range(steps):
        opt.zero_grad()
        loss = curvature * w.square().sum() / 2
        loss.backward()
        sizes.append(math.hypot(*stationarity(opt)))
        if not opt.param_groups[0]["momentum"] and not opt.param_groups[0]["scaling"]:
            state = lyapunov(opt, loss, state)
            if len(sizes) > 1:
                good.append(state.descends(curvature))
                margins.append(state.drop - (1 / state.kappa - alpha * (curvature + 2 / nu) / 2) * state.moved)
        opt.step()
    return sizes, good, margins


@pytest.mark.parametrize("kappa", [1.0, 4.0])
@pytest.mark.parametrize("curvature", [0.0, 0.3, 3.0])
def test_below_the_bound_a_quadratic_descends_and_above_it_does_not(curvature: float, kappa: float) -> None:
    nu = 2.0
    sizes, good, margins = quadratic(curvature, nu, 0.9 * 2 / (kappa * (curvature + 2 / nu)), 400, kappa=kappa)
    assert all(good)
    assert min(margins) > -1e-13
    assert sizes[-1] < 1e-6 * sizes[0]
    # The largest eigenvalue of [[c + 1/ν, −1/ν], [−1/ν, 1/ν]] is what the bound bounds.
    top = np.linalg.eigvalsh(np.array([[curvature + 1 / nu, -1 / nu], [-1 / nu, 1 / nu]]))[-1]
    assert top <= curvature + 2 / nu
    sizes, _, _ = quadratic(curvature, nu, 1.02 * 2 / (kappa * top), 400, kappa=kappa)
    assert sizes[-1] > 1e3 * sizes[0]
    # Beyond the bound F rises: not even a step without any gain is left.
    sizes, good, _ = quadratic(curvature, nu, 1.2 * 2 / (kappa * top), 60, kappa=kappa)
    assert not all(good)
    assert not good[-1]


def test_the_bound_as_the_specification_states_it_is_not_enough() -> None:
    """SPEC section 5 has 2/(κ(Lip + 1/ν)), which for a loss of zero is 2ν/κ. W and Γ pull one another: the gap is
    multiplied by 1 − 2ακ/ν in a step once both move, so that half of this is the limit."""
    nu, kappa, lip = 3.0, 2.0, 0.0
    stated = 2 / (kappa * (lip + 1 / nu))
    sizes, good, _ = quadratic(lip, nu, 0.99 * stated, 40, kappa=kappa)
    assert sizes[-1] > 1e10 * sizes[0]
    assert not any(good[5:])
    # Each step multiplies the gap by 1 − 2·0.99·2 = −2.96, once Γ is not zero.
    assert sizes[-1] / sizes[-2] == pytest.approx(2.96, rel=1e-6)
    assert max_step_size(kappa, nu, lip) == pytest.approx(stated / 2)
    sizes, good, _ = quadratic(lip, nu, 0.99 * stated / 2, 1000, kappa=kappa)
    assert all(good)
    assert sizes[-1] < 1e-6 * sizes[0]


def test_descent_is_sufficient_up_to_rounding_and_no_further() -> None:
    w = torch.tensor([1.0, -0.5], dtype=torch.float64, requires_grad=True)
    opt = DessiLBI([{"params": [w], "group": "weight"}], lr=0.2, nu=2.0, lam=1e-3)
    state = None
    for _ in range(3):
        opt.zero_grad()
        loss = w.square().sum() / 2
        loss.backward()
        state = lyapunov(opt, loss, state)
        opt.step()
    assert state is not None
    needed = (1 - 0.2 * (1 + 2 / 2.0) / 2) * state.moved
    assert needed > 1e-3
    for drop, enough in ((needed, True), (needed + 1e-9, True), (needed - 3e-16, True), (needed - 1e-9, False)):
        assert replace(state, drop=drop).descends(1.0) == enough
    # Beyond the bound nothing is promised, but F must not rise.
    assert replace(state, drop=1e-9).descends(100.0)
    assert not replace(state, drop=-1e-9).descends(100.0)


def test_what_the_theorem_does_not_hold_for_is_refused() -> None:
    def made(**options: Any) -> DessiLBI:
        w = torch.ones(2, requires_grad=True)
        return DessiLBI([{"params": [w], "group": "weight"}], **{"lr": 0.1, **options})

    for options, word in (({"momentum": 0.9}, "momentum"), ({"scaling": True}, "scaling"),
                          ({"maximize": True}, "maximize"),
                          ({"weight_decay": 0.1, "decoupled_weight_decay": True}, "decoupled")):  # fmt: skip
        with pytest.raises(ValueError, match=word):
            lyapunov(made(**options), 0.0)
    two = [{"params": [torch.ones(2, requires_grad=True)], "lr": lr} for lr in (0.1, 0.2)]
    with pytest.raises(ValueError, match=r"one lr and one kappa.*0\.2"):
        lyapunov(DessiLBI(two, lr=0.1), 0.0)
    with pytest.raises(TypeError, match="DessiLBI, got DessiAdamW"):
        lyapunov(DessiAdamW([torch.ones(2, requires_grad=True)], lr=0.1), 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [("lr", 0.05), ("lam", 2.0), ("kappa", 2.0), ("nu", 7.0)])
def test_a_run_whose_settings_change_is_refused(name: str, value: float) -> None:
    w = torch.ones(2, requires_grad=True)
    opt = DessiLBI([{"params": [w], "group": "weight"}], lr=0.1)
    state = lyapunov(opt, 0.0)
    opt.param_groups[0][name] = value
    with pytest.raises(ValueError, match=rf"{name} was .* at the point before and is .*{value}"):
        lyapunov(opt, 0.0, state)


def test_stationarity_by_hand() -> None:
    w = torch.tensor([3.0, -4.0], requires_grad=True)
    b = torch.tensor([1.0], requires_grad=True)
    opt = DessiLBI([{"params": [w], "group": "weight"}, {"params": [b], "group": None}], lr=0.1, nu=2.0)
    # Γ = 0: D = W/ν = (1.5, −2), in ∇L̄ twice, as (∇ + D, −D). b adds its gradient only.
    w.grad, b.grad = torch.tensor([0.5, 1.0]), torch.tensor([2.0])
    found = stationarity(opt)
    assert found.gap == pytest.approx(5.0)
    assert found.gradient == pytest.approx(math.sqrt(2.0**2 + 1.0**2 + 1.5**2 + 2.0**2 + 2.0**2))


def test_stationarity_knows_dessiadamw_and_parameters_without_gradients() -> None:
    w = torch.tensor([3.0, -4.0], requires_grad=True)
    found = stationarity(DessiAdamW([{"params": [w], "group": "weight"}], lr=0.1, nu=math.inf))
    assert found == pytest.approx((0.0, 5.0))


# -- curvature ---------------------------------------------------------------------------------------------------


def test_lipschitz_is_the_largest_eigenvalue_of_the_hessian() -> None:
    for activation in (nn.Tanh, nn.Softplus):
        model = nn.Sequential(nn.Linear(4, 5), activation(), nn.Linear(5, 2)).double()
        batch = torch.randn(12, 4, dtype=torch.float64), torch.randn(12, 2, dtype=torch.float64)
        assert lipschitz(model, F.mse_loss, batch, 1000) == pytest.approx(
            np.abs(spectrum(model, batch)).max(), rel=1e-6
        )


def test_lipschitz_of_a_linear_model_is_that_of_its_design() -> None:
    x = torch.randn(20, 5, dtype=torch.float64)
    model = nn.Linear(5, 1, bias=False).double()
    expected = 2 * np.linalg.norm(x.numpy(), 2) ** 2 / 20
    assert lipschitz(model, F.mse_loss, (x, torch.randn(20, 1).double()), 300) == pytest.approx(expected, rel=1e-8)


def test_negative_curvature_counts_and_a_linear_loss_has_none() -> None:
    model = nn.Linear(2, 1, bias=False)
    x = torch.tensor([[1.0, 2.0]])
    assert lipschitz(model, lambda y, _: -3 * (y**2).sum(), (x, None), 50) == pytest.approx(30.0, rel=1e-5)
    assert lipschitz(model, lambda y, _: y.sum(), (x, None), 5) == 0.0


def test_few_iterations_give_a_lower_bound() -> None:
    model, batch = smooth(nn.Tanh)
    top = np.abs(spectrum(model, batch)).max()
    found = [lipschitz(model, F.mse_loss, batch, n) for n in (1, 3, 10, 30)]
    assert found == sorted(found)
    assert found[-1] <= top * (1 + 1e-9)


def test_bad_arguments_of_lipschitz() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="iterations must be at least 1, got 0"):
        lipschitz(model, F.mse_loss, (torch.ones(1, 2), torch.ones(1, 1)), 0)
    with pytest.raises(ValueError, match="no parameters that require a gradient"):
        lipschitz(model.requires_grad_(False), F.mse_loss, (torch.ones(1, 2), torch.ones(1, 1)))


# -- the bound ---------------------------------------------------------------------------------------------------


def test_max_step_size_by_hand() -> None:
    assert max_step_size(1.0, 100.0, 0.0) == pytest.approx(100.0)  # 2/(2/ν) = ν
    assert max_step_size(2.0, 4.0, 0.5) == pytest.approx(1.0)  # 2/(2·(0.5 + 0.5))
    assert max_step_size(1.0, math.inf, 4.0) == 0.5
    assert max_step_size(1.0, math.inf, 0.0) == math.inf
    assert max_step_size(1.0, math.inf, 4.0, momentum=0.9) == pytest.approx(2 * 1.9 / 4)  # Polyak's
    assert max_step_size(1.0, math.inf, 4.0, momentum=0.9, dampening=0.5) == pytest.approx(2 * 1.9 / 2)
    assert max_step_size(1.0, math.inf, 4.0, momentum=0.9, nesterov=True) == pytest.approx(2 * 1.9 / 2.8 / 4)
    assert max_step_size(1.0, math.inf, 4.0, dampening=0.5) == 0.5  # which torch ignores without momentum
    for name, value in (("kappa", 0.0), ("nu", -1.0), ("lip", -0.1), ("momentum", 1.0)):
        with pytest.raises(ValueError, match=f"{name} must be .* got {value}"):
            max_step_size(**{"kappa": 1.0, "nu": 1.0, "lip": 1.0, name: value})


def radius(c: float, nu: float, step: float, mu: float, dampening: float, nesterov: bool) -> float:
    """The spectral radius of one step on (W, u, Γ), for a loss c·w²/2 and a weight in the support."""
    reach = 1 - dampening if mu else 1.0
    slope = np.array([c + 1 / nu, 0, -1 / nu])
    u = np.array([0, mu, 0]) + reach * slope
    w = np.array([1.0, 0, 0]) - step * (slope + mu * u if nesterov else u)
    gamma = np.array([step / nu, 0, 1 - step / nu])
    return float(np.abs(np.linalg.eigvals(np.stack([w, u, gamma]))).max())


VARIANTS = [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.5, False), (0.5, 0.9, False), (0.9, 0.0, True)]


@pytest.mark.parametrize(("mu", "dampening", "nesterov"), VARIANTS)
@pytest.mark.parametrize("nu", [0.01, 1.0, 500.0])
@pytest.mark.parametrize("lip", [0.0, 0.1, 20.0])
def test_max_step_size_is_stable_with_any_momentum(
    lip: float, nu: float, mu: float, dampening: float, nesterov: bool
) -> None:
    limit = max_step_size(1.0, nu, lip, momentum=mu, dampening=dampening, nesterov=nesterov)
    for share in (0.0, 0.2, 0.7, 1.0):
        assert radius(share * lip, nu, 0.999 * limit, mu, dampening, nesterov) < 1 + 1e-12
    if lip == 0.0:  # there it is the limit; and so it is where there is no coupling
        assert radius(0.0, nu, 1.001 * limit, mu, dampening, nesterov) > 1
    alone = max_step_size(1.0, math.inf, 20.0, momentum=mu, dampening=dampening, nesterov=nesterov)
    assert radius(20.0, math.inf, 1.001 * alone, mu, dampening, nesterov) > 1


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True},
                                     {"momentum": 0.5, "dampening": 0.9}, {"scaling": True}])  # fmt: skip
def test_the_optimizer_itself_is_stable_below_and_not_above(options: dict[str, Any]) -> None:
    nu, lip = 4.0, 0.02
    limit = max_step_size(1.0, nu, lip, **{k: v for k, v in options.items() if k != "scaling"})
    below, _, _ = quadratic(lip, nu, 0.95 * limit, 1200, **options)
    assert below[-1] < 0.1 * below[0]
    if "scaling" not in options:  # whose bound is only sufficient
        above, _, _ = quadratic(lip, nu, 1.1 * limit, 400, **options)
        assert above[-1] > 1e3 * above[0]


# -- the monitor -------------------------------------------------------------------------------------------------


def test_the_monitor_speaks_when_the_step_size_is_too_large_and_not_again() -> None:
    model = nn.Linear(1, 1, bias=False)
    batch = torch.tensor([[2.0]]), torch.tensor([[1.0]])  # Hessian 2·2² = 8
    opt = DessiLBI([{"params": [model.weight], "group": "weight"}], lr=0.1, nu=4.0, kappa=0.5)
    monitor = StepSizeMonitor(model, opt, F.mse_loss, every=2)
    limit = 2 / (0.5 * (8 + 0.5))
    assert monitor.step(*batch) is None
    assert monitor.lip == pytest.approx(8.0)
    opt.param_groups[0]["lr"] = 1.01 * limit
    assert monitor.step(*batch) is None  # does not look
    warning = monitor.step(*batch)
    assert warning is not None
    assert f"lr={1.01 * limit:.3g} is above {limit:.3g}" in warning
    assert f"lower lr to {0.9 * limit:.2g} or less, or warm up" in warning
    assert monitor.look(*batch) is None  # said once
    opt.param_groups[0]["lr"] = 0.99 * limit
    assert monitor.look(*batch) is None
    opt.param_groups[0]["lr"] = 1.01 * limit
    assert monitor.look(*batch) is not None  # it was safe in between


def test_the_monitor_finds_the_group_that_is_too_fast() -> None:
    model = nn.Linear(1, 1)
    batch = torch.tensor([[0.0]]), torch.tensor([[1.0]])  # only the bias has a curvature: 2
    groups = [{"params": [model.weight], "group": "weight", "nu": 1.0},
              {"params": [model.bias], "group": None, "lr": 0.5, "weight_decay": 0.5}]  # fmt: skip
    opt = DessiLBI(groups, lr=0.1, nu=1.0)
    monitor = StepSizeMonitor(model, opt, F.mse_loss)
    assert monitor.look(*batch) is None  # 0.1 < 2/(2 + 2), 0.5 < 2/2.5: what is not penalised has no coupling
    groups_now = opt.param_groups
    groups_now[1]["lr"] = 0.85
    warning = monitor.look(*batch)
    assert warning is not None
    assert "lr=0.85 is above 0.8" in warning
    groups_now[0]["lr"], groups_now[1]["lr"] = 0.6, 0.5
    monitor.look(*batch)
    assert monitor._warned
    groups_now[0]["lr"] = 0.0  # frozen: no bound is too low for that
    assert monitor.look(*batch) is None
    assert not monitor._warned


def test_the_monitor_watches_sgd_and_refuses_what_is_not_along_the_gradient() -> None:
    model, batch = smooth(nn.Tanh)
    top = np.abs(spectrum(model, batch)).max()
    sgd = torch.optim.SGD(model.parameters(), lr=1.1 * 2 * 1.9 / top, momentum=0.9)
    monitor = StepSizeMonitor(model, sgd, F.mse_loss, iterations=100)
    assert monitor.look(*batch) is not None
    sgd.param_groups[0]["lr"] *= 0.8
    assert monitor.look(*batch) is None
    adamw = DessiAdamW(param_groups(model), lr=0.1)
    with pytest.raises(TypeError, match=r"DessiLBI or torch\.optim\.SGD, got DessiAdamW"):
        StepSizeMonitor(model, adamw, F.mse_loss)
    for name in ("every", "iterations"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            StepSizeMonitor(model, sgd, F.mse_loss, **{name: 0})
    with pytest.raises(ValueError, match="watch_step_size=10 with optimizer='dessiadamw'"):
        Config(optimizer="dessiadamw", watch_step_size=10)


def test_a_look_costs_what_it_says() -> None:
    """One forward pass a look, ten products at the first and `iterations` at the others."""
    model, (x, y) = smooth(nn.Tanh)
    passes, products = [0], [0]

    class Counts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Tensor) -> Tensor:
            return z.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            products[0] += 1
            return g

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        passes[0] += 1
        return F.mse_loss(Counts.apply(outputs), targets)

    opt = DessiLBI(param_groups(model), lr=0.01)
    monitor = StepSizeMonitor(model, opt, loss, every=10, iterations=2)
    for _ in range(41):
        monitor.step(x, y)
    assert passes[0] == 5  # at steps 1, 11, 21, 31, 41
    assert products[0] <= 5 + 10 + 4 * 2  # a gradient a look, and the products


@pytest.mark.parametrize("scaling", [False, True])
def test_a_look_leaves_everything_as_it_was(scaling: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 2))
    x, y = torch.randn(8, 4), torch.randint(2, (8,))
    opt = DessiLBI(param_groups(model, linear="neuron"), lr=0.1, momentum=0.9, scaling=scaling)
    F.cross_entropy(model(x), y).backward()
    opt.step()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    state, random = repr(opt.state_dict()), torch.get_rng_state()
    StepSizeMonitor(model, opt, F.cross_entropy).look(x, y)
    assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())
    assert all(torch.equal(g, p.grad) for g, p in zip(grads, model.parameters(), strict=True))  # type: ignore[arg-type]
    assert repr(opt.state_dict()) == state
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    assert all(p.requires_grad for p in model.parameters())


# -- in the training loop ----------------------------------------------------------------------------------------


class Notes:
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.losses: list[float] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, epoch: int, step: int, loss: float) -> None:
        self.losses.append(loss)


@pytest.mark.parametrize("options", [{}, {"conv": "weight", "linear": "neuron"}, {"scaling": True, "keep": None},
                                     {"optimizer": "sgd", "keep": None}])  # fmt: skip
def test_a_watched_run_is_bit_for_bit_the_same(tmp_path: Path, options: dict[str, Any]) -> None:
    config = SMALL.replace(epochs=2, **options)
    watched = Notes()
    train(config, tmp_path / "alone")
    train(config.replace(watch_step_size=3), tmp_path / "watched", progress=watched)
    assert numbers(tmp_path / "alone") == numbers(tmp_path / "watched")
    assert same(final_state(tmp_path / "alone"), final_state(tmp_path / "watched"))
    assert watched.notes == []  # lr 0.05 is a good one


@pytest.mark.parametrize("conv", ["filter", "weight"])
def test_it_warns_before_the_loss_blows_up(tmp_path: Path, conv: str) -> None:
    """The step size rises from nothing to far too much; the warning comes while the loss still falls."""
    config = SMALL.replace(
        model="tests.training.nets:plain", conv=conv, lr=2000.0, warmup=8, epochs=8, keep=None, schedule="constant",
        watch_step_size=2,
    )  # fmt: skip
    watched = Notes()
    try:
        train(config, tmp_path / "run", progress=watched)
    except TrainingDiverged:
        watched.losses.append(math.inf)
    blown = next(i for i, loss in enumerate(watched.losses, 1) if not loss < 10 * watched.losses[0])
    warned = int(watched.notes[0].split()[1])
    assert watched.notes[0].startswith(f"step {warned} (epoch 1): the step size lr=")
    assert warned < blown
    assert watched.losses[warned - 1] <= 1.1 * watched.losses[0]  # there was time to act


def test_the_command_line_shows_the_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    Path("nets.py").write_text("from torch import nn\n\ndef build(num_classes=10):\n    "
                               "return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))\n")  # fmt: skip
    common = ["train", "--model", "nets:build", "--data", "digits", "--epochs", "1", "--device", "cpu"]
    assert main([*common, "--lr", "0.01", "--watch-step-size", "5", "--run", "slow"]) == 0
    assert "step size" not in capsys.readouterr().out
    assert main([*common, "--lr", "50", "--watch-step-size", "5", "--run", "fast"]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("step 1 (epoch 1): the step size lr=50 is above ")
    assert "lower lr to" in line
    assert main([*common, "--optimizer", "dessiadamw", "--watch-step-size", "5", "--run", "other"]) == 2
    assert "watch_step_size=5 with optimizer='dessiadamw'" in capsys.readouterr().err
