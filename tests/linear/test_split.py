"""split_lbi_path against the oracle, and what it makes of D."""

import warnings
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from scipy.sparse.linalg import aslinearoperator
from sklearn.exceptions import ConvergenceWarning

from dessilbi.linear import difference, split_lbi_path
from tests.linear.data import peak, regression
from tests.linear.test_path import LOSSES, problem, units
from tests.oracles import linear as oracle


def differences(p: int) -> Any:
    """The 1-D difference operator, dense."""
    return np.diff(np.eye(p), axis=0)


def transforms(p: int) -> dict[str, tuple[Any, Any]]:
    """The user's D, and the matrix that it is."""
    rng = np.random.default_rng(5)
    dense = rng.standard_normal((p + 3, p))
    few = dense * (rng.random(dense.shape) < 0.3)
    grid = np.array([row for axis in (0, 1) for row in np.diff(np.eye(p).reshape(3, -1, p), axis=axis).reshape(-1, p)])
    weighted = np.linspace(0.5, 2, p - 1)[:, None] * differences(p)
    almost = differences(p) * np.where(np.arange(p) == 3, 2.0, 1.0)
    return {
        "identity": (None, np.eye(p)),
        "difference": ("difference", differences(p)),
        "grid": ((3, p // 3), grid),
        "dense": (dense, dense),
        "sparse": (sparse.coo_matrix(few), few),
        "operator": (aslinearoperator(dense), dense),
        "sparse difference": (difference(p), differences(p)),
        "weighted difference": (sparse.csc_matrix(weighted), weighted),
        "almost a difference": (sparse.csr_array(almost), almost),
    }


CASES = [(name, "squared", "l1") for name in transforms(12)]
CASES += [(name, loss, kind) for name in ("identity", "difference", "grid") for loss in LOSSES
          for kind in ("l1", "group") if (loss, kind) != ("squared", "l1")]  # fmt: skip


@pytest.mark.parametrize(("name", "loss", "kind"), CASES)
def test_the_path_is_that_of_the_three_lines_of_the_appendix(name: str, loss: str, kind: str) -> None:
    x, y = problem(loss)
    given, d = transforms(12)[name]
    weights = np.random.default_rng(3).uniform(0, 2, len(x))
    groups, unit = units(kind, len(d), y.shape[1])
    design, mean, deviation = oracle.standardise(x, weights, True, given is None)
    b = oracle.null_intercept(loss, y, weights)
    nu, kappa, steps = (1.5, 5.0, 300) if loss == "squared" else (1.5, 1.5, 500)
    lip = np.linalg.norm(design * np.sqrt(weights / weights.sum())[:, None], 2) ** 2
    alpha = 1.0 / (kappa * (lip + (1 + np.linalg.norm(d, 2) ** 2) / nu))
    times = np.sort(np.random.default_rng(0).uniform(0, steps * alpha, 40))
    path = split_lbi_path(
        x, y if y.shape[1] > 1 else y[:, 0], D=given, loss=loss, penalty=kind, groups=groups, nu=nu, kappa=kappa,
        alpha=alpha, times=times, sample_weight=weights,
    )  # fmt: skip
    states = oracle.split_lbi(design, y, d, loss, weights, unit, nu, kappa, alpha, steps, b)
    assert path.dense_coefs is not None
    assert path.gammas is not None
    sizes = set()
    for i, t in enumerate(times):
        beta, z, intercept = oracle.at(states, t)
        gamma = kappa * oracle.prox(z, unit)
        exact = {"rtol": 1e-9, "atol": 1e-10}
        np.testing.assert_allclose(np.reshape(path.dense_coefs[i], (-1, 12)), (beta / deviation[:, None]).T, **exact)
        scale = deviation[:, None] if given is None else 1.0
        np.testing.assert_allclose(np.reshape(path.gammas[i], (-1, len(d))), (gamma / scale).T, **exact)
        columns = zip(beta.T, gamma.T, strict=True)
        near = np.array([oracle.projection(one, d[other == 0]) for one, other in columns]) / deviation
        np.testing.assert_allclose(np.reshape(path.coefs[i], (-1, 12)), near, rtol=1e-7, atol=1e-8)
        np.testing.assert_allclose(np.ravel(path.intercepts[i]), intercept - near @ mean, rtol=1e-7, atol=1e-8)
        sizes.add(int((gamma != 0).sum()))
    assert len(sizes - {0, gamma.size}) >= 1  # some of the supports are proper ones
    when = oracle.entries(states, unit, which=2)[unit].T
    known = when <= times[-1]
    np.testing.assert_allclose(np.reshape(path.entries, when.shape)[known], when[known], rtol=1e-9)
    assert (np.reshape(path.entries, when.shape)[~known] > times[-1]).all()


@pytest.mark.parametrize("name", transforms(12))
def test_the_defaults_come_from_the_norms(name: str) -> None:
    """ν = 10‖D‖²/‖∇²L‖, and half of the largest stable step for that."""
    x, y = regression()
    given, d = transforms(12)[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        path, tight = (split_lbi_path(x, y, D=given, nu=nu, max_iter=3) for nu in (None, 0.05))
    design, _, _ = oracle.standardise(x, np.ones(40), True, given is None)
    hessian = design.T @ design / 40
    lip, reach = np.linalg.norm(hessian, 2), np.linalg.norm(d, 2) ** 2
    assert path.nu == pytest.approx(10 * reach / lip, rel=0.02)
    kappa = 2 * np.sqrt(reach) * np.abs(design.T @ y / 40).max() / np.diag(hessian).mean()
    for each in (path, tight):
        assert each.kappa == pytest.approx(kappa, rel=0.02)
        nu = each.nu
        joint = np.block([[hessian + d.T @ d / nu, -d.T / nu], [-d / nu, np.eye(len(d)) / nu]])
        top = np.linalg.eigvalsh(joint)[-1]
        assert top <= lip + (1 + reach) / nu  # the safe bound: 2/(κ(Lip + (1 + ‖D‖²)/ν))
        assert each.alpha == pytest.approx(1 / (each.kappa * top), rel=0.02)


def test_times_by_default_begin_at_the_first_entry() -> None:
    x, y = regression()
    path = split_lbi_path(x, y, n_times=7)
    assert path.times[0] == pytest.approx(path.entries.min())
    assert path.times[-1] == pytest.approx(100 * path.entries.min())
    assert (path.coefs[1] != 0).any()
    given = split_lbi_path(x, y, n_times=5, time=9.0, eps=0.1)
    np.testing.assert_allclose(given.times, np.geomspace(0.9, 9.0, 5))


def test_in_the_end_it_is_least_squares() -> None:
    x, y = regression(60, 8)
    expected = np.linalg.lstsq(np.column_stack([x, np.ones(60)]), y, rcond=None)[0]
    path = split_lbi_path(x, y, eps=1e-3)
    np.testing.assert_allclose(path.coefs[-1], expected[:-1], rtol=1e-3)
    assert path.intercepts[-1] == pytest.approx(expected[-1], rel=1e-2)


def test_a_step_size_above_the_bound_warns_and_diverges() -> None:
    x, y = regression(offset=False)
    hessian = x.T @ x / 40
    joint = np.block([[hessian + np.eye(12) / 3, -np.eye(12) / 3], [-np.eye(12) / 3, np.eye(12) / 3]])
    limit = 2 / (2.0 * np.linalg.eigvalsh(joint)[-1])
    options: dict[str, Any] = {"nu": 3.0, "kappa": 2.0, "fit_intercept": False, "standardize": False, "n_times": 5}
    with pytest.warns(ConvergenceWarning, match="alpha=.* is not below") as caught:
        path = split_lbi_path(x, y, alpha=1.05 * limit, time=500 * limit, **options)
    assert caught[0].filename == __file__
    assert np.abs(path.dense_coefs[-1]).max() > 1e6  # type: ignore[index]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = split_lbi_path(x, y, alpha=0.95 * limit, time=500 * limit, **options)
    assert np.abs(path.dense_coefs[-1]).max() < 10  # type: ignore[index]


def test_fused_coefficients_are_piecewise_constant_and_change_where_they_should() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((120, 60))
    beta = np.repeat([0.0, 2.0, -1.0, 0.0], 15)
    path = split_lbi_path(x, x @ beta + 0.3 * rng.standard_normal(120), D="difference")
    assert set(path.order[:3]) == {14, 29, 44}
    third, fourth = np.sort(path.entries)[2:4]
    k = int(np.searchsorted(path.times, np.sqrt(third * fourth)))
    assert len(np.unique(path.coefs[k].round(12))) == 4
    np.testing.assert_allclose(path.coefs[k], beta, atol=0.25)


def test_total_variation_on_a_grid_finds_the_square() -> None:
    rng = np.random.default_rng(0)
    image = np.zeros((8, 10))
    image[2:5, 3:7] = 2.0
    x = rng.standard_normal((200, 80))
    path = split_lbi_path(x, x @ image.ravel() + 0.2 * rng.standard_normal(200), D=(8, 10), n_times=10, eps=0.1)
    edges = difference((8, 10)) @ image.ravel() != 0
    assert set(path.order[: edges.sum()]) == set(np.flatnonzero(edges))


def test_differences_by_hand() -> None:
    assert (difference(4).toarray() == [[-1, 1, 0, 0], [0, -1, 1, 0], [0, 0, -1, 1]]).all()
    grid = difference((2, 3)).toarray()
    image = np.arange(6.0).reshape(2, 3) ** 2
    expected = np.concatenate([np.diff(image, axis=0).ravel(), np.diff(image, axis=1).ravel()])
    assert (grid @ image.ravel() == expected).all()
    assert difference((2, 3, 4)).shape == (12 + 16 + 18, 24)


@pytest.mark.parametrize("grid", ["difference", (250, 400)])
def test_a_difference_operator_of_100_000_features_is_never_dense(grid: Any) -> None:
    """Memory in proportion to the data: the signal, D, and what is given back."""
    p = 100_000
    x = sparse.eye_array(p, format="csr")
    rng = np.random.default_rng(0)
    y = np.repeat([0.0, 3.0, 0.0, 1.0], p // 4) + 0.1 * rng.standard_normal(p)
    edges = p - 1 if grid == "difference" else 249 * 400 + 250 * 399
    stored = 12 * p + 8 * p + 2 * 12 * edges  # X, y, D: numbers of 8 bytes and indices of 4

    def work() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            split_lbi_path(x, y, D=grid, n_times=3, time=5.0 * p, eps=0.5, nu=1.0 * p, kappa=10.0, fit_intercept=False,
                           max_iter=30)  # fmt: skip

    assert peak(work) < 12 * stored  # about 40 to 80 MB; D alone would be 80 GB


@pytest.mark.parametrize(("options", "text"), [
    ({"D": "tv"}, "D must be None, 'difference', the shape of a grid or a matrix, got 'tv'"),
    ({"D": (3, 5)}, r"D=\(3, 5\): a grid of 15 places, for 12 features"),
    ({"D": np.ones((4, 5))}, r"D must be a matrix with a column for each of 12 features, got shape \(4, 5\)"),
    ({"nu": 0.0}, "nu must be a finite number > 0, got 0.0"),
    ({"kappa": -1.0}, "kappa must be a finite number > 0, got -1.0"),
    ({"alpha": float("inf")}, "alpha must be a finite number > 0, got inf"),
    ({"penalty": "group"}, "needs groups"),
    ({"penalty": "group", "groups": [0] * 12, "D": "difference"}, r"each of 11 penalised rows, got shape \(12,\)"),
])  # fmt: skip
def test_bad_arguments(options: dict[str, Any], text: str) -> None:
    x, y = regression()
    with pytest.raises(ValueError, match=text):
        split_lbi_path(x, y, **options)


def test_too_few_steps_warn() -> None:
    x, y = regression()
    with pytest.warns(ConvergenceWarning, match="after max_iter=5 steps"):
        split_lbi_path(x, y, max_iter=5)
