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

from dessilbi.groups import Elements, Partition, Slices, shrinkage
from dessilbi.kernels.bucket import Bucket

Update = Callable[..., Any]

# By default the compiler stores an intermediate result that has many inputs; here that would be a pass over memory.
_ONE_PASS: dict[str, str | int | bool | Callable[..., Any]] = {
    "realize_reads_threshold": 64,
    "realize_opcount_threshold": 256,
}


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
    lr, rate, step, momentum, undamped, decay, kept, of_new, of_old, sign = numbers.unbind()
    w_ = w.to(v.dtype)
    d = (w_ - shrunk) * rate
    g_ = sign * g.to(v.dtype) + d + decay * w_
    risen = v + lr * (d if rise is None else rise * d)
    direction = g_
    if u is not None:
        # Nesterov's G + D + μu' is (1 + μ)u' − μu: were G + D used twice, the compiler would store it.
        moved = momentum * u + undamped * g_
        direction = of_new * moved + of_old * u
        u.copy_(moved)
    w.copy_(kept * w_ - step * direction)
    v.copy_(risen)


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


def _room(w: Tensor, v: Tensor, scale: Tensor, lam: Tensor, beta_min: Tensor) -> Tensor:
    """max(1 − ρ, beta_min) where every element is a group."""
    active = ((v.abs() > lam) & (scale > 0)).sum()
    return torch.maximum(1 - active.to(v.dtype) / (w != 0).sum().clamp_min(1), beta_min)


def _groups(
    w: Tensor,
    g: Tensor,
    u: Tensor | None,
    v: Tensor,
    norms: Tensor,
    lam: Tensor,
    scaled: Tensor | None,
    numbers: Tensor,
) -> None:
    """`norms` are ‖V_g‖; `scaled` are, under magnitude scaling, ε, ‖W_g‖ and max(1 − ρ, beta_min), one row each."""
    shrink, numbers = numbers[0] * shrinkage(norms, lam), numbers[1:]
    if scaled is None:
        _move(w, g, u, v, shrink * v, None, numbers)
    else:
        scale, own, room = scaled.unbind()
        _move(w, g, u, v, scale * shrink * v, room / own.clamp_min(1), numbers)


@functools.cache
def _variant(function: Update, *key: Any) -> Update:
    """The function compiled for one combination of arguments.

    Each has a code object of its own: torch counts recompilations by code object, and gives up after a few.
    """
    name = f"{function.__name__}_{abs(hash(key)):x}"
    code = function.__code__.replace(co_name=name)
    return torch.compile(types.FunctionType(code, globals(), name), dynamic=True, fullgraph=True, options=_ONE_PASS)


def sgd_step(bucket: Bucket) -> None:
    """One step of DessiLBI."""
    options = bucket.options
    numbers = _numbers(bucket)
    momentum = options["momentum"] != 0
    for i, (p, g, v, part) in enumerate(zip(bucket.params, bucket.grads, bucket.duals, bucket.partitions, strict=True)):
        if p.numel() == 0:
            continue
        u = bucket.states[i]["momentum_buffer"] if momentum else None
        scale = bucket.scales[i] if bucket.scales else None
        if isinstance(part, Elements):
            p, g, v, u, scale = _dense([p, g, v, u, scale], rows=None)  # type: ignore[assignment]
            key = (p.ndim, p.dtype, g.dtype, v.dtype, p.device.type, momentum, scale is not None)
            room = lam = torch.as_tensor(bucket.lams[i], dtype=v.dtype)
            if scale is not None:
                beta_min = torch.as_tensor(options["beta_min"], dtype=v.dtype)
                room = _variant(_room, *key)(p, v, scale, lam, beta_min)
            _variant(_elements, *key)(p, g, u, v, scale, lam, room, numbers)
            continue
        # Norms just before the step, so that V is still in cache when it is read again.
        p, g, v, u = (None if t is None else part.split(t) for t in (p, g, v, u))  # type: ignore[assignment]
        norms = part.norms(v)
        lam = torch.as_tensor(part.threshold(bucket.lams[i], bucket.params[i].shape, options["size_normalised"]))
        scaled = None if scale is None else _scaled(p, norms, lam, scale, part, options["beta_min"])
        norms, lam = part.spread(norms), part.spread(lam) if lam.ndim else lam
        if isinstance(part, Slices) and part.axes == (0,):
            p, g, v, u = _dense([p, g, v, u], rows=len(p))  # type: ignore[assignment]
            shape = (-1, *[1] * (p.ndim - 1))
            norms, scaled = norms.view(shape), None if scaled is None else scaled.view(3, *shape)
        key = (p.ndim, p.dtype, g.dtype, v.dtype, p.device.type, momentum, scaled is not None)
        _variant(_groups, *key)(p, g, u, v, norms, lam.to(v.dtype), scaled, numbers)


def _scaled(w: Tensor, norms: Tensor, lam: Tensor, scale: Tensor, part: Partition, beta_min: float) -> Tensor:
    """ε, ‖W_g‖ and max(1 − ρ, beta_min) of a tensor, stacked and spread; ε moves on to ‖W_g‖."""
    own = part.norms(w.to(norms.dtype))
    active = torch.count_nonzero((norms > lam) & (scale > 0))
    room = (1 - active.to(norms.dtype) / torch.count_nonzero(own).clamp_min(1)).clamp_min(beta_min)
    stacked = torch.stack([part.spread(x) for x in (scale, own, room.expand_as(own))])
    scale.copy_(own)
    return stacked


def _dense(tensors: list[Tensor | None], rows: int | None) -> list[Tensor | None]:
    """Views of the tensors' memory as one row, or as so many rows; as they are where their layouts do not allow it."""
    given = [t for t in tensors if t is not None]
    first = given[0]
    size = 1
    for stride, length in sorted(zip(first.stride(), first.shape, strict=True)):
        if length != 1 and stride != size:
            return tensors
        size *= length
    if any(t.stride() != first.stride() for t in given):
        return tensors
    shape = (size,) if rows is None else (rows, size // rows)
    if rows is not None and rows > 1 and first.stride(0) != shape[-1]:
        return tensors
    strides = (1,) if rows is None else (shape[-1], 1)
    return [None if t is None else t.as_strided(shape, strides) for t in tensors]


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
        1.0 + o["momentum"] if o["nesterov"] else 1.0,
        -o["momentum"] if o["nesterov"] else 0.0,
        -1.0 if o["maximize"] else 1.0,
    ]
    v = bucket.duals[0]
    if isinstance(o["lr"], Tensor):
        return torch.stack([torch.as_tensor(x, dtype=v.dtype, device=v.device) for x in values])
    return torch.tensor(values, dtype=v.dtype, device=v.device)
