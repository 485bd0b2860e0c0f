"""The iteration, fast: one file a backend, chosen here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

from dessilbi.kernels import foreach
from dessilbi.kernels.bucket import Bucket

Kernel = Callable[[Bucket], None]

__all__ = ["Bucket", "Kernel", "adamw_kernel", "sgd_kernel"]


def sgd_kernel(bucket: Bucket) -> Kernel:
    """The kernel that moves this bucket of DessiLBI."""
    return foreach.sgd_step


def adamw_kernel(bucket: Bucket) -> Kernel:
    """The kernel that moves this bucket of DessiAdamW."""
    return foreach.adamw_step
