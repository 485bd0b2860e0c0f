"""The iteration on lists of tensors, with torch's foreach operations: runs everywhere, compiles nothing.

The coupling is ours; W then moves by torch's own functional SGD or AdamW on G + D. On a CPU the lists are worked off in
pieces that stay in cache, so that temporaries cost neither memory traffic nor fresh pages; on an accelerator the
whole list is one piece, so that it costs few launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from dessilbi.coupling import joint_norms, tally
from dessilbi.groups import Elements, shrinkage
from dessilbi.kernels.bucket import Bucket

# Elements of a piece on a CPU: half a dozen float32 arrays of this size fit a core's share of the last-level cache.
PIECE = 1 << 18


def sgd_step(bucket: Bucket) -> None:
    """One step of DessiLBI."""

    def move(piece: Piece, w: list[Tensor], g: list[Tensor]) -> None:
        buffers = piece.cut(bucket.state("momentum_buffer")) if bucket.options["momentum"] else []
        move_sgd(w, g, buffers, bucket.options, first=bucket.first)

    _step(bucket, move, PIECE if bucket.params[0].device.type == "cpu" else None)


def adamw_step(bucket: Bucket) -> None:
    """One step of DessiAdamW."""

    def move(piece: Piece, w: list[Tensor], g: list[Tensor]) -> None:
        means, squares = piece.cut(bucket.state("exp_avg")), piece.cut(bucket.state("exp_avg_sq"))
        move_adamw(w, g, means, squares, bucket.state("step"), bucket.options)

    _step(bucket, move, None)


def _step(bucket: Bucket, move: Callable[[Piece, list[Tensor], list[Tensor]], None], limit: int | None) -> None:
    sign = -1.0 if bucket.options["maximize"] else 1.0
    factors = _factors(bucket, limit) if bucket.partitions else None
    for piece in _pieces(bucket, limit):
        params, grads = piece.cut(bucket.params), piece.cut(bucket.grads)
        w = full_precision(params)
        if factors is None:
            g = full_precision(grads)
            # A copy also for nesterov: torch's foreach code adds the momentum to the gradients in place.
            if sign < 0 or bucket.options.get("nesterov"):
                g = list(torch._foreach_mul(g, sign))
        else:
            g, rate = _couple(bucket, piece, factors, w), 1 / bucket.options["nu"]
            if sign > 0:
                g = list(torch._foreach_add(full_precision(grads), g, alpha=rate))
            else:
                torch._foreach_mul_(g, rate)
                torch._foreach_sub_(g, full_precision(grads))
        move(piece, w, g)
        if w is not params:
            torch._foreach_copy_(params, w)


def full_precision(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors themselves, or float32 copies where they are of half precision: the state is float32 then."""
    return tensors if tensors[0].dtype.itemsize > 2 else [t.float() for t in tensors]


def move_sgd(
    params: list[Tensor], grads: list[Tensor], buffers: list[Tensor], options: dict[str, Any], *, first: bool
) -> None:
    """torch.optim.SGD with step κα; the buffers start at zero, so that the first gradient comes in undamped.

    By torch's foreach code unless `fused` asks for its fused kernel, which is also the one that reads a learning rate
    on the device.
    """
    decay, lr = options["weight_decay"], _step_size(options)
    if options["decoupled_weight_decay"] and decay:
        torch._foreach_mul_(params, 1 - decay)
        decay = 0.0
    settings = {
        "weight_decay": decay,
        "momentum": options["momentum"],
        "lr": lr,
        "dampening": 0.0 if first else options["dampening"],
        "nesterov": options["nesterov"],
        "maximize": False,
    }
    if _fused(params[0], options) or (isinstance(lr, Tensor) and not torch.compiler.is_compiling()):
        # What torch.optim.SGD(fused=True) comes down to; its way there sorts by device and dtype, which is done.
        torch._fused_sgd_(params, _aligned(grads, params), buffers, is_first_step=False, **settings)
    else:
        sgd(params, grads, list(buffers) or [None] * len(params), foreach=True, **settings)


