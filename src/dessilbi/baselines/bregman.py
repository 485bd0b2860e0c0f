r"""Linearized Bregman training: the weights themselves are sparse, few at first, and come in as training needs them.

With J = λ Σ_g ‖θ_g‖ (for single elements λ‖θ‖₁) and a subgradient v of J + ‖·‖²/(2δ) at θ, in the place of θ it is v
that follows the gradient:

    v ← v − τ·m                     m the averaged gradient (LinBreg), or Adam's direction (AdaBreg)
    θ ← prox_{δJ}(δv) = δ·Prox_λ(v)

A weight that is zero stays zero until its gradients have added up to what it lacks of λ: inverse scale space like
DessiLBI's, but with one network and not two, which is therefore never dense. Started from a few weights
(`sparse_start`) a run is sparse throughout; how many weights there are in the end follows from λ, τ, the start and the
number of steps, and cannot be stated in advance.

Bungert, Roith, Tenbrinck, Burger, "A Bregman learning framework for sparse neural networks", JMLR 2022. For groups they
multiply λ by √|g|: that is `size_normalised` here. Their average has τ inside, which is the same while τ stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd

from dessilbi.baselines.allocation import allocate, check_keep
from dessilbi.baselines.optimizer import ListOptimizer
from dessilbi.baselines.tensors import Excluded, partitioned
from dessilbi.groups import Partition, description
from dessilbi.masks import elementwise
from dessilbi.scalespace import partitions_of


class _Bregman(ListOptimizer):
    """What LinBreg and AdaBreg share. Param groups are those of `DessiLBI`: `group` and `size_normalised` beside the
    options; what is not penalised has no v, and moves by δτ."""

    _rules: ClassVar[dict[str, tuple[Callable[[float], bool], str]]] = {
        "lr": (lambda x: 0 <= x < math.inf, "a finite number ≥ 0"),
        "lam": (lambda x: 0 <= x < math.inf, "a finite number ≥ 0"),
        "delta": (lambda x: 0 < x < math.inf, "a finite number > 0"),
    }

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, {**defaults, "group": "auto", "size_normalised": False})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, with the `group` of the parameters."""
        super().add_param_group(param_group)
        for part in partitions_of(self.param_groups[-1]):
            if part is not None and part.coupling is not None:
                raise ValueError("group='channel': the groups must lie in one tensor each here; choose 'filter'")

    def _move(self, params: list[Tensor], options: dict[str, Any]) -> None:
        parts = dict(zip(options["params"], partitions_of(options), strict=True))
        plain = [p for p in params if parts[p] is None]
        if plain:
            self._follow(plain, plain, options, options["delta"] * options["lr"])
        sparse = [(p, part) for p in params if (part := parts[p]) is not None]
        if sparse:
            duals = [self._dual(p, part, options) for p, part in sparse]
            self._follow([p for p, _ in sparse], duals, options, options["lr"])
            _read(sparse, duals, options)

    def _follow(self, params: list[Tensor], points: list[Tensor], options: dict[str, Any], lr: float) -> None:
        """Move the points, v or θ, by the gradients of the parameters."""
        raise RuntimeError("subclasses say how")

    def _dual(self, p: Tensor, part: Partition, options: dict[str, Any]) -> Tensor:
        """v of a parameter; in the beginning the subgradient of least norm, θ/δ + λ·θ_g/‖θ_g‖."""
        state = self.state[p]
        if "dual" not in state:
            theta = part.split(p.detach())
            unit = theta * part.spread(1 / part.norms(theta).clamp_min(torch.finfo(p.dtype).tiny))
            threshold = part.threshold(options["lam"], p.shape, options["size_normalised"])
            state["dual"] = torch.empty_like(p).copy_((theta / options["delta"] + threshold * unit).reshape(p.shape))
        dual: Tensor = state["dual"]
        return dual

    def state_dict(self) -> dict[str, Any]:
        """As in torch, of tensors and plain values only; Partition objects become their descriptions."""
        found = super().state_dict()
        for group in found["param_groups"]:
            group["group"] = description(group["group"])
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """As in torch; how parameters are cut into groups must be the same as before."""
        own = [group["group"] for group in self.param_groups]
        for i, (mine, saved) in enumerate(zip(own, state_dict["param_groups"], strict=False)):
            if description(mine) != saved.get("group"):
                raise ValueError(
                    f"state_dict: param group {i} was saved with group={saved.get('group')!r}, but this optimizer has "
                    f"group={description(mine)!r}; build it with the same groups"
                )
        super().load_state_dict(state_dict)
        for group, mine in zip(self.param_groups, own, strict=True):
            group["group"] = mine


