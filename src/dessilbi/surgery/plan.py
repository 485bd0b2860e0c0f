"""Which channels go: the zeros of a masked network, cut back to what its operators can do without."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from dessilbi.surgery.blocks import Block, idle_blocks
from dessilbi.surgery.flow import Flow
from dessilbi.surgery.graph import FIXED, Graph
from dessilbi.surgery.nodes import name_of, owner, shape_of, varying
from dessilbi.surgery.rules import Affine, Concatenation, GroupNorm, Movement

_MAKING = ("zeros", "ones", "full", "empty", "rand", "randn", "new_zeros", "new_ones", "new_full", "new_empty")


@dataclass
class Cut:
    """What stays of a parameter: positions along axes; in a convolution in groups, columns for each row, and how many
    groups there are then."""

    shape: torch.Size
    index: dict[int, Tensor] = field(default_factory=dict)
    columns: Tensor | None = None
    groups: int | None = None

    def __call__(self, t: Tensor) -> Tensor:
        """The part of the parameter, or of a tensor that goes with it, that stays."""
        for axis, index in self.index.items():
            if t.ndim > axis and t.shape[axis] == self.shape[axis]:
                t = t.index_select(axis, index.to(t.device))
        if self.columns is not None and t.ndim > 1 and t.shape[1] == self.shape[1]:
            columns = self.columns.to(t.device)
            t = t[torch.arange(len(columns), device=t.device).unsqueeze(1), columns]
        return t

    @property
    def size(self) -> torch.Size:
        """The shape that is left."""
        sizes = [len(self.index[d]) if d in self.index else n for d, n in enumerate(self.shape)]
        if self.columns is not None:
            sizes[1] = self.columns.shape[1]
        return torch.Size(sizes)


class Plan:
    """What is removed from a network whose parameters have these values.

    A class goes if each of its positions is zero or without influence, except where operators need it: a tensor of two
    axes of channels loses whole slices only; the groups of a convolution stay equally wide; what a padded shortcut
    carries over stays where it arrives; every layer keeps one channel.

    Args:
        graph: of the network.
        values: its parameters and buffers, zero where they are masked.
    """

    def __init__(self, graph: Graph, values: Mapping[str, Tensor]) -> None:
        self.graph = graph
        self.flow = Flow(graph, values)
        self.blocks: list[Block] = idle_blocks(self.flow)
        self.absent: set[fx.Node] = set().union(*(block.absent for block in self.blocks))
        self.nodes = [n for n in graph.nodes if n not in self.absent]
        self.rank: dict[int, int] = {}
        self.emptied: list[str] = []
        self.gone = torch.zeros(len(graph.classes), dtype=torch.bool)
        self.gone[graph.classes] = True
        self.gone[FIXED] = False
        self._keep_what_matters()
        for node in self.nodes:
            if node in graph.hard or owner(node)[0] in graph.rigid:
                for x in (node, *graph.inputs(node)):
                    for atoms in self._tensors(x):
                        self._keep(atoms)
        self._refuse_unknown()
        self._settle()
        self._lay_out_pads()

    def has(self, name: str) -> bool:
        """Whether a parameter is still there."""
        return all(block.keeps(name) for block in self.blocks)

    def lost(self, atoms: Tensor) -> Tensor:
        """Which of these positions go."""
        return self.gone[self.graph.classes[atoms]]

    def stays(self, atoms: Tensor) -> Tensor:
        """The positions along an axis that stay, in their new order."""
        classes = self.graph.classes[atoms]
        index = (~self.gone[classes]).nonzero().flatten()
        if self.rank and any(int(c) in self.rank for c in classes):
            ranks = torch.tensor([self.rank.get(int(c), -1) for c in classes[index]])
            index = index[ranks.argsort(stable=True)]
        return index

    # -- which classes go ----------------------------------------------------------------------------------------

    def _keep_what_matters(self) -> None:
        elementwise = [n for n, name in self.graph.names.items() if name in self.graph.scattered and self.has(name)]
        for node in [*self.nodes, *elementwise]:
            atoms, zero, live = (x if isinstance(x, list) else [x] for x in (
                self.graph.look(node), self.flow.zero_of(node), self.flow.live_of(node)))  # fmt: skip
            for a, z, m in zip(atoms, zero, live, strict=True):
                there = m & ~z
                if there.any():
                    self._keep(a[there])

    def _keep(self, atoms: Tensor) -> bool:
        """Let these stay; whether that is news."""
        classes = self.graph.classes[atoms]
        news = bool(self.gone[classes].any())
        self.gone[classes] = False
        return news

    def _refuse_unknown(self) -> None:
        for blocked in self.graph.blocked:
            if blocked.node not in self.absent and self.lost(blocked.atoms).any():
                path, kind = owner(blocked.node)
                gone = set(self.graph.classes[blocked.atoms][self.lost(blocked.atoms)].tolist())
                writers = sorted({
                    name
                    for (name, axis), atoms in self.graph.axes.items()
                    if axis == 0 and len(self.graph.shapes[name]) > 1 and gone & set(self.graph.classes[atoms].tolist())
                })  # fmt: skip
                raise ValueError(
                    f"module {path!r} ({kind}) uses {blocked.node.target}, which is not known here, and channels that "
                    f"the selection removes flow into it (from {', '.join(writers) or 'other layers'}): leave these "
                    "out of the selection; nothing was changed"
                )

    def _settle(self) -> None:
        """Keep more until every operator can work with what is left."""
        crossed = [a for n in self.nodes for a in self._tensors(n) if len(varying(a)) > 1]
        crossed += [a for name, a in self.graph.scattered.items() if self.has(name) and len(varying(a)) > 1]
        changed = True
        while changed:
            changed = False
            for atoms in crossed:
                lost = self.lost(atoms)
                if lost.any():
                    whole = torch.zeros_like(lost)
                    for d in varying(atoms):
                        others = [e for e in range(atoms.ndim) if e != d]
                        whole |= lost.amin(others, keepdim=True)
                    stays = lost & ~whole
                    changed |= bool(stays.any()) and self._keep(atoms[stays])
            for name, g in self.graph.grouped.items():
                if self.has(name):
                    changed |= self._balance(g.groups, g.inner, g.outer)
            for node in self.graph.pads:
                if node not in self.absent:
                    changed |= self._carry(node)
            for (name, _), atoms in self.graph.axes.items():
                if self.has(name) and self.lost(atoms).all() and self._keep(atoms[:1]):
                    self.emptied.append(name)
                    changed = True

    def _tensors(self, node: fx.Node) -> list[Tensor]:
        atoms = self.graph.look(node)
        return atoms if isinstance(atoms, list) else [atoms]

    def _balance(self, groups: int, inner: Tensor, outer: Tensor) -> bool:
        """Groups that are left have equally many inputs, and equally many outputs."""
        if groups == 1:
            return False
        sides = [atoms.view(groups, -1) for atoms in (inner, outer)]
        alive = ~torch.stack([self.lost(side).all(1) for side in sides]).all(0)
        changed = False
        for side in sides:
            lost = self.lost(side)
            width = int((~lost).sum(1).max().clamp_min(1))
            for i in alive.nonzero().flatten().tolist():
                short = width - int((~lost[i]).sum())
                if short > 0:
                    changed |= self._keep(side[i][lost[i]][:short])
        return changed

    def _carry(self, node: fx.Node) -> bool:
        """What comes in through a padded shortcut arrives; what arrives from nowhere can be new, if it can be moved
        behind what is carried."""
        pad = self.graph.pads[node]
        carried = (pad.source >= 0).nonzero().flatten()
        inner, outer = pad.inner[pad.source[carried]], pad.outer[carried]
        coming, arriving = ~self.lost(inner), ~self.lost(outer)
        changed = self._keep(outer[coming]) if bool((coming & ~arriving).any()) else False
        alone = arriving & ~coming
        if alone.any() and node not in self.graph.rewired and not self._movable(pad.outer):
            if self.graph.is_module(node):
                self.graph.rewired.add(node)
            else:
                changed |= self._keep(inner[alone])
        return changed

    # -- the order of what stays ---------------------------------------------------------------------------------

    def _movable(self, atoms: Tensor) -> bool:
        """Whether channels may change places: no operator that they pass depends on their order."""
        if not hasattr(self, "_ordered"):
            self._ordered = torch.zeros(len(self.graph.classes), dtype=torch.bool)
            self._ordered[FIXED] = True
            held: list[Tensor] = []
            for node in self.nodes:
                rule = self.graph.rules[node]
                moves = isinstance(rule, Movement) and rule.touched(self.graph, node) is not None
                if moves or isinstance(rule, (Concatenation, GroupNorm)):
                    held += [a for x in (node, *self.graph.inputs(node)) for a in self._tensors(x)]
                held += [a for a in self._tensors(node) if len(varying(a)) > 1]
            held += [a for g in self.graph.grouped.values() for a in (g.inner, g.outer)]
            for atoms_held in held:
                self._ordered[self.graph.classes[atoms_held]] = True
        return not bool(self._ordered[self.graph.classes[atoms]].any())

    def _lay_out_pads(self) -> None:
        """Where a shortcut carries over fewer channels than stay in its place: what is carried comes first."""
        for node in self.nodes:
            pad = self.graph.pads.get(node)
            if pad is None or node in self.graph.rewired:
                continue
            kept = ~self.lost(pad.outer)
            carried = pad.source >= 0
            coming = torch.zeros_like(kept)
            coming[carried] = ~self.lost(pad.inner[pad.source[carried]])
            if bool((kept & carried & ~coming).any()) or any(
                int(c) in self.rank for c in self.graph.classes[pad.inner]
            ):
                order = self.stays(pad.inner)
                place = {int(p): i for i, p in enumerate(pad.source.tolist()) if p >= 0}
                front = [i for i in range(int(carried.nonzero()[0])) if kept[i]]
                middle = [place[int(p)] for p in order if int(p) in place]
                rest = [i for i in kept.nonzero().flatten().tolist() if i not in {*front, *middle}]
                for rank, i in enumerate([*front, *middle, *rest]):
                    self.rank[int(self.graph.classes[pad.outer[i]])] = rank

    def arrangement(self, node: fx.Node) -> list[int]:
        """For every channel that stays of a rewired padding, its place in what the unchanged code makes."""
        pad = self.graph.pads[node]
        first = int((pad.source >= 0).nonzero()[0])
        come = {int(p): first + i for i, p in enumerate(self.stays(pad.inner))}
        behind = first + len(come) if first == 0 else 0
        return [come.get(int(pad.source[i]), behind) for i in self.stays(pad.outer)]

    def amounts(self, node: fx.Node) -> tuple[int, int]:
        """How many channels a padding adds now, before and after."""
        pad = self.graph.pads[node]
        before = int((~self.lost(pad.outer[: int((pad.source >= 0).nonzero()[0])])).sum())
        return before, len(self.stays(pad.outer)) - len(self.stays(pad.inner)) - before

    # -- what comes of it ----------------------------------------------------------------------------------------

    def shape(self, node: fx.Node, index: int = 0) -> torch.Size:
        """The shape of a tensor afterwards."""
        value = node.meta.get("val")
        if isinstance(value, (list, tuple)):
            shape, atoms = value[index].shape, self.graph.look(node)[index]
        else:
            shape, atoms = shape_of(node), self.graph.look(node)
        sizes = list(shape)
        for d, stays in self.places(atoms).items():
            sizes[d] = len(stays)
        return torch.Size(sizes)

    def places(self, atoms: Tensor) -> dict[int, Tensor]:
        """For every axis that channels lie along, the positions that stay, in their new order."""
        axes = varying(atoms)
        if len(axes) == 1:
            return {axes[0]: self.stays(atoms.flatten())}
        lost = self.lost(atoms)
        return {d: (~lost.amin([e for e in axes if e != d]).flatten()).nonzero().flatten() for d in axes}

    def cuts(self) -> dict[str, Cut]:
        """What stays of every parameter and buffer that loses something or is put in another order."""
        found: dict[str, Cut] = {}

        def cut(name: str) -> Cut:
            return found.setdefault(name, Cut(self.graph.shapes[name]))

        for (name, axis), atoms in self.graph.axes.items():
            index = self.stays(atoms)
            if self.has(name) and not torch.equal(index, torch.arange(len(atoms))):
                cut(name).index[axis] = index
        for name, atoms in self.graph.scattered.items():
            for d, index in self.places(atoms).items() if self.has(name) else ():
                if not torch.equal(index, torch.arange(atoms.shape[d])):
                    cut(name).index[d] = index
        for name in self.graph.grouped:
            if self.has(name) and (columns := self._columns(name)) is not None:
                cut(name).columns, cut(name).groups = columns, self.groups(name)
        return {name: c for name, c in found.items() if c.index or c.columns is not None}

    def _columns(self, name: str) -> Tensor | None:
        """Of a convolution in groups, the columns that stay in each row that does."""
        g = self.graph.grouped[name]
        rows, columns = (g.inner, g.outer) if g.transposed else (g.outer, g.inner)
        there, left = (~self.lost(side).view(g.groups, -1) for side in (rows, columns))
        if bool(there.all()) and bool(left.all()):
            return None
        return torch.stack([left[i].nonzero().flatten() for i in range(g.groups) for _ in range(int(there[i].sum()))])

    def groups(self, name: str) -> int:
        """How many groups a convolution has afterwards."""
        g = self.graph.grouped[name]
        return int((~self.lost(g.outer).view(g.groups, -1).all(1)).sum())

    def suspects(self) -> list[fx.Node]:
        """Operators whose sizes may be written into the network's code, and that lose channels or borrow a size of what
        does."""
        found = []
        for node in self.nodes:
            if node in self.graph.rewired or self.graph.in_attention(node):
                continue
            rule, kind = self.graph.rules[node], owner(node)[1]
            axes = rule.touched(self.graph, node)
            in_groups = isinstance(rule, Affine) and rule.groups(self.graph, node) > 1 and not kind.startswith("Conv")
            of_its_own = kind == "GroupNorm" and self.graph.calls[node].get("weight") is not None
            if in_groups or (isinstance(rule, GroupNorm) and not of_its_own):
                axes = varying(self.graph.look(node))
            if (axes and self._loses(node)) or self.borrowed(node):
                found.append(node)
        return found

    def _loses(self, node: fx.Node) -> bool:
        """Whether channels go from an operator's output or inputs."""
        return any(bool(self.lost(a).any()) for x in (node, *self.graph.inputs(node)) for a in self._tensors(x))

    def borrowed(self, node: fx.Node) -> list[fx.Node]:
        """For an operator that reshapes what loses nothing, the tensors that do lose channels and that one of its sizes
        may be read from (`b, c, h, w = x.shape`): as long along an axis, and used in the same module. For one that
        makes a new tensor, all of that module: its sizes may be computed from theirs."""
        call = self.graph.calls[node]
        sizes: Any = call.get("size", call.get("shape", call.get("sizes")))
        makes = name_of(node) in _MAKING
        reshapes = name_of(node) in ("view", "reshape", "unflatten", "expand") and isinstance(sizes, (list, tuple))
        if not makes and (not reshapes or self._loses(node)):
            return []
        own = [n for n in self.nodes if owner(n)[0] == owner(node)[0]]
        near = dict.fromkeys(x for n in own for x in (n, *self.graph.inputs(n)) if x not in self.graph.names)
        return [
            x for x in near
            if isinstance(x.meta.get("val"), Tensor)
            and any((makes or old in sizes) and new != old for old, new in zip(shape_of(x), self.shape(x), strict=True))
        ]  # fmt: skip

    def warn(self, named: Iterable[str]) -> None:
        """Say which layers of those named would have been left with nothing."""
        named = set(named)
        for name in dict.fromkeys(self.emptied):
            if name in named:
                layer = name.rpartition(".")[0] or name
                warnings.warn(
                    f"nothing of layer {layer!r} is selected, but the network needs it: one channel of zeros stays",
                    UserWarning,
                    stacklevel=4,
                )
