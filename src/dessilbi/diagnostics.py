"""Instruments: is the step size safe, does the run descend, has it arrived?

With full gradients, no momentum and no scaling, and α < 2/(κ(Lip + 2/ν)), the Lyapunov function

    F_k = α·L̄(W_k, Γ_k) + B_Ω(Γ_k, Γ_{k−1}; g_{k−1}),      L̄ = L(W) + ‖W − Γ‖²/(2ν),      g = V − Γ/κ ∈ ∂Ω(Γ)

with the Bregman distance B_Ω(Γ, Γ'; g') = Ω(Γ) − Ω(Γ') − ⟨g', Γ − Γ'⟩, falls at every step by at least
ρ‖P_k − P_{k−1}‖², P = (W, Γ), ρ = 1/κ − α(Lip + 2/ν)/2. (The paper has 1/ν for 2/ν. The coupling's Hessian
[[1, −1], [−1, 1]]/ν has norm 2/ν, and only with that does the proof's first inequality hold.) `lyapunov` computes F
along a run; `lipschitz` and `max_step_size` give the bound, `StepSizeMonitor` watches it while a network trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD, Optimizer

from dessilbi.coupling import joint_norms
from dessilbi.optim import DessiAdamW, DessiLBI

Loss = Callable[[Any, Any], Tensor]


# -- descent -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lyapunov:
    """F at one point of a run, and what the next point needs to know of this one."""

    value: float
    drop: float
    """F_{k−1} − F_k; NaN at the first point."""
    moved: float
    """‖P_k − P_{k−1}‖²; NaN at the first point."""
    alpha: float
    kappa: float
    nu: float
    weights: list[Tensor]
    gammas: list[Tensor]
    subgradients: list[Tensor]
    lam: list[float]
    terms: float
    """How large the terms are of which F is the sum: what is lost by rounding is relative to these."""
    rounding: float
    """What rounding may have taken from `drop`; NaN at the first point."""

    def rho(self, lip: float) -> float:
        """ρ = 1/κ − α(Lip + 2/ν)/2: positive where the step size is safe. Weight decay belongs to Lip: add it."""
        return 1 / self.kappa - self.alpha * (lip + 2 / self.nu) / 2

    def descends(self, lip: float) -> bool:
        """Whether F has fallen by at least ρ‖P_k − P_{k−1}‖², but for rounding: the test of sufficient descent.

        Where the step size is not safe, ρ < 0 promises nothing; that F has not risen is then what is asked.
        """
        return self.drop >= max(self.rho(lip), 0.0) * self.moved - self.rounding


@torch.no_grad()
def lyapunov(optimizer: DessiLBI, loss: Tensor | float, before: Lyapunov | None = None) -> Lyapunov:
    """F_k of a run of DessiLBI. Call it with the loss at the present weights, before each step:

        >>> state = None
        >>> for _ in range(1000):
        ...     optimizer.zero_grad()
        ...     loss = criterion(model(x), y)  # of all the data
        ...     loss.backward()
        ...     state = lyapunov(optimizer, loss, state)
        ...     optimizer.step()

    from the second call on, `state.descends(lip)` says whether the step before was a good one. It holds for what the
    theorem is about: one α and κ, constant λ, no momentum, no magnitude scaling. It copies the weights and waits for
    the device: an instrument, not a part of training.
    """
    alpha, kappa, nu = _of_theorem(optimizer)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    pairs = optimizer.penalised()
    lam = [float(optimizer.threshold(p)) for p, _ in pairs]
    if before is not None:
        then = {"lr": before.alpha, "kappa": before.kappa, "nu": before.nu, "lam": before.lam}
        for name, now in {"lr": alpha, "kappa": kappa, "nu": nu, "lam": lam}.items():
            if then[name] != now:
                raise ValueError(
                    f"{name} was {then[name]!r} at the point before and is {now!r} now: the Lyapunov function is of "
                    "one run with one of each; leave out schedule and target, or start it anew"
                )
    partitions = [part for _, part in pairs]
    gammas = [optimizer.gamma(p) for p, _ in pairs]
    subgradients = [optimizer.dual(p) - gamma / kappa for (p, _), gamma in zip(pairs, gammas, strict=True)]
    omega = _zero(params)
    for (p, part), norms in zip(pairs, joint_norms(partitions, gammas), strict=True):
        threshold = part.threshold(optimizer.threshold(p), p.shape, optimizer.options(p)["size_normalised"])
        omega += part.distinct(threshold * norms).sum().double()
    distance = _zero(params)
    if before is not None:
        # g' ∈ ∂Ω(Γ') and Ω is a norm: Ω(Γ') = ⟨g', Γ'⟩, so that B = Ω(Γ) − ⟨g', Γ⟩.
        distance = omega - sum((g * gamma).sum().double() for g, gamma in zip(before.subgradients, gammas, strict=True))
    total = torch.as_tensor(loss, dtype=torch.float64, device=omega.device)
    for (p, _), gamma in zip(pairs, gammas, strict=True):
        total = total + (p - gamma).square().sum().double() / (2 * optimizer.options(p)["nu"])
    for group in optimizer.param_groups:
        if group["weight_decay"]:
            total = total + group["weight_decay"] / 2 * sum(p.square().sum().double() for p in group["params"])
    value = float(alpha * total + distance)
    terms = float(alpha * abs(total) + 2 * omega + sum(x.square().sum().double() for x in gammas) / kappa)
    moved = rounding = math.nan
    if before is not None:
        rounding = 16 * torch.finfo(params[0].dtype).eps * (terms + before.terms)
        old, new = [*before.weights, *before.gammas], [*params, *gammas]
        moved = float(sum((x - y).square().sum().double() for x, y in zip(new, old, strict=True)))
    return Lyapunov(
        value=value,
        drop=math.nan if before is None else before.value - value,
        moved=moved,
        alpha=alpha,
        kappa=kappa,
        nu=nu,
        weights=[p.detach().clone() for p in params],
        gammas=gammas,
        subgradients=subgradients,
        lam=lam,
        terms=terms,
        rounding=rounding,
    )


def _of_theorem(optimizer: DessiLBI) -> tuple[float, float, float]:
    """α, κ and the smallest ν of an optimizer that the theorem holds for."""
    if not isinstance(optimizer, DessiLBI):
        raise TypeError(f"optimizer must be a DessiLBI, got {type(optimizer).__name__}")
    groups = optimizer.param_groups
    for name in ("momentum", "scaling", "decoupled_weight_decay", "maximize"):
        values = [group[name] for group in groups if group[name]]
        if values:
            raise ValueError(f"the Lyapunov function needs {name}={type(values[0])()!r}, got {values[0]!r}")
    steps, kappas = {float(g["lr"]) for g in groups}, {g["kappa"] for g in groups}
    if len(steps) > 1 or len(kappas) > 1:
        raise ValueError(
            f"the Lyapunov function needs one lr and one kappa for all groups, got {sorted(steps)} and {sorted(kappas)}"
        )
    return steps.pop(), kappas.pop(), min((g["nu"] for g in groups if g["group"] is not None), default=math.inf)


def _zero(params: list[Tensor]) -> Tensor:
    return torch.zeros((), dtype=torch.float64, device=params[0].device)


class Stationarity(NamedTuple):
    """How far a run is from a critical point of L̄, and Γ from W."""

    gradient: float
    """‖∇L̄(W, Γ)‖, from the gradients that the parameters have now."""
    gap: float
    """‖W − Γ‖ over the penalised parameters."""


@torch.no_grad()
def stationarity(optimizer: DessiLBI | DessiAdamW) -> Stationarity:
    """‖∇L̄‖ and ‖W − Γ‖. Call it after `backward()`: the gradient of the loss is read from the parameters."""
    penalised = {id(p) for p, _ in optimizer.penalised()}
    square = gap = 0.0
    for group in optimizer.param_groups:
        for p in group["params"]:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            if id(p) in penalised:
                away = p - optimizer.gamma(p)
                gap += float(away.square().sum())
                pull = away / group["nu"]
                square += float(pull.square().sum())
                gradient = gradient + pull
            square += float(gradient.square().sum())
    return Stationarity(math.sqrt(square), math.sqrt(gap))


# -- step sizes --------------------------------------------------------------------------------------------------


def max_step_size(
    kappa: float, nu: float, lip: float, *, momentum: float = 0.0, dampening: float = 0.0, nesterov: bool = False
) -> float:
    """The α below which DessiLBI descends: 2/(κ(Lip + 2/ν)), Lip the Lipschitz constant of the loss's gradient.

    With momentum μ there is no such theorem; given is then the α below which the iteration is stable on quadratic
    losses of that curvature, while the support stays: 2(1 + μ)/(κ(s(Lip + 1/ν) + (1 + μ)/ν)), s = 1 − dampening, or
    1 + 2μ with Nesterov's. (It is where −1 becomes an eigenvalue; the last term is Γ's, which has no momentum.) The
    same holds under magnitude scaling, whose β·ε ≤ 1 make Γ's steps only shorter.
    """
    for name, number, valid in (("kappa", kappa, kappa > 0), ("nu", nu, nu > 0), ("lip", lip, lip >= 0)):
        if not valid:
            raise ValueError(f"{name} must be a number {'≥' if name == 'lip' else '>'} 0, got {number!r}")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be a number in [0, 1), got {momentum!r}")
    reach = 1 + 2 * momentum if nesterov else 1 - dampening if momentum else 1.0  # torch ignores dampening alone
    curvature = kappa * (reach * (lip + 1 / nu) + (1 + momentum) / nu)
    return 2 * (1 + momentum) / curvature if curvature else math.inf


class _Curvature:
    """Power iteration on the Hessian of a model's loss over its trainable parameters.

    Gradients, buffers (running statistics) and random numbers are left as they were.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.model, self.loss = model, loss
        self.vector: list[Tensor] | None = None

    def __call__(self, inputs: Any, targets: Any, iterations: int) -> float:
        """A lower bound of the largest |eigenvalue|, better with every iteration of this call and of those before."""
        params = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if not params:
            raise ValueError("model has no parameters that require a gradient: there is no curvature to measure")
        points = {name: p.detach().requires_grad_() for name, p in params.items()}
        buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        leaves = list(points.values())
        devices = {p.device for p in leaves if p.device.type == "cuda"}
        with torch.random.fork_rng(list(devices)), torch.enable_grad():
            outputs = functional_call(self.model, {**points, **buffers}, (inputs,))
            gradients = torch.autograd.grad(self.loss(outputs, targets), leaves, create_graph=True, allow_unused=True)
            used = [(p, g) for p, g in zip(leaves, gradients, strict=True) if g is not None and g.requires_grad]
            if not used:
                return 0.0  # the loss is linear in the weights
            at, slopes = [p for p, _ in used], [g for _, g in used]
            vector = self.vector if self.vector is not None else _random_like(at)
            wide = torch.promote_types(at[0].dtype, torch.float32)
            size = torch.ones((), device=at[0].device)
            for _ in range(iterations):
                products = torch.autograd.grad(
                    slopes, at, grad_outputs=vector, retain_graph=True, allow_unused=True, materialize_grads=True
                )
                size = torch.stack([torch.linalg.vector_norm(h, dtype=wide) for h in products]).norm()
                vector = [h / size.clamp_min(torch.finfo(size.dtype).tiny).to(h.dtype) for h in products]
        found = float(size)
        self.vector = vector if math.isfinite(found) and found > 0 else None
        return math.inf if math.isnan(found) else found