def _read(sparse: list[tuple[Tensor, Partition]], duals: list[Tensor], options: dict[str, Any]) -> None:
    """θ = δ·Prox_λ(v)."""
    shrunk = []
    for (p, part), v in zip(sparse, duals, strict=True):
        threshold = part.threshold(options["lam"], p.shape, options["size_normalised"])
        shrunk.append(part.prox(part.split(v), threshold).reshape(p.shape))
    if options["delta"] != 1:
        torch._foreach_mul_(shrunk, options["delta"])
    torch._foreach_copy_([p for p, _ in sparse], shrunk)


class LinBreg(_Bregman):
    """Linearized Bregman iterations (see above): v ← v − τ·m, θ = δ·Prox_λ(v).

    m is the gradient, or with `momentum` μ its average, m ← μ·m + (1 − μ)·G: unlike in :class:`torch.optim.SGD` the
    step does not grow with μ.

    Args:
        params: tensors or param groups, as in :class:`~dessilbi.DessiLBI`; :func:`~dessilbi.param_groups` sorts them.
        lr: τ, the step size.
        lam: λ; the larger, the fewer weights come in, and the later.
        delta: δ; θ moves with δτ.
        momentum: μ.
    """

    _rules: ClassVar = {**_Bregman._rules, "momentum": (lambda x: 0 <= x < 1, "a number in [0, 1)")}

    def __init__(self, params: ParamsT, lr: float, *, lam: float, delta: float = 1.0, momentum: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "lam": lam, "delta": delta, "momentum": momentum})

    def _follow(self, params: list[Tensor], points: list[Tensor], options: dict[str, Any], lr: float) -> None:
        momentum = options["momentum"]
        buffers: list[Any] = self._kept(params, "momentum_buffer") if momentum else [None] * len(params)
        sgd(
            points, [p.grad for p in params], buffers,  # type: ignore[misc]
            foreach=True, lr=lr, momentum=momentum, dampening=momentum, weight_decay=0, nesterov=False, maximize=False,
        )  # fmt: skip


class AdaBreg(_Bregman):
    """LinBreg with the directions of Adam: v ← v − τ·m̂/(√ŝ + ε) with the moments m, s of :class:`torch.optim.Adam`.

    Args:
        params, lam, delta: as in `LinBreg`.
        lr: τ, about that of Adam.
        betas, eps: as in :class:`torch.optim.Adam`.
    """

    _rules: ClassVar = {**_Bregman._rules, "eps": (lambda x: 0 <= x < math.inf, "a finite number ≥ 0")}

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        lam: float,
        delta: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "lam": lam, "delta": delta, "betas": betas, "eps": eps})

    def _follow(self, params: list[Tensor], points: list[Tensor], options: dict[str, Any], lr: float) -> None:
        means, squares = self._kept(params, "exp_avg"), self._kept(params, "exp_avg_sq")
        beta1, beta2 = options["betas"]
        adam(
            points, [p.grad for p in params], means, squares, [], self._kept(params, "step"),  # type: ignore[misc]
            foreach=True, lr=lr, beta1=beta1, beta2=beta2, eps=options["eps"],
            amsgrad=False, weight_decay=0, maximize=False,
        )  # fmt: skip


@torch.no_grad()
def sparse_start(
    model: nn.Module,
    keep: float = 0.01,
    *,
    conv: str | None = "weight",
    linear: str | None = "weight",
    exclude: Excluded = (),
    seed: int | None = None,
) -> None:
    """Set all but a random part of every tensor to zero and multiply the rest by √(n/kept): the variance of its
    entries, on which the initialisation has seen to it that signals neither grow nor fade, is what it was.

    Args:
        model: as it was initialised.
        keep: the fraction of the weights (filters) of every tensor that stay, at least one of each. The optimizer adds
            to them where gradients ask for it; 0.01 is what its authors take.
        conv, linear, exclude: what becomes sparse, as in :func:`~dessilbi.baselines.magnitude`.
        seed: of the choice; by default torch's random numbers decide.
    """
    check_keep(keep)
    found = partitioned(model, conv, linear, exclude)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for name, (p, part) in found.items():
        shape = tuple(p.shape) if part.kind == "weight" else (part.count(p.shape),)
        scores = torch.rand(shape, generator=generator)
        mask = allocate({name: scores}, max(keep, 1 / scores.numel()))[name].to(p.device)
        p.mul_(elementwise(mask, part, p.shape)).mul_(math.sqrt(mask.numel() / int(mask.sum())))