def _step_size(options: dict[str, Any]) -> Any:
    """κα; as a tensor in float32, which is what torch's fused kernels read."""
    lr = options["lr"]
    return options["kappa"] * (lr.float() if isinstance(lr, Tensor) else lr)


def _aligned(grads: list[Tensor], params: list[Tensor]) -> list[Tensor]:
    """The gradients in the memory layout of their parameters, as torch's fused kernels want them."""
    pairs = zip(grads, params, strict=True)
    return [g if g.ndim < 2 or g.stride() == p.stride() else torch.empty_like(p).copy_(g) for g, p in pairs]


def _fused(p: Tensor, options: dict[str, Any]) -> bool:
    """Whether W moves by torch's fused kernels: as in torch if asked for, and by default on CUDA."""
    if options["fused"] is None:
        return p.is_cuda and not options["foreach"]
    return bool(options["fused"])


def move_adamw(
    params: list[Tensor],
    grads: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    options: dict[str, Any],
) -> None:
    """torch.optim.AdamW with step κα, by torch's fused kernel where the device has one."""
    fused = options["foreach"] is not True and params[0].device.type in ("cpu", "cuda", "mps", "xpu")
    adamw(
        params,
        _aligned(grads, params) if fused else grads,
        means,
        squares,
        [],
        steps,
        foreach=not fused,
        fused=fused,
        amsgrad=False,
        beta1=options["betas"][0],
        beta2=options["betas"][1],
        lr=_step_size(options),
        weight_decay=options["weight_decay"],
        eps=options["eps"],
        maximize=False,
    )


