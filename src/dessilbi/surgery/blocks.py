"""Residual branches that add nothing: a block that is then only its shortcut, and what takes its place."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from torch import fx, nn

from dessilbi.surgery.flow import Flow
from dessilbi.surgery.nodes import inside, name_of, owner, shape_of
from dessilbi.surgery.rules import Elementwise

_POSITIVE = ("relu", "relu6", "sigmoid", "softmax", "square", "abs", "hardsigmoid")
_PASSING = ("max_pool2d", "max_pool1d", "avg_pool2d", "adaptive_avg_pool2d", "dropout", "flatten", "slice", "pad",
            "contiguous", "clone", "view", "reshape")  # fmt: skip


@dataclass
class Block:
    """A module whose branch is zero: in its place come these children of it, in order, and a ReLU where `relu`."""

    path: str
    children: list[str] = field(default_factory=list)
    relu: bool = False
    absent: set[fx.Node] = field(default_factory=set)

    def replacement(self, model: nn.Module) -> nn.Module:
        """What is left of the module."""
        parts = {name: model.get_submodule(f"{self.path}.{name}") for name in self.children}
        if self.relu:
            parts["relu"] = nn.ReLU()
        return nn.Sequential(OrderedDict(parts)) if parts else nn.Identity()

    def keeps(self, name: str) -> bool:
        """Whether a parameter of the network is still there."""
        if not inside(name, self.path):
            return True
        return any(inside(name, f"{self.path}.{child}") for child in self.children)


def idle_blocks(flow: Flow) -> list[Block]:
    """The modules of which nothing but the shortcut is left, and that the network's code can do without."""
    found: list[Block] = []
    for node in flow.graph.nodes:
        if name_of(node) != "add" or not isinstance(flow.graph.rules[node], Elementwise):
            continue
        path, _ = owner(node)
        if not path or path in flow.graph.needed or any(block.path == path for block in found):
            continue
        if any(_is_zero(flow, x, node) for x in flow.graph.inputs(node)):
            block = _block(flow, path)
            if block is not None:
                found.append(block)
    # A block inside of another goes with it.
    return [b for b in found if not any(b is not o and inside(b.path, o.path) for o in found)]


def _is_zero(flow: Flow, x: fx.Node, node: fx.Node) -> bool:
    return x.op == "call_function" and shape_of(x) == shape_of(node) and bool(flow.zero_of(x).all())


def _block(flow: Flow, path: str) -> Block | None:
    """The block at this path if it is a chain: input, children or ReLU, additions of zero, output."""
    graph = flow.graph
    own = [n for n in graph.nodes if inside(owner(n)[0], path)]
    members = set(own)
    read_outside = {x for n in graph.nodes if n not in members for x in graph.inputs(n)} | set(graph.outputs)
    leaving = [n for n in own if n in read_outside]
    if len(leaving) != 1:
        return None
    chain: list[str] = []
    kept: set[fx.Node] = set()
    current, relus = leaving[0], []
    while current in members:
        place, _ = owner(current)
        if place != path:
            child = place.removeprefix(path + ".").partition(".")[0]
            part = {n for n in own if inside(owner(n)[0], f"{path}.{child}")}
            sources = {x for n in part for x in graph.inputs(n) if x not in part and x.op == "call_function"}
            if len(sources) != 1 or child in chain:
                return None
            chain.append(child)
            kept |= part
            current = sources.pop()
        elif name_of(current) == "relu" and not chain:
            relus.append(current)
            current = graph.inputs(current)[0]
        elif name_of(current) == "add":
            others = [x for x in graph.inputs(current) if not _is_zero(flow, x, current)]
            if len(others) != 1 or graph.calls[current].get("alpha", 1) != 1:
                return None
            current = others[0]
        elif name_of(current) == "dropout":
            current = graph.inputs(current)[0]
        else:
            return None
    if current.op != "call_function":
        return None
    relu = bool(relus) and not (not chain and _not_negative(flow, current))
    if relu:
        kept.add(relus[0])
    return Block(path, chain[::-1], relu, members - kept)


def _not_negative(flow: Flow, node: fx.Node) -> bool:
    while node.op == "call_function":
        if name_of(node) in _POSITIVE:
            return True
        inputs = flow.graph.inputs(node)
        if name_of(node) == "add" and len(inputs) == 2:
            return all(_not_negative(flow, x) for x in inputs)
        if name_of(node) not in _PASSING or not inputs:
            return False
        node = inputs[0]
    return False
