"""D, the linear map whose image is sparse, and the projection on what it leaves alone. D is never made dense."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import LinearOperator, lsmr

Array = NDArray[Any]


def difference(shape: int | tuple[int, ...]) -> sparse.csr_array:
    """The differences of neighbours, of a row of coefficients (fused lasso) or of those on a grid (total variation).

    Args:
        shape: the number of coefficients, or the shape of the grid that they lie on, last axis fastest.
    """
    extent = (shape,) if isinstance(shape, int) else tuple(shape)
    place = np.arange(int(np.prod(extent))).reshape(extent)
    low = np.concatenate([np.delete(place, -1, axis).ravel() for axis in range(len(extent))])
    high = np.concatenate([np.delete(place, 0, axis).ravel() for axis in range(len(extent))])
    rows = np.arange(len(low))
    values = np.concatenate([-np.ones(len(low)), np.ones(len(low))])
    where = (np.concatenate([rows, rows]), np.concatenate([low, high]))
    return sparse.csr_array((values, where), shape=(len(low), place.size))


class Transform:
    """The identity."""

    def __init__(self, features: int) -> None:
        self.shape = (features, features)

    def matmul(self, beta: Array) -> Array:
        """Dβ."""
        return beta

    def rmatmul(self, gamma: Array) -> Array:
        """Dᵀγ."""
        return gamma

    def project(self, beta: Array, support: Array) -> Array:
        """The nearest coefficients whose Dβ is zero outside of the support: both of one output."""
        result: Array = np.where(support, beta, 0)
        return result


class Matrix(Transform):
    """A matrix, sparse or dense, or a LinearOperator."""

    def __init__(self, d: Any, dtype: Any) -> None:
        self.shape = d.shape
        self.dtype = dtype
        if sparse.issparse(d):
            self.d: Any = sparse.csr_array(d, dtype=dtype)
            self.transposed: Any = self.d.T.tocsr()
        else:
            self.d = d if isinstance(d, LinearOperator) else np.asarray(d, dtype=dtype)
            self.transposed = self.d.T

    def matmul(self, beta: Array) -> Array:
        return np.asarray(self.d @ beta, dtype=self.dtype)

    def rmatmul(self, gamma: Array) -> Array:
        return np.asarray(self.transposed @ gamma, dtype=self.dtype)

    def project(self, beta: Array, support: Array) -> Array:
        null = ~support
        if not null.any():
            return beta
        if isinstance(self.d, LinearOperator):
            kept = self.d

            def forward(x: Array) -> Array:
                return np.where(null, kept @ np.ravel(x), 0)

            def backward(x: Array) -> Array:
                return np.asarray(kept.T @ np.where(null, np.ravel(x), 0))

            rows: Any = LinearOperator(self.shape, matvec=forward, rmatvec=backward, dtype=self.dtype)
            target = forward(beta)
        else:
            rows = self.d[np.flatnonzero(null)]
            target = rows @ beta
        # β minus the smallest change that takes Dβ to zero there.
        precision = float(np.finfo(self.dtype).eps)
        change = lsmr(rows, target, atol=precision, btol=precision, maxiter=4 * max(self.shape))[0]
        return np.asarray(beta - change, dtype=self.dtype)


class Edges(Matrix):
    """Differences: each row has a number and its negative. A projection is the mean of each connected piece."""

    def __init__(self, d: Any, dtype: Any) -> None:
        super().__init__(d, dtype)
        ends = self.d.indices.reshape(-1, 2)
        self._low, self._high = ends[:, 0], ends[:, 1]

    @staticmethod
    def fits(d: Any) -> bool:
        """Whether a matrix is of this kind."""
        if not sparse.issparse(d):
            return False
        rows = sparse.csr_array(d)
        if not (np.diff(rows.indptr) == 2).all():
            return False
        pairs = rows.data.reshape(-1, 2)
        return bool((pairs != 0).all() and (pairs.sum(1) == 0).all())

    def project(self, beta: Array, support: Array) -> Array:
        p, joined = self.shape[1], ~support
        links = (np.ones(int(joined.sum()), dtype=bool), (self._low[joined], self._high[joined]))
        count, label = connected_components(sparse.coo_array(links, shape=(p, p)).tocsr(), directed=False)
        means = np.bincount(label, beta, count) / np.bincount(label, minlength=count)
        return np.asarray(means[label], dtype=self.dtype)


def transform(d: Any, features: int, dtype: Any) -> Transform:
    """D as the user gives it: None, "difference", the shape of a grid, or a matrix."""
    if d is None:
        return Transform(features)
    if isinstance(d, str):
        if d != "difference":
            raise ValueError(f"D must be None, 'difference', the shape of a grid or a matrix, got {d!r}")
        return Edges(difference(features), dtype)
    if isinstance(d, tuple) and all(isinstance(x, (int, np.integer)) for x in d):
        if int(np.prod(d)) != features:
            raise ValueError(f"D={d!r}: a grid of {int(np.prod(d))} places, for {features} features")
        return Edges(difference(tuple(int(x) for x in d)), dtype)
    if not (sparse.issparse(d) or isinstance(d, LinearOperator)):
        d = np.asarray(d, dtype=dtype)
    if d.ndim != 2 or d.shape[1] != features or not d.shape[0]:
        raise ValueError(f"D must be a matrix with a column for each of {features} features, got shape {d.shape}")
    return Edges(d, dtype) if Edges.fits(d) else Matrix(d, dtype)
