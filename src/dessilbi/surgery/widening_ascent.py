"""New filters for which the gradient of what they feed is largest (after GradMax, Evci et al. 2022).

The weights that new filters feed are zero, so that the outputs stay. Their gradient does not depend on these weights,
but on the filters w: for a linear layer behind it is M w, M = Σ δ xᵀ over the batch, δ the loss's gradient at the layer
that reads them and x what they read. Of k filters of one norm, at right angles, those with the largest J = ½ Σ ‖M w‖²
are the first k right singular vectors of M. GradMax itself makes the filters zero and takes the left ones for the
weights they feed, which gives the same gradient; but then a ReLU has no slope, a normalisation nothing to normalise.

Here J is climbed for all layers at once, whatever lies between: W ← √2 · polar(∂J/∂W), which for the linear layer is
orthogonal iteration, and never goes down where J is convex. The best of the filters seen stay. No second derivative is
needed: with the weights that are fed at ε times their gradient, ∂L/∂W = ε ∂J/∂W, since at zero it is nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

_STEPS = 10
_LARGEST = 1e-3  # of the weights that are fed, while ∂J/∂W is looked for


def steepest(
    model: nn.Module,
    filters: Sequence[tuple[nn.Parameter, int, Tensor]],
    fed: Sequence[tuple[nn.Parameter, Tensor]],
    loss: Callable[[nn.Module], Tensor],
) -> None:
    """Turn filters, in place, to where the gradient of the weights they feed is largest; buffers stay as they are.

    Args:
        model: the wider network.
        filters: weights, the axis their filters lie along, and which of these are new.
        fed: weights, and masks that are true at what reads these filters, which is zero.
        loss: of a network.
    """
    buffers = [(b, b.clone()) for b in model.buffers()]
    asked = [(p, p.requires_grad) for p in model.parameters()]
    best, highest = [p.detach().clone() for p, _, _ in filters], -math.inf
    try:
        for p in [p for p, _, _ in filters] + [p for p, _ in fed]:
            p.requires_grad_(True)
        for _ in range(_STEPS if filters and fed else 0):
            height, slopes = _look(model, filters, fed, loss)
            if not highest < height < math.inf:
                break
            best, highest = [p.detach().clone() for p, _, _ in filters], height
            for (p, axis, new), slope in zip(filters, slopes, strict=True):
                _turn(p, axis, new.to(p.device), slope)
    finally:
        with torch.no_grad():
            for (p, _, _), values in zip(filters, best, strict=True):
                p.copy_(values)
            for b, value in buffers:
                b.copy_(value)
        for p, needed in asked:
            p.requires_grad_(needed)


def _look(
    model: nn.Module,
    filters: Sequence[tuple[nn.Parameter, int, Tensor]],
    fed: Sequence[tuple[nn.Parameter, Tensor]],
    loss: Callable[[nn.Module], Tensor],
) -> tuple[float, list[Tensor]]:
    """Twice J, and ∂J/∂W up to a factor."""
    slopes = _gradients(model, [p for p, _ in fed], loss)
    for g, (_, mask) in zip(slopes, fed, strict=True):
        g.mul_(mask.to(g.device))
    height = float(torch.stack([g.double().square().sum().cpu() for g in slopes]).sum())
    largest = max(float(g.abs().max()) for g in slopes)
    with torch.no_grad():
        for (p, _), g in zip(fed, slopes, strict=True):
            p.add_(g, alpha=_LARGEST / (largest or 1.0))
        found = _gradients(model, [p for p, _, _ in filters], loss)
        for p, mask in fed:
            p.masked_fill_(mask.to(p.device), 0.0)
    return height, found


def _gradients(model: nn.Module, tensors: list[nn.Parameter], loss: Callable[[nn.Module], Tensor]) -> list[Tensor]:
    with torch.enable_grad():
        return list(torch.autograd.grad(loss(model), tensors, materialize_grads=True))


@torch.no_grad()
def _turn(p: nn.Parameter, axis: int, new: Tensor, slope: Tensor) -> None:
    """Filters of norm √2 at right angles, as near to the slope's as there are; where there is no slope they stay."""
    matrix = slope.index_select(axis, new).movedim(axis, 0).flatten(1).float()
    if not bool(matrix.isfinite().all() and matrix.any()):
        return
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    turned = u @ v
    turned *= math.sqrt(2) / turned.norm(dim=1, keepdim=True).clamp_min(1e-12)
    like = p.index_select(axis, new).movedim(axis, 0)
    p.index_copy_(axis, new, turned.view(like.shape).movedim(0, axis).to(p.dtype))
