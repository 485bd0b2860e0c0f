r"""Network slimming: channels are worth what the normalisation after them multiplies them with.

During training loss + λ Σ|γ| over the scales γ of all normalisations that follow a convolution (or a linear layer);
afterwards the channels of smallest |γ|, of all layers together, go. Scales compare across layers, because what they
multiply has variance 1 everywhere, and cost nothing to read.

Liu, Li, Shen, Huang, Yan, Zhang, "Learning efficient convolutional networks through network slimming", ICCV 2017. They
add the subgradient λ·sign(γ); here it is a proximal step (:mod:`~dessilbi.baselines.penalty`), so that scales end at
zero exactly. Their λ is 1e-4 or 1e-5.

Without `Slimming` in training the scales say little. In residual networks a channel of the stream goes only when all
that write it are out: the last convolutions of blocks are better left out (`exclude`), or :func:`dessilbi.complete` is
asked what else must go.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dessilbi.baselines.allocation import allocate, check_keep
from dessilbi.baselines.penalty import Penalty
from dessilbi.baselines.tensors import Excluded, selection
from dessilbi.groups import Elements
from dessilbi.masks import following_norms
from dessilbi.roles import excluded
from dessilbi.selection import Selection
from dessilbi.wrappers import clean, unwrap


class Slimming(Penalty):
    """λ Σ|γ| on the scales of normalisations.

    Args:
        model, optimizer: what is trained.
        lam: λ.
        exclude: as in :func:`dessilbi.param_groups`; a layer is left out with its normalisation.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, lam: float = 1e-4, *, exclude: Excluded = ()) -> None:
        scales = _scales(model, exclude)
        super().__init__(optimizer, lam, {name: (scale, Elements()) for name, scale in scales.items()})


@torch.no_grad()
def slim(model: nn.Module, keep: float, *, exclude: Excluded = ()) -> Selection:
    """Keep the filters of largest |γ| over all layers together, but the largest one of every layer in any case."""
    check_keep(keep)
    scores = {name: scale.detach().abs() for name, scale in _scales(model, exclude).items()}
    total = sum(x.numel() for x in scores.values())
    if int(keep * total + 1e-6) < len(scores):
        raise ValueError(
            f"keep={keep!r} of {total} filters is fewer than one for each of {len(scores)} layers: raise keep, at "
            f"least to {len(scores) / total:.4g}"
        )
    first = {name: x.index_fill(0, x.argmax(), math.inf) for name, x in scores.items()}
    return selection(allocate(first, keep), "filter", method="slimming", keep=keep)


def _scales(model: nn.Module, exclude: Excluded) -> dict[str, Tensor]:
    """The scales of the normalisations that follow a layer, by the name of that layer's weight."""
    inner = unwrap(model)
    norms, left_out = following_norms(inner), excluded(inner, exclude)
    found: dict[str, Tensor] = {}
    for name, module in inner.named_modules():
        norm = norms.get(id(module))
        if norm is None or {id(module.weight), id(norm.weight)} & left_out:
            continue
        assert isinstance(norm.weight, Tensor)
        found[clean(f"{name}.weight")] = norm.weight
    if not found:
        raise ValueError(
            "no layer of the model is followed by a normalisation with a scale that is not excluded: there are no "
            "scales to go by; take magnitude(model, keep, conv='filter')"
        )
    return found
