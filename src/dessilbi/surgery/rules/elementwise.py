"""Functions of single elements, of one operand or of two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from dessilbi.surgery.nodes import (
    aligned,
    reduced,
    shape_of,
    varying,
)
from dessilbi.surgery.rules.base import PINNED, Rule, blank, channels, no, only_along

if TYPE_CHECKING:
    from dessilbi.surgery.flow import Flow
    from dessilbi.surgery.graph import Graph


class Unary(Rule):
    """Works on every element alone; `zero_stays` if f(0) = 0."""

    def __init__(self, zero_stays: bool) -> None:
        self.zero_stays = zero_stays

    def keeps_zero(self, call: dict[str, Any]) -> bool:
        return self.zero_stays

    def link(self, g: Graph, n: fx.Node) -> None:
        g.atoms[n] = g.look(g.inputs(n)[0])

    def zero(self, f: Flow, n: fx.Node) -> Tensor:
        zero = f.zero_of(f.graph.inputs(n)[0])
        return zero if self.keeps_zero(f.graph.calls[n]) else no(zero)

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        f.need(f.graph.inputs(n)[0], out)


class _Bounded(Unary):
    """On numbers, or on tensors of one element; other tensors keep all channels."""

    def __init__(self) -> None:
        super().__init__(True)

    def link(self, g: Graph, n: fx.Node) -> None:
        if all(shape_of(x).numel() == 1 for x in g.inputs(n)[1:]):
            super().link(g, n)
        else:
            PINNED.link(g, n)

    def zero(self, f: Flow, n: fx.Node) -> Tensor:
        return no(f.graph.atoms[n]) if n in f.graph.pinned else super().zero(f, n)

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        if n in f.graph.pinned:
            Rule.live(self, f, n, out)
        else:
            super().live(f, n, out)


class Clamp(_Bounded):
    def keeps_zero(self, call: dict[str, Any]) -> bool:
        low, high = call.get("min", call.get("min_val")), call.get("max", call.get("max_val"))
        if isinstance(low, fx.Node) or isinstance(high, fx.Node):
            return False
        return (low is None or low <= 0) and (high is None or high >= 0)


class Power(_Bounded):
    def keeps_zero(self, call: dict[str, Any]) -> bool:
        exponent = call.get("exponent")
        return isinstance(exponent, (int, float)) and exponent > 0


class Softmax(Unary):
    """Mixes one axis: what changes along it stays."""

    def __init__(self) -> None:
        super().__init__(False)

    def link(self, g: Graph, n: fx.Node) -> None:
        super().link(g, n)
        call = g.calls[n]
        axis = call["dim"] % max(1, len(shape_of(n)))
        if axis in varying(g.atoms[n]):
            g.pin(g.atoms[n])

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        super().live(f, n, out.any(f.graph.calls[n]["dim"], keepdim=True))


class Prelu(Unary):
    def __init__(self) -> None:
        super().__init__(True)

    def link(self, g: Graph, n: fx.Node) -> None:
        call = g.calls[n]
        x, name = call["self"], g.names.get(call["weight"])
        atoms = g.atoms[n] = g.look(x)
        if name is None or (g.shapes[name].numel() > 1 and not only_along(atoms, 1)):
            g.pin(atoms)
        elif g.shapes[name].numel() > 1:
            g.tie(channels(atoms, x, 1), g.axis(name, 0))


class Binary(Rule):
    """Elementwise on two operands, broadcast against each other; or on one and a number.

    `absorbs`: one zero makes the product zero. `first`: a zero first operand does (division).
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def operands(self, g: Graph, n: fx.Node) -> tuple[Any, Any]:
        call = g.calls[n]
        names = [name for name in ("self", "other", "input", "tensor1") if name in call][:2]
        a, b = (call[name] for name in names)
        return a, b

    def link(self, g: Graph, n: fx.Node) -> None:
        a, b = self.operands(g, n)
        ndim = len(shape_of(n))
        if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
            g.atoms[n] = aligned(g.look(a if isinstance(a, fx.Node) else b), ndim)
            return
        x, y = (aligned(self._met(g, v, other, ndim), ndim) for v, other in ((a, b), (b, a)))
        free_x, free_y = blank(a, ndim, varying(y)), blank(b, ndim, varying(x))
        if not (free_x and varying(y)) and not (free_y and varying(x)):
            g.tie(x, y)
        # The output goes by an operand that has all of its positions; where both do, by the simpler one.
        fit = [v for v, operand in ((x, a), (y, b)) if self._fits(operand, n, x, y)]
        if not fit:
            PINNED.link(g, n)
            return
        g.atoms[n] = min(fit, key=lambda v: (len(varying(v)), not v.any()))

    def _met(self, g: Graph, v: fx.Node, other: fx.Node, ndim: int) -> Tensor:
        """The atoms of an operand; a parameter that meets no channels gets none."""
        met = [0] if other in g.names else varying(aligned(g.look(other), ndim))
        if v in g.names and (not met or (other not in g.names and blank(v, ndim, met))):
            atoms: Tensor = g.present(v)
            return atoms.reshape([1] * len(shape_of(v))) if atoms.numel() == 1 else atoms
        atoms = g.look(v)
        return atoms

    def _fits(self, node: fx.Node, n: fx.Node, x: Tensor, y: Tensor) -> bool:
        """Whether an operand is broadcast along no axis that channels lie along."""
        shape, ndim = shape_of(node), len(shape_of(n))
        own = [1] * (ndim - len(shape)) + list(shape)
        return all(own[d] > 1 for d in {*varying(x), *varying(y)})

    def zero(self, f: Flow, n: fx.Node) -> Tensor:
        a, b = self.operands(f.graph, n)
        ndim = len(shape_of(n))
        if n in f.graph.pinned:
            return no(f.graph.atoms[n])
        za, zb = (aligned(f.zero_of(v), ndim) if isinstance(v, fx.Node) else torch.tensor(v == 0) for v in (a, b))
        shape = f.graph.atoms[n].shape
        if self.kind == "mul":
            zero = za | zb
        elif self.kind == "div":
            zero = za
        else:
            zero = za & zb
        return reduced(zero.expand(torch.broadcast_shapes(zero.shape, shape)), shape, "all")

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        if n in f.graph.pinned:
            super().live(f, n, out)
            return
        a, b = self.operands(f.graph, n)
        for x, other in ((a, b), (b, a)):
            if not isinstance(x, fx.Node):
                continue
            matters = out
            if self.kind == "mul" and isinstance(other, fx.Node):
                matters = out & ~aligned(f.zero_of(other), out.ndim)
            f.need(x, matters)
