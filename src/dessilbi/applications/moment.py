"""A run as it was at the end of an epoch: what an early selection may know, and no more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dessilbi.path import Path
from dessilbi.training import optimizers
from dessilbi.training.run import Run


@dataclass(frozen=True)
class Moment:
    """The path up to an epoch, and the state of the run there.

    A path remembers |V| of single weights for its last point only. Ranked by these, an early selection would know how
    the run went on; so the path ends here, with |V| as the checkpoint has it.
    """

    run: Run
    epoch: float
    path: Path
    state: dict[str, Any]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The network's parameters and buffers."""
        return dict(self.state["model"])

    @classmethod
    def of(cls, run: Run, model: nn.Module, shape: tuple[int, ...], at: int | None = None) -> Moment:
        """The end of epoch `at`, or of the latest checkpoint.

        `model` is the run's network, for images of this shape; it takes the weights of the moment.
        """
        path, last = cls.check(run, at)
        state = run.latest() if at is None else run.at_epoch(at)
        if state is None or not state["points"]:
            raise ValueError(f"{run.folder}: has no checkpoint yet: let it train for an epoch")
        last = state["points"] - 1 if at is None else last
        try:
            model.load_state_dict(state["model"])
        except RuntimeError as error:
            line = " ".join(str(error).split())
            raise ValueError(
                f"{run.folder}: the checkpoint is of another network than {run.config.model!r}: {line}"
            ) from error
        epoch = path.points[last]["point"]
        if last + 1 < len(path):
            path.truncate(last + 1)
            config = run.config.replace(compile="none", fused=False)
            optimizer = optimizers.build(config, model, torch.device("cpu"), shape)
            optimizers.load(optimizer, state["optimizer"])
            path.attach(model, optimizer)  # type: ignore[arg-type]
        return cls(run, epoch, path, state)

    @staticmethod
    def check(run: Run, at: int | None = None) -> tuple[Path, int]:
        """The path of the run and the index of that epoch on it; raises what `of` would, before any data is read."""
        if not run.config.ours:
            raise ValueError(
                f"{run.folder}: a run of {run.config.optimizer} leaves no path to select from: train with dessilbi or "
                "dessiadamw"
            )
        if not run.path_file.is_file():
            raise ValueError(f"{run.folder}: has no path yet: let it train for an epoch")
        path = Path.load(run.path_file)
        points = [point["point"] for point in path.points]
        if at is None:
            return path, len(points) - 1
        if at not in points:
            ends = [int(p) for p in points if p == int(p)]
            there = f"epochs {ends[0]} to {ends[-1]}" if ends else "no whole epoch"
            raise ValueError(f"{run.folder}: epoch {at} is not on its path, which has {there}")
        return path, points.index(at)