@dataclass(slots=True)
class Piece:
    """A part of a bucket: which parameters, and of each which rows of its split view (None: all)."""

    bucket: Bucket
    which: list[int]
    rows: list[slice | None]

    def cut(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        parts = self.bucket.partitions
        if not parts:
            return list(tensors)
        split = [parts[i].split(tensors[i]) for i in self.which]
        return [t if r is None else t[r] for t, r in zip(split, self.rows, strict=True)]

    def spread(self, values: Sequence[Tensor]) -> list[Tensor]:
        """One value a group of every parameter, broadcastable against this piece of it."""
        full = [self.bucket.partitions[i].spread(values[i]) for i in self.which]
        return [
            t if r is None or t.ndim == 0 or t.shape[0] == 1 else t[r] for t, r in zip(full, self.rows, strict=True)
        ]

    def pick(self, values: Sequence[Any]) -> list[Any]:
        return [values[i] for i in self.which]


def _pieces(bucket: Bucket, limit: int | None) -> Iterator[Piece]:
    """The bucket in pieces of about `limit` elements: long tensors are cut into rows, short ones put together."""
    if limit is None or not bucket.partitions:
        yield Piece(bucket, list(range(len(bucket.params))), [None] * len(bucket.params))
        return
    piece, filled = Piece(bucket, [], []), 0
    for i, p in enumerate(bucket.params):
        size = p.numel()
        if size <= limit:
            if filled and filled + size > limit:
                yield piece
                piece, filled = Piece(bucket, [], []), 0
            piece.which.append(i)
            piece.rows.append(None)
            filled += size
            continue
        rows = bucket.partitions[i].split(p).shape[0]
        step = max(1, rows * limit // size)
        for start in range(0, rows, step):
            yield Piece(bucket, [i], [slice(start, min(start + step, rows))])
    if piece.which:
        yield piece


@dataclass(slots=True)
class Factors:
    """What a whole tensor must be read for, before its pieces move.

    For groups `shrink` is κ·ε·max(0, 1 − λ/‖V_g‖) and, under magnitude scaling, `rise` is β; for single elements there
    is only `room`, max(1 − ρ, beta_min).
    """

    shrink: list[Tensor]
    rise: list[Tensor]
    room: list[Tensor]


def _factors(bucket: Bucket, limit: int | None) -> Factors:
    if not isinstance(bucket.partitions[0], Elements):
        whole = bucket.joint or bucket
        if not whole.factors:
            whole.factors = group_factors(whole)
        pairs = [whole.factors[i] for i in bucket.index]
        return Factors([shrink for shrink, _ in pairs], [rise for _, rise in pairs if rise is not None], [])
    factors = Factors([], [], [])
    if bucket.scales:
        active = [torch.zeros((), dtype=torch.long, device=v.device) for v in bucket.duals]
        for piece in _pieces(bucket, limit):
            shrunk = _shrunk(bucket, piece, piece.cut(bucket.duals))
            for i, x in zip(piece.which, shrunk, strict=True):
                active[i].add_(torch.count_nonzero(x))
        for w, v, n in zip(bucket.params, bucket.duals, active, strict=True):
            factors.room.append(_room(n, torch.count_nonzero(w), bucket.options, v.dtype))
    return factors


def group_factors(bucket: Bucket) -> dict[int, tuple[Tensor, Tensor | None]]:
    """κ·ε·max(0, 1 − λ/‖V_g‖) of every parameter and, under magnitude scaling, β; ε moves on to ‖W_g‖."""
    options, parts = bucket.options, bucket.partitions
    shrink = []
    for i, norms in enumerate(joint_norms(parts, bucket.duals)):
        threshold = parts[i].threshold(bucket.lams[i], bucket.params[i].shape, options["size_normalised"])
        shrink.append(shrinkage(norms, threshold).mul_(options["kappa"]))
    if not bucket.scales:
        return {place: (x, None) for place, x in zip(bucket.index, shrink, strict=True)}
    factors: dict[int, tuple[Tensor, Tensor | None]] = {}
    torch._foreach_mul_(shrink, bucket.scales)
    own = joint_norms(parts, (full_precision([p])[0] for p in bucket.params))
    for i, (active, alive) in enumerate(zip(tally(parts, shrink), tally(parts, own), strict=True)):
        room = _room(active, alive, options, own[i].dtype)
        bucket.scales[i].copy_(own[i])
        factors[bucket.index[i]] = shrink[i], room / own[i].clamp_min(1)
    return factors


def _room(active: Tensor, alive: Tensor, options: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """max(1 − ρ, beta_min), the part of a layer that is not selected yet."""
    return (1 - active.to(dtype) / alive.clamp_min(1)).clamp_min_(options["beta_min"])


def _shrunk(bucket: Bucket, piece: Piece, v: list[Tensor]) -> list[Tensor]:
    """Γ/κ = ε ⊙ Prox_λ(V), where every element is a group."""
    lams, elements = piece.pick(bucket.lams), bucket.partitions[0]
    shrunk = [elements.prox(x, lam) for x, lam in zip(v, lams, strict=True)]
    if bucket.scales:
        torch._foreach_mul_(shrunk, piece.cut(bucket.scales))
    return shrunk


def _couple(bucket: Bucket, piece: Piece, factors: Factors, w: list[Tensor]) -> list[Tensor]:
    """Move V by α·β ⊙ D and return ν·D = W − Γ, fresh."""
    options = bucket.options
    rate = options["lr"] / options["nu"]
    v = piece.cut(bucket.duals)
    if factors.shrink:
        d = list(torch._foreach_addcmul(w, v, piece.spread(factors.shrink), value=-1.0))
        rise = list(torch._foreach_mul(d, piece.spread(factors.rise))) if factors.rise else d
    else:
        d = list(torch._foreach_add(w, _shrunk(bucket, piece, v), alpha=-options["kappa"]))
        rise = d
        if bucket.scales:
            scale = piece.cut(bucket.scales)
            torch._foreach_copy_(scale, w)
            torch._foreach_abs_(scale)
            rise = list(torch._foreach_div(d, torch._foreach_clamp_min(scale, 1.0)))
            torch._foreach_mul_(rise, piece.pick(factors.room))
    if isinstance(rate, Tensor):
        torch._foreach_add_(v, torch._foreach_mul(rise, rate))
    else:
        torch._foreach_add_(v, rise, alpha=rate)
    return d
