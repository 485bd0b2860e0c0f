r"""Gradual magnitude pruning: the smallest weights go while the network trains, first many and then few.

From `begin` to `end` (fractions of the run) the fraction of weights that are left falls from 1 to `keep`:

    keep(t) = keep + (1 − keep)·(1 − (t − begin)/(end − begin))³

Zhu, Gupta, "To prune, or not to prune: exploring the efficacy of pruning for model compression", ICLR workshop 2018
(arXiv 2017); Iterative-Pruning-B in the paper. One training, as simple as it gets, and hard to beat where that training
is long: compare at equal numbers of epochs. What is out is out for good, so the step size should still be large
at `end`, that the rest can adapt; they find 100 to 1000 steps between cuts to make no difference.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from dessilbi.baselines.companion import Companion
from dessilbi.baselines.magnitude import magnitude
from dessilbi.baselines.tensors import Excluded, check_moved, partitioned
from dessilbi.selection import Selection, named_tensors


class Gradual(Companion):
    """Call `step` after every optimizer step. What is out stays zero, whatever momentum says, until `remove`.

    All processes of a distributed run find the same masks: they have the same weights, and ties go by position.

    Args:
        model, optimizer: what is trained.
        keep: the fraction of weights (filters) that are left in the end.
        allocation: how much each tensor gets, as in :func:`~dessilbi.baselines.allocate`.
        begin, end: between which parts of the run the cuts lie.
        every: steps between two cuts; the last cut is at `end` in any case.
        conv, linear, exclude: what is pruned, as in :func:`~dessilbi.baselines.magnitude`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        keep: float,
        allocation: str = "global",
        *,
        begin: float = 0.0,
        end: float = 0.75,
        every: int = 100,
        conv: str | None = "weight",
        linear: str | None = "weight",
        exclude: Excluded = (),
    ) -> None:
        if not 0 <= begin <= end <= 1:
            raise ValueError(f"begin and end must be fractions with 0 ≤ begin ≤ end ≤ 1, got {begin!r} and {end!r}")
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every must be a whole number of steps ≥ 1, got {every!r}")
        self.keep, self.allocation, self.begin, self.end, self.every = keep, allocation, begin, end, every
        self._model = model
        self._sparse: dict[str, Any] = {"conv": conv, "linear": linear, "exclude": exclude}
        check_moved(partitioned(model, **self._sparse), optimizer)
        self._cut(keep)  # an error is worth more now than in the middle of the run
        self._selection, self._left, self._steps = self._cut(1.0), 1.0, 0
        self._handle = self._selection.apply(model)

    @property
    def selection(self) -> Selection:
        """What is left now."""
        return self._selection

    def target(self, fraction_done: float) -> float:
        """The fraction that is to be left when this much of the run is done."""
        if not fraction_done >= 0:
            raise ValueError(f"fraction_done must be a number ≥ 0, got {fraction_done!r}")
        if fraction_done >= self.end:
            return self.keep
        if fraction_done <= self.begin:
            return 1.0
        return self.keep + (1 - self.keep) * ((self.end - fraction_done) / (self.end - self.begin)) ** 3

    def step(self, fraction_done: float) -> None:
        keep = self.target(fraction_done)
        self._steps += 1
        due = fraction_done >= self.end or self._steps % self.every == 0
        if due and keep < self._left:  # a run that was made longer may be behind what was cut
            self._selection, self._left = self._cut(keep, self._selection), keep
            self._enforce()

    def state_dict(self) -> dict[str, Any]:
        arrays, header = self._selection.packed()
        return {"steps": self._steps, "left": self._left, "arrays": arrays, "header": header}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        left = Selection.unpacked(state["arrays"], state["header"])
        if left.keys() != self._selection.keys():
            raise ValueError(f"the state prunes {sorted(left)}, this companion {sorted(self._selection)}: make it with "
                             "the same conv, linear and exclude")  # fmt: skip
        self._selection, self._steps, self._left = left, state["steps"], state["left"]
        self._enforce()

    def remove(self) -> None:
        self._handle.remove()

    def _enforce(self) -> None:
        params = named_tensors(self._model)
        self._handle.change([(params[name], mask) for name, mask in self._selection.masks(self._model).items()])

    def _cut(self, keep: float, within: Selection | None = None) -> Selection:
        """The largest of what is left."""
        found = magnitude(self._model, keep, self.allocation, within=within, **self._sparse)
        return Selection(found, found.level, {**found.source, "method": "gradual", "keep": self.keep})
