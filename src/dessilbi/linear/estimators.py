"""The estimators: a path and a time on it, in the manners of scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from dessilbi.linear import lbi, split
from dessilbi.linear.course import LinearPath
from dessilbi.linear.problem import Problem

Array = NDArray[Any]


class PathEstimator(BaseEstimator):
    """What all of them share: to run through a path, and to stop at a time of it."""

    def _run(self, problem: Problem, times: Array | None, kappa: float | None, nu: float | None) -> LinearPath:
        raise NotImplementedError

    def _standardise(self) -> bool:
        return bool(self.standardize)

    def _stop(self, path: LinearPath, x: Any, targets: Array, loss: str, weights: Any, labels: Array) -> int:
        """Which of the path's times the estimator stops at."""
        return len(path.times) - 1

    def _problem(self, x: Any, targets: Array, loss: str, weights: Any) -> Problem:
        return Problem(x, targets, loss, weights, self.fit_intercept, self._standardise())

    def _fit(self, x: Any, targets: Array, loss: str, weights: Any, labels: Array) -> int:
        """Leave what the path shows; the index of the time to stop at."""
        path = self._run(self._problem(x, targets, loss, weights), None, self.kappa, getattr(self, "nu", None))
        index = self._stop(path, x, targets, loss, weights, labels)
        self.times_, self.time_ = path.times, float(path.times[index])
        self.coef_path_, self.intercept_path_ = path.coefs, path.intercepts
        self.entry_times_, self.selection_order_ = path.entries, path.order
        self.alpha_, self.kappa_, self.n_iter_ = path.alpha, path.kappa, path.n_iter
        if path.nu is not None:
            self.nu_, self.gamma_path_, self.dense_coef_path_ = path.nu, path.gammas, path.dense_coefs
        return index

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _predictor(self, X: Any) -> Array:
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse=("csr", "csc"), dtype=(np.float64, np.float32), reset=False)
        return np.asarray(X @ self.coef_.T + self.intercept_)


class PathRegressor(RegressorMixin, PathEstimator):
    """The squared loss."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Run through the path.

        Args:
            X: samples × features, dense or sparse.
            y: a number for every sample.
            sample_weight: weights of the samples.
        """
        X, y = validate_data(self, X, y, accept_sparse=("csr", "csc"), dtype=(np.float64, np.float32), y_numeric=True)
        y = y.astype(X.dtype, copy=False)
        index = self._fit(X, y, "squared", sample_weight, y)
        self.coef_, self.intercept_ = self.coef_path_[index], float(self.intercept_path_[index])
        return self

    def predict(self, X: Any) -> Array:
        """A number for every sample."""
        return self._predictor(X)


class PathClassifier(ClassifierMixin, PathEstimator):
    """The logistic loss for two classes, the multinomial one for more."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Run through the path.

        Args:
            X: samples × features, dense or sparse.
            y: the class of every sample.
            sample_weight: weights of the samples.
        """
        X, y = validate_data(self, X, y, accept_sparse=("csr", "csc"), dtype=(np.float64, np.float32))
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        count = len(self.classes_)
        if count < 2:
            raise ValueError(f"y has 1 class only, {self.classes_[0]!r}: a classifier needs at least 2 classes")
        if count == 2:
            index = self._fit(X, labels.astype(X.dtype), "logistic", sample_weight, labels)
            self.coef_, self.intercept_ = self.coef_path_[index][None], self.intercept_path_[index][None]
        else:
            index = self._fit(X, np.eye(count, dtype=X.dtype)[labels], "multinomial", sample_weight, labels)
            self.coef_, self.intercept_ = self.coef_path_[index], self.intercept_path_[index]
        return self

    def decision_function(self, X: Any) -> Array:
        """The linear predictor: of two classes that of the second, else one for every class."""
        eta = self._predictor(X)
        return eta[:, 0] if len(self.classes_) == 2 else eta

    def predict_proba(self, X: Any) -> Array:
        """The probability of every class."""
        eta = self.decision_function(X)
        if eta.ndim == 1:
            return np.stack([expit(-eta), expit(eta)], axis=1)
        result: Array = softmax(eta, axis=1)
        return result

    def predict_log_proba(self, X: Any) -> Array:
        """The logarithm of that."""
        result: Array = np.log(self.predict_proba(X))
        return result

    def predict(self, X: Any) -> Array:
        """The most likely class of every sample."""
        eta = self.decision_function(X)
        index = (eta > 0).astype(int) if eta.ndim == 1 else eta.argmax(1)
        result: Array = self.classes_[index]
        return result


