"""What the optimizers here share: options that are checked, and steps that move lists of tensors."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer


class ListOptimizer(Optimizer):
    """A subclass says what its numbers must be (`_rules`) and how to `_move` parameters that have a gradient."""

    _rules: ClassVar[dict[str, tuple[Callable[[float], bool], str]]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch."""
        options = {**self.defaults, **param_group}
        for name, (valid, need) in self._rules.items():
            value = options[name]
            if not isinstance(value, Real) or isinstance(value, bool):
                raise TypeError(f"{name} must be {need}, got {value!r} ({type(value).__name__})")
            if not valid(float(value)):
                raise ValueError(f"{name} must be {need}, got {value!r}")
        betas = options.get("betas", (0.0, 0.0))
        if len(betas) != 2 or not all(0 <= b < 1 for b in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step. `closure`, if given, re-evaluates the model and returns the loss, which is passed on."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if p.grad.layout != torch.strided:
                    raise ValueError(
                        f"the gradient of a parameter of shape {tuple(p.shape)} is sparse ({p.grad.layout}); make it "
                        "dense, for example with Embedding(sparse=False)"
                    )
            if params:
                self._move(params, group)
        return loss

    def _move(self, params: list[Tensor], options: dict[str, Any]) -> None:
        raise RuntimeError("subclasses say how")

    def _kept(self, params: list[Tensor], name: str) -> list[Tensor]:
        """What the optimizer keeps under this name for each of the parameters; zeros to begin with."""
        for p in params:
            if name not in self.state[p]:
                self.state[p][name] = torch.zeros_like(p) if name != "step" else torch.zeros(())
        return [self.state[p][name] for p in params]
