r"""Which entries to keep, given a score for each: how many in every tensor, and exactly how many in all.

The scores say what is best inside a tensor; the allocation says how much of it each tensor gets.

- "global": the largest scores over all tensors together. Fair only where scores of different layers compare, which
  magnitudes do not: a layer whose weights are small altogether (wide ones under weight decay) may vanish whole, and
  with it the network. That is the known way in which global magnitude pruning collapses at small `keep`.
- "uniform": the same fraction of every tensor. Never collapses; small first layers are cut as hard as large ones.
- "erk": Erdős–Rényi-kernel densities: the density of a layer with weight shape s is min(1, ε·Σs/Πs), with the ε that
  gives the stated total. Layers that would exceed 1 are kept whole and the rest is rescaled.
  Mocanu et al., "Scalable training of artificial neural networks with adaptive sparse connectivity inspired by network
  science", Nature Communications 2018; the kernel form is of Evci, Gale, Menick, Castro, Elsen, "Rigging the lottery:
  making all tickets winners", ICML 2020.
- "lamp": scores are magnitudes |w|, and an entry's new score is the share of w² in the squares of all entries of its
  tensor that are not smaller: w_u²/Σ_{v: |w_v| ≥ |w_u|} w_v². Then global. It is a magnitude that does not depend on
  the layer's scale; the largest entry of every tensor scores 1. The strongest magnitude criterion here and the one to
  compare with. Lee, Park, Mo, Ahn, Shin, "Layer-adaptive sparsity for the magnitude-based pruning", ICLR 2021.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real

import numpy as np
import torch
from torch import Tensor

ALLOCATIONS = ("global", "uniform", "erk", "lamp")


def check_keep(keep: float, name: str = "keep") -> None:
    if not isinstance(keep, Real) or isinstance(keep, bool):
        raise TypeError(f"{name} must be a fraction from 0 to 1, got {keep!r} ({type(keep).__name__})")
    if not 0 <= keep <= 1:
        raise ValueError(f"{name} must be a fraction from 0 to 1, got {keep!r}")


def check_allocation(allocation: str) -> None:
    if allocation not in ALLOCATIONS:
        raise ValueError(f"allocation must be one of {', '.join(ALLOCATIONS)}, got {allocation!r}")


@torch.no_grad()
def allocate(
    scores: Mapping[str, Tensor],
    keep: float,
    allocation: str = "global",
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Tensor]:
    """Keep the entries of the largest scores: bool masks shaped like the scores.

    Exactly ⌊keep · entries⌋ are kept (as `select` counts); of equal scores the first ones, by position. Except by
    "global" no tensor is emptied, which an error says where `keep` is too small for it.

    Args:
        scores: by name, larger is better; −inf marks an entry that is out already and never comes back.
        keep: the fraction of all entries to keep.
        allocation: one of `ALLOCATIONS`; what they mean is above.
        shapes: the shapes of the parameters, where the scores are one a filter and "erk" has to know them.
    """
    check_keep(keep)
    check_allocation(allocation)
    if not scores:
        raise ValueError("scores is empty: give at least one tensor")
    for name, x in scores.items():
        if bool(x.isnan().any()):
            raise ValueError(
                f"the scores of {name} contain NaN: training has diverged, or the loss has no gradient there"
            )
    flat = [x.detach().flatten() for x in scores.values()]
    count = int(keep * sum(x.numel() for x in flat) + 1e-6)
    room = [int((x != -math.inf).sum()) for x in flat]
    if count > sum(room):
        raise ValueError(
            f"keep={keep!r} asks for {count} entries, but only {sum(room)} are not out already: lower keep"
        )
    if allocation != "global" and count < (tensors := sum(n > 0 for n in room)):
        raise ValueError(
            f"keep={keep!r} keeps {count} entries, fewer than there are tensors ({tensors}), and "
            f"allocation={allocation!r} leaves one in each: raise keep, or choose allocation='global'"
        )
    if allocation == "lamp":
        counts = _counts([_lamp(x) for x in flat], count)
    elif allocation == "global":
        counts = _counts(flat, count)
    else:
        counts = _rounded(_filled(_appetites(scores, allocation, shapes), room, count), room, count)
    return {name: _largest(x, n).view(s.shape) for (name, s), x, n in zip(scores.items(), flat, counts, strict=True)}


def _largest(x: Tensor, count: int) -> Tensor:
    """Which of a row of numbers are the `count` largest; of equal ones the first."""
    if count <= 0 or count >= x.numel():
        return torch.full_like(x, count > 0, dtype=torch.bool)
    threshold = x.kthvalue(x.numel() - count + 1).values
    chosen = x > threshold
    ties = (x == threshold).nonzero().flatten()
    chosen[ties[: count - int(chosen.sum())]] = True
    return chosen


def _counts(rows: Sequence[Tensor], count: int) -> list[int]:
    """How many of the `count` largest of all rows together lie in each."""
    chosen = _largest(torch.cat([x.to(rows[0].device) for x in rows]), count)
    return [int(mine.sum()) for mine in chosen.split([x.numel() for x in rows])]


def _lamp(x: Tensor) -> Tensor:
    """The LAMP scores of a row of magnitudes, in descending order.

    In that order they descend too, so how many of a tensor are kept says which: no entry need know its place.
    """
    squares = _descending(x).double().square()
    if bool((x < 0).any()):  # −inf came last
        squares[int((x >= 0).sum()) :] = -1
    above = squares.clamp_min(0).cumsum(0)
    lamp = torch.where(squares > 0, squares / above, squares)
    if lamp.numel() and squares[0] == 0:
        lamp[0] = 1  # a tensor of zeros keeps one entry like any other
    return lamp


def _descending(x: Tensor) -> Tensor:
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.sort(x.numpy())).flip(0)  # ten times as fast as a sort that tells the places too
    return x.sort(descending=True).values


def _appetites(
    scores: Mapping[str, Tensor], allocation: str, shapes: Mapping[str, Sequence[int]] | None
) -> list[float]:
    """To which numbers the entries kept in each tensor are to be proportional, until one is kept whole."""
    found = []
    for name, x in scores.items():
        shape = tuple(x.shape if shapes is None else shapes[name])
        if allocation == "erk" and len(shape) < 2:
            raise ValueError(f"allocation='erk' needs the shape of the weight {name}, got {shape}: pass shapes")
        found.append(x.numel() * (sum(shape) / math.prod(shape) if allocation == "erk" else 1.0))
    return found


def _filled(appetites: Sequence[float], room: Sequence[int], count: int) -> list[float]:
    """min(room, ε·appetite) for every tensor, with the ε for which they sum up to the count."""
    whole: set[int] = set()
    while True:
        rest = [i for i in range(len(room)) if i not in whole]
        left, hunger = count - sum(room[i] for i in whole), sum(appetites[i] for i in rest)
        share = left / hunger if hunger else 0.0
        full = {i for i in rest if share * appetites[i] >= room[i]}
        if not full:
            return [room[i] if i in whole else share * appetites[i] for i in range(len(room))]
        whole |= full


def _rounded(targets: Sequence[float], room: Sequence[int], count: int) -> list[int]:
    """Whole numbers by the targets that sum up to the count (largest remainders); none is zero where there is room."""
    found = [min(n, max(1, math.floor(t + 1e-9))) for t, n in zip(targets, room, strict=True)]
    while (missing := count - sum(found)) > 0:
        i = max((i for i, n in enumerate(room) if found[i] < n), key=lambda i: targets[i] - found[i])
        found[i] += 1
    for _ in range(-missing):
        i = min((i for i in range(len(room)) if found[i] > 1), key=lambda i: targets[i] - found[i])
        found[i] -= 1
    return found
