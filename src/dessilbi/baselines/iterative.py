"""Iterative pruning: train, take the smallest 20 % of what is left, and again.

What happens between the rounds makes the method, and is decided by what `train` does with the selection it is given:

- rewinding: start again from the weights of an early epoch, masked. The iterative ticket of Frankle, Carbin, "The
  lottery ticket hypothesis: finding sparse, trainable neural networks", ICLR 2019, and, rewound to after a few epochs,
  of Frankle, Dziugaite, Roy, Carbin, "Linear mode connectivity and the lottery ticket hypothesis", ICML 2020;
- going on: fine-tune the weights as they are, masked. Han et al., "Learning both weights and connections for efficient
  neural networks", NeurIPS 2015 (Iterative-Pruning-A).

The best magnitude tickets there are, and the dearest: one training a round, 11 rounds down to keep = 0.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from dessilbi.baselines.allocation import check_allocation, check_keep
from dessilbi.baselines.magnitude import magnitude
from dessilbi.baselines.tensors import Excluded
from dessilbi.selection import Selection


def rounds_to(keep: float, rate: float = 0.2) -> int:
    """How many rounds it takes: the least n ≥ 1 with (1 − rate)ⁿ ≤ keep."""
    check_keep(keep)
    if not keep > 0:
        raise ValueError(f"keep must be above 0, got {keep!r}: no number of rounds gets there")
    if not 0 < rate < 1:
        raise ValueError(f"rate must be a fraction between 0 and 1, got {rate!r}")
    return max(1, math.ceil(math.log(keep) / math.log1p(-rate) - 1e-9))


def ladder(keep: float, rate: float = 0.2) -> list[float]:
    """What is kept after each round: 1 − rate, (1 − rate)², …, and at last exactly `keep`."""
    rounds = rounds_to(keep, rate)
    return [(1 - rate) ** i for i in range(1, rounds)] + [keep]


def iterative(
    train: Callable[[Selection | None], nn.Module],
    keep: float,
    rate: float = 0.2,
    allocation: str = "global",
    *,
    conv: str | None = "weight",
    linear: str | None = "weight",
    exclude: Excluded = (),
    after: Selection | None = None,
) -> Iterator[Selection]:
    """The selections of all rounds, one by one; `train` is called when the next one is asked for.

    Args:
        train: is given what is left (None: everything) and returns the trained network. What it does about rewinding
            is its affair, see above.
        keep: the fraction of weights (filters) kept after the last round.
        rate: the part of the remaining weights that a round takes.
        allocation: as in `allocate`; what is out stays out under all of them.
        conv, linear, exclude: what is pruned, as in :func:`~dessilbi.baselines.magnitude`.
        after: go on after the round of this selection, for a run that was interrupted.
    """
    check_allocation(allocation)
    return _rounds(train, ladder(keep, rate), allocation, after, {"conv": conv, "linear": linear, "exclude": exclude})


def _rounds(
    train: Callable[[Selection | None], nn.Module],
    rungs: list[float],
    allocation: str,
    left: Selection | None,
    sparse: dict[str, Any],
) -> Iterator[Selection]:
    done = 0 if left is None else int(left.source.get("round", 0))
    for i, rung in enumerate(rungs[done:], done + 1):
        found = magnitude(train(left), rung, allocation, within=left, **sparse)
        left = Selection(found, found.level, {**found.source, "method": "iterative", "round": i, "of": len(rungs)})
        yield left
