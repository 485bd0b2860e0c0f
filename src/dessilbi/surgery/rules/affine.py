"""Layers with a weight: convolutions, linear layers, embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, fx

from dessilbi.surgery.nodes import (
    Grouped,
    along,
    full_name,
    name_of,
    onto,
    reduced,
    shape_of,
    varying,
)
from dessilbi.surgery.rules.base import PINNED, Rule, at_axis, channels, fixed, no

if TYPE_CHECKING:
    from dessilbi.surgery.flow import Flow
    from dessilbi.surgery.graph import Graph


class Affine(Rule):
    """Convolution and linear layers, transposed or not: the channels of the input meet an axis of the weight."""

    def link(self, g: Graph, n: fx.Node) -> None:
        x, name, bias = self.parts(g, n)
        axis = self.channel_axis(g, n)
        atoms = g.look(x)
        if name is None or (bias is not None and bias not in g.names) or len(g.shapes[name]) < 2:
            PINNED.link(g, n)
            return
        for d in varying(atoms):
            if d != axis:  # a channel goes at every place or at none
                g.tie(atoms, atoms.narrow(d, 0, 1))
                atoms = atoms.narrow(d, 0, 1)
        inner, groups = channels(atoms, x, axis), self.groups(g, n)
        ins, outs = (0, 1) if self.transposed(n) else (1, 0)
        if groups == 1:
            g.tie(inner, g.axis(name, ins))
            outer = g.axis(name, outs)
        else:
            held = g.axis(name, 0)
            if name not in g.grouped:
                other = g.new(shape_of(n)[axis] if ins == 0 else shape_of(x)[axis])
                inner_, outer_ = (held, other) if ins == 0 else (other, held)
                g.grouped[name] = Grouped(groups, inner_, outer_, transposed=ins == 0)
                if len(inner_) == len(outer_) == groups:
                    g.tie(inner_, outer_)  # depthwise: a group is one channel, in and out
            g.tie(inner, g.grouped[name].inner)
            outer = g.grouped[name].outer
        if bias is not None:
            g.tie(outer, g.axis(g.names[bias], 0))
        g.atoms[n] = onto(outer, axis, len(shape_of(n)))

    def parts(self, g: Graph, n: fx.Node) -> tuple[fx.Node, str | None, fx.Node | None]:
        call = g.calls[n]
        return call["input"], g.names.get(call["weight"]), call["bias"]

    def transposed(self, n: fx.Node) -> bool:
        return "transpose" in full_name(n)

    def groups(self, g: Graph, n: fx.Node) -> int:
        return int(g.calls[n].get("groups") or 1)

    def channel_axis(self, g: Graph, n: fx.Node) -> int:
        ndim = len(shape_of(n))
        if name_of(n) == "linear":
            return ndim - 1
        return ndim - len(shape_of(g.calls[n]["weight"])) + 1

    def _weight(self, f: Flow, n: fx.Node) -> tuple[Tensor, int]:
        """Where the weight is not zero, as (groups, outputs, inputs), and the axis of the channels."""
        _, name, _ = self.parts(f.graph, n)
        used, groups = f.used(str(name)), self.groups(f.graph, n)
        if self.transposed(n):
            return used.view(groups, -1, used.shape[1]).transpose(1, 2), self.channel_axis(f.graph, n)
        return used.view(groups, -1, used.shape[1]), self.channel_axis(f.graph, n)

    def zero(self, f: Flow, n: fx.Node) -> Tensor:
        atoms = f.graph.atoms[n]
        x, name, bias = self.parts(f.graph, n)
        axis = self.channel_axis(f.graph, n)
        if name is None or n in f.graph.pinned:
            return no(atoms)
        used, _ = self._weight(f, n)
        there = ~channels(reduced(f.zero_of(x), at_axis(f.zero_of(x), axis), "all"), x, axis).reshape(
            used.shape[0], 1, -1
        )
        outer = (used & there).any(2).flatten()
        if bias is not None:
            outer = outer | (f.value(f.graph.names[bias]) != 0)
        return reduced(onto(~outer, axis, atoms.ndim), atoms.shape, "all")

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        if n in f.graph.pinned:
            super().live(f, n, out)
            return
        x, _, _ = self.parts(f.graph, n)
        used, axis = self._weight(f, n)
        matters = along(out, axis, shape_of(n)[axis]).reshape(used.shape[0], -1, 1)
        f.need(x, onto((used & matters).any(1).flatten(), axis, len(shape_of(x))))


class Addmm(Affine):
    """A linear layer whose weight is stored the other way round."""

    def parts(self, g: Graph, n: fx.Node) -> tuple[fx.Node, str | None, fx.Node | None]:
        call = g.calls[n]
        return call["mat1"], g.names.get(call["mat2"]), call["self"]

    def transposed(self, n: fx.Node) -> bool:
        return True

    def channel_axis(self, g: Graph, n: fx.Node) -> int:
        return 1


class Embedding(Rule):
    """Looks up rows: the columns of the table are the channels."""

    def link(self, g: Graph, n: fx.Node) -> None:
        name = g.names.get(g.calls[n]["weight"])
        if name is None:
            g.atoms[n] = fixed(n)
            return
        g.atoms[n] = onto(g.axis(name, 1), len(shape_of(n)) - 1, len(shape_of(n)))

    def zero(self, f: Flow, n: fx.Node) -> Tensor:
        name, atoms = f.graph.names.get(f.graph.calls[n]["weight"]), f.graph.atoms[n]
        if name is None:
            return no(atoms)
        return reduced(onto((f.value(name) == 0).all(0), atoms.ndim - 1, atoms.ndim), atoms.shape, "all")

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        pass
