"""AdaBound: Adam in the beginning, SGD in the end."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from dessilbi.baselines.optimizer import ListOptimizer


class AdaBound(ListOptimizer):
    r"""Adam whose step size for every weight is bounded, loosely at first and by one value, that of SGD, in the end.

    With the moments m, v of Adam, α = `lr`, f = `final_lr`, γ = `gamma`, in step t = 1, 2, …:

    .. math::
        \eta &= \mathrm{clip}\Big(\frac{\alpha\sqrt{1 - \beta_2^t}}{(1 - \beta_1^t)(\sqrt v + \epsilon)},\
            f\,\big(1 - \frac{1}{\gamma t + 1}\big),\ f\,\big(1 + \frac{1}{\gamma t}\big)\Big) \\
        w &\leftarrow w - \eta \odot m

    After 1/γ steps the bounds are f/2 and 2f. What is not in the paper is as in its authors' code: the factors that
    correct Adam's start, f multiplied by what a schedule has made of α since the beginning, decay as part of the
    gradient.

    Luo, Xiong, Liu, Sun, "Adaptive gradient methods with dynamic bound of learning rate", ICLR 2019.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as in :class:`torch.optim.Adam`.
        final_lr: the step size of SGD in the end, for the `lr` of the beginning.
        gamma: how fast the bounds close.
        amsbound: divide by the largest √v so far, as AMSGrad does.
    """

    _rules: ClassVar[dict[str, tuple[Callable[[float], bool], str]]] = {
        "lr": (lambda x: 0 < x < math.inf, "a finite number > 0 (final_lr follows what becomes of it)"),
        "final_lr": (lambda x: 0 <= x < math.inf, "a finite number ≥ 0"),
        "gamma": (lambda x: 0 < x < 1, "a number in (0, 1)"),
        "eps": (lambda x: 0 <= x < math.inf, "a finite number ≥ 0"),
        "weight_decay": (lambda x: 0 <= x < math.inf, "a finite number ≥ 0"),
    }

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
        super().add_param_group(param_group)
        self.param_groups[-1].setdefault("base_lr", self.param_groups[-1]["lr"])

    def _move(self, params: list[Tensor], options: dict[str, Any]) -> None:
        steps = self._kept(params, "step")
        means, squares = self._kept(params, "exp_avg"), self._kept(params, "exp_avg_sq")
        grads: list[Tensor] = [p.grad for p in params]  # type: ignore[misc]
        if options["maximize"]:
            grads = list(torch._foreach_neg(grads))
        if options["weight_decay"]:
            grads = list(torch._foreach_add(grads, params, alpha=options["weight_decay"]))
        beta1, beta2 = options["betas"]
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        if options["amsbound"]:
            largest = self._kept(params, "max_exp_avg_sq")
            torch._foreach_maximum_(largest, squares)
            squares = largest
        torch._foreach_add_(steps, 1)
        times = [float(t) for t in steps]  # they live on the host
        final, gamma = options["final_lr"] * options["lr"] / options["base_lr"], options["gamma"]
        eta = list(torch._foreach_sqrt(squares))
        torch._foreach_add_(eta, options["eps"])
        torch._foreach_reciprocal_(eta)
        torch._foreach_mul_(eta, [options["lr"] * math.sqrt(1 - beta2**t) / (1 - beta1**t) for t in times])
        torch._foreach_clamp_min_(eta, [final * (1 - 1 / (gamma * t + 1)) for t in times])
        torch._foreach_clamp_max_(eta, [final * (1 + 1 / (gamma * t)) for t in times])
        torch._foreach_addcmul_(params, eta, means, value=-1)