class LBIPath(PathEstimator):
    """The parameters of LBI."""

    def __init__(
        self,
        *,
        penalty: str = "l1",
        groups: Any = None,
        time: float | None = None,
        n_times: int = 100,
        eps: float = 1e-2,
        kappa: float | None = None,
        alpha: float | None = None,
        fit_intercept: bool = True,
        standardize: bool = True,
        max_iter: int = 100_000,
    ) -> None:
        self.penalty = penalty
        self.groups = groups
        self.time = time
        self.n_times = n_times
        self.eps = eps
        self.kappa = kappa
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.standardize = standardize
        self.max_iter = max_iter

    def _run(self, problem: Problem, times: Array | None, kappa: float | None, nu: float | None) -> LinearPath:
        return lbi.run(
            problem, self.penalty, self.groups, kappa, self.alpha, times, self.n_times, self.eps,
            getattr(self, "time", None), self.max_iter,
        )  # fmt: skip


class SplitLBIPath(PathEstimator):
    """The parameters of Split LBI."""

    def __init__(
        self,
        *,
        D: Any = None,
        penalty: str = "l1",
        groups: Any = None,
        time: float | None = None,
        n_times: int = 100,
        eps: float = 1e-2,
        nu: float | None = None,
        kappa: float | None = None,
        alpha: float | None = None,
        fit_intercept: bool = True,
        standardize: bool | None = None,
        max_iter: int = 100_000,
    ) -> None:
        self.D = D
        self.penalty = penalty
        self.groups = groups
        self.time = time
        self.n_times = n_times
        self.eps = eps
        self.nu = nu
        self.kappa = kappa
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.standardize = standardize
        self.max_iter = max_iter

    def _standardise(self) -> bool:
        return self.D is None if self.standardize is None else bool(self.standardize)

    def _run(self, problem: Problem, times: Array | None, kappa: float | None, nu: float | None) -> LinearPath:
        return split.run(
            problem, self.D, self.penalty, self.groups, nu, kappa, self.alpha, times, self.n_times, self.eps,
            getattr(self, "time", None), self.max_iter,
        )  # fmt: skip


class LBI(PathRegressor, LBIPath):
    """Sparse linear regression by the linearized Bregman iteration.

    From nothing towards least squares, features enter in the order of their importance. To stop early is to
    regularise: as the lasso selects, but without its shrinkage of what is selected. :class:`LBICV` finds the time.

    Args:
        penalty, groups, n_times, eps, kappa, alpha, fit_intercept, standardize, max_iter: as in :func:`lbi_path`.
        time: the path time to stop at, where a lasso would have the penalty 1/time. By default 1/eps times the first
            entry.

    Attributes:
        coef_, intercept_: at `time_`.
        times_, coef_path_, intercept_path_: the path, a row a time.
        selection_order_: the features that entered, first to last.
        entry_times_: when each coefficient entered; inf: never.
        alpha_, kappa_, n_iter_: the step size (the last one), damping, and number of steps.

    References:
        Osher, Ruan, Xiong, Yao, Yin: Sparse recovery via differential inclusions. Applied and Computational Harmonic
        Analysis, 2016.
    """


class LBIClassifier(PathClassifier, LBIPath):
    """Sparse logistic and multinomial regression by the linearized Bregman iteration.

    As :class:`LBI`, for classes. With more than two of them, penalty="group" without `groups` lets a feature enter for
    all classes at once.
    """


class SplitLBI(PathRegressor, SplitLBIPath):
    """Linear regression with a sparse Dβ by Split LBI: selection that is robust to correlated features, fused and
    total-variation sparsity. :class:`SplitLBICV` finds the time to stop at.

    Args:
        D, nu and the rest: as in :func:`split_lbi_path`.
        time: the path time to stop at; by default 1/eps times the first entry.

    Attributes:
        coef_, intercept_: at `time_`; β projected on the structure: Dβ = 0 wherever γ = 0.
        times_, coef_path_, intercept_path_: the path of those, a row a time.
        dense_coef_path_, gamma_path_: β(t), and the sparse γ(t) that shows the structure.
        selection_order_: the rows of D (without D, the features) that entered, first to last.
        entry_times_: when each entered; inf: never.
        nu_, alpha_, kappa_, n_iter_: as used.

    References:
        Huang, Sun, Xiong, Yao: Boosting with structural sparsity: a differential inclusion approach. Applied and
        Computational Harmonic Analysis, 2018.
    """


class SplitLBIClassifier(PathClassifier, SplitLBIPath):
    """Logistic and multinomial regression with a sparse Dβ by Split LBI: :class:`SplitLBI` for classes."""
