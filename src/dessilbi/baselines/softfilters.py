"""Soft filter pruning: at the end of every epoch the smallest filters are set to zero, and go on training.

He, Kang, Dong, Fu, Yang, "Soft filter pruning for accelerating deep convolutional neural networks", IJCAI 2018: the
same fraction of every layer, by ‖W_g‖₂. A filter that was a mistake to take comes back; the network has its full
capacity between the cuts, and is at every epoch's end what it would be when pruned. It needs no trained network to
start from and no fine-tuning in the end.

Only filters are set to zero, not the scale and shift of the normalisation that follows, nor biases: with its scale at
zero a channel would have no gradient and could never come back. So a filter that is out leaves a constant behind, until
the last `selection`, applied, takes that away too.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from dessilbi.baselines.allocation import allocate, check_keep
from dessilbi.baselines.companion import Companion
from dessilbi.baselines.tensors import Excluded, check_moved, partitioned, selection, size
from dessilbi.masks import elementwise
from dessilbi.selection import Selection


class SoftFilters(Companion):
    """Call `end_epoch` after every epoch. It has no state: what it does depends on the weights alone.

    Args:
        model, optimizer: what is trained.
        keep: the fraction of filters that stay, the same in every layer, at least one. (The paper removes 0.1 to 0.4.)
        conv, linear, exclude: "filter" or "neuron", or None for what is left alone, as in
            :func:`~dessilbi.baselines.magnitude`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        keep: float,
        *,
        conv: str | None = "filter",
        linear: str | None = None,
        exclude: Excluded = (),
    ) -> None:
        check_keep(keep)
        for argument, kind in (("conv", conv), ("linear", linear)):
            if kind == "weight":
                raise ValueError(f"{argument}='weight': soft filter pruning takes whole filters; choose 'filter', or "
                                 "None to leave these layers alone")  # fmt: skip
        self.keep = keep
        self._found = partitioned(model, conv, linear, exclude)
        check_moved(self._found, optimizer)
        _ = self.selection  # an error is worth more now than at the end of an epoch

    @property
    @torch.no_grad()
    def selection(self) -> Selection:
        """The filters that are large enough now; after `end_epoch`, those that it left."""
        norms = {name: size(p.detach(), part, 2) for name, (p, part) in self._found.items()}
        return selection(allocate(norms, self.keep, "uniform"), "filter", method="soft-filters", keep=self.keep)

    @torch.no_grad()
    def end_epoch(self) -> None:
        for name, mask in self.selection.items():
            p, part = self._found[name]
            p.masked_fill_(~elementwise(mask, part, p.shape), 0)
