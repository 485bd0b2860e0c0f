"""Pooling, resampling and reductions: what works along axes that channels do not lie along."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from dessilbi.surgery.nodes import (
    full_name,
    name_of,
    shape_of,
    varying,
)
from dessilbi.surgery.rules.base import Rule, fixed, no
from dessilbi.surgery.rules.elementwise import Unary

if TYPE_CHECKING:
    from dessilbi.surgery.flow import Flow
    from dessilbi.surgery.graph import Graph


class Spatial(Unary):
    """Pooling and resampling: the last axes, which no channel may lie along."""

    def __init__(self) -> None:
        super().__init__(True)

    def link(self, g: Graph, n: fx.Node) -> None:
        x = g.inputs(n)[0]
        atoms, axes = g.look(x), int("".join(c for c in full_name(n) if c.isdigit())[:1] or 2)
        if any(d >= atoms.ndim - axes for d in varying(atoms)) or isinstance(n.meta.get("val"), (list, tuple)):
            g.pin(atoms)
            g.atoms[n] = fixed(n)
            return
        g.atoms[n] = atoms

    def zero(self, f: Flow, n: fx.Node) -> Any:
        if isinstance(f.graph.atoms[n], list):
            return Rule.zero(self, f, n)
        return super().zero(f, n)

    def live(self, f: Flow, n: fx.Node, out: Any) -> None:
        f.need_all(f.graph.inputs(n)[0]) if isinstance(out, list) else super().live(f, n, out)


class Reduction(Rule):
    """Mean, sum, maximum over axes. Over channels a sum can do without zeros, anything else needs all of them."""

    def link(self, g: Graph, n: fx.Node) -> None:
        x = g.inputs(n)[0]
        atoms, axes = g.look(x), self.axes(g, n)
        if isinstance(n.meta.get("val"), (list, tuple)):
            g.pin(atoms)
            g.atoms[n] = fixed(n)
            return
        lost = [d for d in varying(atoms) if d in axes]
        if lost and len(lost) == len(varying(atoms)):
            if name_of(n) != "sum":
                g.pin(atoms)
            atoms = torch.zeros([1] * atoms.ndim, dtype=torch.long)
        for d in lost:  # summed over something that is not the channels, which then lose the same everywhere
            g.tie(atoms, atoms.narrow(d, 0, 1))
            atoms = atoms.narrow(d, 0, 1)
        g.atoms[n] = atoms.reshape([s for d, s in enumerate(atoms.shape) if self.keeps(g, n) or d not in axes])

    def axes(self, g: Graph, n: fx.Node) -> list[int]:
        ndim, dim = len(shape_of(g.inputs(n)[0])), g.calls[n].get("dim")
        axes = list(range(ndim)) if dim is None or dim == [] else dim if isinstance(dim, (list, tuple)) else [dim]
        return [d % ndim for d in axes]

    def keeps(self, g: Graph, n: fx.Node) -> bool:
        return bool(g.calls[n].get("keepdim"))

    def zero(self, f: Flow, n: fx.Node) -> Any:
        if isinstance(f.graph.atoms[n], list):
            return super().zero(f, n)
        if name_of(n) == "logsumexp":
            return no(f.graph.atoms[n])
        zero = f.zero_of(f.graph.inputs(n)[0])
        for d in self.axes(f.graph, n):
            zero = zero.all(d, keepdim=True)
        return zero.reshape(f.graph.atoms[n].shape)

    def live(self, f: Flow, n: fx.Node, out: Any) -> None:
        x = f.graph.inputs(n)[0]
        if isinstance(out, list):
            f.need_all(x)
            return
        axes = self.axes(f.graph, n)
        shape = [1 if d in axes else s for d, s in enumerate(f.graph.look(x).shape)]
        f.need(x, out.reshape(shape))
