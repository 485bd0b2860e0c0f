"""LBI: the linearized Bregman iteration for linear models, and the whole path that it runs through."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning

from dessilbi.linear.course import Entries, Grid, LinearPath, grid_times, squeeze
from dessilbi.linear.penalties import Penalty, penalty
from dessilbi.linear.problem import DAMPING, RESOLUTION, STEP, Problem, largest
from dessilbi.linear.working import Columns, GramColumns

Array = NDArray[Any]


def lbi_path(
    X: Any,
    y: Any,
    *,
    loss: str = "squared",
    penalty: str = "l1",
    groups: Any = None,
    kappa: float | None = None,
    alpha: float | None = None,
    times: Any = None,
    n_times: int = 100,
    eps: float = 1e-2,
    time: float | None = None,
    fit_intercept: bool = True,
    standardize: bool = True,
    sample_weight: Any = None,
    max_iter: int = 100_000,
) -> LinearPath:
    """The path of the linearized Bregman iteration (LBI): from nothing to the unpenalised fit, in one run.

    With L the mean loss over the samples and Ω the l1 or group penalty, from z = β = 0,

        z ← z − α∇L(β),      β = κ·Prox_Ω(z),      t ← t + α

    Time t is the regularisation parameter; 1/t corresponds to the penalty of a lasso. Coefficients enter in the order
    of their importance, and unlike the lasso's they are not shrunk once they are in: for κ → ∞ the path is
    that of :func:`iss_path`, unbiased on the support that it has reached.

    Computed is the plain iteration, to rounding. But features whose z is below 1 do not act back on the others, so
    that their z is brought up to date for many steps at a time, in one product of matrices; a step only takes two
    products with the features that are in play.

    Args:
        X, y: the data; X dense or sparse, in float32 or float64, which is what is computed in. For the logistic loss y
            is 0 and 1, for "multinomial" it has a column of 0 and 1 for every class.
        loss: "squared" (half of the mean square), "logistic" or "multinomial".
        penalty: "l1", or "group": features of one label enter together; with several classes also "group" without
            `groups`: a feature enters for all classes at once.
        groups: a label for every feature.
        kappa: how fast coefficients follow. Large is close to the inverse scale space and takes as many more
            steps. By default twice the size that the largest coefficient seems to have, max|∇L(0)| over the mean
            curvature.
        alpha: the step size. Below 2/(κ‖∇²L‖) it is stable. By default about 1/(κ‖∇²L‖), where of the Hessian only
            that part counts that belongs to features in play, and at most a twentieth of the time that has passed.
        times: the times at which the path is wanted, ascending. In between iterations z is linear.
        n_times, eps, time: otherwise it is wanted at `n_times` times, evenly spaced in log t, from the first
            entry, 1/max|∇L(0)|, to `time`, or to 1/eps times the first entry.
        fit_intercept: whether there is an intercept, which is not penalised.
        standardize: whether features are brought to deviation 1 for the iteration. Coefficients are in the units of X.
        sample_weight: weights of the samples.
        max_iter: the most steps; if the path ends before its time, a ConvergenceWarning says so.
    """
    problem = Problem(X, y, loss, sample_weight, fit_intercept, standardize)
    return run(problem, penalty, groups, kappa, alpha, times, n_times, eps, time, max_iter)


def run(
    problem: Problem,
    kind: str,
    groups: Any,
    kappa: float | None,
    alpha: float | None,
    times: Any,
    n_times: int,
    eps: float,
    time: float | None,
    max_iter: int,
) -> LinearPath:
    """`lbi_path` of a problem."""
    p, outputs = problem.slope.shape
    pen = penalty(kind, p, outputs, groups)
    kappa = positive("kappa", DAMPING * problem.size or 1.0 if kappa is None else kappa)
    top = float(pen.norms(problem.slope).max())
    first = 1 / top if top > 0 else 1.0
    grid = Grid(grid_times(times, first, n_times, eps, time), problem.slope, problem.intercept)
    if alpha is not None:
        check_step(positive("alpha", alpha), 2 / (kappa * problem.lipschitz() or 1))
    state = _State(problem, pen, kappa, alpha, grid, max_iter)
    state.rest(first if top > 0 else np.inf)
    while not grid.done and not state.settled():
        if state.steps >= max_iter:
            warn_short(max_iter, state.time, float(grid.times[-1]))
            break
        state.advance()
    grid.stand(state.z, state.b)
    zs, intercepts = grid.states
    coefs, intercepts = problem.restore(kappa * pen.prox(zs), intercepts)
    return LinearPath(
        times=grid.times,
        coefs=squeeze(coefs),
        intercepts=intercepts[:, 0] if outputs == 1 else intercepts,
        entries=state.entries.by_row(problem.slope.shape),
        alpha=state.alpha,
        kappa=kappa,
        n_iter=max(1, state.steps),
    )


class _State:
    """Where the iteration stands: z of all features, the intercepts, and which features are in play."""

    def __init__(
        self, problem: Problem, pen: Penalty, kappa: float, alpha: float | None, grid: Grid, max_iter: int
    ) -> None:
        self.problem, self.penalty, self.kappa, self.fixed, self.grid = problem, pen, kappa, alpha, grid
        self.max_iter = max_iter
        self.z, self.b = np.zeros_like(problem.slope), problem.intercept.astype(problem.dtype)
        self.velocity = -problem.slope
        self.entries = Entries(pen, self.z)
        self.time, self.steps, self.alpha = 0.0, 0, alpha or 0.0
        # A batch of steps needs as many columns of n and of p numbers: a small part of the data.
        n, p = problem.design.shape
        self.batch = int(np.clip(min(n, p) // 8, 8, 64))
        self.index = np.zeros(0, dtype=np.intp)
        self.local: Columns | None = None
        self.vector = np.random.default_rng(0).standard_normal((p, 1)).astype(problem.dtype)
        self.norm = 0.0

    def rest(self, first: float) -> None:
        """Until the first entry nothing moves but z, on a straight line: one step, or as many as fit."""
        until = min(first, float(self.grid.times[-1]))
        if self.fixed is not None:
            count = min(int(until / self.fixed), self.max_iter)
            until, self.steps = count * self.fixed, count
        z = until * self.velocity
        self.grid.passed(0.0, until, (self.z, self.b), (z, self.b))
        self.entries.passed(0.0, until, z)
        self.z, self.time = z, until

    def settled(self) -> bool:
        """Whether what is left of the path cannot move z any more, by more than the root of the precision."""
        speed = float(np.abs(self.velocity).max())
        return bool(speed * (float(self.grid.times[-1]) - self.time) < np.sqrt(np.finfo(self.z.dtype).eps))

    def advance(self) -> None:
        """Some steps: with the features in play, then for all others at once, up to where another one enters."""
        self._choose()
        assert self.local is not None
        alpha = self._step()
        left = (float(self.grid.times[-1]) - self.time) / alpha
        count = int(min(self.batch, self.max_iter - self.steps, np.ceil(left - 1e-9)))
        zs, bs, totals = self.local.run(self.z[self.index], self.b, self.kappa, alpha, max(1, count))
        if len(self.index) < len(self.z):
            whole = self.z - self.local.others(totals, alpha)
            whole[:, self.index] = zs
            norms = self.penalty.norms(whole)
            outside = self.penalty.rows(norms > 1)
            outside[:, self.index] = False
            entering = outside.any(1)
            if entering.any():
                # From the step after this one on, it acts on the others.
                whole = whole[: int(entering.argmax()) + 1]
        else:
            whole, norms = zs, self.penalty.norms(zs)
        before, b = self.z, self.b
        for z, norm, after in zip(whole, norms, bs, strict=False):
            end = self.time + alpha
            self.grid.passed(self.time, end, (before, b), (z, after))
            self.entries.passed(self.time, end, z, norm)
            before, b, self.time = z, after, end
        self.velocity = (before - (whole[-2] if len(whole) > 1 else self.z)) / alpha
        self.z, self.b, self.alpha = before.copy(), b, alpha
        self.steps += len(whole)

    def _choose(self) -> None:
        """The features in play: selected ones, and those that would enter within the batch as they move now."""
        p = len(self.z)
        alpha = self._step()
        ahead, needed = self.batch * alpha, self._close(0.0)
        # While few are selected the steps are long: not all that would enter in a batch of them is worth taking along.
        soon, most = self._close(ahead), 2 * needed.sum() + 32
        while soon.sum() > most and ahead > alpha:
            ahead /= 2
            soon = self._close(ahead)
        needed |= soon
        kept = np.zeros(p, dtype=bool)
        kept[self.index] = True
        if not (needed & ~kept).any() and self.local is not None and len(self.index) < 1.25 * needed.sum() + 8:
            return
        everything = p <= 64 or 4 * needed.sum() > p
        index = np.arange(p) if everything else np.flatnonzero(needed)
        if self.local is not None and np.array_equal(index, self.index):
            return
        self.index = index
        of = GramColumns if self.problem.gram is not None else Columns
        self.local = of(self.problem, self.penalty, index)
        if self.fixed is None:
            self.norm, self.vector[index] = largest(self.local.curve, self.vector[index], precision=1e-2)
            if self.problem.moves:
                self.norm = max(self.norm, self.problem.loss.curvature)

    def _step(self) -> float:
        """The step size: stable, and as fine as the path is looked at."""
        if self.fixed is not None:
            return self.fixed
        stable = STEP / (self.kappa * self.norm) if self.norm else np.inf
        return min(stable, RESOLUTION * self.time)

    def _close(self, ahead: float) -> Array:
        """The features that are selected, or would be after some time of moving as they move now."""
        z = self.z + ahead * self.velocity if ahead else self.z
        return self.penalty.rows(self.penalty.norms(z) > 1 - 1e-6)


def positive(name: str, value: Any) -> float:
    """The number, or an error that says what it should have been."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number > 0, got {value!r}")
    if not 0 < value < np.inf:
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}")
    return float(value)


def check_step(alpha: float, limit: float) -> None:
    """Warn of a step size that is too large."""
    if alpha >= limit:
        warnings.warn(
            f"alpha={alpha:.4g} is not below {limit:.4g} = 2/(kappa·‖∇²L‖): the path may oscillate or diverge; lower "
            "alpha or kappa, or leave alpha=None",
            ConvergenceWarning,
            stacklevel=4,
        )


def warn_short(max_iter: int, time: float, end: float) -> None:
    """Warn of a path that ended before its time."""
    warnings.warn(
        f"the path stopped at time {time:.4g} of {end:.4g}, after max_iter={max_iter} steps, and stands still from "
        "there on: raise max_iter, or eps, or lower kappa",
        ConvergenceWarning,
        stacklevel=4,
    )
