"""Split LBI: sparsity of Dβ, with β left free to fit; and the path that it runs through."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dessilbi.linear.course import Entries, Grid, LinearPath, grid_times, squeeze
from dessilbi.linear.lbi import check_step, positive, warn_short
from dessilbi.linear.penalties import penalty as make_penalty
from dessilbi.linear.problem import DAMPING, STEP, Problem, largest
from dessilbi.linear.transforms import Transform, transform

Array = NDArray[Any]

# ν in units of ‖D‖²/‖∇²L‖: how much further the curvature of the loss reaches than that of the coupling.
RELAXATION = 10.0


def split_lbi_path(
    X: Any,
    y: Any,
    *,
    D: Any = None,
    loss: str = "squared",
    penalty: str = "l1",
    groups: Any = None,
    nu: float | None = None,
    kappa: float | None = None,
    alpha: float | None = None,
    times: Any = None,
    n_times: int = 100,
    eps: float = 1e-2,
    time: float | None = None,
    fit_intercept: bool = True,
    standardize: bool | None = None,
    sample_weight: Any = None,
    max_iter: int = 100_000,
) -> LinearPath:
    r"""The path of Split LBI: Dβ is close to a sparse γ, and γ grows in the order of importance.

    With L the mean loss over the samples, Ω the l1 or group penalty on the rows of D, and
    L̄(β, γ) = L(β) + ‖Dβ − γ‖²/(2ν), from β = γ = z = 0,

        β ← β − κα∇_β L̄,      z ← z − α∇_γ L̄,      γ = κ·Prox_Ω(z),      t ← t + α

    β is not penalised but held near γ by a ridge, of weight 1/ν. So features that are correlated share the fit before
    it is decided which of them enter: where the lasso takes a wrong one first, and keeps it, a large ν finds the right
    ones. γ shows the structure; the `coefs` of the path are β projected on it: the nearest coefficients with Dβ = 0
    wherever γ = 0. An iteration takes two products with X and two with D.

    Args:
        X, y, loss, penalty, groups, times, n_times, eps, time, fit_intercept, sample_weight, max_iter: as in
            :func:`lbi_path`; groups label the rows of D.
        D: None for the identity; "difference" for the differences of neighbours (fused, piecewise constant
            coefficients); a tuple, the shape of a grid whose places are the features, for total variation on it; or a
            matrix: an array, a scipy sparse matrix or a LinearOperator. It stays what it is.
        nu: the gap that is allowed between Dβ and γ. By default 10·‖D‖²/‖∇²L‖. Larger values see through stronger
            correlations and take as many more steps.
        kappa: how fast β and γ follow; by default twice ‖D‖ times the size that the largest coefficient seems to have.
        alpha: the step size, stable below 2/(κ‖∇²L̄‖). The norm is that of the joint Hessian of β and γ, at most
            ‖∇²L‖ + (1 + ‖D‖²)/ν (for D = 1 that is the Lip + 2/ν of the network's optimizer; papers that write
            Lip + 1/ν forget that γ moves too). It is computed, and α = 1/(κ‖∇²L̄‖) by default.
        standardize: whether features are brought to deviation 1 for the iteration; D then acts on the coefficients of
            those. By default only where D is the identity.
    """
    standardise = D is None if standardize is None else standardize
    problem = Problem(X, y, loss, sample_weight, fit_intercept, standardise)
    return run(problem, D, penalty, groups, nu, kappa, alpha, times, n_times, eps, time, max_iter)


def run(
    problem: Problem,
    d: Any,
    kind: str,
    groups: Any,
    nu: float | None,
    kappa: float | None,
    alpha: float | None,
    times: Any,
    n_times: int,
    eps: float,
    time: float | None,
    max_iter: int,
) -> LinearPath:
    """`split_lbi_path` of a problem."""
    p, outputs = problem.slope.shape
    dtype = problem.dtype
    trans = transform(d, p, dtype)
    rows = trans.shape[0]
    pen = make_penalty(kind, rows, outputs, groups)
    lip, reach = problem.lipschitz(), _norm(trans, dtype)
    nu = positive("nu", RELAXATION * reach / lip if nu is None and lip and reach else 1.0 if nu is None else nu)
    size = problem.size * math.sqrt(reach)
    kappa = positive("kappa", DAMPING * size or 1.0 if kappa is None else kappa)
    norm = max(_joint_norm(problem, trans, nu, lip), problem.loss.curvature if problem.moves else 0.0)
    if alpha is None:
        alpha = STEP / (kappa * norm)
    else:
        check_step(positive("alpha", alpha), 2 / (kappa * norm))

    beta, b = np.zeros_like(problem.slope), problem.intercept.astype(dtype)
    z = np.zeros((rows, outputs), dtype)
    gamma = np.zeros_like(z)
    entries = Entries(pen, z)
    grid: Grid | None = None
    if times is not None or time is not None:
        grid = Grid(grid_times(times, None, n_times, eps, time), beta, z, b)
    now, steps = 0.0, 0
    while steps < max_iter and problem.slope.any() and not (grid is not None and grid.done):
        gradient, slope = problem.gradient(beta, b)
        gap = (trans.matmul(beta) - gamma) / nu
        old = beta, z, b
        beta = beta - kappa * alpha * (gradient + trans.rmatmul(gap))
        if problem.moves:
            b = b - kappa * alpha * slope
        z = z + alpha * gap
        gamma = kappa * pen.prox(z)
        start, now, steps = now, now + alpha, steps + 1
        if entries.passed(start, now, z) and grid is None:
            grid = Grid(grid_times(None, float(entries.times.min()), n_times, eps, None), beta, z, b)
        if grid is not None:
            grid.passed(start, now, old, (beta, z, b))
    if grid is None:
        grid = Grid(grid_times(None, now or 1.0, n_times, eps, None), beta, z, b)
    if not grid.done and problem.slope.any():
        warn_short(max_iter, now, float(grid.times[-1]))
    grid.stand(beta, z, b)

    betas, zs, intercepts = grid.states
    gammas = kappa * pen.prox(zs)
    sparse = np.stack([_projected(trans, *pair) for pair in zip(betas, gammas, strict=True)])
    dense, _ = problem.restore(betas, intercepts)
    coefs, intercepts = problem.restore(sparse, intercepts)
    if d is None and problem.design.scale is not None:
        gammas = gammas / problem.design.scale[:, None]
    return LinearPath(
        times=grid.times,
        coefs=squeeze(coefs),
        intercepts=intercepts[:, 0] if outputs == 1 else intercepts,
        entries=entries.by_row(z.shape),
        alpha=alpha,
        kappa=kappa,
        n_iter=max(1, steps),
        nu=nu,
        dense_coefs=squeeze(dense),
        gammas=squeeze(gammas),
    )


def _projected(trans: Transform, beta: Array, gamma: Array) -> Array:
    """β of one time, projected on the support of γ."""
    columns = zip(beta.T, gamma.T, strict=True)
    return np.stack([trans.project(one, other != 0) for one, other in columns], axis=1)


def _norm(trans: Transform, dtype: Any) -> float:
    """‖D‖²."""
    if type(trans) is Transform:
        return 1.0
    start = np.random.default_rng(0).standard_normal((trans.shape[1], 1)).astype(dtype)
    return largest(lambda u: trans.rmatmul(trans.matmul(u)), start)[0]


def _joint_norm(problem: Problem, trans: Transform, nu: float, lip: float) -> float:
    """The largest eigenvalue of [[∇²L + DᵀD/ν, −Dᵀ/ν], [−D/ν, 1/ν]], with a bound of ∇²L."""
    if type(trans) is Transform:
        return lip / 2 + 1 / nu + math.hypot(lip / 2, 1 / nu)
    rows, p = trans.shape

    def product(u: Array) -> Array:
        gap = (trans.matmul(u[:p]) - u[p:]) / nu
        return np.concatenate([problem.curve(u[:p]) + trans.rmatmul(gap), -gap])

    start = np.random.default_rng(0).standard_normal((p + rows, 1)).astype(problem.dtype)
    return largest(product, start)[0]
