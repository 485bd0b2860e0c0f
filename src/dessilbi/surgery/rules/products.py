"""Products of activations: matrices and attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from dessilbi.surgery.nodes import (
    aligned,
    onto,
    reduced,
    shape_of,
    varying,
)
from dessilbi.surgery.rules.base import PINNED, Rule, at_axis, blank, no

if TYPE_CHECKING:
    from dessilbi.surgery.flow import Flow
    from dessilbi.surgery.graph import Graph


class Matmul(Rule):
    """The product of two activations, batched."""

    def link(self, g: Graph, n: fx.Node) -> None:
        a, b = self.operands(g, n)
        if min(len(shape_of(a)), len(shape_of(b))) < 2:
            PINNED.link(g, n)
            return
        ndim = len(shape_of(n))
        x, y = aligned(g.look(a), ndim), aligned(g.look(b), ndim)
        rows, columns = x.shape[-2] > 1, y.shape[-1] > 1
        for z, axis in ((x, -1), (y, -2)):
            if z.shape[axis] > 1:
                # The size of the contracted axis may be in a scale: it stays as it is, unless whole matrices go.
                g.tie(z, z.narrow(axis, 0, 1))
                if z.shape[:-2].numel() == 1:
                    g.pin(z)
        if rows and columns:
            PINNED.link(g, n)
            return
        left, right = x.narrow(-1, 0, 1), y.narrow(-2, 0, 1)
        if varying(left) and varying(right):
            g.tie(left, right)
        elif x.shape[-1] > 1 or y.shape[-2] > 1:
            g.pin(x)
            g.pin(y)
        chosen = right if len(varying(right)) >= len(varying(left)) else left
        g.atoms[n] = chosen

    def operands(self, g: Graph, n: fx.Node) -> tuple[fx.Node, fx.Node]:
        a, b = [v for v in g.calls[n].values() if isinstance(v, fx.Node)][-2:]
        return a, b

    def zero(self, f: Flow, n: fx.Node) -> Tensor:
        atoms = f.graph.atoms[n]
        a, b = self.operands(f.graph, n)
        if n in f.graph.pinned:
            return no(atoms)
        x, y = aligned(f.zero_of(a), atoms.ndim), aligned(f.zero_of(b), atoms.ndim)
        zero = (x.unsqueeze(-1) | y.unsqueeze(-3)).all(-2)
        return reduced(zero.expand(torch.broadcast_shapes(zero.shape, atoms.shape)), atoms.shape, "all")

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        a, b = self.operands(f.graph, n)
        if n in f.graph.pinned:
            super().live(f, n, out)
            return
        x, y = aligned(f.zero_of(a), out.ndim), aligned(f.zero_of(b), out.ndim)
        f.need(a, (out.unsqueeze(-2) & ~y.unsqueeze(-3)).any(-1))
        f.need(b, (out.unsqueeze(-2) & ~x.unsqueeze(-1)).any(-3))


class Einsum(Rule):
    """A product written with letters. What lies along a letter that all operands and the output have (a head) goes
    through; along the others nothing is lost."""

    def link(self, g: Graph, n: fx.Node) -> None:
        operands, letters, output = self.parts(g, n)
        through = set(output).intersection(*map(set, letters))
        if "." in "".join([*letters, output]) or any(len({*word}) < len(word) for word in letters):
            PINNED.link(g, n)
            return
        found: dict[str, Tensor] = {}
        for x, word in zip(operands, letters, strict=True):
            atoms = g.look(x)
            for d in varying(atoms):
                if word[d] not in through:
                    g.tie(atoms, atoms.narrow(d, 0, 1))
                    atoms = atoms.narrow(d, 0, 1)
            if len(varying(atoms)) != 1:  # nothing along one letter: all of it stays
                g.pin(g.look(x))
                continue
            (d,) = varying(atoms)
            if word[d] in found:
                g.tie(atoms.flatten(), found[word[d]])
            found[word[d]] = atoms.flatten()
        if len(found) == 1 and all(varying(g.look(x)) for x in operands):
            ((letter, vector),) = found.items()
            g.atoms[n] = onto(vector, output.index(letter), len(output))
        else:
            PINNED.link(g, n)

    def parts(self, g: Graph, n: fx.Node) -> tuple[list[fx.Node], list[str], str]:
        """The operands, the letters of each, and those of the output."""
        equation = g.calls[n]["equation"].replace(" ", "")
        inputs, arrow, output = equation.partition("->")
        letters = inputs.split(",")
        if not arrow:
            every = "".join(letters)
            output = "".join(sorted(letter for letter in {*every} if every.count(letter) == 1))
        return list(g.calls[n]["tensors"]), letters, output

    def _along(self, f: Flow, n: fx.Node) -> tuple[list[tuple[fx.Node, int]], int]:
        """The operands with the axis that the channels lie along, and that axis of the output."""
        operands, letters, output = self.parts(f.graph, n)
        (axis,) = varying(f.graph.atoms[n])
        return [(x, word.index(output[axis])) for x, word in zip(operands, letters, strict=True)], axis

    def zero(self, f: Flow, n: fx.Node) -> Tensor:
        atoms = f.graph.atoms[n]
        if n in f.graph.pinned:
            return no(atoms)
        operands, axis = self._along(f, n)
        zero = torch.zeros(atoms.numel(), dtype=torch.bool)
        for x, d in operands:
            there = f.zero_of(x)
            zero |= reduced(there, at_axis(there, d), "all").flatten()
        return onto(zero, axis, atoms.ndim)

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        if n in f.graph.pinned:
            super().live(f, n, out)
            return
        for x, d in self._along(f, n)[0]:
            like = f.graph.look(x)
            f.need(x, onto(out.flatten(), d, like.ndim).expand(like.shape))


class Attention(Rule):
    """softmax(q kᵀ/√d) v: heads go whole, since d is in the scale."""

    def link(self, g: Graph, n: fx.Node) -> None:
        call = g.calls[n]
        q, k, v = (g.look(call[part]) for part in ("query", "key", "value"))
        shapes = [shape_of(call[part])[:-2] for part in ("query", "key", "value")]
        mask = call.get("attn_mask")
        along_tokens = any(x.shape[-2] > 1 for x in (q, k, v))
        if along_tokens or len(set(shapes)) > 1 or q.ndim < 3:
            PINNED.link(g, n)
            return
        for x in (q, k, v):
            g.tie(x, x.narrow(-1, 0, 1))
        head = q.narrow(-1, 0, 1)
        g.tie(head, k.narrow(-1, 0, 1))
        g.tie(head, v.narrow(-1, 0, 1))
        if isinstance(mask, fx.Node):
            added = aligned(g.look(mask), q.ndim)
            if not set(varying(added)) <= set(varying(head)):
                g.pin(added)
                added = torch.zeros_like(head)
            if not blank(mask, q.ndim, varying(head)):
                g.tie(head, added)
        g.atoms[n] = v

    def zero(self, f: Flow, n: fx.Node) -> Tensor:
        zero = f.zero_of(f.graph.calls[n]["value"])
        return reduced(zero, f.graph.atoms[n].shape, "all") if (n not in f.graph.pinned) else no(f.graph.atoms[n])

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        if n in f.graph.pinned:
            super().live(f, n, out)
            return
        call = f.graph.calls[n]
        f.need(call["value"], out)
        matters = (out & ~f.zero_of(call["value"])).any(-1, keepdim=True)
        for part in ("query", "key"):
            f.need(call[part], matters.expand(f.graph.look(call[part]).shape))
        if isinstance(call.get("attn_mask"), fx.Node):
            f.need(call["attn_mask"], matters)
