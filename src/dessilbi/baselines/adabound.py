"""AdaBound: Adam in the beginning, SGD in the end."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

_RULES: dict[str, tuple[Callable[[float], bool], str]] = {
    "lr": (lambda x: 0 < x < math.inf, "a finite number > 0 (final_lr follows what becomes of it)"),
    "final_lr": (lambda x: 0 <= x < math.inf, "a finite number ≥ 0"),
    "gamma": (lambda x: 0 <= x < math.inf, "a finite number ≥ 0 (0 is Adam)"),
    "eps": (lambda x: 0 <= x < math.inf, "a finite number ≥ 0"),
    "weight_decay": (lambda x: 0 <= x < math.inf, "a finite number ≥ 0"),
}


class AdaBound(Optimizer):
    r"""Adam whose step size for every weight is bounded, loosely at first and by one value, that of SGD, in the end.

    With the moments m, v of Adam, corrected for their start, and α = `lr`, f = `final_lr`, γ = `gamma`:

    .. math::
        \eta &= \mathrm{clip}\Big(\frac{\alpha}{\sqrt{\hat v} + \epsilon},\ f\,\big(1 - \frac{1}{\gamma t + 1}\big),\
            f\,\big(1 + \frac{1}{\gamma t}\big)\Big) \\
        w &\leftarrow w - \eta \odot \hat m

    γ = 0 leaves Adam; γ → ∞ is SGD with the step f and the momentum of an average, from the first step on. As in the
    authors' code f is multiplied by what a schedule has made of α since the beginning, and decay is part of the
    gradient. Unlike there ε is added to √v̂, as in :class:`torch.optim.Adam`, and m̂ is corrected after the bounds, as
    their paper has it that η alone is bounded.

    Luo, Xiong, Liu, Sun, "Adaptive gradient methods with dynamic bound of learning rate", ICLR 2019.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as in :class:`torch.optim.Adam`.
        final_lr: the step size of SGD in the end, for the `lr` of the beginning.
        gamma: how fast the bounds close; after 1/γ steps they are f/2 and 2f.
        amsbound: divide by the largest √v so far, as AMSGrad does.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        final_lr: float = 0.1,
        gamma: float = 1e-3,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsbound: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        options = locals()
        super().__init__(params, {k: v for k, v in options.items() if k not in ("self", "params", "__class__")})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; `base_lr` is the `lr` that `final_lr` belongs to."""
        options = {**self.defaults, **param_group}
        for name, (valid, need) in _RULES.items():
            value = options[name]
            if not isinstance(value, Real) or isinstance(value, bool):
                raise TypeError(f"{name} must be {need}, got {value!r} ({type(value).__name__})")
            if not valid(float(value)):
                raise ValueError(f"{name} must be {need}, got {value!r}")
        if len(options["betas"]) != 2 or not all(0 <= b < 1 for b in options["betas"]):
            raise ValueError(f"betas must be two numbers in [0, 1), got {options['betas']!r}")
        super().add_param_group(param_group)
        self.param_groups[-1].setdefault("base_lr", self.param_groups[-1]["lr"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step. `closure`, if given, re-evaluates the model and returns the loss, which is passed on."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            lists = [params, [p.grad for p in params], *map(list, zip(*map(self._state, params), strict=True))]
            if group["amsbound"]:
                for p in params:
                    self.state[p].setdefault("max_exp_avg_sq", torch.zeros_like(p))
                lists.append([self.state[p]["max_exp_avg_sq"] for p in params])
            if params:
                for tensors, _ in self._group_tensors_by_device_and_dtype(lists).values():
                    _move(*tensors, options=group)
        return loss

    def _state(self, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state = self.state[p]
        if not state:
            if p.grad is not None and p.grad.layout != torch.strided:
                raise ValueError(f"the gradient of a parameter of shape {tuple(p.shape)} is sparse ({p.grad.layout}); "
                                 "make it dense, for example with Embedding(sparse=False)")  # fmt: skip
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        return state["step"], state["exp_avg"], state["exp_avg_sq"]


def _move(
    params: list[Tensor],
    grads: list[Tensor],
    steps: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    largest: list[Tensor] | None = None,
    *,
    options: dict[str, Any],
) -> None:
    """One step for parameters of one device and dtype."""
    torch._foreach_add_(steps, 1)
    if options["maximize"]:
        grads = list(torch._foreach_neg(grads))
    if options["weight_decay"]:
        grads = list(torch._foreach_add(grads, params, alpha=options["weight_decay"]))
    beta1, beta2 = options["betas"]
    torch._foreach_lerp_(means, grads, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
    if largest is not None:
        torch._foreach_maximum_(largest, squares)
    times = [float(t) for t in steps]  # they live on the host
    final, gamma = options["final_lr"] * options["lr"] / options["base_lr"], options["gamma"]
    eta = list(torch._foreach_sqrt(squares if largest is None else largest))
    torch._foreach_div_(eta, [math.sqrt(1 - beta2**t) for t in times])
    torch._foreach_add_(eta, options["eps"])
    torch._foreach_reciprocal_(eta)
    torch._foreach_mul_(eta, options["lr"])
    torch._foreach_clamp_min_(eta, [final * (1 - 1 / (gamma * t + 1)) for t in times])
    torch._foreach_clamp_max_(eta, [final * (1 + 1 / (gamma * t)) if gamma else math.inf for t in times])
    torch._foreach_mul_(eta, means)
    torch._foreach_div_(eta, [beta1**t - 1 for t in times])
    torch._foreach_add_(params, eta)
