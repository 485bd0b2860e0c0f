"""Functions of single elements, of one operand or of two."""

from __future__ import annotations

from collections.abc import Callable
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


class Zeros(Unary):
    """Zeros of the shape of its input, whose values do not matter."""

    def __init__(self) -> None:
        super().__init__(True)

    def zero(self, f: Flow, n: fx.Node) -> Tensor:
        return torch.ones_like(f.graph.atoms[n], dtype=torch.bool)

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        pass


class _Conditional(Unary):
    """Keeps zero zero, except where `link` found operands with which all channels must stay."""

    def __init__(self) -> None:
        super().__init__(True)

    def zero(self, f: Flow, n: fx.Node) -> Tensor:
        return no(f.graph.atoms[n]) if n in f.graph.pinned else super().zero(f, n)

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        if n in f.graph.pinned:
            Rule.live(self, f, n, out)
        else:
            super().live(f, n, out)


class _Bounded(_Conditional):
    """On numbers, or on tensors of one element; other tensors keep all channels."""

    def link(self, g: Graph, n: fx.Node) -> None:
        if all(shape_of(x).numel() == 1 for x in g.inputs(n)[1:]):
            super().link(g, n)
        else:
            PINNED.link(g, n)


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


class Prelu(_Conditional):
    def link(self, g: Graph, n: fx.Node) -> None:
        call = g.calls[n]
        x, name = call["self"], g.names.get(call["weight"])
        if name is None:
            PINNED.link(g, n)
            return
        atoms = g.atoms[n] = g.look(x)
        if g.shapes[name].numel() > 1 and not only_along(atoms, 1):
            g.pin(atoms)
        elif g.shapes[name].numel() > 1:
            g.tie(channels(atoms, x, 1), g.axis(name, 0))


class Elementwise(Rule):
    """On several operands, broadcast against each other; some may be numbers.

    Args:
        zero: where the result is zero, given where the operands are.
        operands: their names, by default the first two.
    """

    def __init__(self, zero: Callable[..., Tensor], *operands: str) -> None:
        self.gives_zero = zero
        self.operands = operands or ("self", "other")

    def link(self, g: Graph, n: fx.Node) -> None:
        nodes = [v for name in self.operands if isinstance(v := g.calls[n][name], fx.Node)]
        ndim = len(shape_of(n))
        met = [aligned(self._met(g, v, [o for o in nodes if o is not v], ndim), ndim) for v in nodes]
        everywhere = {d for x in met for d in varying(x)}
        # The output goes by an operand that has all of its positions; of several, by the simplest.
        fit = [x for v, x in zip(nodes, met, strict=True) if self._has(v, ndim, everywhere)]
        if not fit:
            PINNED.link(g, n)
            return
        for i, (v, x) in enumerate(zip(nodes, met, strict=True)):
            for o, y in zip(nodes[:i], met[:i], strict=True):
                free = (blank(v, ndim, varying(y)) and varying(y)) or (blank(o, ndim, varying(x)) and varying(x))
                if not free:
                    g.tie(x, y)
        chosen = g.atoms[n] = min(fit, key=lambda x: (len(varying(x)), not x.any()))
        for v, x in zip(nodes, met, strict=True):
            if varying(chosen) and blank(v, ndim, varying(chosen)):
                g.pin(x)  # what lies along other axes must stay as long as the output, which knows nothing of it

    def _met(self, g: Graph, v: fx.Node, others: list[fx.Node], ndim: int) -> Tensor:
        """The atoms of an operand; a parameter that meets no channels gets none."""
        met = sorted({d for o in others if o not in g.names for d in varying(aligned(g.look(o), ndim))})
        meets_parameter = any(o in g.names for o in others)
        atoms: Tensor
        if v in g.names and (blank(v, ndim, met) if met else not meets_parameter):
            atoms = g.present(v)
            return atoms.reshape([1] * len(shape_of(v))) if atoms.numel() == 1 else atoms
        atoms = g.look(v)
        return atoms

    def _has(self, v: fx.Node, ndim: int, axes: set[int]) -> bool:
        """Whether an operand is broadcast along none of these axes."""
        shape = [1] * (ndim - len(shape_of(v))) + list(shape_of(v))
        return all(shape[d] > 1 for d in axes)

    def _zeros(self, f: Flow, n: fx.Node) -> list[Tensor]:
        ndim = len(shape_of(n))
        values = [f.graph.calls[n][name] for name in self.operands]
        return [aligned(f.zero_of(v), ndim) if isinstance(v, fx.Node) else torch.tensor(v == 0) for v in values]

    def zero(self, f: Flow, n: fx.Node) -> Tensor:
        if n in f.graph.pinned:
            return no(f.graph.atoms[n])
        shape = f.graph.atoms[n].shape
        zero = self.gives_zero(*self._zeros(f, n))
        return reduced(zero.expand(torch.broadcast_shapes(zero.shape, shape)), shape, "all")

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        for name in self.operands:
            v = f.graph.calls[n][name]
            if not isinstance(v, fx.Node):
                continue
            if n in f.graph.pinned:
                f.need_all(v)
            else:
                f.need(v, self.matters(f, n, name, out))

    def matters(self, f: Flow, n: fx.Node, name: str, out: Tensor) -> Tensor:
        """Where an operand matters, given where the result does."""
        return out


class Product(Elementwise):
    """What is multiplied by zero does not matter."""

    def __init__(self) -> None:
        super().__init__(torch.logical_or)

    def matters(self, f: Flow, n: fx.Node, name: str, out: Tensor) -> Tensor:
        first, second = self._zeros(f, n)
        return out & ~(second if name == "self" else first)


class Glu(Rule):
    """One half of an axis times the sigmoid of the other."""

    def halves(self, f: Graph, n: fx.Node, x: Tensor) -> tuple[Tensor, Tensor]:
        axis = f.calls[n]["dim"] % x.ndim
        first, second = x.chunk(2, axis) if x.shape[axis] > 1 else (x, x)
        return first, second

    def link(self, g: Graph, n: fx.Node) -> None:
        first, second = self.halves(g, n, g.look(g.calls[n]["self"]))
        g.tie(first, second)
        if first.numel() == 1:  # a half of one channel
            g.pin(first)
        g.atoms[n] = first

    def zero(self, f: Flow, n: fx.Node) -> Tensor:
        return self.halves(f.graph, n, f.zero_of(f.graph.calls[n]["self"]))[0]

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        x = f.graph.calls[n]["self"]
        axis, like = f.graph.calls[n]["dim"] % out.ndim, f.graph.look(x)
        f.need(x, torch.cat([out, out], axis) if like.shape[axis] > 1 else out)
