"""X̃ = (X − 1μᵀ)·diag(1/s): a design matrix, centred and scaled inside its products, so that it is never copied."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from sklearn.utils.sparsefuncs import mean_variance_axis

Array = NDArray[Any]

# Numbers in a block of rows, where something must be computed from centred values.
_BLOCK = 1 << 18


class Design:
    """A dense or sparse matrix with a centre μ and a scale s that its products account for.

    Args:
        x: samples × features; an array, or a scipy CSR or CSC matrix.
        centre, scale: of the features; None for 0 and 1.
    """

    def __init__(self, x: Any, centre: Array | None = None, scale: Array | None = None) -> None:
        self.x, self.centre, self.scale = x, centre, scale
        self.shape: tuple[int, int] = x.shape
        self.dtype = x.dtype
        self.sparse = sparse.issparse(x)

    @classmethod
    def standardised(cls, x: Any, weights: Array, centre: bool, scale: bool) -> Design:
        """With the weighted means and deviations of the features; without centring, deviations are from zero.

        `weights` of the samples add up to 1. A constant feature keeps the scale 1.
        """
        mean, square = _moments(x, weights, centre)
        deviation = np.sqrt(square)
        deviation[deviation <= 10 * np.finfo(x.dtype).eps * np.abs(mean)] = 0
        deviation[deviation == 0] = 1
        return cls(x, mean if centre else None, deviation if scale else None)

    @property
    def stored(self) -> int:
        """How many numbers the matrix holds."""
        return int(self.x.nnz) if self.sparse else self.shape[0] * self.shape[1]

    def matmul(self, b: Array) -> Array:
        """X̃b, for b of features × outputs."""
        if self.scale is not None:
            b = b / self.scale[:, None]
        product: Array = self.x @ b
        return product if self.centre is None else product - self.centre @ b

    def rmatmul(self, r: Array) -> Array:
        """X̃ᵀr, for r of samples × outputs."""
        product: Array = self.x.T @ r
        if self.centre is not None:
            product -= np.outer(self.centre, r.sum(0))
        if self.scale is not None:
            product /= self.scale[:, None]
        return product

    def columns(self, index: Array) -> Design:
        """A copy of some features."""
        part = self.x[:, index]
        centre = None if self.centre is None else self.centre[index]
        scale = None if self.scale is None else self.scale[index]
        if self.sparse:
            return Design(part, centre, scale)
        if centre is not None:
            part -= centre
        if scale is not None:
            part /= scale
        return Design(part)

    def gram(self, weights: Array) -> Array:
        """X̃ᵀ diag(weights) X̃, dense."""
        n, p = self.shape
        if self.sparse:
            product = (self.x.T @ self.x.multiply(weights[:, None]).tocsr()).toarray()
            if self.centre is not None:
                product -= np.outer(self.centre, self.centre)
            if self.scale is not None:
                product /= self.scale[:, None] * self.scale
            return np.asarray(product, dtype=self.dtype)
        result = np.zeros((p, p), dtype=self.dtype)
        root = np.sqrt(weights)[:, None]
        for rows in _blocks(n, p):
            part = self.x[rows] if self.centre is None else self.x[rows] - self.centre
            part = part * root[rows]
            result += part.T @ part
        if self.scale is not None:
            result /= self.scale[:, None] * self.scale
        return result

    def squares(self, weights: Array) -> Array:
        """The weighted mean squares of the columns of X̃."""
        _, square = _moments(self.x, weights, self.centre is not None)
        return square if self.scale is None else square / self.scale**2


def _blocks(n: int, p: int) -> list[slice]:
    height = max(1, _BLOCK // max(1, p))
    return [slice(i, i + height) for i in range(0, n, height)]


def _moments(x: Any, weights: Array, centre: bool) -> tuple[Array, Array]:
    """The weighted mean of every column (0 without `centre`), and the mean square around it."""
    if sparse.issparse(x):
        if not centre:
            return np.zeros(x.shape[1], x.dtype), np.asarray(x.multiply(x).T @ weights, dtype=x.dtype)
        mean, square = mean_variance_axis(x, axis=0, weights=weights)
        return np.asarray(mean, dtype=x.dtype), np.asarray(square, dtype=x.dtype)
    mean = weights @ x if centre else np.zeros(x.shape[1], x.dtype)
    square = np.zeros(x.shape[1], x.dtype)
    for rows in _blocks(*x.shape):
        part = x[rows] - mean
        square += weights[rows] @ (part * part)
    return mean, square
