"""Magnitude pruning: the smallest weights go.

Han, Pool, Tran, Dally, "Learning both weights and connections for efficient neural networks", NeurIPS 2015. On a
network trained to the end, with its weights rewound, the mask is the one-shot ticket of Frankle, Carbin, "The lottery
ticket hypothesis: finding sparse, trainable neural networks", ICLR 2019.

With ``conv="filter"`` it is filter pruning by l1 norms: Li, Kadav, Durdanovic, Samet, Graf, "Pruning filters for
efficient ConvNets", ICLR 2017.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from dessilbi.baselines.allocation import allocate
from dessilbi.baselines.tensors import Excluded, partitioned, selection, size
from dessilbi.selection import Selection


@torch.no_grad()
def magnitude(
    model: nn.Module,
    keep: float,
    allocation: str = "global",
    *,
    conv: str | None = "weight",
    linear: str | None = "weight",
    exclude: Excluded = (),
    within: Selection | None = None,
) -> Selection:
    """Keep the largest |w|; at the filter level the filters of largest ‖W_g‖₁ (Li et al., ICLR 2017).

    Global magnitudes may empty whole layers at small `keep`; "lamp" is the fair form (see
    :mod:`~dessilbi.baselines.allocation`). Filters of different layers differ in size, hence in norm: use "uniform".
    `within` another selection only what that keeps is kept, and `keep` is still a fraction of everything.
    """
    found = partitioned(model, conv, linear, exclude)
    scores = {name: size(p.detach(), part) for name, (p, part) in found.items()}
    if within is not None:
        if within.keys() != scores.keys():
            raise ValueError(
                f"within selects from {sorted(within)}, this from {sorted(scores)}: give the same conv, linear and "
                "exclude"
            )
        scores = {name: x.masked_fill(~within[name].to(x.device), -math.inf) for name, x in scores.items()}
    masks = allocate(scores, keep, allocation, {name: p.shape for name, (p, _) in found.items()})
    return selection(masks, method="magnitude", keep=keep, allocation=allocation)
