"""The exact inverse scale space of the l1 penalty: the limit of LBI for κ → ∞."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls
from sklearn.exceptions import ConvergenceWarning

from dessilbi.linear.course import order
from dessilbi.linear.problem import Problem

Array = NDArray[Any]


@dataclass(frozen=True)
class IssPath:
    """A piecewise constant path: `coefs[i]` and `intercepts[i]` from `times[i]` up to, not including, `times[i + 1]`.

    It begins with zeros at time 0. Coefficients are in the units of X.
    """

    times: Array
    coefs: Array
    intercepts: Array
    subgradients: Array
    """ρ at the breakpoints, of the standardised features: what ∂‖β‖₁ contains; linear in between."""
    entries: Array
    """When each coefficient first left zero; inf: never."""

    @property
    def order(self) -> Array:
        """The features that entered, first to last."""
        return order(self.entries)

    def at(self, time: float | Array) -> Array:
        """The coefficients at some times."""
        if np.any(np.asarray(time) < 0):
            raise ValueError(f"time must be at least 0, got {time!r}")
        result: Array = self.coefs[np.searchsorted(self.times, time, side="right") - 1]
        return result


def iss_path(
    X: Any,
    y: Any,
    *,
    max_time: float = np.inf,
    max_breaks: int | None = None,
    fit_intercept: bool = True,
    standardize: bool = True,
    sample_weight: Any = None,
) -> IssPath:
    """The exact path of the inverse scale space, for the squared loss L(β) = ‖y − Xβ‖²/(2n) and the l1 penalty:

        dρ/dt = −∇L(β),      ρ ∈ ∂‖β‖₁,      β(0) = ρ(0) = 0

    β is piecewise constant and ρ piecewise linear. When a ρ_j reaches ±1 at a breakpoint, β becomes the least-squares
    fit on all features with |ρ| = 1, each with the sign of its ρ or zero: a non-negative least-squares problem.
    Then ρ moves on, along the gradient there, to the next breakpoint. So the estimate has no shrinkage bias: on a
    support with the right signs it is least squares. The path ends where the gradient vanishes.

    Args:
        X, y, fit_intercept, standardize, sample_weight: as in :func:`lbi_path`. The columns of a sparse X that are
            selected become dense.
        max_time: the time to stop at.
        max_breaks: the most breakpoints, by default 10·min(n, p) + 100; a ConvergenceWarning says if they did not do.
    """
    problem = Problem(X, y, "squared", sample_weight, fit_intercept, standardize)
    n, p = problem.design.shape
    limit = 10 * min(n, p) + 100 if max_breaks is None else max_breaks
    root = np.sqrt(problem.loss.weights)
    target = root * (problem.loss.targets[:, 0] - problem.intercept[0])
    gradient = problem.slope[:, 0].copy()
    # What the gradient would be by rounding alone.
    columns = np.sqrt(problem.design.squares(problem.loss.weights))
    nothing = 100 * np.finfo(problem.dtype).eps * columns * np.linalg.norm(target)
    time, beta, rho = 0.0, np.zeros(p, problem.dtype), np.zeros(p, problem.dtype)
    times, betas, rhos = [time], [beta], [rho]
    full = np.zeros(p, dtype=bool)
    while len(times) <= limit:
        gradient[np.abs(gradient) <= nothing] = 0
        # Where ρ is ±1 already, and the gradient would take it out, it stays: β has taken up that part.
        outward = np.where(full, 0, np.abs(gradient))
        inward = full & (beta == 0) & (gradient * rho > 0)
        speed = outward + np.where(inward, np.abs(gradient), 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            wait = np.where(speed > 0, (1 + np.sign(gradient) * rho) / speed, np.inf)
        step = float(wait.min())
        if not np.isfinite(step) or time + step > max_time:
            break
        time += step
        hit = wait <= step * (1 + 1e-12)
        rho = np.where(full & ~inward, rho, rho - step * gradient)
        rho[hit] = np.sign(rho[hit])
        full = hit | (full & ~inward)
        beta = _fit(problem, root, target, rho, full)
        gradient = problem.gradient(beta[:, None], problem.intercept)[0][:, 0]
        times.append(time)
        betas.append(beta)
        rhos.append(rho)
    else:
        warnings.warn(
            f"the path has more than {limit} breakpoints and ends at time {time:.4g}: raise max_breaks",
            ConvergenceWarning,
            stacklevel=2,
        )
    stack = np.stack(betas)
    entered = stack != 0
    entries = np.where(entered.any(0), np.array(times)[entered.argmax(0)], np.inf)
    coefs, intercepts = problem.restore(stack[..., None], np.tile(problem.intercept, (len(times), 1)))
    return IssPath(np.array(times), coefs[..., 0], intercepts[:, 0], np.stack(rhos), entries)


def _fit(problem: Problem, root: Array, target: Array, rho: Array, full: Array) -> Array:
    """Least squares on the features with |ρ| = 1, with the signs of ρ."""
    index = np.flatnonzero(full)
    block = problem.design.columns(index)
    signed = root[:, None] * block.matmul(np.diag(rho[index]))
    if signed.shape[0] > signed.shape[1]:
        q, signed = np.linalg.qr(signed)
        target = q.T @ target
    found, _ = nnls(np.asarray(signed, dtype=float), np.asarray(target, dtype=float))
    beta = np.zeros_like(rho)
    beta[index] = rho[index] * found
    return beta
