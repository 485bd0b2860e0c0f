"""The equations, as pure functions on tensors: the reference that every fast kernel is checked against.

For a tensor W in a penalised group, G the gradient of the loss at W and Γ = κ·Prox_λ(V):

    D  = (W − Γ)/ν                          the coupling: the gradient of ‖W − Γ‖²/(2ν)
    V' = V + α·D                            the dual variable integrates it: inverse scale space
    W' = a step of SGD (or AdamW) of size κα on G + D

Nothing here is written in place and nothing is fast. `couple` gives D and V', for tensors that have groups in common
`couple_jointly` does; `sgd` and `adamw` move W.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from dessilbi.coupling import joint_norms, tally
from dessilbi.groups import Number, Partition


def gamma(
    v: Tensor,
    partition: Partition,
    *,
    kappa: float,
    lam: Number,
    scale: Tensor | None = None,
    size_normalised: bool = False,
    norms: Tensor | None = None,
) -> Tensor:
    """Γ = κ·ε ⊙ Prox_λ(V), shaped like V. `scale` is ε, one number a group, under magnitude scaling.

    `norms` are ‖V_g‖, where they are known already or groups span tensors (see `joint_norms`).
    """
    split = partition.split(v)
    norms = partition.norms(split) if norms is None else norms
    shrunk = kappa * partition.prox(split, partition.threshold(lam, v.shape, size_normalised), norms)
    return (shrunk if scale is None else partition.spread(scale) * shrunk).reshape(v.shape)


class Coupled(NamedTuple):
    """What the coupling gives in one step: D, V' and, under magnitude scaling, ε'."""

    d: Tensor
    v: Tensor
    scale: Tensor | None


def couple(
    w: Tensor,
    v: Tensor,
    partition: Partition,
    *,
    lr: Number,
    kappa: float,
    nu: float,
    lam: Number,
    scale: Tensor | None = None,
    beta_min: float = 1e-2,
    size_normalised: bool = False,
) -> Coupled:
    """D = (W − Γ)/ν and V' = V + α·β ⊙ D, from W and Γ before the step.

    With `scale` (ε of the last step) magnitude scaling is on:
    β_j = max(1 − ρ, beta_min)/max(1, n_j), n_j = ‖W_j‖, ρ = #supp(Γ)/#supp(W) in groups of this tensor, and the new
    ε_j = n_j goes with V'.
    """
    return couple_jointly(
        [w], [v], [partition],
        lr=lr, kappa=kappa, nu=nu, lam=lam, scales=None if scale is None else [scale],
        beta_min=beta_min, size_normalised=size_normalised,
    )[0]  # fmt: skip


def couple_jointly(
    w: Sequence[Tensor],
    v: Sequence[Tensor],
    partitions: Sequence[Partition],
    *,
    lr: Number,
    kappa: float,
    nu: float,
    lam: Number,
    scales: Sequence[Tensor] | None = None,
    beta_min: float = 1e-2,
    size_normalised: bool = False,
) -> list[Coupled]:
    """`couple` for several tensors, whose groups may span them: norms and ρ are then those of all their tensors."""
    epsilons = [None] * len(v) if scales is None else scales
    before = [
        gamma(x, part, kappa=kappa, lam=lam, scale=scale, size_normalised=size_normalised, norms=norms)
        for x, part, scale, norms in zip(v, partitions, epsilons, joint_norms(partitions, v), strict=True)
    ]
    d = [(x - y) / nu for x, y in zip(w, before, strict=True)]
    if scales is None:
        return [Coupled(x, y + lr * x, None) for x, y in zip(d, v, strict=True)]
    norms = joint_norms(partitions, w)
    active, alive = tally(partitions, joint_norms(partitions, before)), tally(partitions, norms)
    result = []
    for i, part in enumerate(partitions):
        room = (1 - active[i].to(v[i].dtype) / alive[i].clamp_min(1)).clamp_min(beta_min)
        beta = part.spread(room / norms[i].clamp_min(1))
        rise = (beta * part.split(d[i])).reshape(d[i].shape)
        result.append(Coupled(d[i], v[i] + lr * rise, norms[i]))
    return result


def sgd(
    w: Tensor,
    g: Tensor,
    u: Tensor | None,
    *,
    step: Number,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """W' and the momentum buffer u' of `torch.optim.SGD`; decoupled decay is the paper's W' = … − wd·W."""
    if weight_decay and not decoupled_weight_decay:
        g = g + weight_decay * w
    if momentum:
        u = g if u is None else momentum * u + (1 - dampening) * g
        g = g + momentum * u if nesterov else u
    kept = w * (1 - weight_decay) if weight_decay and decoupled_weight_decay else w
    return kept - step * g, u


class Moments(NamedTuple):
    """The running means of AdamW, and how many steps they have seen."""

    mean: Tensor
    square: Tensor
    steps: int


def adamw(
    w: Tensor,
    g: Tensor,
    moments: Moments,
    *,
    step: Number,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> tuple[Tensor, Moments]:
    """W' and the moments of `torch.optim.AdamW` (decay decoupled, scaled by the step)."""
    t = moments.steps + 1
    mean = betas[0] * moments.mean + (1 - betas[0]) * g
    square = betas[1] * moments.square + (1 - betas[1]) * g.square()
    denominator = (square / (1 - betas[1] ** t)).sqrt() + eps
    kept = w * (1 - step * weight_decay)
    return kept - step * (mean / (1 - betas[0] ** t)) / denominator, Moments(mean, square, t)


def support(
    v: Tensor,
    partition: Partition,
    *,
    lam: Number,
    scale: Tensor | None = None,
    size_normalised: bool = False,
    norms: Tensor | None = None,
) -> Tensor:
    """Which groups of Γ are not zero: bool, one entry a group (elementwise where groups are elements)."""
    norms = partition.norms(partition.split(v)) if norms is None else norms
    active = norms > partition.threshold(lam, v.shape, size_normalised)
    if scale is not None:
        active = active & (scale > 0)
    return partition.flat(active, v.shape)
