"""What the adapters share: a threshold to drive and a path to record, told by a trainer how far its run is."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from torch import nn

from dessilbi.optim import DessiAdamW, DessiLBI
from dessilbi.path import Path, early_points
from dessilbi.threshold import TargetThreshold

# What Path.record keeps under these names is its own.
_TAKEN = {"self", "point", "time", "lam"}


@dataclass(frozen=True)
class Settings:
    """The arguments of the callbacks.

    Args:
        keep: the fraction of groups in the support in the end: drives :class:`~dessilbi.TargetThreshold`. None: λ is
            left as it is.
        ramp: the part of the run over which the support grows.
        every_n_epochs: how often the end of an epoch is recorded; the end of the run always is.
        early: how many log-spaced points are recorded in the first epoch, where most of the path happens.
        file: where the path is saved, at least at the end of every recorded epoch. None: nowhere.
    """

    keep: float | None = None
    ramp: float = 0.3
    every_n_epochs: int = 1
    early: int = 5
    file: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and not 0 < self.keep <= 1:
            raise ValueError(f"keep must be a fraction in (0, 1], or None, got {self.keep!r}")
        for name, least in (("every_n_epochs", 1), ("early", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer ≥ {least}, got {value!r}")


class Recorder:
    """One run.

    Args:
        settings: what the user asked for.
        model, optimizers: of the trainer; one of the optimizers, maybe wrapped, must be ours.
        remedy: what to do if none is.
        epoch_steps: optimizer steps in the first epoch; None if nobody knows.
        path: the path to go on with, where a run is resumed.
    """

    def __init__(
        self,
        settings: Settings,
        model: nn.Module,
        optimizers: Iterable[Any],
        remedy: str,
        epoch_steps: int | None,
        path: Path | None = None,
    ) -> None:
        optimizer = _ours(optimizers, remedy)
        self._threshold = None if settings.keep is None else TargetThreshold(optimizer, settings.keep, settings.ramp)
        self._early = set(early_points(epoch_steps, settings.early) if epoch_steps else ())
        self._file = None if settings.file is None else FilePath(settings.file)
        if path is None:
            path = Path(model, optimizer)
        else:
            path.attach(model, optimizer)
        self.path = path

    def step(self, done: int, total: float) -> bool:
        """After an optimizer step, the `done`-th of `total`: set λ, and say whether this moment is to be recorded."""
        if self._threshold is not None:
            self._threshold.step(done / total)
        return done in self._early

    def record(self, point: float, metrics: Mapping[str, Any]) -> None:
        """Record this moment; what comes later about a moment that is recorded already is added to it."""
        scalars = {f"{name}_" if name in _TAKEN else name: float(value) for name, value in metrics.items()}
        if self.recorded(point):
            self.path.note(**scalars)
        else:
            self.path.record(point, **scalars)

    def recorded(self, point: float | None) -> bool:
        """Whether this moment is the last recorded one."""
        return len(self.path) > 0 and self.path.points[-1]["point"] == point

    def save(self) -> None:
        """Write the path to the user's file."""
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self.path.save(self._file)


def _ours(optimizers: Iterable[Any], remedy: str) -> DessiLBI | DessiAdamW:
    """The one optimizer of ours, out of whatever wraps it."""
    found, names = [], []
    for optimizer in optimizers:
        while not isinstance(optimizer, (DessiLBI, DessiAdamW)) and hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        names.append(type(optimizer).__name__)
        if isinstance(optimizer, (DessiLBI, DessiAdamW)):
            found.append(optimizer)
    if len(found) == 1:
        return found[0]
    given = f"the trainer's optimizers are {', '.join(names) or 'none'}"
    if found:
        raise ValueError(f"{given}: one path belongs to one optimizer; put all parameters into one DessiLBI")
    raise ValueError(f"{given}, and none of them is a DessiLBI or DessiAdamW: {remedy}")
