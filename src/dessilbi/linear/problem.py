"""A linear model's data, ready to iterate on: standardised inside its products, with the norms that set step sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.utils import check_array, check_consistent_length
from sklearn.utils.validation import _check_sample_weight

from dessilbi.linear.design import Design
from dessilbi.linear.losses import LOSSES, Loss

Array = NDArray[Any]

# κ in units of the largest first guess at a coefficient: how closely a path follows the inverse scale space. Time is in
# units of the first entry, so a path to 100 times that takes about 100·DAMPING/STEP iterations a unit of ‖X̃‖².
DAMPING = 2.0
# κα‖∇²L‖, of which anything below 2 is stable; up to 1 nothing overshoots.
STEP = 1.0
# The longest step, as a share of the time that has passed: about the distance of 100 times from 1 to 100.
RESOLUTION = 0.05


class Problem:
    """L(β, b) = Σ_i w_i ℓ(y_i, x̃_iᵀβ + b).

    Args:
        x, y: the data. For "logistic" y is 0 and 1; for "multinomial" it has a column of 0 and 1 for every class.
        loss: "squared", "logistic" or "multinomial".
        sample_weight: weights of the samples, or None.
        fit_intercept: whether there is a b; the features are then centred.
        standardise: whether features are brought to deviation 1.
    """

    def __init__(self, x: Any, y: Any, loss: str, sample_weight: Any, fit_intercept: bool, standardise: bool) -> None:
        if loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)}, got {loss!r}")
        x = check_array(x, accept_sparse=("csr", "csc"), dtype=(np.float64, np.float32))
        y = check_array(y, dtype=x.dtype, ensure_2d=False)
        check_consistent_length(x, y)
        weights = _check_sample_weight(sample_weight, x, dtype=x.dtype, ensure_non_negative=True)
        if not weights.sum() > 0:
            raise ValueError("sample_weight: all weights are zero, there is nothing to fit")
        weights = weights / weights.sum()
        self.design = Design.standardised(x, weights, fit_intercept, standardise)
        targets = y.reshape(len(y), -1)
        self.fit_intercept = fit_intercept
        self.loss: Loss = LOSSES[loss](targets, weights)
        self.intercept = self.loss.null() if fit_intercept else np.zeros(self.loss.outputs, x.dtype)
        self.moves = fit_intercept and self.loss.moves
        eta = np.broadcast_to(self.intercept, targets.shape)
        self.slope = self.design.rmatmul(self.loss.gradient(eta))
        """The gradient where all coefficients are zero."""
        self.gram: Array | None = None
        if loss == "squared" and 4 * self.features**2 <= self.design.stored:
            self.gram = self.design.gram(weights)

    @property
    def features(self) -> int:
        return self.design.shape[1]

    @property
    def dtype(self) -> Any:
        return self.design.dtype

    @property
    def size(self) -> float:
        """About how large a coefficient becomes: the largest gradient over the mean curvature."""
        square = float(self.design.squares(self.loss.weights).mean()) * self.loss.curvature
        return float(np.abs(self.slope).max()) / square if square else 0.0

    def gradient(self, beta: Array, b: Array) -> tuple[Array, Array]:
        """The derivatives by β and b; two products with X̃, or one with the Gram matrix."""
        if self.gram is not None:
            return self.slope + self.gram @ beta, b
        r = self.loss.gradient(self.design.matmul(beta) + b)
        return self.design.rmatmul(r), r.sum(0)

    def curve(self, u: Array) -> Array:
        """The product of u with a bound of the Hessian over β."""
        if self.gram is not None:
            product: Array = self.gram @ u
            return product
        return self.design.rmatmul(self.loss.curvature * self.loss.weights[:, None] * self.design.matmul(u))

    def lipschitz(self) -> float:
        """A bound of ‖∇²L‖: what is 0.25·‖X‖² for the logistic loss of n samples, over n."""
        start = np.random.default_rng(0).standard_normal((self.features, 1)).astype(self.dtype)
        norm, _ = largest(self.curve, start)
        return max(norm, self.loss.curvature if self.moves else 0.0)

    def restore(self, coefs: Array, intercepts: Array) -> tuple[Array, Array]:
        """Coefficients of X and intercepts, from those of X̃: … × features × outputs, … × outputs."""
        if self.design.scale is not None:
            coefs = coefs / self.design.scale[:, None]
        if self.design.centre is not None:
            intercepts = intercepts - np.einsum("j,...jk->...k", self.design.centre, coefs)
        return coefs, intercepts


def largest(product: Callable[[Array], Array], start: Array, precision: float = 1e-3) -> tuple[float, Array]:
    """The largest eigenvalue of a positive semidefinite map, by power iteration, and its vector.

    It approaches from below; what is given is a thousandth more than where the iteration stood still.
    """
    size, u = 0.0, start / max(float(np.linalg.norm(start)), 1e-30)
    for _ in range(100):
        moved = product(u)
        before, size = size, float(np.linalg.norm(moved))
        if not size:
            break
        u = moved / size
        if size - before < precision * size:
            break
    return size * (1 + precision), u
