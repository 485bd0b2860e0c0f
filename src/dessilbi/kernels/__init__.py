"""The iteration, fast: one file a backend, chosen here and nowhere else.

`fused=True` asks for one pass over memory, by Triton on CUDA devices and by torch.compile elsewhere, and says why where
it cannot. By default CUDA tensors take Triton where they can, and all else takes `foreach`, which compiles nothing.
Without a C++ compiler torch.compile cannot work on a CPU: then `foreach` takes over, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec

from dessilbi.kernels import foreach
from dessilbi.kernels.bucket import Bucket

Kernel = Callable[[Bucket], None]

__all__ = ["Bucket", "Kernel", "adamw_kernel", "sgd_kernel"]

_HAS_TRITON = find_spec("triton") is not None


def sgd_kernel(bucket: Bucket) -> Kernel:
    """The kernel that moves this bucket of DessiLBI."""
    fused = bucket.options["fused"]
    on_gpu = bucket.params[0].is_cuda
    if bucket.joint is not None and fused:
        raise ValueError(
            "fused=True: the fused kernel cannot move this group: it takes tensors one by one, and groups of kind "
            "'channel' span them; leave fused=None"
        )
    if not bucket.partitions or bucket.options["foreach"] or fused is False or not (fused or on_gpu):
        return foreach.sgd_step
    if not on_gpu:
        from dessilbi.kernels import compiled

        reason = compiled.why_not()
        if reason is None:
            return compiled.sgd_step
        warnings.warn(f"fused=True: {reason}; going on with foreach", RuntimeWarning, stacklevel=4)
        return foreach.sgd_step
    reason = "Triton is not installed"
    if _HAS_TRITON:
        from dessilbi.kernels import triton

        reason = triton.why_not(bucket)
        if reason is None:
            return triton.sgd_step
    if fused:
        raise ValueError(f"fused=True: the fused kernel cannot move this group: {reason}; leave fused=None")
    return foreach.sgd_step


def adamw_kernel(bucket: Bucket) -> Kernel:
    """The kernel that moves this bucket of DessiAdamW."""
    return foreach.adamw_step
