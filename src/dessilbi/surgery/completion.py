"""The normalisations that follow what a selection leaves out, wherever they stand."""

from __future__ import annotations

import torch
from torch import nn

from dessilbi.selection import Selection
from dessilbi.surgery.flow import Flow
from dessilbi.surgery.graph import Inputs
from dessilbi.surgery.shrinking import check_network, masked_copy, values_of


def complete(model: nn.Module, sel: Selection, example_inputs: Inputs) -> Selection:
    """The selection, and with it the scale and shift of every normalisation of a channel that is absent.

    `Selection.masks` finds a normalisation that stands beside its convolution. In a DenseNet, where it stands behind a
    concatenation, or before the next block's activation, the network has to be followed: a channel that is zero under
    the selection is zero behind a normalisation as well. At level "weight" nothing is added: there M ⊙ W is all.

    Args:
        model: any network that torch.export can follow.
        sel: of filters, neurons or layers.
        example_inputs: a tensor, a tuple of positional or a dict of keyword arguments for the network.
    """
    if sel.level == "weight":
        return sel
    model = check_network(model)
    masks = sel.masks(model)
    # Without the plain layers that level "layer" leaves out: what comes behind them is not zero then.
    work, graph = masked_copy(model, sel, example_inputs)
    silent = Flow(graph, values_of(work), silencing=True).silent
    found = {name: masks[name].cpu() if name in masks else torch.ones_like(mask) for name, mask in silent.items()}
    new = {name: mask for name, mask in silent.items() if bool((found[name] & ~mask).any())}
    return Selection(dict(sel), sel.level, sel.source, {**sel.along, **new})
