"""The estimators that choose the time to stop at by cross-validation."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import check_cv
from sklearn.utils import _safe_indexing
from sklearn.utils.parallel import Parallel, delayed
from sklearn.utils.validation import _check_sample_weight

from dessilbi.linear.course import LinearPath
from dessilbi.linear.estimators import LBIPath, PathClassifier, PathEstimator, PathRegressor, SplitLBIPath
from dessilbi.linear.losses import LOSSES

Array = NDArray[Any]


class CrossValidated(PathEstimator):
    """Stops where the loss on held-out samples is smallest.

    Every fold runs through the times of the path on all the data, with its κ and ν, so that a time means the same.
    """

    def _stop(self, path: LinearPath, x: Any, targets: Array, loss: str, weights: Any, labels: Array) -> int:
        folds = list(check_cv(self.cv, labels, classifier=isinstance(self, PathClassifier)).split(x, labels))
        weights = _check_sample_weight(weights, x)
        parts = Parallel(n_jobs=self.n_jobs)(
            delayed(self._held_out)(path, x, targets, loss, weights, train, test) for train, test in folds
        )
        losses, sizes = np.stack([part[0] for part in parts]), np.array([part[1] for part in parts])
        self.loss_path_ = losses / np.maximum(sizes, np.finfo(float).tiny)[:, None]
        return int((losses.sum(0) / sizes.sum()).argmin())

    def _held_out(
        self, path: LinearPath, x: Any, targets: Array, loss: str, weights: Array, train: Array, test: Array
    ) -> tuple[Array, float]:
        """The loss on the samples of a fold at every time, weighted and summed, and the sum of the weights."""
        problem = self._problem(_safe_indexing(x, train), targets[train], loss, weights[train])
        found = self._run(problem, path.times, path.kappa, path.nu)
        held, y = _safe_indexing(x, test), targets[test].reshape(len(test), -1)
        if found.coefs.ndim == 2:
            eta = (held @ found.coefs.T + found.intercepts).T[..., None]
        else:
            eta = np.stack([held @ c.T + b for c, b in zip(found.coefs, found.intercepts, strict=True)])
        each = LOSSES[loss].of_samples(eta, y)
        return each.astype(float) @ weights[test], float(weights[test].sum())


class LBICVPath(CrossValidated, LBIPath):
    """The parameters of LBI, with folds in place of a time."""

    def __init__(
        self,
        *,
        penalty: str = "l1",
        groups: Any = None,
        n_times: int = 100,
        eps: float = 1e-2,
        kappa: float | None = None,
        alpha: float | None = None,
        fit_intercept: bool = True,
        standardize: bool = True,
        max_iter: int = 100_000,
        cv: Any = None,
        n_jobs: int | None = None,
    ) -> None:
        self.penalty = penalty
        self.groups = groups
        self.n_times = n_times
        self.eps = eps
        self.kappa = kappa
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.standardize = standardize
        self.max_iter = max_iter
        self.cv = cv
        self.n_jobs = n_jobs


class SplitLBICVPath(CrossValidated, SplitLBIPath):
    """The parameters of Split LBI, with folds in place of a time."""

    def __init__(
        self,
        *,
        D: Any = None,
        penalty: str = "l1",
        groups: Any = None,
        n_times: int = 100,
        eps: float = 1e-2,
        nu: float | None = None,
        kappa: float | None = None,
        alpha: float | None = None,
        fit_intercept: bool = True,
        standardize: bool | None = None,
        max_iter: int = 100_000,
        cv: Any = None,
        n_jobs: int | None = None,
    ) -> None:
        self.D = D
        self.penalty = penalty
        self.groups = groups
        self.n_times = n_times
        self.eps = eps
        self.nu = nu
        self.kappa = kappa
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.standardize = standardize
        self.max_iter = max_iter
        self.cv = cv
        self.n_jobs = n_jobs


class LBICV(PathRegressor, LBICVPath):
    """:class:`LBI`, stopped at the time that cross-validation chooses.

    Args:
        cv: the number of folds (5 by default), a splitter, or pairs of indices.
        n_jobs: folds at a time.
        The rest: as in :func:`lbi_path`.

    Attributes:
        time_: the time chosen.
        loss_path_: folds × times: the mean loss on the held-out samples.
        The rest: as in :class:`LBI`.
    """


class LBIClassifierCV(PathClassifier, LBICVPath):
    """:class:`LBIClassifier`, stopped at the time that cross-validation chooses: see :class:`LBICV`."""


class SplitLBICV(PathRegressor, SplitLBICVPath):
    """:class:`SplitLBI`, stopped at the time that cross-validation chooses: see :class:`LBICV`."""


class SplitLBIClassifierCV(PathClassifier, SplitLBICVPath):
    """:class:`SplitLBIClassifier`, stopped at the time that cross-validation chooses: see :class:`LBICV`."""
