"""Movement of data, with explicit index maps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from dessilbi.surgery.nodes import (
    Pad,
    along,
    compact,
    name_of,
    onto,
    shape_of,
    varying,
)
from dessilbi.surgery.rules.base import PINNED, Rule, channels, fixed, listed, no

if TYPE_CHECKING:
    from dessilbi.surgery.flow import Flow
    from dessilbi.surgery.graph import Graph

_SHAPED_LIKE = ("expand_as", "reshape_as", "view_as")


class Movement(Rule):
    """Moves data and changes none: executed on the positions of its inputs, which gives the index map."""

    def link(self, g: Graph, n: fx.Node) -> None:
        sources = self.sources(g, n)
        offset, places = 0, {}
        for x in sources:
            atoms = g.look(x)
            place = torch.arange(offset, offset + atoms.numel()).view(atoms.shape)
            places[x] = self.spread(g, n, place, shape_of(x))
            offset += atoms.numel()
        try:
            moved = self.move(
                n, fx.node.map_arg(g.calls[n], lambda x: places[x] if x in places else self.given(g, n, x, x))
            )
        except (RuntimeError, TypeError, IndexError, NotImplementedError):
            Rule.link(self, g, n)
            g.maps[n] = None
            return
        flat = torch.cat([g.look(x).reshape(-1) for x in sources])
        maps = [compact(m) for m in listed(moved)]
        atoms = [flat[m] for m in maps]
        for a in atoms:
            if a.numel() == 1:  # one channel taken out of several: it is not there to be removed
                g.pin(a)
        several = isinstance(moved, list)
        g.maps[n], g.atoms[n] = (maps, atoms) if several else (maps[0], atoms[0])

    def sources(self, g: Graph, n: fx.Node) -> list[fx.Node]:
        """The tensors that are moved, each once."""
        first = next(iter(g.calls[n].values()))
        return list(dict.fromkeys(first if isinstance(first, (list, tuple)) else [first]))

    def spread(self, g: Graph, n: fx.Node, place: Tensor, shape: torch.Size) -> Tensor:
        return place.expand(shape)

    def given(self, g: Graph, n: fx.Node, x: fx.Node, origin: fx.Node) -> Tensor:
        """An argument that is not moved: a tensor written into the code, or one of which only the shape counts.

        `origin` is what it is in the graph, `x` what it is in the network that is looked at.
        """
        return torch.empty(()).expand(shape_of(x)) if name_of(n) in _SHAPED_LIKE else g.constant(origin)

    def move(self, n: fx.Node, call: dict[str, Any]) -> Any:
        """The operator, executed: on numbers of positions in place of its inputs."""
        target: Any = n.target
        if name_of(n) in ("view", "_unsafe_view"):
            return call["self"].reshape(call["size"])
        if name_of(n) == "view_as":
            return call["self"].reshape(call["other"].shape)
        arguments = target._schema.arguments
        args = [call[a.name] for a in arguments if not a.kwarg_only]
        kwargs = {a.name: call[a.name] for a in arguments if a.kwarg_only and call[a.name] is not None}
        moved = target(*args, **kwargs)
        return list(moved) if isinstance(moved, (list, tuple)) else moved

    def _outputs(self, f: Flow, n: fx.Node) -> list[tuple[Tensor, Any]]:
        maps, atoms = f.graph.maps[n], f.graph.atoms[n]
        return list(zip(listed(maps), listed(atoms), strict=True))

    def zero(self, f: Flow, n: fx.Node) -> Any:
        if f.graph.maps[n] is None:
            return super().zero(f, n)
        flat = torch.cat([f.zero_of(x).reshape(-1) for x in self.sources(f.graph, n)])
        zeros = [flat[m] for m, _ in self._outputs(f, n)]
        return zeros if isinstance(f.graph.maps[n], list) else zeros[0]

    def live(self, f: Flow, n: fx.Node, out: Any) -> None:
        if f.graph.maps[n] is None:
            super().live(f, n, out)
            return
        sources = self.sources(f.graph, n)
        sizes = [f.graph.look(x).numel() for x in sources]
        needed = torch.zeros(sum(sizes), dtype=torch.bool)
        for (m, _), matters in zip(self._outputs(f, n), listed(out), strict=True):
            needed[m[matters.expand(m.shape)]] = True
        for x, part in zip(sources, needed.split(sizes), strict=True):
            f.need(x, part.view(f.graph.look(x).shape))

    def touched(self, g: Graph, n: fx.Node) -> list[int] | None:
        name, atoms = name_of(n), g.atoms[n]
        if isinstance(atoms, list):
            return varying(atoms[0])
        call = g.calls[n]
        if name in ("flatten", "permute", "transpose", "t", "cat", "concat", "unsqueeze", "squeeze", "movedim", "stack",
                    "numpy_T", "swapaxes", "ravel"):  # fmt: skip
            return None
        sizes: Any = call.get("size", call.get("shape", call.get("sizes")))
        if name in ("view", "reshape", "_unsafe_view", "expand") and isinstance(sizes, (list, tuple)):
            first = len(shape_of(n)) - len(sizes)
            return [d for d in varying(atoms) if sizes[d - first] != -1] or None
        if name == "unflatten":
            first = call["dim"] % len(shape_of(g.inputs(n)[0]))
            return [d for d in varying(atoms) if first <= d < first + len(sizes) and sizes[d - first] != -1] or None
        if name in ("slice", "select", "narrow", "flip", "roll", "index_select"):
            ndim = len(shape_of(g.inputs(n)[0]))
            axes = call.get("dims", call.get("dim", 0))
            axes = [d % ndim for d in (axes if isinstance(axes, (list, tuple)) else [axes])]
            return [d for d in varying(g.look(g.inputs(n)[0])) if d in axes] or None
        return varying(atoms)


class Concatenation(Movement):
    """Needs to be laid out only along axes that matter."""

    def spread(self, g: Graph, n: fx.Node, place: Tensor, shape: torch.Size) -> Tensor:
        axis = g.calls[n]["dim"] % len(shape)
        all_shapes = [g.look(x).shape for x in self.sources(g, n)]
        return place.expand([
            size if d == axis else max(s[d] for s in all_shapes) for d, size in enumerate(shape)
        ])  # fmt: skip


class Getitem(Rule):
    """One of several outputs."""

    def link(self, g: Graph, n: fx.Node) -> None:
        source, index = self._where(g, n)
        atoms = g.look(source)
        g.atoms[n] = atoms[index] if isinstance(atoms, list) else fixed(n)

    def _where(self, g: Graph, n: fx.Node) -> tuple[fx.Node, int]:
        source, index = list(g.calls[n].values())[:2]
        return source, index

    def zero(self, f: Flow, n: fx.Node) -> Any:
        source, index = self._where(f.graph, n)
        zero = f.zero_of(source)
        return zero[index] if isinstance(zero, list) else no(f.graph.atoms[n])

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        source, index = self._where(f.graph, n)
        f.need_part(source, index, out)


class Padding(Rule):
    """New positions at the ends of axes. Along channels the output has atoms of its own: what is carried over may be
    zero in the input and written by others in the sum that follows (option-A shortcuts)."""

    def _amounts(self, g: Graph, n: fx.Node) -> dict[int, tuple[int, int]]:
        ndim, pad = len(shape_of(n)), g.calls[n]["pad"]
        given = {ndim - 1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)}
        # Nothing added to the channels is still a place where something could be: option A between streams that are
        # equally wide. These can grow, and shrink, apart.
        return {axis: two for axis, two in given.items() if two != (0, 0) or axis == min(given)}

    def link(self, g: Graph, n: fx.Node) -> None:
        x = g.calls[n]["self"]
        atoms = g.look(x)
        hit = [d for d in self._amounts(g, n) if d in varying(atoms)]
        if not hit:
            g.atoms[n] = atoms
            return
        if len(varying(atoms)) > 1 or g.calls[n].get("mode", "constant") != "constant":
            PINNED.link(g, n)
            return
        axis = hit[0]
        size = shape_of(x)[axis]
        source = torch.nn.functional.pad(torch.arange(size), self._amounts(g, n)[axis], value=-1)
        outer = g.new(len(source))
        g.pads[n] = Pad(source, channels(atoms, x, axis), outer)
        g.atoms[n] = onto(outer, axis, atoms.ndim)

    def zero(self, f: Flow, n: fx.Node) -> Tensor:
        zero, filled = f.zero_of(f.graph.calls[n]["self"]), not f.graph.calls[n].get("value")
        pad = f.graph.pads.get(n)
        if pad is None:
            atoms = f.graph.atoms[n]
            return zero & filled if zero.shape == atoms.shape else no(atoms)
        axis = varying(f.graph.atoms[n])[0]
        vector = torch.cat([along(zero, axis, len(pad.inner)), torch.tensor([filled])])
        return onto(vector[pad.source], axis, zero.ndim)

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        x, pad = f.graph.calls[n]["self"], f.graph.pads.get(n)
        if pad is None:
            f.need(x, out) if out.shape == f.graph.look(x).shape else f.need_all(x)
            return
        axis = varying(f.graph.atoms[n])[0]
        vector = torch.zeros(len(pad.inner), dtype=torch.bool)
        carried = pad.source >= 0
        vector[pad.source[carried]] = along(out, axis, len(pad.source))[carried]
        f.need(x, onto(vector, axis, out.ndim))

    def touched(self, g: Graph, n: fx.Node) -> list[int] | None:
        return varying(g.atoms[n]) if n in g.pads else None
