"""What the loop tells whoever watches it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Reporter:
    """Calls those methods that the `progress` object of :func:`~dessilbi.training.train` has."""

    def __init__(self, progress: object | None = None) -> None:
        self._progress = progress

    def _call(self, method: str, *arguments: Any) -> None:
        found = getattr(self._progress, method, None)
        if found is not None:
            found(*arguments)

    def start(self, total_epochs: int, steps_per_epoch: int) -> None:
        self._call("start", total_epochs, steps_per_epoch)

    def step(self, epoch: int, step: int, loss: float | None) -> None:
        self._call("step", epoch, step, loss)

    def epoch(self, metrics: Mapping[str, Any]) -> None:
        self._call("epoch", dict(metrics))

    def note(self, text: str) -> None:
        self._call("note", text)
