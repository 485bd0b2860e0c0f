r"""A penalty λ Σ_g ‖w_g‖ on some parameters, by a proximal step after every step of the optimizer.

    w ← Prox_{αλ/(1−μ)}(w − α·u)

with α the step size, u what the optimizer makes of the gradient and μ its momentum. Proximal and not by a subgradient
λ·sign(w) added to the gradient, for two reasons: its zeros are exact, so that the result *is* a selection, while under
subgradients weights hop around zero by ±αλ and a cut must be invented afterwards; and it is stable for every λ.

Momentum makes of a constant gradient g the step α·g·(1 − dampening)/(1 − μ); the threshold is multiplied alike. So
λ means the same with and without momentum, and the resting points are those of loss + λ Σ_g ‖w_g‖. Optimizers that
scale every coordinate, such as Adam, get the threshold αλ: the penalty is decoupled from the loss there, as AdamW's
decay is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dessilbi.baselines.companion import Companion
from dessilbi.baselines.tensors import check_moved
from dessilbi.groups import Number, Partition


class Penalty(Companion):
    """Acts by a hook of the optimizer; there is nothing to call.

    Args:
        optimizer: moves the parameters; a parameter without a gradient stays where it is.
        lam: λ, the weight of the penalty beside the loss.
        found: the parameters and how each is cut into groups, by name.
    """

    def __init__(self, optimizer: Optimizer, lam: float, found: Mapping[str, tuple[Tensor, Partition]]) -> None:
        if not isinstance(lam, Real) or isinstance(lam, bool):
            raise TypeError(f"lam must be a finite number ≥ 0, got {lam!r} ({type(lam).__name__})")
        if not 0 <= lam < math.inf:
            raise ValueError(f"lam must be a finite number ≥ 0, got {lam!r}")
        check_moved(found, optimizer)
        self.lam: float = float(lam)
        self._found: dict[str, tuple[Tensor, Partition]] = dict(
            found
        )  # keeps the parameters alive, and with them their ids
        self._parts: dict[int, Partition] = {id(p): part for p, part in found.values()}
        self._hook: RemovableHandle = optimizer.register_step_post_hook(self._after_step)

    def remove(self) -> None:
        self._hook.remove()

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            threshold = self.lam * _reach(group)
            for p in group["params"]:
                part = self._parts.get(id(p))
                if part is not None and p.grad is not None:
                    p.copy_(part.prox(part.split(p), threshold).reshape(p.shape))


def _reach(group: dict[str, Any]) -> Number:
    """How far a constant gradient of 1 moves a weight in a step, once the momentum is up."""
    reach: Number = group["lr"] * (1 - group.get("dampening", 0.0)) / (1 - group.get("momentum", 0.0))
    return reach
