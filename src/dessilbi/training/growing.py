"""``Growing``: the settings of a network that grows while it trains, and what the loop asks of whoever lets it grow.

Imports no torch. The decisions themselves are in :mod:`dessilbi.applications.grow`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from dessilbi.training.run import Run

POLICIES = ("ratio", "uniform")
INITS = ("zero", "random", "gradmax", "split")


@dataclass(frozen=True)
class Growing:
    """How a network grows (the paper's section "Growing Networks").

    Args:
        every: J: so many epochs after a growth comes the next decision.
        tau: τ: a layer grows if more than this fraction of its filters is in the support of Γ. A table gives layers
            their own, by the beginning of their names: ``{"default": 0.8, "classifier": 0.5}``.
        by, least: a layer of w filters gets max(`least`, `by`·w) more.
        growths: stop growing after so many.
        params, macs: budgets, the latter for one image. The growth that would pass one is cut down to fit, and is the
            last. A list of `params` is a budget for each of so many growths, which fill them as far as they can.
        flat: stop growing when the training loss fell by less than this part of it since the last decision.
        then: E: epochs of training after the growth has stopped.
        policy: ``uniform`` is the control: all layers grow alike, whatever Γ says.
        init: see :func:`dessilbi.widen`.
    """

    every: int = 10
    tau: Any = 0.8
    by: float = 0.3
    least: int = 2
    growths: int | None = None
    params: Any = None
    macs: int | None = None
    flat: float = 0.0
    then: int = 30
    policy: str = "ratio"
    init: str = "zero"

    def __post_init__(self) -> None:
        for name in ("every", "least", "then"):
            _whole(name, getattr(self, name))
        for name in ("growths", "macs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name))
        for name, low in (("by", 0.0), ("flat", 0.0)):
            _number(name, getattr(self, name), low, math.inf)
        for name, tau in self.thresholds.items():
            _number(f"tau of {name}" if name != "default" else "tau", tau, 0.0, 1.0)
        for budget in self.budgets:
            _whole("params", budget)
        for name, known in (("policy", POLICIES), ("init", INITS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(known)}")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Growing:
        """The settings of a configuration's `grow_options`."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise ValueError(f"grow_options has {name!r}: known are {', '.join(known)}")
        return cls(**options)

    def check_time(self, epochs: int) -> None:
        """Raise a ValueError if a run of so many epochs could not grow once."""
        if self.every + self.then > epochs:
            raise ValueError(f"epochs={epochs} with grow_options every={self.every} and then={self.then}: there is no "
                             "time to grow; epochs is the most that the run may take in all")  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Plain values, those that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def thresholds(self) -> dict[str, float]:
        """τ by the beginning of a layer's name."""
        return {"default": 0.8, **self.tau} if isinstance(self.tau, Mapping) else {"default": self.tau}

    def threshold(self, layer: str) -> float:
        """τ of a layer: that of the longest name that it begins with."""
        named = [name for name in self.thresholds if layer == name or layer.startswith(name + ".")]
        return self.thresholds[max(named, key=len, default="default")]

    @property
    def budgets(self) -> Sequence[int]:
        """The list of `params`, or the one."""
        return self.params if isinstance(self.params, (list, tuple)) else () if self.params is None else (self.params,)

    @property
    def in_steps(self) -> bool:
        """Whether every growth has a budget of its own."""
        return isinstance(self.params, (list, tuple))


def _whole(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}: must be a whole number of at least 1")


def _number(name: str, value: Any, low: float, high: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        upto = "" if math.isinf(high) else f" and at most {high:g}"
        raise ValueError(f"{name}={value!r}: must be a number of at least {low:g}{upto}")


class Now(NamedTuple):
    """A run at the end of an epoch: its network and optimizer, what was measured, one input, and the loss of a network
    on a batch of the training data."""

    model: nn.Module
    optimizer: Optimizer
    metrics: Mapping[str, Any]
    example: Tensor
    loss: Callable[[nn.Module], Tensor]


class Grower(Protocol):
    """What lets the network of a run grow: the loop asks it at the end of every epoch."""

    @property
    def end(self) -> int | None:
        """The epoch at whose end the run is done; None while that is open."""

    def step_size(self, step: int, steps_per_epoch: int) -> float:
        """α for step number `step`, counted from 0 over the whole run."""

    def end_epoch(self, now: Now) -> nn.Module | None:
        """A wider network to go on with, to which the optimizer was moved; None to go on as before."""

    def write(self, run: Run) -> None:
        """Leave in the run folder what there is to know."""

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes, as plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where that was."""
