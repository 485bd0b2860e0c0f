r"""Gradual magnitude pruning: the smallest weights go while the network trains, first many and then few.

From `begin` to `end` (fractions of the run) the fraction of weights that are left falls from 1 to `keep`:

    keep(t) = keep + (1 − keep)·(1 − (t − begin)/(end − begin))³

Zhu, Gupta, "To prune, or not to prune: exploring the efficacy of pruning for model compression", ICLR workshop 2018
(arXiv 2017); Iterative-Pruning-B in the paper. One training, as simple as it gets, and hard to beat where that training
is long: compare at equal numbers of epochs. What is out is out for good, so the step size should still be large
at `end`, that the rest can adapt; they find 100 to 1000 steps between cuts to make no difference.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dessilbi.baselines.allocation import allocate, check_keep, selection
from dessilbi.baselines.companion import Companion
from dessilbi.baselines.tensors import Excluded, check_moved, partitioned, size
from dessilbi.selection import Selection, _named


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
        check_keep(keep)
        if not 0 <= begin <= end <= 1:
            raise ValueError(f"begin and end must be fractions with 0 ≤ begin ≤ end ≤ 1, got {begin!r} and {end!r}")
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every must be a whole number of steps ≥ 1, got {every!r}")
        self.keep, self.allocation, self.begin, self.end, self.every = keep, allocation, begin, end, every
        self._model = model
        self._found = partitioned(model, conv, linear, exclude)
        check_moved(self._found, optimizer)
        masks = {name: torch.ones_like(x, dtype=torch.bool) for name, x in self._sizes().items()}
        self._selection = self._of(masks)
        self._cut(keep)  # an error is worth more now than in the middle of the run
        self._handle = self._selection.apply(model)
        self._steps, self._done = 0, False

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
        last = fraction_done >= self.end
        if self._done or not (last or self._steps % self.every == 0):
            return
        self._done = last
        if keep < self._selection.keep:  # a run that was made longer may be behind what was cut
            self._selection = self._of(self._cut(keep))
            self._enforce()

    def state_dict(self) -> dict[str, Any]:
        arrays, header = self._selection.packed()
        return {"steps": self._steps, "done": self._done, "arrays": arrays, "header": header}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        left = Selection.unpacked(state["arrays"], state["header"])
        if left.keys() != self._selection.keys():
            raise ValueError(f"the state prunes {sorted(left)}, this companion {sorted(self._selection)}: make it with "
                             "the same conv, linear and exclude")  # fmt: skip
        self._selection, self._steps, self._done = left, state["steps"], state["done"]
        self._enforce()

    def remove(self) -> None:
        self._handle.remove()

    def _enforce(self) -> None:
        params = _named(self._model)
        self._handle.change([(params[name], mask) for name, mask in self._selection.masks(self._model).items()])

    @torch.no_grad()
    def _sizes(self) -> dict[str, Tensor]:
        return {name: size(p.detach(), part) for name, (p, part) in self._found.items()}

    def _cut(self, keep: float) -> dict[str, Tensor]:
        """The largest of what is left."""
        left = self._selection
        scores = {name: x.masked_fill(~left[name].to(x.device), -math.inf) for name, x in self._sizes().items()}
        return allocate(scores, keep, self.allocation, {name: p.shape for name, (p, _) in self._found.items()})

    def _of(self, masks: dict[str, Tensor]) -> Selection:
        return selection(masks, method="gradual", keep=self.keep, allocation=self.allocation)
