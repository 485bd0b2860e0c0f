"""lbi_path against the oracle, step by step."""

import warnings
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from sklearn.exceptions import ConvergenceWarning

from dessilbi.linear import lbi_path, split_lbi_path
from tests.linear.data import classes, peak, regression
from tests.oracles import linear as oracle

LOSSES = ["squared", "logistic", "multinomial"]


def problem(loss: str, n: int = 40, p: int = 12) -> tuple[Any, Any]:
    """X and targets of samples × outputs."""
    if loss == "squared":
        x, y = regression(n, p)
        return x, y[:, None]
    x, labels = classes(n, p, 2 if loss == "logistic" else 3)
    return x, np.eye(3)[labels] if loss == "multinomial" else labels[:, None].astype(float)


def units(kind: str, rows: int, outputs: int) -> tuple[Any, Any]:
    """The user's labels, and the oracle's unit of every element."""
    if kind == "l1":
        return None, np.arange(rows * outputs).reshape(rows, outputs)
    labels = np.array(
        [7 if j < 12 and j % 3 == 0 else j // 2 for j in range(rows)]
    )  # neither sorted nor next to each other
    return labels, np.repeat(np.unique(labels, return_inverse=True)[1][:, None], outputs, 1)


def in_user_units(z: Any, b: Any, unit: Any, kappa: float, mean: Any, deviation: Any) -> tuple[Any, Any]:
    """Coefficients outputs × features, and intercepts."""
    beta = kappa * oracle.prox(z, unit) / deviation[:, None]
    return beta.T, b - mean @ beta


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("standardize", [True, False])
@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("kind", ["l1", "group"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_path_is_that_of_the_plain_iteration(
    loss: str, kind: str, fit_intercept: bool, standardize: bool, weighted: bool
) -> None:
    x, y = problem(loss)
    weights = np.random.default_rng(3).uniform(0, 2, len(x)) if weighted else np.ones(len(x))
    design, mean, deviation = oracle.standardise(x, weights, fit_intercept, standardize)
    groups, unit = units(kind, x.shape[1], y.shape[1])
    b = oracle.null_intercept(loss, y, weights) if fit_intercept else None
    slope = design.T @ oracle.gradient(loss, np.zeros_like(y) + (0 if b is None else b), y, weights)
    first = 1 / oracle.norms(slope, unit).max()
    lip = np.linalg.norm(design.T @ (design * (weights / weights.sum())[:, None]), 2)
    kappa, steps = 1.5, 250
    alpha = 0.8 / (kappa * lip)
    times = np.concatenate([[0, 0.3 * first], np.sort(np.random.default_rng(0).uniform(0, steps * alpha, 20))])
    times[2:].sort()
    times = np.unique(times)
    path = lbi_path(
        x, y if y.shape[1] > 1 else y[:, 0], loss=loss, penalty=kind, groups=groups, kappa=kappa, alpha=alpha,
        times=times, fit_intercept=fit_intercept, standardize=standardize,
        sample_weight=weights if weighted else None,
    )  # fmt: skip
    states = oracle.lbi(design, y, loss, weights, unit, kappa, alpha, steps, b)
    entered = 0
    for i, t in enumerate(times):
        z, intercept = oracle.at(states, t)
        coef, expected = in_user_units(z, intercept, unit, kappa, mean, deviation)
        np.testing.assert_allclose(np.reshape(path.coefs[i], coef.shape), coef, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(np.ravel(path.intercepts[i]), expected, rtol=1e-9, atol=1e-11)
        entered = max(entered, int((coef != 0).sum()))
    assert entered >= 3
    when = oracle.entries([s for s in states if s[0] <= times[-1] + alpha], unit)
    found = path.entries if loss == "multinomial" else path.entries[None]
    by_row = when[unit].T
    known = by_row <= times[-1]
    np.testing.assert_allclose(found[known], by_row[known], rtol=1e-9)
    assert (found[~known] > times[-1]).all()
    first_of_row = np.where(found <= times[-1], found, np.inf).min(0)
    expected_order = [j for j in np.argsort(by_row.min(0), kind="stable") if np.isfinite(first_of_row[j])]
    assert [j for j in path.order if np.isfinite(first_of_row[j])] == expected_order


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", ["l1", "group"])
def test_features_out_of_play_are_brought_up_to_date_exactly(loss: str, kind: str) -> None:
    """Many more features than steps take along; they enter one after another, and some leave again."""
    x, y = problem(loss, 30, 300)
    weights = np.ones(30)
    design, _, deviation = oracle.standardise(x, weights)
    groups, unit = units(kind, 300, y.shape[1])
    kappa, steps = 3.0, 400
    curvature = {"squared": 1.0, "logistic": 0.25, "multinomial": 0.5}[loss]
    alpha = 1.0 / (kappa * curvature * np.linalg.norm(design, 2) ** 2 / 30)
    times = alpha * np.arange(1, steps + 1)
    path = lbi_path(x, y if y.shape[1] > 1 else y[:, 0], loss=loss, penalty=kind, groups=groups, kappa=kappa,
                    alpha=alpha, times=times)  # fmt: skip
    b = oracle.null_intercept(loss, y, weights)
    if kind == "group":  # the oracle's loops over 150 groups are slow: the same, by indices
        states = []
        z, beta = np.zeros((300, y.shape[1])), np.zeros((300, y.shape[1]))
        for _ in range(steps):
            r = oracle.gradient(loss, design @ beta + b, y, weights)
            z = z - alpha * design.T @ r
            b = b if loss == "squared" else b - kappa * alpha * r.sum(0)
            size = np.sqrt(np.bincount(unit.ravel(), (z**2).ravel()))
            beta = kappa * z * np.maximum(0, 1 - 1 / np.maximum(size, 1e-300))[unit]
            states.append(beta)
    else:
        states = [kappa * (s[1] - np.clip(s[1], -1, 1))
                  for s in oracle_l1(design, y, loss, weights, kappa, alpha, steps, b)]  # fmt: skip
    support = []
    for found, beta in zip(path.coefs, states, strict=True):
        expected = beta / deviation[:, None]
        np.testing.assert_allclose(np.reshape(found, (-1, 300)), expected.T, rtol=1e-7, atol=1e-9)
        support.append((beta != 0).any(1))
    ever, last = np.any(support, 0).sum(), support[-1].sum()
    assert 10 < ever < 250
    if loss == "squared" and kind == "l1":
        assert last < ever  # some have left


def oracle_l1(design: Any, y: Any, loss: str, weights: Any, kappa: float, alpha: float, steps: int, b: Any) -> Any:
    """The oracle's LBI, where every element is a unit: without its loop over them."""
    z = np.zeros((design.shape[1], y.shape[1]))
    for k in range(steps):
        r = oracle.gradient(loss, design @ (kappa * (z - np.clip(z, -1, 1))) + b, y, weights)
        z = z - alpha * design.T @ r
        b = b if loss == "squared" else b - kappa * alpha * r.sum(0)
        yield alpha * (k + 1), z, b


def test_a_feature_that_enters_unforeseen_acts_from_then_on() -> None:
    """Correlated features turn round when others enter: some enter that were not taken along for that batch."""
    n, p, steps = 200, 600, 400
    rng = np.random.default_rng(0)
    x = np.sqrt(0.1) * rng.standard_normal((n, p)) + np.sqrt(0.9) * rng.standard_normal((n, 1))
    y = x[:, :20] @ (3 * rng.choice([-1.0, 1.0], 20)) + rng.standard_normal(n)
    design, _, deviation = oracle.standardise(x, np.ones(n))
    alpha = n / np.linalg.norm(design, 2) ** 2
    path = lbi_path(x, y, kappa=1.0, alpha=alpha, times=alpha * np.arange(1, steps + 1))
    states = oracle_l1(design, y[:, None], "squared", np.ones(n), 1.0, alpha, steps, y.mean(0))
    for found, (_, z, _) in zip(path.coefs, states, strict=True):
        np.testing.assert_allclose(found, (z - np.clip(z, -1, 1))[:, 0] / deviation, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(("loss", "n", "p"), [(loss, *size) for loss in LOSSES for size in ((40, 12), (60, 300))])
def test_by_default_it_begins_at_the_first_entry_and_follows_the_path_of_small_steps(loss: str, n: int, p: int) -> None:
    """What the coarser default steps should have been is a fine Euler discretisation."""
    x, y = problem(loss, n, p)
    path = lbi_path(x, y if y.shape[1] > 1 else y[:, 0], loss=loss, n_times=30, eps=0.1)
    design, _, deviation = oracle.standardise(x, np.ones(n))
    b = oracle.null_intercept(loss, y, np.ones(n))
    slope = np.abs(design.T @ oracle.gradient(loss, np.zeros_like(y) + b, y, np.ones(n))).max()
    assert path.times[0] == pytest.approx(1 / slope)
    np.testing.assert_allclose(np.diff(np.log(path.times)), np.log(10) / 29, rtol=1e-9)
    assert path.times[-1] == pytest.approx(10 / slope)
    curvature = {"squared": 1.0, "logistic": 0.25, "multinomial": 0.5}[loss]
    assert path.kappa == pytest.approx(2 * slope / curvature)  # columns have mean square 1
    lip = curvature * np.linalg.norm(design, 2) ** 2 / n
    coarse = max(path.alpha, path.times[-1] / path.n_iter)
    assert path.alpha <= 0.05 * path.times[-1]
    if p > n:  # few features are in play, and only their part of the Hessian counts
        assert path.alpha > 2 / (path.kappa * lip)
    fine = min(0.04 / (path.kappa * lip), path.times[0] / 50)
    assert coarse > 2 * fine
    now, expected = 0, []
    for t, z, _ in oracle_l1(design, y, loss, np.ones(n), path.kappa, fine, int(path.times[-1] / fine) + 2, b):
        while now < 30 and path.times[now] <= t:
            expected.append((path.kappa * (z - np.clip(z, -1, 1)) / deviation[:, None]).T)
            now += 1
    assert len(expected) == 30
    error = np.abs(path.coefs.reshape(30, -1, p) - np.array(expected)).max()
    assert error < 0.05 * np.abs(expected[-1]).max()


@pytest.mark.parametrize(("loss", "n", "p"), [("squared", 60, 300), ("multinomial", 40, 12), ("squared", 900, 10)])
def test_the_default_step_is_stable_and_not_far_from_the_bound(loss: str, n: int, p: int) -> None:
    x, y = problem(loss, n, p)
    path = lbi_path(x, y if y.shape[1] > 1 else y[:, 0], loss=loss, eps=1e-3)
    design, _, _ = oracle.standardise(x, np.ones(n))
    curvature = 0.5 if loss == "multinomial" else 1.0
    active = (path.coefs.reshape(len(path.times), -1, p) != 0).any((0, 1))
    bounds = [2 / (path.kappa * max(curvature * np.linalg.norm(part, 2) ** 2 / n, 0.5 if loss == "multinomial" else 0))
              for part in (design, design[:, active])]  # fmt: skip
    assert 0.4 * bounds[0] < path.alpha < 0.6 * bounds[1]


@pytest.mark.parametrize("loss", ["logistic", "multinomial"])
def test_the_intercept_counts_in_the_step_size_where_features_are_small(loss: str) -> None:
    x, y = problem(loss)
    path = lbi_path(0.05 * x, y if y.shape[1] > 1 else y[:, 0], loss=loss, standardize=False, eps=0.1)
    assert path.alpha * path.kappa * {"logistic": 0.25, "multinomial": 0.5}[loss] < 1.01


def test_in_the_end_it_is_least_squares() -> None:
    x, y = regression(60, 8)
    path = lbi_path(x, y, eps=1e-4)
    expected = np.linalg.lstsq(np.column_stack([x, np.ones(60)]), y, rcond=None)[0]
    np.testing.assert_allclose(path.coefs[-1], expected[:-1], rtol=1e-5)
    assert path.intercepts[-1] == pytest.approx(expected[-1], rel=1e-5)


@pytest.mark.parametrize("layout", ["csr", "csc", "fortran", "noncontiguous"])
@pytest.mark.parametrize("shape", [(50, 90), (900, 10)])
def test_the_layout_of_x_does_not_matter(layout: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape) * (rng.random(shape) < 0.3)
    y = x[:, :3].sum(1) + rng.standard_normal(shape[0]) + 1
    weights = rng.uniform(0.5, 2, shape[0])
    given = {"csr": sparse.csr_matrix, "csc": sparse.csc_array, "fortran": np.asfortranarray,
             "noncontiguous": lambda a: np.repeat(a, 2, 1)[:, ::2]}[layout](x)  # fmt: skip
    for options in ({}, {"fit_intercept": False}, {"standardize": False}):
        one = lbi_path(x, y, sample_weight=weights, n_times=20, **options)  # type: ignore[arg-type]
        other = lbi_path(given, y, sample_weight=weights, n_times=20, **options)
        np.testing.assert_allclose(other.coefs, one.coefs, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(other.intercepts, one.intercepts, rtol=1e-8)


@pytest.mark.parametrize(("n", "p"), [(900, 10), (450, 100)])
def test_many_samples_go_by_the_gram_matrix_to_the_same_path(n: int, p: int) -> None:
    x, y = regression(n, p)
    assert 4 * p**2 <= x.size
    weights = np.random.default_rng(0).uniform(0, 2, n)
    design, mean, deviation = oracle.standardise(x, weights)
    unit = np.arange(p)[:, None]
    times = 0.05 * np.arange(1, 60)
    path = lbi_path(x, y, kappa=5.0, alpha=0.05, times=times, sample_weight=weights)
    centre = oracle.null_intercept("squared", y[:, None], weights)
    states = oracle.lbi(design, y[:, None], "squared", weights, unit, 5.0, 0.05, 60, centre)
    for i, t in enumerate(times):
        coef, intercept = in_user_units(*oracle.at(states, t), unit, 5.0, mean, deviation)
        np.testing.assert_allclose(path.coefs[i], coef[0], rtol=1e-9, atol=1e-11)
        assert path.intercepts[i] == pytest.approx(intercept[0])
    if p > 64:
        assert 0 < (path.coefs[-1] != 0).sum() < p / 4  # or all of them would have been in play


def test_float32_stays_float32_and_is_close() -> None:
    for n, p in ((40, 200), (900, 10)):
        x, y = regression(n, p)
        wide, narrow = lbi_path(x, y, n_times=20), lbi_path(x.astype("f4"), y.astype("f4"), n_times=20)
        assert narrow.coefs.dtype == narrow.intercepts.dtype == np.float32
        np.testing.assert_allclose(narrow.coefs, wide.coefs, atol=2e-3 * np.abs(wide.coefs).max())


def test_weights_count_samples() -> None:
    x, y = regression()
    times = np.geomspace(0.3, 30, 15)
    counts = np.random.default_rng(0).integers(0, 4, 40)
    one = lbi_path(x, y, sample_weight=counts, times=times)
    other = lbi_path(np.repeat(x, counts, 0), np.repeat(y, counts), times=times)
    np.testing.assert_allclose(one.coefs, other.coefs, rtol=1e-6, atol=1e-8)


def test_times_between_iterations_and_beyond_the_end() -> None:
    x, y = regression()
    path = lbi_path(x, y, times=[0.0, 1e3, 1e6, 1e9])  # settled long before
    assert not path.coefs[0].any()
    np.testing.assert_allclose(path.coefs[3], path.coefs[2], rtol=1e-6)


def test_constant_targets_and_constant_features() -> None:
    x, y = regression()
    path = lbi_path(x, np.full(40, 3.0))
    assert not path.coefs.any()
    assert len(path.order) == 0
    np.testing.assert_allclose(path.intercepts, 3.0)
    x[:, 2] = 5.0
    path = lbi_path(x, y)
    assert not path.coefs[:, 2].any()
    assert np.isfinite(path.coefs).all()


@pytest.mark.parametrize(("options", "text"), [
    ({"loss": "hinge"}, "loss must be one of squared, logistic, multinomial, got 'hinge'"),
    ({"penalty": "l2"}, "penalty must be 'l1' or 'group', got 'l2'"),
    ({"penalty": "group"}, "needs groups"),
    ({"groups": [0] * 12}, "groups are given, but penalty='l1'"),
    ({"penalty": "group", "groups": [0, 1]}, r"one label for each of 12 penalised rows, got shape \(2,\)"),
    ({"kappa": 0.0}, "kappa must be a finite number > 0, got 0.0"),
    ({"alpha": -1.0}, "alpha must be a finite number > 0, got -1.0"),
    ({"kappa": float("nan")}, "kappa must be a finite number > 0, got nan"),
    ({"times": [2.0, 1.0]}, r"times must be finite, at least 0 and strictly ascending, got \[2.0, 1.0\]"),
    ({"times": []}, "times must be"),
    ({"n_times": 0}, "n_times must be at least 1, got 0"),
    ({"eps": 1.0}, r"eps must be a number in \(0, 1\), got 1.0"),
    ({"time": -3.0}, "time must be a finite number > 0, got -3.0"),
    ({"sample_weight": [-1.0] * 40}, "(?i)negative"),
    ({"sample_weight": [0.0] * 40}, "(?i)weights are zero|non-zero"),
    ({"loss": "logistic"}, "y must be between 0 and 1 for the logistic loss, got .*: use 0 and 1"),
    ({"loss": "multinomial"}, "y must have a column for every class"),
])  # fmt: skip
def test_bad_arguments(options: dict[str, Any], text: str) -> None:
    x, y = regression()
    with pytest.raises(ValueError, match=text):
        lbi_path(x, y, **options)


def test_a_kappa_that_is_no_number() -> None:
    x, y = regression()
    with pytest.raises(TypeError, match="kappa must be a number > 0, got '3'"):
        lbi_path(x, y, kappa="3")  # type: ignore[arg-type]


def test_a_step_size_above_the_bound_warns_and_one_below_does_not() -> None:
    x, y = regression(offset=False)
    design, _, _ = oracle.standardise(x, np.ones(40))
    limit = 2 / (2.0 * np.linalg.norm(design, 2) ** 2 / 40)
    with pytest.warns(ConvergenceWarning, match=r"alpha=.* is not below .* = 2/\(kappa·‖∇²L‖\)") as caught:
        lbi_path(x, y, kappa=2.0, alpha=1.01 * limit, time=3.0)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lbi_path(x, y, kappa=2.0, alpha=0.99 * limit, time=3.0)


def test_too_few_steps_warn() -> None:
    x, y = regression()
    with pytest.warns(ConvergenceWarning, match=r"the path stopped at time .* after max_iter=7 steps"):
        path = lbi_path(x, y, max_iter=7)
    assert path.n_iter == 7
    np.testing.assert_array_equal(path.coefs[-1], path.coefs[-2])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(400, 5000), (6000, 400), (1200, 1200)])
def test_nothing_as_large_as_x_is_allocated(shape: tuple[int, int], dtype: Any) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(dtype)
    y = x[:, :5].sum(1) + rng.standard_normal(shape[0]).astype(dtype)
    lbi_path(x[:9], y[:9], n_times=2)  # what is allocated once
    assert peak(lambda: lbi_path(x, y, n_times=5)) < 0.8 * x.nbytes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        assert peak(lambda: split_lbi_path(x, y, n_times=5, max_iter=20)) < 0.8 * x.nbytes
