"""The estimators: scikit-learn's checks, and that they are the path, stopped."""

import warnings
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from scipy.special import expit, softmax
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, KFold, StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from dessilbi.linear import (
    LBI,
    LBICV,
    LBIClassifier,
    LBIClassifierCV,
    SplitLBI,
    SplitLBIClassifier,
    SplitLBIClassifierCV,
    SplitLBICV,
    lbi_path,
    split_lbi_path,
)
from tests.linear.data import classes, regression

# Shorter paths than by default where a fit is many of them, or many steps: the checks fit each model a hundred times.
SHORT, FOLDS = {"n_times": 20, "eps": 0.1}, {"n_times": 10, "eps": 0.2, "cv": 3}
CHECKED = [
    LBI(), LBIClassifier(), SplitLBI(**SHORT), SplitLBIClassifier(**SHORT),
    LBICV(**FOLDS), LBIClassifierCV(**FOLDS), SplitLBICV(**FOLDS), SplitLBIClassifierCV(**FOLDS),
]  # fmt: skip


@parametrize_with_checks(CHECKED)
def test_scikit_learns_checks(estimator: Any, check: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        check(estimator)


@pytest.mark.parametrize("split", [False, True])
def test_a_regressor_is_the_path_stopped(split: bool) -> None:
    x, y = regression()
    weights = np.random.default_rng(0).uniform(0, 2, 40)
    model = (SplitLBI if split else LBI)(time=20.0, n_times=15).fit(x, y, weights)
    path = (split_lbi_path if split else lbi_path)(x, y, time=20.0, n_times=15, sample_weight=weights)
    np.testing.assert_array_equal(model.coef_path_, path.coefs)
    np.testing.assert_array_equal(model.intercept_path_, path.intercepts)
    np.testing.assert_array_equal(model.times_, path.times)
    np.testing.assert_array_equal(model.entry_times_, path.entries)
    np.testing.assert_array_equal(model.coef_, path.coefs[-1])
    assert model.coef_path_.shape == (15, 12)
    assert model.time_ == 20.0
    assert isinstance(model.intercept_, float)
    np.testing.assert_allclose(model.predict(x), x @ path.coefs[-1] + path.intercepts[-1])
    ranks = np.argsort(path.entries, kind="stable")
    np.testing.assert_array_equal(model.selection_order_, ranks[np.isfinite(path.entries[ranks])])
    assert set(model.selection_order_[:4]) == {0, 1, 2, 3}
    assert (model.alpha_, model.kappa_, model.n_iter_) == (path.alpha, path.kappa, path.n_iter)
    if split:
        np.testing.assert_array_equal(model.gamma_path_, path.gammas)
        np.testing.assert_array_equal(model.dense_coef_path_, path.dense_coefs)
        assert model.nu_ == path.nu


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", [LBIClassifier, SplitLBIClassifier])
def test_a_classifier_is_the_path_stopped(kind: Any, count: int) -> None:
    x, labels = classes(count=count)
    names = np.array(["red", "blue", "green"])[labels]
    model = kind(n_times=10, eps=0.1).fit(x, names)
    # Classes in alphabetical order: y of two is whether it is the second one.
    order = np.unique(names)
    targets = (names == order[1]).astype(float) if count == 2 else (names[:, None] == order).astype(float)
    loss = "logistic" if count == 2 else "multinomial"
    path = (lbi_path if kind is LBIClassifier else split_lbi_path)(x, targets, loss=loss, n_times=10, eps=0.1)
    eta = x @ path.coefs[-1].T + path.intercepts[-1]
    np.testing.assert_array_equal(model.classes_, order)
    np.testing.assert_allclose(model.decision_function(x), eta)
    expected = np.stack([expit(-eta), expit(eta)], 1) if count == 2 else softmax(eta, 1)
    np.testing.assert_allclose(model.predict_proba(x), expected)
    np.testing.assert_allclose(np.exp(model.predict_log_proba(x)), expected)
    np.testing.assert_array_equal(model.predict(x), order[expected.argmax(1)])
    assert model.coef_.shape == ((1, 8) if count == 2 else (3, 8))
    assert model.coef_path_.shape == ((10, 8) if count == 2 else (10, 3, 8))
    assert model.score(x, names) > 0.8


def test_late_on_the_path_a_classifier_is_unpenalised_logistic_regression() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 4)) + 1
    labels = (x @ [1.0, -0.5, 0.0, 0.2] + rng.logistic(size=400) > 0.3).astype(int)
    model = LBIClassifier(eps=1e-4).fit(x, labels)
    reference = LogisticRegression(C=np.inf, tol=1e-10).fit(x, labels)
    np.testing.assert_allclose(model.coef_, reference.coef_, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(model.intercept_, reference.intercept_, rtol=1e-3, atol=1e-3)


def test_groups_of_classes_enter_together() -> None:
    x, labels = classes(n=100)
    model = LBIClassifier(penalty="group").fit(x, labels)
    support = model.coef_path_ != 0
    assert (support.all(1) == support.any(1)).all()
    assert set(model.selection_order_[:3]) == {0, 1, 2}


def held_out(kind: Any, x: Any, y: Any, folds: Any, weights: Any, **options: Any) -> Any:
    """Mean losses on held-out samples, by hand: folds × times."""
    path_of = split_lbi_path if kind in (SplitLBICV, SplitLBIClassifierCV) else lbi_path
    loss = "squared" if kind in (LBICV, SplitLBICV) else "multinomial" if y.ndim == 2 else "logistic"
    whole = path_of(x, y, loss=loss, sample_weight=weights, **options)
    same = {"kappa": whole.kappa, "times": whole.times} | ({} if whole.nu is None else {"nu": whole.nu})
    table, sizes = [], []
    for train, test in folds:
        part = path_of(x[train], y[train], loss=loss, sample_weight=weights[train], **same)
        row = []
        for coef, intercept in zip(part.coefs, part.intercepts, strict=True):
            eta = x[test] @ coef.T + intercept
            if loss == "squared":
                each = (y[test] - eta) ** 2 / 2
            elif loss == "logistic":
                each = -np.log(np.where(y[test] == 1, expit(eta), expit(-eta)))
            else:
                each = -np.log((softmax(eta, 1) * y[test]).sum(1))
            row.append(float(each @ weights[test]) / weights[test].sum())
        table.append(row)
        sizes.append(weights[test].sum())
    return whole, np.array(table), np.array(sizes)


@pytest.mark.parametrize("kind", [LBICV, SplitLBICV, LBIClassifierCV, SplitLBIClassifierCV])
def test_cross_validation_by_hand(kind: Any) -> None:
    classifier = kind in (LBIClassifierCV, SplitLBIClassifierCV)
    x, y = classes(n=90) if classifier else regression(noise=3.0)
    targets = np.eye(3)[y] if classifier else y
    weights = np.random.default_rng(0).uniform(0, 2, len(y))
    options = {"n_times": 25, "eps": 0.05}
    folds = list((StratifiedKFold(4) if classifier else KFold(4)).split(x, y))
    whole, table, sizes = held_out(kind, x, targets, folds, weights, **options)
    best = int((sizes @ table).argmin())
    model = kind(cv=4, **options).fit(x, y, weights)
    np.testing.assert_allclose(model.loss_path_, table, rtol=1e-8)
    assert model.time_ == whole.times[best]
    assert 0 < best < 24  # neither end: there was something to choose
    np.testing.assert_array_equal(model.coef_, whole.coefs[best])
    np.testing.assert_array_equal(model.coef_path_, whole.coefs)
    parallel = kind(cv=4, n_jobs=2, **options).fit(x, y, weights)
    np.testing.assert_array_equal(parallel.loss_path_, model.loss_path_)
    np.testing.assert_array_equal(parallel.coef_, model.coef_)


def test_cross_validation_finds_the_coefficients() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((120, 200))
    beta = np.zeros(200)
    beta[:5] = 3.0, -2.0, 2.0, 1.5, -1.0
    y = x @ beta + rng.standard_normal(120)
    model = LBICV().fit(x, y)
    assert set(model.selection_order_[:5]) == set(range(5))
    np.testing.assert_allclose(model.coef_[:5], beta[:5], atol=0.4)


def test_they_live_in_pipelines_and_searches() -> None:
    x, y = regression()
    assert cross_val_score(make_pipeline(StandardScaler(), LBI()), x, y, cv=3).min() > 0.8
    search = GridSearchCV(SplitLBI(n_times=5, eps=0.1), {"nu": [0.5, 5.0]}, cv=2).fit(x, y)
    assert search.best_params_["nu"] in (0.5, 5.0)
    model = SplitLBI(D="difference", nu=3.0)
    assert clone(model).get_params() == model.get_params()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sparse_data_and_both_precisions(dtype: Any) -> None:
    x, y = regression()
    x[np.abs(x) < 0.5] = 0
    dense = LBI(n_times=10).fit(x.astype(dtype), y)
    thin = LBI(n_times=10).fit(sparse.csr_matrix(x.astype(dtype)), y)
    assert dense.coef_.dtype == dtype
    np.testing.assert_allclose(thin.coef_, dense.coef_, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(thin.predict(sparse.csr_matrix(x)), thin.predict(x), rtol=1e-5, atol=1e-5)


def test_standardisation_is_off_where_d_mixes_coefficients() -> None:
    x, y = regression()
    options = {"n_times": 5, "eps": 0.2}
    for given, chosen in ((None, True), ("difference", False)):
        by_default = SplitLBI(D=given, **options).fit(x, y)
        stated = SplitLBI(D=given, standardize=chosen, **options).fit(x, y)
        other = SplitLBI(D=given, standardize=not chosen, **options).fit(x, y)
        np.testing.assert_array_equal(by_default.coef_path_, stated.coef_path_)
        assert not np.allclose(by_default.coef_path_, other.coef_path_)


@pytest.mark.parametrize(("model", "text"), [
    (LBI(penalty="l0"), "penalty must be 'l1' or 'group', got 'l0'"),
    (LBI(time=-1.0), "time must be a finite number > 0, got -1.0"),
    (LBI(eps=2), r"eps must be a number in \(0, 1\), got 2"),
    (SplitLBI(D="tv"), "D must be None"),
    (SplitLBI(nu=-2.0), "nu must be a finite number > 0, got -2.0"),
    (LBICV(cv=1), "(?i)cv|k-fold"),
])  # fmt: skip
def test_bad_arguments(model: Any, text: str) -> None:
    x, y = regression()
    with pytest.raises(ValueError, match=text):
        model.fit(x, y)
