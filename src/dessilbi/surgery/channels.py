"""The groups of kind "channel": filters, of whatever layers, that write the same channels."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dessilbi.coupling import channels
from dessilbi.groups import Partition, Slices
from dessilbi.surgery.graph import FIXED, Graph, Inputs


def channel_partitions(
    model: nn.Module, example_inputs: Inputs, filters: Mapping[str, Partition]
) -> dict[str, Partition]:
    """For convolution weights, cut into `filters`, the partitions that join filters which write the same channels.

    Two filters belong together if surgery could only remove their channels together: those of all layers that write a
    residual stream, those of a depthwise convolution and of the layer before it. A shortcut that pads (option A) starts
    a stream of its own. Layers that share no channel with another keep their filters.
    """
    return joined(Graph.of(model, example_inputs), filters)


def joined(graph: Graph, filters: Mapping[str, Partition]) -> dict[str, Partition]:
    """As `channel_partitions`, of a graph that is known."""
    classes = {name: _classes(graph, name, part) for name, part in filters.items()}
    found = dict(filters)
    for names in _families(classes):
        together = torch.cat([classes[name] for name in names])
        alone = together < 0
        together[alone] = -1 - torch.arange(len(together))[alone]
        if len(together.unique()) < len(together):
            numbers = together.unique(return_inverse=True)[1].split([len(classes[name]) for name in names])
            members = [(graph.shapes[name], filters[name], i) for name, i in zip(names, numbers, strict=True)]
            found.update(zip(names, channels(members), strict=True))
    return found


def _classes(graph: Graph, name: str, part: Partition) -> Tensor:
    """The class of every filter's channel; one that surgery cannot remove is negative, and alone."""
    count = part.count(graph.shapes[name])
    if name in graph.grouped:
        atoms = graph.grouped[name].outer
    else:
        axis = part.axes[0] if isinstance(part, Slices) else 0
        atoms = graph.axes.get((name, axis), torch.full((count,), FIXED))
    classes = graph.classes[atoms].clone()
    classes[classes == FIXED] = -1
    return classes


def _families(classes: Mapping[str, Tensor]) -> list[list[str]]:
    """Tensors that share a class, directly or through others."""
    families: list[tuple[set[int], list[str]]] = []
    for name, numbers in classes.items():
        mine = {c for c in numbers.tolist() if c > 0}
        joined = [f for f in families if f[0] & mine]
        families = [f for f in families if f not in joined]
        families.append((mine.union(*(f[0] for f in joined)), [n for f in joined for n in f[1]] + [name]))
    return [names for _, names in families]
