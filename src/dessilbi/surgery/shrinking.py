"""``shrink``: the network that a selection leaves, physically smaller."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from dessilbi.selection import Selection
from dessilbi.surgery import state
from dessilbi.surgery.blocks import Block
from dessilbi.surgery.graph import Graph, Inputs, call_arguments, traced
from dessilbi.surgery.plan import Cut, Plan
from dessilbi.surgery.resize import harden, mismatched, resize
from dessilbi.surgery.transition import leave_out
from dessilbi.wrappers import unwrap


@dataclass
class Shrunk:
    """A network cut down, and how.

    Attributes:
        model: the narrower network.
        masks: what is left of the selection in it: masks of parameters that kept zeros.
        cuts: what stayed of each parameter that lost something.
        gone: parameters that are no more.
    """

    model: nn.Module
    masks: dict[str, Tensor]
    cuts: dict[str, Cut]
    gone: set[str]


def shrink(model: nn.Module, sel: Selection, example_inputs: Inputs, optimizer: Optimizer | None = None) -> nn.Module:
    """A narrower copy of the network that computes what the masked network computes.

    Filters, neurons and whole residual branches that are provably zero under the selection go, or that nothing depends
    on, with their normalisation and the input channels of whatever reads them. In evaluation mode the outputs are those
    of ``with sel.applied(model)``. What is zero but needed stays as zeros: a channel of a residual stream that another
    layer writes, a channel that a sigmoid would make 0.5 of, one channel of a layer that would be empty.

    At level "layer" an empty layer that all data pass through (in a VGG) is left out, and pooling and channels of zeros
    make the sizes fit where they differ: there the masked network would be dead, and the result is not its equal.

    Args:
        model: any network that torch.export can follow. It is not changed.
        sel: the selection.
        example_inputs: a tensor, a tuple of positional or a dict of keyword arguments for the network.
        optimizer: of the network; it is moved over to the new parameters, momentum, V and all other state cut alike.
            Filters lose the part of V that belongs to removed inputs: a step of DessiLBI with groups of several weights
            is then not the one that the masked network would have made, since norms count what is there.

    Where the selection is in force (`sel.apply(model)`), what is left of it is in force on the new network as well.
    """
    model = check_network(model)
    shrunk = cut_down(model, sel, example_inputs)
    if optimizer is not None:
        state.move(optimizer, model, shrunk.model, shrunk.cuts)
    state.carry_masks(model, shrunk.model, shrunk.cuts, shrunk.gone)
    return shrunk.model


def cut_down(model: nn.Module, sel: Selection, example_inputs: Inputs) -> Shrunk:
    """As `shrink`, with what is left of the selection."""
    if not isinstance(sel, Selection):
        raise TypeError(f"sel must be a Selection, got {type(sel).__name__}: write Selection({{name: mask}})")
    model = check_network(model)
    training = {name: m.training for name, m in model.named_modules()}
    work, graph = masked_copy(model, sel, example_inputs)
    small, plan = fit(work, graph, example_inputs)
    plan.warn(sel)
    if not same_outputs(work, small, example_inputs):
        raise RuntimeError(
            "the narrower network does not compute what the masked one does; nothing was changed. Its forward may "
            "use sizes in a way that the exported graph does not show: please report it"
        )
    for name, module in small.named_modules():
        module.training = training.get(name, model.training)
    cuts = plan.cuts()
    there = {name for name, _ in small.named_parameters(remove_duplicate=False)}
    masks = {
        name: cuts[name](mask) if name in cuts else mask
        for name, mask in sel.masks(model).items()
        if name in there
    }  # fmt: skip
    gone = {name for name, _ in model.named_parameters(remove_duplicate=False)} - there
    return Shrunk(small, {name: mask for name, mask in masks.items() if not mask.all()}, cuts, gone)


def check_network(model: object) -> nn.Module:
    """The network itself, where it is compiled or distributed; a TypeError if it is none."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    return unwrap(model)


def masked_copy(model: nn.Module, sel: Selection, example_inputs: Inputs) -> tuple[nn.Module, Graph]:
    """A copy in evaluation mode, zero where the selection says, without the plain layers that it leaves out."""
    masks = sel.masks(model)
    work = copy.deepcopy(model).eval()
    for p in work.parameters():
        p.grad = None
    named = dict(work.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, mask in masks.items():
            named[name].masked_fill_(~mask, 0)
    graph = Graph.of(work, example_inputs)
    empty = [name for name, mask in sel.items() if not mask.any()] if sel.level == "layer" else []
    if empty and leave_out(work, graph, empty, example_inputs):
        graph = Graph.of(work, example_inputs)
    return work, graph


def fit(work: nn.Module, graph: Graph, example_inputs: Inputs) -> tuple[nn.Module, Plan]:
    """The narrower network, tried out: what its code cannot do with, stays."""
    stand: set[str] = set()
    while True:
        plan = Plan(graph, values_of(work))
        untried = [block for block in plan.blocks if block.path not in stand]
        if untried and (stuck := _stuck(work, untried, example_inputs)):
            graph.needed.update(stuck)
            continue
        stand.update(block.path for block in untried)
        cuts, suspects = plan.cuts(), plan.suspects()
        bad = []
        for adapt in (True, False) if suspects else (True,):
            small = copy.deepcopy(work)
            resize(small, plan, cuts, adapt=adapt)
            bad = mismatched(plan, _operators(small, example_inputs)) if suspects else []
            if not bad:
                return small, plan
        harden(plan, bad)


def _stuck(work: nn.Module, blocks: list[Block], example_inputs: Inputs) -> list[str]:
    """The blocks that nothing can stand in for: called with more than one argument, say, or asked for attributes."""

    def stands(some: list[Block]) -> bool:
        without = copy.deepcopy(work)
        for block in some:
            without.set_submodule(block.path, block.replacement(without))
        return same_outputs(work, without, example_inputs)

    if stands(blocks):
        return []
    alone = [block.path for block in blocks if not stands([block])]
    return alone or [block.path for block in blocks]


def _operators(model: nn.Module, example_inputs: Inputs) -> list[fx.Node] | None:
    """What a network does; None if it cannot be followed, for sizes that do not fit one another."""
    try:
        return traced(model, example_inputs)[0]
    except ValueError:
        return None


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


@torch.no_grad()
def same_outputs(before: nn.Module, after: nn.Module, example_inputs: Inputs) -> bool:
    """Whether two networks compute the same, but for rounding: the promise, kept on the example inputs."""
    args, kwargs = call_arguments(example_inputs)
    expected = _tensors(before(*args, **kwargs))
    try:
        found = _tensors(after(*args, **kwargs))
    except Exception:  # sizes that do not fit one another, or whatever else the network's code runs into
        return False
    if len(expected) != len(found):
        return False
    for x, y in zip(expected, found, strict=True):
        if not x.is_floating_point() or not bool(x.isfinite().all()):
            continue
        scale = x.abs().max().clamp_min(1)
        if x.shape != y.shape or (x - y).abs().max() > 1e3 * torch.finfo(x.dtype).eps * scale:
            return False
    return True


def _tensors(value: Any) -> list[Tensor]:
    leaves, _ = torch.utils._pytree.tree_flatten(value)
    if any(not isinstance(x, (Tensor, int, float, str, type(None))) for x in leaves):
        leaves = [y for x in leaves for y in (list(x.values()) if isinstance(x, Mapping) else [x])]
    return [x for x in leaves if isinstance(x, Tensor)]
