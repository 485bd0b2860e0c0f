"""What the tests of runs share."""

from pathlib import Path
from typing import Any

import torch

from dessilbi.training import Config, train
from dessilbi.training.run import Run

TIMES = ("seconds", "images_per_second", "evaluation_seconds")
# Everything that has a state: momentum, a target for λ, dropout, batch normalisation, a schedule.
SMALL = Config(
    model="tests.training.nets:tiny",
    data="digits",
    epochs=3,
    batch=128,
    lr=0.05,
    nu=10.0,
    keep=0.3,
    schedule="cosine",
    device="cpu",
    conv="filter",
    linear="weight",
)


def numbers(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run, but for what a clock says."""
    return [{k: v for k, v in m.items() if k not in TIMES} for m in Run.open(folder).metrics()]


def final_state(folder: Path) -> dict[str, Any]:
    """The last checkpoint, but for what a clock says."""
    state = Run.open(folder).latest()
    assert state is not None
    return {k: v for k, v in state.items() if k != "seconds"}


def same(a: Any, b: Any) -> bool:
    """Whether two nested states are equal bit for bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool((a == b).all()) if hasattr(a, "all") else bool(a == b)


class Stops:
    """Watches a run and does something at a step."""

    def __init__(self, epoch: int, step: int, act: Any) -> None:
        self.at, self.act = (epoch, step), act
        self.notes: list[str] = []

    def step(self, epoch: int, step: int, loss: float | None) -> None:
        if (epoch, step) == self.at:
            self.act()

    def note(self, text: str) -> None:
        self.notes.append(text)


__all__ = ["SMALL", "TIMES", "Stops", "final_state", "numbers", "same", "train"]
