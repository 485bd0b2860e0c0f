"""The exact inverse scale space: the differential inclusion itself, and LBI's way to it."""

import itertools
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import lasso_path

from dessilbi.linear import iss_path, lbi_path, split_lbi_path
from tests.linear.data import regression
from tests.oracles import linear as oracle

PLAIN: dict[str, Any] = {"fit_intercept": False, "standardize": False}


def orthogonal(n: int, p: int, seed: int = 0) -> Any:
    """XᵀX = n·1."""
    return np.sqrt(n) * np.linalg.qr(np.random.default_rng(seed).standard_normal((n, p)))[0]


def equicorrelated(n: int, p: int, r: float, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return np.sqrt(1 - r) * rng.standard_normal((n, p)) + np.sqrt(r) * rng.standard_normal((n, 1))


DATA = {
    "more samples": regression(40, 12),
    "more features": regression(25, 80, noise=1.0),
    "correlated": (equicorrelated(40, 30, 0.8), np.random.default_rng(9).standard_normal(40)),
}


@pytest.mark.parametrize("standard", [True, False])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", DATA)
def test_the_differential_inclusion_holds_from_breakpoint_to_breakpoint(
    name: str, weighted: bool, standard: bool
) -> None:
    """ρ continuous with dρ/dt = −∇L(β), ρ ∈ ∂‖β‖₁, β constant in between: there is no other such β (but for ties)."""
    x, y = DATA[name]
    weights = np.random.default_rng(1).uniform(0.2, 2, len(y)) if weighted else np.ones(len(y))
    design, mean, deviation = oracle.standardise(x, weights, standard, standard)
    path = iss_path(x, y, fit_intercept=standard, standardize=standard, sample_weight=weights)
    betas = path.coefs * deviation
    centre = oracle.null_intercept("squared", y[:, None], weights) if standard else 0.0

    def slope(beta: Any) -> Any:
        eta = design @ beta[:, None] + centre
        return (design.T @ oracle.gradient("squared", eta, y[:, None], weights))[:, 0]

    scale = np.abs(slope(betas[0])).max()
    assert path.times[0] == 0
    assert not betas[0].any()
    assert len(path.times) > 12
    assert (np.diff(path.times) > 0).all()
    for i, beta in enumerate(betas):
        rho, active = path.subgradients[i], beta != 0
        assert np.abs(rho).max() <= 1 + 1e-9
        np.testing.assert_allclose(rho[active], np.sign(beta[active]), atol=1e-9)
        if i + 1 < len(betas):
            moved = rho - (path.times[i + 1] - path.times[i]) * slope(beta)
            # ρ moves along the gradient to the next breakpoint, and stays ±1 where β is not zero.
            np.testing.assert_allclose(path.subgradients[i + 1], moved, atol=1e-8 * scale * path.times[i + 1] + 1e-10)
            np.testing.assert_allclose(moved[active], np.sign(beta[active]), atol=1e-8 * scale * path.times[i + 1])
        assert path.intercepts[i] == pytest.approx(np.ravel(centre)[0] - mean @ path.coefs[i] if standard else 0.0)
    assert np.abs(slope(betas[-1])).max() < 1e-9 * scale  # it ends at least squares
    assert any(((a != 0) & (b == 0)).any() for a, b in itertools.pairwise(betas)) or name == "more samples"


def test_each_estimate_is_the_best_of_its_signs() -> None:
    """By trying all supports: least squares on the features with |ρ| = 1, with the signs of ρ."""
    x, y = regression(30, 7, noise=2.0, offset=False)
    path = iss_path(x, y, **PLAIN)
    for beta, rho in zip(path.coefs, path.subgradients, strict=True):
        full = np.flatnonzero(np.abs(rho) > 1 - 1e-12)
        best, value = np.zeros(7), (y**2).sum()
        for size in range(1, len(full) + 1):
            for some in itertools.combinations(full, size):
                fit = np.zeros(7)
                fit[list(some)] = np.linalg.lstsq(x[:, list(some)], y, rcond=None)[0]
                residual = ((y - x @ fit) ** 2).sum()
                if (fit * rho >= 0).all() and residual < value - 1e-12:
                    best, value = fit, residual
        np.testing.assert_allclose(beta, best, atol=1e-10)


def test_of_an_orthogonal_design_everything_is_known() -> None:
    """Feature j enters at n/|x_jᵀy| with its least-squares coefficient; LBI then follows as 1 − exp(−κ(t − t_j))."""
    n, p = 50, 9
    x = orthogonal(n, p)
    y = x @ np.array([3.0, -2.5, 2.0, 1.5, -1.2, 1.0, 0.7, 0.0, 0.0]) + np.random.default_rng(1).standard_normal(n)
    when, fit = n / np.abs(x.T @ y), x.T @ y / n
    path = iss_path(x, y, **PLAIN)
    np.testing.assert_allclose(path.entries, when, rtol=1e-12)
    np.testing.assert_allclose(path.times[1:], np.sort(when), rtol=1e-12)
    for t, beta in zip(path.times, path.coefs, strict=True):
        np.testing.assert_allclose(beta, np.where(when <= t * (1 + 1e-12), fit, 0), atol=1e-12)
    np.testing.assert_array_equal(path.order, np.argsort(when))
    kappa, alpha = 40.0, 1e-5
    times = np.geomspace(when.min() / 2, 2 * when.min(), 30)
    found = lbi_path(x, y, kappa=kappa, alpha=alpha, times=times, **PLAIN)
    expected = fit * -np.expm1(-kappa * np.maximum(times[:, None] - when, 0))
    np.testing.assert_allclose(found.coefs, expected, atol=2 * kappa * alpha * np.abs(fit).max())
    np.testing.assert_allclose(found.entries[when < times[-1]], when[when < times[-1]], rtol=1e-4)


def test_lbi_comes_to_it_exponentially_in_kappa() -> None:
    """At a time between two breakpoints the error falls as exp(−κ·λ·(t − t_k)), λ the least curvature of the support;
    the entry times themselves come near only as 1/κ."""
    x, y = regression(60, 6, noise=0.3, offset=False)
    path = iss_path(x, y, **PLAIN)
    k = int(np.flatnonzero((path.coefs != 0).sum(1) == 3)[-1])  # the longest pieces are the early ones
    start, end = path.times[k], path.times[k + 1]
    t = start + 0.7 * (end - start)
    active = path.coefs[k] != 0
    hessian = x[:, active].T @ x[:, active] / 60
    least, lip = np.linalg.eigvalsh(hessian)[0], np.linalg.norm(x.T @ x / 60, 2)
    kappas = np.array([4.0, 6.0, 8.0, 10.0, 12.0, 14.0]) / (least * (t - start))
    errors, entries = [], []
    for kappa in kappas:
        found = lbi_path(x, y, kappa=kappa, alpha=0.02 / (kappa * lip), times=[t], **PLAIN)
        errors.append(np.abs(found.coefs[0] - path.at(t)).max())
        entries.append(np.abs(found.entries[active] - path.entries[active]).max())
    slopes = np.diff(np.log(errors)) / np.diff(kappas) / (least * (t - start))
    assert errors[-1] < 1e-4 * np.abs(path.at(t)).max()
    assert slopes[-3:] == pytest.approx([-1.0] * 3, abs=0.15)
    powers = np.diff(np.log(entries)) / np.diff(np.log(kappas))
    assert powers[-3:] == pytest.approx([-1.0] * 3, abs=0.25)


def irrepresentable(x: Any, support: Any) -> float:
    """‖X_Nᵀ X_S (X_Sᵀ X_S)⁻¹‖∞: below 1, no feature outside is mistaken for those of the support."""
    inside, outside = x[:, support], np.delete(x, support, 1)
    return float(np.abs(outside.T @ inside @ np.linalg.inv(inside.T @ inside)).sum(1).max())


@pytest.mark.parametrize("seed", range(5))
def test_without_noise_the_signs_are_found_under_the_irrepresentable_condition(seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((300, 40))
    beta = np.zeros(40)
    beta[[2, 5, 11, 30]] = 3.0, -2.0, 1.0, -0.5
    assert irrepresentable(x, np.flatnonzero(beta)) < 1
    path = iss_path(x, x @ beta, **PLAIN)
    ever = (path.coefs != 0).any(0)
    np.testing.assert_array_equal(np.flatnonzero(ever), np.flatnonzero(beta))  # no wrong one, at any time
    np.testing.assert_allclose(path.coefs[-1], beta, atol=1e-10)  # and no bias
    for found in (lbi_path(x, x @ beta, kappa=100.0, **PLAIN), split_lbi_path(x, x @ beta, **PLAIN)):
        assert set(found.order[:4]) == set(np.flatnonzero(beta))
    end = lbi_path(x, x @ beta, kappa=100.0, **PLAIN).coefs[-1]
    np.testing.assert_array_equal(np.sign(end), np.sign(beta))
    np.testing.assert_allclose(end, beta, atol=1e-3)


def mistaken(n: int = 200) -> tuple[Any, Any]:
    """Two true features; the third is nearly their sum, which explains y better than either of them alone."""
    rng = np.random.default_rng(0)
    x = orthogonal(n, 3)
    x[:, 2] = 0.67 * x[:, 0] + 0.67 * x[:, 1] + np.sqrt(1 - 2 * 0.67**2) * x[:, 2]
    return x, x @ [2.0, 2.0, 0.0] + 0.1 * rng.standard_normal(n)


def test_where_the_lasso_is_wrong_split_lbi_at_larger_nu_is_right() -> None:
    x, y = mistaken()
    assert irrepresentable(x, [0, 1]) > 1
    _, coefs, _ = lasso_path(x, y)
    first = next(int(np.flatnonzero(c)[0]) for c in coefs.T if c.any())
    assert first == 2
    assert iss_path(x, y, **PLAIN).order[0] == 2
    right = {nu: set(split_lbi_path(x, y, nu=nu, n_times=10, **PLAIN).order[:2]) == {0, 1} for nu in (0.01, 20.0)}
    assert right == {0.01: False, 20.0: True}


def test_an_end_before_the_end() -> None:
    x, y = regression()
    whole = iss_path(x, y)
    part = iss_path(x, y, max_time=float(whole.times[3]) * 1.01)
    np.testing.assert_array_equal(part.coefs, whole.coefs[:4])
    with pytest.warns(ConvergenceWarning, match=r"more than 2 breakpoints and ends at time .*: raise max_breaks"):
        few = iss_path(x, y, max_breaks=2)
    np.testing.assert_array_equal(few.times, whole.times[: len(few.times)])


def test_the_path_at_any_time() -> None:
    x, y = regression()
    path = iss_path(x, y)
    between = (path.times[2] + path.times[3]) / 2
    np.testing.assert_array_equal(path.at(between), path.coefs[2])
    np.testing.assert_array_equal(path.at(path.times[3]), path.coefs[3])
    np.testing.assert_array_equal(path.at(np.array([0.0, 1e9])), path.coefs[[0, -1]])
    with pytest.raises(ValueError, match=r"time must be at least 0, got -1\.0"):
        path.at(-1.0)


def test_sparse_and_float32_designs() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 20)) * (rng.random((60, 20)) < 0.4)
    y = x[:, :3].sum(1) + 0.1 * rng.standard_normal(60)
    path = iss_path(x, y)
    thin = iss_path(sparse.csr_array(x), y)
    np.testing.assert_allclose(thin.coefs, path.coefs, atol=1e-9)
    narrow = iss_path(x.astype("f4"), y.astype("f4"), max_time=float(path.times[5]) * 1.001)
    assert narrow.coefs.dtype == np.float32
    np.testing.assert_allclose(narrow.coefs[3], path.coefs[3], atol=1e-3)


def test_duplicate_features_do_not_end_it() -> None:
    """Ties: of two equal features any share is a solution; together they have the coefficient of one."""
    x, y = regression(40, 5, offset=False)
    path = iss_path(np.column_stack([x, x[:, 0]]), y, **PLAIN)
    alone = iss_path(x, y, **PLAIN)
    np.testing.assert_allclose(path.coefs[-1][0] + path.coefs[-1][5], alone.coefs[-1][0], rtol=1e-8)
    np.testing.assert_allclose(path.times, alone.times, rtol=1e-8)