def _random_like(tensors: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(x.shape, generator=generator, dtype=torch.float32).to(x) for x in tensors]
    norm = torch.stack([x.square().sum() for x in drawn]).sum().sqrt()
    return [x / norm for x in drawn]


def lipschitz(model: nn.Module, loss: Loss, batch: tuple[Any, Any], iterations: int = 30) -> float:
    """The norm of the Hessian of `loss(model(inputs), targets)` at the present weights, by power iteration.

    This is how fast the gradient changes here: the Lip of the step-size bound as far as one point shows it (a lower
    bound; after some steps ask again). Costs a backward pass through the backward pass, about two gradients, an
    iteration. On a GPU, attention kernels without a second derivative must be switched to the plain one.

    Args:
        model: in the mode it trains in.
        loss: of (outputs, targets), such as `torch.nn.functional.cross_entropy`.
        batch: (inputs, targets); all of the data if it is to be exact.
        iterations: of the power method.
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations!r}")
    return _Curvature(model, loss)(*batch, iterations)


class StepSizeMonitor:
    """Watches the step size while a network trains, and speaks up before the loss blows up.

    Every so many steps the curvature of the loss on the batch at hand is measured by a few Hessian-vector products,
    which start from where the last ones ended, and compared with the step size:

        >>> monitor = StepSizeMonitor(model, optimizer, cross_entropy, every=100)
        >>> for x, y in batches:
        ...     warning = monitor.step(x, y)  # None, or what is wrong and what to do
        ...     ...

    Training that goes well comes near the bound by itself and stays there: a warning says that the loss is about to
    grow if the step size is not lowered, not that the run is lost. The same warning comes again only after the step
    size has been safe in between. A look costs `iterations` products of about two gradients each: with the defaults
    4 to 8 % of training.

    Args:
        model: as it is trained, not wrapped for distribution.
        optimizer: DessiLBI, or torch's SGD.
        loss: of (outputs, targets).
        every: steps from one look to the next. The first look is at the first step.
        iterations: Hessian-vector products a look; the first one takes ten.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, loss: Loss, *, every: int = 100, iterations: int = 2
    ) -> None:
        if not isinstance(optimizer, (DessiLBI, SGD)):
            raise TypeError(f"optimizer must be DessiLBI or torch.optim.SGD, got {type(optimizer).__name__}: the bound "
                            "is about steps along the gradient")  # fmt: skip
        for name, number in (("every", every), ("iterations", iterations)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number!r}")
        self.optimizer, self.every, self.iterations = optimizer, every, iterations
        self.steps = 0
        self.lip = math.nan
        """The curvature at the last look."""
        self._curvature = _Curvature(model, loss)
        self._warned = False

    def step(self, inputs: Any, targets: Any) -> str | None:
        """Call it before each step; it looks at the batch, if it is time to."""
        self.steps += 1
        return self.look(inputs, targets) if (self.steps - 1) % self.every == 0 else None

    def look(self, inputs: Any, targets: Any) -> str | None:
        """Measure now."""
        first = self._curvature.vector is None
        self.lip = self._curvature(inputs, targets, max(10, self.iterations) if first else self.iterations)
        step, limit = min(self._steps(), key=lambda pair: pair[1] / pair[0] if pair[0] else math.inf)
        safe = step < limit
        warning = None
        if not safe and not self._warned:
            warning = (
                f"the step size lr={step:.3g} is above {limit:.3g}, the largest stable one at the curvature of the "
                f"loss now ({self.lip:.3g}): lower lr to {0.9 * limit:.2g} or less, or warm up, before the loss grows"
            )
        self._warned = not safe
        return warning

    def _steps(self) -> Iterable[tuple[float, float]]:
        """The step size of every param group, and its bound."""
        for group in self.optimizer.param_groups:
            nu = group.get("nu", math.inf) if group.get("group", "none") is not None else math.inf
            decay = 0.0 if group.get("decoupled_weight_decay") else group["weight_decay"]
            yield (
                float(group["lr"]),
                max_step_size(
                    group.get("kappa", 1.0),
                    nu,
                    self.lip + decay,
                    momentum=group["momentum"],
                    dampening=group["dampening"],
                    nesterov=group["nesterov"],
                ),
            )
