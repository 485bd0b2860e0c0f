"""The wider network itself: made, understood and filled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dessilbi.surgery.graph import Graph, Inputs
from dessilbi.surgery.resize import mismatched, resize
from dessilbi.surgery.shrinking import values_of
from dessilbi.surgery.widening_ascent import steepest
from dessilbi.surgery.widening_plan import Grown, Layer, Stretch, layers_of, place
from dessilbi.surgery.widening_single import double
from dessilbi.surgery.widening_values import (
    Insertion,
    Sized,
    constants,
    he,
    is_channels_last,
    new_filters,
    split,
    untouched,
)

# What "random" gives outgoing weights, and "split" takes from one for the other, as a part of He's standard deviation.
_SMALL = 0.1


class Start(NamedTuple):
    """A network as it is, its graph and layers."""

    model: nn.Module
    example_inputs: Inputs
    graph: Graph
    layers: Mapping[str, Layer]


class Grew(NamedTuple):
    """A wider network, the plan of what is new in it, and how the old entries got there."""

    model: nn.Module
    plan: Grown
    layers: dict[str, Layer]
    insertions: dict[str, Insertion]


def stretched(start: Start, stretch: Stretch) -> Grew | None:
    """The network that a plan describes, its new entries zero; None where its code does not follow."""
    sizes = {name: Sized(size, is_channels_last(start.model)) for name, size in stretch.sizes().items()}
    for adapt in (True, False) if stretch.suspects() else (True,):
        wide = _copy(start.model)
        resize(wide, stretch, sizes, adapt=adapt)  # type: ignore[arg-type]
        try:
            graph = Graph.of(wide, start.example_inputs)
        except ValueError:
            continue
        layers = {layer.path: layer for layer in layers_of(graph)}
        if layers.keys() != start.layers.keys():
            continue
        for interleaved in (False, True):
            plan = _placed(start, stretch, graph, layers, interleaved)
            grew = _understood(start, wide, plan, layers) if plan is not None else None
            if grew is not None:
                return grew
    return None


def doubled(start: Start, paths: Sequence[str]) -> Grew:
    """The network with a second filter in layers that have one; its new entries are zero."""
    wide = _copy(start.model)
    training = {name: module.training for name, module in wide.named_modules()}
    try:
        double(wide, paths, start.example_inputs)
        graph = Graph.of(wide, start.example_inputs)
        layers = {layer.path: layer for layer in layers_of(graph)}
        alike = layers.keys() == start.layers.keys()
    except (RuntimeError, ValueError):
        alike = False
    if alike:
        origin = torch.zeros(len(graph.classes), dtype=torch.long)
        for path in paths:
            first, second = graph.classes[layers[path].atoms].tolist()
            origin[second] = first
        grew = _understood(start, wide, Grown(graph, origin), layers)
        if grew is not None:
            for name, module in wide.named_modules():
                module.training = training[name]
            return grew
    raise ValueError(
        "it has a single channel, which is an output of the network or a stream's, or whose size is written into the "
        "network's code; begin with two"
    )


def _copy(model: nn.Module) -> nn.Module:
    wide = copy.deepcopy(model)
    for p in wide.parameters():
        p.grad = None
    return wide


def _placed(
    start: Start, stretch: Stretch, graph: Graph, layers: Mapping[str, Layer], interleaved: bool
) -> Grown | None:
    """What is new in the wider network's graph, if it fits."""
    origin = torch.zeros(len(graph.classes), dtype=torch.long)
    for path, layer in start.layers.items():
        if int(stretch.more(layer.atoms).sum()):
            of = place(layer, layers[path], stretch, interleaved)
            if not len(of):
                return None
            classes = graph.classes[layers[path].atoms]
            origin[classes[of >= 0]] = classes[of[of >= 0]]
    return Grown(graph, origin)


def _understood(start: Start, wide: nn.Module, plan: Grown, layers: dict[str, Layer]) -> Grew | None:
    """The wider network with what is new in it, if without that it is the network as it is."""
    if not plan.leaves(start.graph) or mismatched(plan, start.graph.nodes):
        return None
    there, constant = values_of(wide), constants(plan.graph)
    insertions = {name: Insertion(cut, there[name], constant.get(name, 0.0)) for name, cut in plan.cuts().items()}
    return Grew(wide, plan, layers, insertions)


@torch.no_grad()
def fill(grew: Grew, model: nn.Module, init: str, generator: torch.Generator) -> None:
    """Give the wider network its values: those of the network that it came from, and new ones."""
    old, wide = values_of(model), values_of(grew.model)
    weights = {layer.weight: layer for layer in grew.layers.values()}
    for name, insertion in grew.insertions.items():
        t = wide[name].detach()
        layer = weights.get(name)
        if layer is None:
            t.fill_(insertion.fill)
        elif init != "split":
            he(grew.plan, layer, t, generator, _SMALL if init == "random" else 0.0)
        insertion.into(t, old[name].detach())
        if init == "split":
            split(grew.plan, name, layer, t, generator, _SMALL)


def ascend(grew: Grew, loss: Callable[[nn.Module], Tensor]) -> None:
    """Turn the new filters to where what they feed has the largest gradient."""
    named, plan = dict(grew.model.named_parameters()), grew.plan
    filters, fed = [], []
    for layer in grew.layers.values():
        insertion, p = grew.insertions.get(layer.weight), named.get(layer.weight)
        if insertion is None or p is None:
            continue
        new = plan.lost(layer.atoms).nonzero().flatten()
        grouped = plan.graph.grouped.get(layer.weight)
        if len(new) and not (grouped and grouped.transposed):  # where filters lie along no axis they stay as drawn
            filters.append((p, layer.rows, new))
        mask = untouched(new_filters(plan, layer), insertion)
        if mask.any():
            fed.append((p, mask))
    steepest(grew.model, filters, fed, loss)
