"""What the new entries of a wider network hold, and how the old ones get into their places."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dessilbi.surgery.graph import Graph
from dessilbi.surgery.nodes import name_of
from dessilbi.surgery.plan import Cut
from dessilbi.surgery.rules import GroupNorm
from dessilbi.surgery.rules.elementwise import Prelu
from dessilbi.surgery.rules.norms import Norm
from dessilbi.surgery.widening_plan import Grown, Layer

_PRELU = 0.25
_FACTORS = ("mul", "multiply", "div", "true_divide", "divide")


class Insertion:
    """A parameter, or a tensor that goes with it, with the new entries put in: the inverse of a :class:`Cut`.

    Args:
        cut: what of the wider parameter are the old entries.
        like: the wider parameter, for its shape and layout in memory.
        fill: what the new entries are.
    """

    def __init__(self, cut: Cut, like: Tensor, fill: float = 0.0) -> None:
        self.cut, self.like, self.fill = cut, like, fill
        self.old = cut.size

    def __call__(self, t: Tensor) -> Tensor:
        cut, fill = self.cut, True if t.dtype == torch.bool else self.fill
        if t.shape == self.old:
            whole = torch.full_like(self.like, fill, dtype=t.dtype, requires_grad=False)
            return self.into(whole, t)
        # What has one entry a filter, say: norms, shaped to be spread over the parameter.
        for axis, index in cut.index.items():
            if t.ndim > axis and t.shape[axis] == self.old[axis]:
                shape = [n if d != axis else cut.shape[axis] for d, n in enumerate(t.shape)]
                t = t.new_full(shape, fill).index_copy_(axis, index.to(t.device), t)
        return t

    def into(self, whole: Tensor, t: Tensor) -> Tensor:
        """Put the old entries into a tensor of the wider shape, in place."""
        where = [
            torch.arange(n, device=whole.device) for n in self.cut.shape[: max(2, 1 + max(self.cut.index, default=0))]
        ]
        for axis, index in self.cut.index.items():
            where[axis] = index.to(whole.device)
        places = [w.view([-1 if d == e else 1 for e in range(len(where))]) for d, w in enumerate(where)]
        if self.cut.columns is not None:
            places[1] = self.cut.columns.to(whole.device)
        whole[tuple(places)] = t.to(whole.dtype)
        return whole


def constants(graph: Graph) -> dict[str, float]:
    """What new entries of parameters and buffers are that are no layers' weights, where that is not zero: those of a
    normalisation or a factor change nothing."""
    found: dict[str, float] = {}
    for node in graph.nodes:
        rule, call = graph.rules[node], graph.calls[node]
        if isinstance(rule, (Norm, GroupNorm)):
            ones: list[Any] = [call.get("weight"), call.get("running_var")]
        elif name_of(node) in _FACTORS:
            ones = graph.inputs(node)
        elif isinstance(rule, Prelu):
            found[graph.names.get(call["weight"], "")] = _PRELU
            continue
        else:
            continue
        found.update((graph.names[x], 1.0) for x in ones if x in graph.names)
    return found


def he(plan: Grown, layer: Layer, like: Tensor, generator: torch.Generator) -> Tensor:
    """He's normal distribution, of the size that a ReLU's output asks for: every filter has the norm √2, about."""
    fan_in = math.prod(n for d, n in enumerate(like.shape) if d != layer.rows)
    if layer.rows == 1 and layer.weight in plan.graph.grouped:
        fan_in //= plan.graph.grouped[layer.weight].groups
    values = torch.randn(like.shape, generator=generator) * math.sqrt(2 / fan_in)
    return torch.empty_like(like, requires_grad=False).copy_(values)


def new_filters(plan: Grown, layer: Layer) -> Tensor:
    """Where a weight belongs to a new filter, as a mask that spreads over it."""
    shape = plan.graph.shapes[layer.weight]
    rest = [1] * (len(shape) - 2)
    g = plan.graph.grouped.get(layer.weight)
    lost = plan.lost(layer.atoms)
    if g is not None and g.transposed:  # a row is an input, its columns the outputs of its group
        return lost.view(g.groups, 1, -1).expand(-1, len(g.inner) // g.groups, -1).reshape(*shape[:2], *rest)
    return lost.view(1, -1, *rest) if layer.rows == 1 else lost.view(-1, 1, *rest)
