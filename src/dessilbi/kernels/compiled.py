"""The iteration in one pass by torch.compile: for CPUs, and for devices without Triton kernels of their own.

What needs a whole group or a whole tensor first (norms, ρ) is read in a pass of its own, as in `foreach`; the rest is
one elementwise function. Numbers enter as a tensor and shapes as symbols, so that a changed step size or threshold, or
another layer, compiles nothing new.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dessilbi.groups import Elements, Slices
from dessilbi.kernels import foreach
from dessilbi.kernels.bucket import Bucket

Update = Callable[..., None]


@functools.cache
def why_not() -> str | None:
    """What keeps torch.compile from working here; None if nothing does."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler (install g++, or set CXX)"
    return None


def _move(
    w: Tensor, g: Tensor, u: Tensor | None, v: Tensor, shrunk: Tensor, rise: Tensor | None, numbers: Tensor
) -> None:
    """The step, given Γ and β (None: 1), with every option of SGD a number in a sum."""
    lr, rate, step, momentum, undamped, decay, kept, of_g, of_u, sign = numbers.unbind()
    w_ = w.to(v.dtype)
    d = (w_ - shrunk) * rate
    g_ = sign * g.to(v.dtype) + d + decay * w_
    risen = v + lr * (d if rise is None else rise * d)
    if u is not None:
        moved = momentum * u + undamped * g_
        g_ = of_g * g_ + of_u * moved
        u.copy_(moved)
    v.copy_(risen)
    w.copy_(kept * w_ - step * g_)


def _elements(
    w: Tensor, g: Tensor, u: Tensor | None, v: Tensor, scale: Tensor | None, lam: Tensor, room: Tensor, numbers: Tensor
) -> None:
    kappa, numbers = numbers[0], numbers[1:]
    shrunk = kappa * torch.copysign((v.abs() - lam).clamp_min(0), v)
    if scale is None:
        _move(w, g, u, v, shrunk, None, numbers)
    else:
        norms = w.to(v.dtype).abs()
        _move(w, g, u, v, scale * shrunk, room / norms.clamp_min(1), numbers)
        scale.copy_(norms)


def _groups(
    w: Tensor, g: Tensor, u: Tensor | None, v: Tensor, shrink: Tensor, rise: Tensor | None, numbers: Tensor
) -> None:
    _move(w, g, u, v, shrink * v, rise, numbers[1:])


@functools.cache
def _variant(function: Update, *key: Any) -> Update:
    """The function compiled for one combination of arguments.

    Each has a code object of its own: torch counts recompilations by code object, and gives up after a few.
    """
    name = f"{function.__name__}_{abs(hash(key)):x}"
    code = function.__code__.replace(co_name=name)
    return torch.compile(types.FunctionType(code, globals(), name), dynamic=True, fullgraph=True)


def sgd_step(bucket: Bucket) -> None:
    """One step of DessiLBI."""
    options = bucket.options
    factors = foreach.group_factors(bucket, foreach.PIECE)
    numbers = _numbers(bucket)
    momentum = options["momentum"] != 0
    for i, (p, g, v, part) in enumerate(zip(bucket.params, bucket.grads, bucket.duals, bucket.partitions, strict=True)):
        if p.numel() == 0:
            continue
        u = bucket.states[i]["momentum_buffer"] if momentum else None
        scale = bucket.scales[i] if bucket.scales else None
        tensors = [p, g, v, *([] if u is None else [u]), *([] if scale is None else [scale])]
        if isinstance(part, Elements):
            if all(t.stride() == p.stride() for t in tensors) and (flat := _flat(p)) is not None:
                p, g, v, u, scale = (None if t is None else t.as_strided(*flat) for t in (p, g, v, u, scale))  # type: ignore[assignment]
            lam = torch.as_tensor(bucket.lams[i], dtype=v.dtype)
            room = factors.room[i] if factors.room else lam
            key = (p.ndim, p.dtype, g.dtype, v.dtype, p.device.type, momentum, scale is not None)
            _variant(_elements, *key)(p, g, u, v, scale, lam, room, numbers)
            continue
        p, g, v = (part.split(t) for t in (p, g, v))
        u = None if u is None else part.split(u)
        shrink = part.spread(factors.shrink[i])
        rise = part.spread(factors.rise[i]) if factors.rise else None
        if isinstance(part, Slices) and part.axes == (0,) and all(t.is_contiguous() for t in (p, g, v)):
            p, g, v, shrink = (t.view(t.shape[0], -1) for t in (p, g, v, shrink))
            u = None if u is None else u.view(p.shape)
            rise = None if rise is None else rise.view(shrink.shape)
        key = (p.ndim, p.dtype, g.dtype, v.dtype, p.device.type, momentum, rise is not None)
        _variant(_groups, *key)(p, g, u, v, shrink, rise, numbers)


def _flat(p: Tensor) -> tuple[tuple[int], tuple[int]] | None:
    """Size and stride of the tensor as one row of memory; None where it has gaps."""
    dense = sorted(zip(p.stride(), p.shape, strict=True))
    expected = 1
    for stride, size in dense:
        if size != 1 and stride != expected:
            return None
        expected *= size
    return (p.numel(),), (1,)


def _numbers(bucket: Bucket) -> Tensor:
    """κ and then what `_move` takes, as one tensor in the dtype of the state."""
    o = bucket.options
    decay = o["weight_decay"]
    values = [
        o["kappa"],
        o["lr"],
        1 / o["nu"],
        o["kappa"] * o["lr"],
        o["momentum"],
        1.0 if bucket.first else 1.0 - o["dampening"],
        0.0 if o["decoupled_weight_decay"] else decay,
        1.0 - decay if o["decoupled_weight_decay"] else 1.0,
        1.0 if o["nesterov"] else 0.0,
        o["momentum"] if o["nesterov"] else 1.0,
        -1.0 if o["maximize"] else 1.0,
    ]
    v = bucket.duals[0]
    if isinstance(o["lr"], Tensor):
        return torch.stack([torch.as_tensor(x, dtype=v.dtype, device=v.device) for x in values])
    return torch.tensor(values, dtype=v.dtype, device=v.device)
