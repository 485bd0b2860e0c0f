"""What becomes wider along with a layer, and where: `shrink`'s own plan, read the other way round.

A new channel is a further copy of a class of the graph, its *template*: wherever positions of the class lie, as many
come in. That gives the sizes of the wider network (:class:`Stretch`) before it is made. Once it is made, its own graph
says which positions belong to the new channels (:class:`Grown`): those that `shrink` would take out to get the old
network back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx

from dessilbi.surgery.graph import FIXED, Graph
from dessilbi.surgery.nodes import shape_of, varying
from dessilbi.surgery.plan import Plan
from dessilbi.surgery.rules.affine import Affine, Embedding
from dessilbi.surgery.rules.spatial import Reduction


class Layer(NamedTuple):
    """What writes channels: its path, its weight, the weight's axes of outputs and inputs, the outputs' atoms."""

    path: str
    weight: str
    rows: int
    columns: int
    atoms: Tensor
    node: fx.Node


def layers_of(graph: Graph) -> Iterator[Layer]:
    """The layers in the order of execution, each once."""
    known = set()
    for node in graph.nodes:
        rule, name = graph.rules[node], None
        if isinstance(rule, Affine) and node not in graph.pinned:
            name = rule.parts(graph, node)[1]
            rows, columns = (1, 0) if rule.transposed(node) else (0, 1)
        elif isinstance(rule, Embedding):
            name = graph.names.get(graph.calls[node]["weight"])
            rows, columns = 1, 0
        if name is None or name in known:
            continue
        known.add(name)
        atoms = graph.grouped[name].outer if name in graph.grouped else graph.axes.get((name, rows))
        if atoms is not None:
            yield Layer(name.removesuffix(".weight"), name, rows, columns, atoms, node)


def sums(graph: Graph) -> Iterator[tuple[fx.Node, Tensor]]:
    """Sums over channels, which can do with fewer (of zeros) but not with more, and the classes they count."""
    for node in graph.nodes:
        if isinstance(graph.rules[node], Reduction) and not torch.as_tensor(graph.atoms[node]).any():
            classes = torch.cat([graph.classes[graph.look(x)].flatten() for x in graph.inputs(node)]).unique()
            if bool((classes != FIXED).any()):
                yield node, classes[classes != FIXED]


class Stretch(Plan):
    """The sizes of a network in which some classes are there several times.

    Args:
        graph: of the network as it is.
        copies: for every class, how many copies of it come in.
    """

    def __init__(self, graph: Graph, copies: Tensor) -> None:
        self.graph, self.copies = graph, copies
        self.nodes, self.absent, self.blocks, self.rank = graph.nodes, set(), [], {}
        self.gone = copies > 0  # of these classes the operators see another number

    def more(self, atoms: Tensor) -> Tensor:
        """How many positions come in beside each of these."""
        return self.copies[self.graph.classes[atoms]]

    def shape(self, node: fx.Node, index: int = 0) -> torch.Size:
        value = node.meta.get("val")
        if isinstance(value, (list, tuple)):
            return self._stretched(value[index].shape, self.graph.look(node)[index])
        return self._stretched(shape_of(node), self.graph.look(node))

    def _stretched(self, shape: Sequence[int], atoms: Tensor) -> torch.Size:
        sizes, more, axes = list(shape), self.more(atoms), varying(atoms)
        for d in axes:
            others = [e for e in axes if e != d]
            sizes[d] += int((more.amin(others) if others else more).sum())
        return torch.Size(sizes)

    def groups(self, name: str) -> int:
        g = self.graph.grouped[name]
        return g.groups + (
            int(self.more(g.outer).sum()) * g.groups // len(g.outer) if depthwise(self.graph, name) else 0
        )

    def amounts(self, node: fx.Node) -> tuple[int, int]:
        pad = self.graph.pads[node]
        first = int((pad.source >= 0).nonzero()[0])
        before = first + int(self.more(pad.outer[:first]).sum())
        outer = len(pad.outer) + int(self.more(pad.outer).sum())
        return before, outer - before - len(pad.inner) - int(self.more(pad.inner).sum())

    def sizes(self) -> dict[str, torch.Size]:
        """The new shape of every parameter and buffer that gets one."""
        found: dict[str, list[int]] = {}
        for (name, axis), atoms in self.graph.axes.items():
            found.setdefault(name, list(self.graph.shapes[name]))[axis] += int(self.more(atoms).sum())
        for name, g in self.graph.grouped.items():
            other = g.outer if g.transposed else g.inner
            found[name][1] = (len(other) + int(self.more(other).sum())) // self.groups(name)
        for name, atoms in self.graph.scattered.items():
            found[name] = list(self._stretched(self.graph.shapes[name], atoms))
        return {name: torch.Size(size) for name, size in found.items() if torch.Size(size) != self.graph.shapes[name]}


class Grown(Plan):
    """What `shrink` would cut out of the wider network: the classes of the new channels.

    Args:
        graph: of the wider network.
        origin: for every class that is one of the new channels, its template's; FIXED for all others.
    """

    def __init__(self, graph: Graph, origin: Tensor) -> None:
        self.graph, self.origin, self.gone = graph, origin, origin != FIXED
        self.nodes, self.absent, self.blocks, self.rank = graph.nodes, set(), [], {}

    def leaves(self, old: Graph) -> bool:
        """Whether without them every tensor has its old size."""
        if self.gone[FIXED] or len(self.graph.nodes) != len(old.nodes):
            return False
        try:
            cuts = self.cuts()
        except RuntimeError:  # the groups of a convolution are not equally wide
            return False
        sizes = {name: cuts[name].size if name in cuts else shape for name, shape in self.graph.shapes.items()}
        grouped = {name: self.groups(name) for name in self.graph.grouped}
        return sizes == old.shapes and grouped == {name: g.groups for name, g in old.grouped.items()}


def depthwise(graph: Graph, name: str) -> bool:
    """Whether every group of a convolution is one channel, in and out."""
    g = graph.grouped[name]
    return len(g.inner) == len(g.outer) == g.groups


def sections(graph: Graph, classes: Tensor) -> int:
    """Into how many equal parts of their axis channels of these classes come in: the groups of the convolutions that
    they meet, but for depthwise ones, which get more groups."""
    mine = set(classes.tolist()) - {FIXED}
    counts = [
        g.groups
        for name, g in graph.grouped.items()
        if not depthwise(graph, name) and mine & set(graph.classes[torch.cat([g.inner, g.outer])].tolist())
    ]
    return math.lcm(1, *counts)


def templates(graph: Graph, layer: Layer) -> Tensor:
    """The classes that more channels of a layer are copies of: the last one of every section."""
    classes = graph.classes[layer.atoms]
    parts = sections(graph, classes)
    if len(classes) % parts:
        return classes[:0]
    last = [part[part != FIXED][-1:] for part in classes.view(parts, -1)]
    return torch.cat(last).unique() if all(len(x) for x in last) else classes[:0]


def chosen(graph: Graph, layer: Layer, count: int, generator: torch.Generator) -> Tensor:
    """`count` classes of every section of a layer's channels at random; each of a section before one comes again."""
    classes = graph.classes[layer.atoms]
    found: list[Tensor] = []
    for part in classes.view(sections(graph, classes), -1):
        free = part[part != FIXED].unique()
        rounds = -(-count // len(free))
        order = torch.cat([free[torch.randperm(len(free), generator=generator)] for _ in range(rounds)])
        found.append(order[:count])
    return torch.cat(found)


def carried(graph: Graph, own: Tensor) -> Tensor:
    """The copies of all classes: what shortcuts that pad (option A) take over from one stream to the next comes to
    the copies that the streams have of their own."""
    copies = own.clone()
    for pad in graph.pads.values():
        there = pad.source >= 0
        arriving, coming = (graph.classes[a] for a in (pad.outer[there], pad.inner[pad.source[there]]))
        copies[arriving] = torch.where(arriving == coming, copies[arriving], own[arriving] + copies[coming])
    copies[FIXED] = 0
    return copies


def place(layer: Layer, wide: Layer, stretch: Stretch, interleaved: bool) -> Tensor:
    """For each of a layer's outputs in the wider network the output that is its template, -1 where it is not new.

    New ones follow their templates, several positions of one template as a whole (the pixels of a channel) or,
    `interleaved`, each by itself. Empty if that does not give the layer's width.
    """
    classes, more = stretch.graph.classes[layer.atoms].tolist(), stretch.more(layer.atoms).tolist()
    found: list[int] = []
    i = 0
    while i < len(classes):
        j = i + 1
        while not interleaved and j < len(classes) and classes[j] == classes[i] and more[i]:
            j += 1
        first, run = len(found), j - i
        found += [-1] * run + [first + k % run for k in range(sum(more[i:j]))]
        i = j
    return torch.tensor(found) if len(found) == len(wide.atoms) else torch.zeros(0, dtype=torch.long)


def streams(graph: Graph, layers: Mapping[str, Layer]) -> list[list[str]]:
    """The layers whose channels are the same, and so grow together; those that can grow at all."""
    found: list[tuple[set[int], list[str]]] = []
    for path, layer in layers.items():
        mine = set(templates(graph, layer).tolist())
        if not mine:
            continue
        every = set(graph.classes[layer.atoms].tolist()) - {FIXED}
        joined = [f for f in found if f[0] & every]
        found = [f for f in found if f not in joined]
        found.append((every.union(*(f[0] for f in joined)), [p for f in joined for p in f[1]] + [path]))
    return [paths for _, paths in found]
