"""The losses, as functions of the linear predictor η = X̃β + b: what the iteration needs of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, log_softmax, softmax

Array = NDArray[Any]

# A class that no sample has would have an intercept of −∞.
_RARE = 1e-10


class Loss(ABC):
    """A mean over weighted samples; the weights add up to 1. Predictors are samples × outputs."""

    curvature: float
    """The largest second derivative of one sample's loss."""
    moves: bool
    """Whether the intercept depends on the coefficients, where features are centred."""

    def __init__(self, targets: Array, weights: Array) -> None:
        self.targets, self.weights = targets, weights
        self._column = weights[:, None]

    @property
    def outputs(self) -> int:
        return int(self.targets.shape[1])

    @abstractmethod
    def null(self) -> Array:
        """The best intercepts while all coefficients are zero."""

    @abstractmethod
    def gradient(self, eta: Array) -> Array:
        """The derivative by every predictor."""

    @staticmethod
    @abstractmethod
    def of_samples(eta: Array, targets: Array) -> Array:
        """The loss of each sample, for stacks of predictors: … × samples × outputs."""


class Squared(Loss):
    """½(y − η)²."""

    curvature = 1.0
    moves = False

    def null(self) -> Array:
        mean: Array = self.weights @ self.targets
        return mean

    def gradient(self, eta: Array) -> Array:
        result: Array = self._column * (eta - self.targets)
        return result

    @staticmethod
    def of_samples(eta: Array, targets: Array) -> Array:
        result: Array = 0.5 * ((eta - targets) ** 2).sum(-1)
        return result


class Logistic(Loss):
    """log(1 + exp η) − yη, for y of 0 and 1."""

    curvature = 0.25
    moves = True

    def __init__(self, targets: Array, weights: Array) -> None:
        outside = targets[(targets < 0) | (targets > 1)]
        if outside.size:
            raise ValueError(
                f"y must be between 0 and 1 for the logistic loss, got {outside[0]}: use 0 and 1 as classes"
            )
        super().__init__(targets, weights)

    def null(self) -> Array:
        share = np.clip(self.weights @ self.targets, _RARE, 1 - _RARE)
        result: Array = np.log(share / (1 - share))
        return result

    def gradient(self, eta: Array) -> Array:
        result: Array = self._column * (expit(eta) - self.targets)
        return result

    @staticmethod
    def of_samples(eta: Array, targets: Array) -> Array:
        result: Array = (np.logaddexp(0, eta) - targets * eta).sum(-1)
        return result


class Multinomial(Loss):
    """log Σ_k exp η_k − η_y, for y of one 1 a row. A predictor for each class; they share what is common to all."""

    curvature = 0.5
    moves = True

    def __init__(self, targets: Array, weights: Array) -> None:
        if targets.shape[1] < 2 or (targets < 0).any() or not np.allclose(targets.sum(1), 1):
            raise ValueError(
                "y must have a column for every class for the multinomial loss, and rows of 0 and 1 that add up to 1, "
                f"got shape {targets.shape} and a first row {targets[0]}"
            )
        super().__init__(targets, weights)

    def null(self) -> Array:
        logs = np.log(np.clip(self.weights @ self.targets, _RARE, 1))
        result: Array = logs - logs.mean()
        return result

    def gradient(self, eta: Array) -> Array:
        result: Array = self._column * (softmax(eta, axis=1) - self.targets)
        return result

    @staticmethod
    def of_samples(eta: Array, targets: Array) -> Array:
        result: Array = -(targets * log_softmax(eta, axis=-1)).sum(-1)
        return result


LOSSES: dict[str, type[Loss]] = {"squared": Squared, "logistic": Logistic, "multinomial": Multinomial}
