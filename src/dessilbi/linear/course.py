"""What is written down while an iteration runs: states at the times of a grid, and when each unit entered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dessilbi.linear.penalties import Penalty

Array = NDArray[Any]


@dataclass(frozen=True)
class LinearPath:
    """A regularisation path of a linear model.

    `coefs` and `intercepts` have one row a time; of the multinomial loss they have a further axis, the classes, before
    that of the features.
    """

    times: Array
    """Path times t = Σα, ascending; 1/t is what a lasso's penalty would be."""
    coefs: Array
    """The sparse estimates, in the units of X."""
    intercepts: Array
    entries: Array
    """When each coefficient of γ, or of β where there is no splitting, first left zero; inf: never."""
    alpha: float
    """The last step size."""
    kappa: float
    n_iter: int
    nu: float | None = None
    dense_coefs: Array | None = None
    """β(t) of a split model, of which `coefs` is the projection."""
    gammas: Array | None = None
    """γ(t) of a split model."""

    @property
    def order(self) -> Array:
        """The features, or rows of D, that entered, first to last; a row enters with its first output."""
        return order(self.entries)


def order(entries: Array) -> Array:
    """Indices of finite entry times, ascending; of outputs × rows the earliest counts."""
    first = entries if entries.ndim == 1 else entries.min(0)
    ranked = np.argsort(first, kind="stable")
    return ranked[np.isfinite(first[ranked])]


class Grid:
    """The times at which states are wanted, filled in as the iteration passes them, linearly in between."""

    def __init__(self, times: Array, *like: Array) -> None:
        self.times, self.filled = times, 0
        self.states = [np.zeros((len(times), *x.shape), x.dtype) for x in like]

    def passed(self, start: float, end: float, before: tuple[Array, ...], after: tuple[Array, ...]) -> None:
        """The iteration has gone from one state to the next."""
        while self.filled < len(self.times) and self.times[self.filled] <= end:
            share = 1.0 if end <= start else max(0.0, (float(self.times[self.filled]) - start) / (end - start))
            for rows, old, new in zip(self.states, before, after, strict=True):
                rows[self.filled] = old + share * (new - old)
            self.filled += 1

    def stand(self, *state: Array) -> None:
        """Nothing changes any more."""
        for rows, value in zip(self.states, state, strict=True):
            rows[self.filled :] = value
        self.filled = len(self.times)

    @property
    def done(self) -> bool:
        return self.filled == len(self.times)


class Entries:
    """The first time at which the norm of each unit of z passed 1."""

    def __init__(self, penalty: Penalty, z: Array) -> None:
        self.penalty = penalty
        self.norms = penalty.norms(z)
        self.times = np.full(self.norms.shape, np.inf)

    def passed(self, start: float, end: float, z: Array, norms: Array | None = None) -> bool:
        """z is the state at the end of a step; whether any unit enters in it."""
        old, self.norms = self.norms, self.penalty.norms(z) if norms is None else norms
        entered = (self.norms > 1) & np.isinf(self.times)
        if not entered.any():
            return False
        rise = self.norms[entered] - old[entered]
        self.times[entered] = start + (end - start) * np.clip((1 - old[entered]) / rise, 0, 1)
        return True

    def by_row(self, shape: tuple[int, ...]) -> Array:
        """The entry time of every number of z, outputs × rows; rows alone, where there is one output."""
        times = self.times
        if times.shape != shape:
            times = np.broadcast_to(self.penalty.rows(times)[:, None], shape)
        return squeeze(np.ascontiguousarray(times))


def squeeze(states: Array) -> Array:
    """… × rows × outputs, as the user sees it: … × rows for one output, else … × outputs × rows."""
    return states[..., 0] if states.shape[-1] == 1 else np.swapaxes(states, -1, -2)


def grid_times(times: Any, first: float | None, n_times: int, eps: float, stop: float | None) -> Array:
    """The times of the path: those given, or `n_times` from the first entry to `stop`, or to first/eps.

    Where the first entry is not known yet, they start at eps·stop.
    """
    if times is not None:
        given = np.asarray(times, dtype=float)
        ascending = given.ndim == 1 and len(given) and (np.diff(given) > 0).all()
        if not ascending or not 0 <= given[0] <= given[-1] < np.inf:
            raise ValueError(f"times must be finite, at least 0 and strictly ascending, got {times!r}")
        return given
    if n_times < 1:
        raise ValueError(f"n_times must be at least 1, got {n_times!r}")
    if not 0 < eps < 1:
        raise ValueError(f"eps must be a number in (0, 1), got {eps!r}")
    if stop is None:
        assert first is not None
        end = first / eps
    else:
        end = float(stop)
    if not 0 < end < np.inf:
        raise ValueError(f"time must be a finite number > 0, got {stop!r}")
    if n_times == 1:
        return np.array([end])
    result = np.geomspace(eps * end if first is None else min(first, end / 2), end, n_times)
    result[-1] = end  # to the bit, where geomspace rounds
    return result
