"""The rule about which nothing is known, and what the others are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from dessilbi.surgery.nodes import (
    along,
    shape_of,
    varying,
)

if TYPE_CHECKING:
    from dessilbi.surgery.flow import Flow
    from dessilbi.surgery.graph import Graph


class Rule:
    """An operator about which nothing is known: what flows into it cannot be removed, and its output is fixed."""

    def link(self, g: Graph, n: fx.Node) -> None:
        for x in g.inputs(n):
            for atoms in listed(g.present(x)):
                if x in g.names:
                    g.pin(atoms)
                elif atoms.any():
                    g.block(n, atoms)
        g.atoms[n] = fixed(n)

    def zero(self, f: Flow, n: fx.Node) -> Any:
        atoms = f.graph.atoms[n]
        return [torch.zeros_like(a, dtype=torch.bool) for a in atoms] if isinstance(atoms, list) else no(atoms)

    def live(self, f: Flow, n: fx.Node, out: Any) -> None:
        for x in f.graph.inputs(n):
            f.need_all(x)

    def touched(self, g: Graph, n: fx.Node) -> list[int] | None:
        """The output axes whose size may be written into the network's code; None: none is."""
        return None


def listed(x: Any) -> list[Any]:
    return x if isinstance(x, list) else [x]


def no(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool)


def fixed(n: fx.Node) -> Any:
    """The atoms of an output that stays as it is."""
    value = n.meta.get("val")
    if isinstance(value, (list, tuple)):
        return [torch.zeros([1] * (v.ndim if isinstance(v, Tensor) else 0), dtype=torch.long) for v in value]
    return torch.zeros([1] * len(shape_of(n)), dtype=torch.long)


def blank(v: fx.Node, ndim: int, axes: list[int]) -> bool:
    """Whether a tensor is broadcast along all of these axes, so that it does not care what happens along them."""
    shape = [1] * (ndim - len(shape_of(v))) + list(shape_of(v))
    return all(shape[d] == 1 for d in axes)


def only_along(atoms: Tensor, axis: int) -> bool:
    return set(varying(atoms)) <= {axis}


def channels(atoms: Tensor, x: fx.Node, axis: int) -> Tensor:
    return along(atoms, axis, shape_of(x)[axis])


def at_axis(x: Tensor, axis: int) -> list[int]:
    return [s if d == axis else 1 for d, s in enumerate(x.shape)]


class Constant(Rule):
    """Makes or reads nothing but what is fixed: index computations, masks, new tensors."""

    def link(self, g: Graph, n: fx.Node) -> None:
        g.atoms[n] = fixed(n)


class Pinned(Rule):
    """Known to need all of its inputs as they are: argmax, cumulative sums, weights that are computed."""

    def link(self, g: Graph, n: fx.Node) -> None:
        for x in g.inputs(n):
            g.pin(g.look(x))
        g.atoms[n] = fixed(n)
        g.pinned.add(n)


UNKNOWN, CONSTANT, PINNED = Rule(), Constant(), Pinned()
