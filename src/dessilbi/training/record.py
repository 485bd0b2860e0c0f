"""The path of a run, kept in step with its checkpoints."""

from __future__ import annotations

import os
from pathlib import Path as FilePath

from torch import nn

from dessilbi.optim import DessiAdamW, DessiLBI
from dessilbi.path import Path, early_points


class Record:
    """Records a few points inside the first epoch and one at the end of each, and saves them before each checkpoint.

    A checkpoint knows how many points there were. Those in the file beyond them were recorded after it, by a process
    that was killed, and are forgotten when the run resumes from there.
    """

    def __init__(self, model: nn.Module, optimizer: DessiLBI | DessiAdamW, file: FilePath, steps: int) -> None:
        self.path = Path(model, optimizer)
        self.file = file
        self.steps = steps
        self._model, self._optimizer = model, optimizer
        self._early = frozenset(early_points(steps))
        self._saved = 0

    def __len__(self) -> int:
        return len(self.path)

    def early(self, epoch: int, step: int) -> None:
        """Record if this many steps into this epoch (counted from 0) is a point of interest."""
        if epoch == 0 and step in self._early:
            self.path.record(step / self.steps)

    def end(self, epoch: int, **scalars: float) -> None:
        """Record the end of an epoch."""
        self.path.record(epoch, **scalars)

    def save(self) -> None:
        """Write the file if there is anything new."""
        if len(self) != self._saved:
            self.path.save(self.file)
            self._saved = len(self)

    def put_aside(self, file: FilePath) -> None:
        """Let the path so far be another file, and a new one take its place."""
        self.save()
        file.parent.mkdir(exist_ok=True)
        os.replace(self.file, file)

    def resume(self, points: int) -> None:
        """Go on after so many points of the file."""
        if not points:
            self.file.unlink(missing_ok=True)
            return
        path = Path.load(self.file)
        if len(path) < points:
            raise ValueError(f"{self.file}: {len(path)} points where the checkpoint has {points}: not this run's path")
        longer = len(path) > points
        path.truncate(points)
        path.attach(self._model, self._optimizer)
        self.path, self._saved = path, points
        if longer:
            path.save(self.file)
