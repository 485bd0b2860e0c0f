"""Magnitude pruning: the smallest weights go.

Han, Pool, Tran, Dally, "Learning both weights and connections for efficient neural networks", NeurIPS 2015. On a
network trained to the end, with its weights rewound, the mask is the one-shot ticket of Frankle, Carbin, "The lottery
ticket hypothesis: finding sparse, trainable neural networks", ICLR 2019.

With ``conv="filter"`` it is filter pruning by l1 norms: Li, Kadav, Durdanovic, Samet, Graf, "Pruning filters for
efficient ConvNets", ICLR 2017.
"""

from __future__ import annotations

import torch
from torch import nn

from dessilbi.baselines.allocation import allocate, selection
from dessilbi.baselines.tensors import Excluded, partitioned, size
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
) -> Selection:
    """Keep the largest |w|; at the filter level the filters of largest ‖W_g‖₁ (Li et al., ICLR 2017).

    Global magnitudes may empty whole layers at small `keep`; "lamp" is the fair form (see
    :mod:`~dessilbi.baselines.allocation`). Filters of different layers differ in size, hence in norm: use "uniform".
    """
    found = partitioned(model, conv, linear, exclude)
    scores = {name: size(p.detach(), part) for name, (p, part) in found.items()}
    masks = allocate(scores, keep, allocation, {name: p.shape for name, (p, _) in found.items()})
    return selection(masks, method="magnitude", keep=keep, allocation=allocation)
