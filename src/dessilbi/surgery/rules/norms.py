"""Normalisations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from dessilbi.surgery.nodes import (
    along,
    onto,
    reduced,
    shape_of,
    varying,
)
from dessilbi.surgery.rules.base import PINNED, Rule, at_axis, channels, no, only_along

if TYPE_CHECKING:
    from dessilbi.surgery.flow import Flow
    from dessilbi.surgery.graph import Graph


class Norm(Rule):
    """Batch and instance normalisation: every channel on its own."""

    def link(self, g: Graph, n: fx.Node) -> None:
        call = g.calls[n]
        x = call["input"]
        atoms = g.look(x)
        if not only_along(atoms, 1) or g.computed(call, "weight", "bias", "running_mean", "running_var"):
            PINNED.link(g, n)
            return
        g.atoms[n] = atoms
        inner = channels(atoms, x, 1)
        for part in ("weight", "bias", "running_mean", "running_var"):
            if call.get(part) is not None:
                g.tie(inner, g.axis(g.names[call[part]], 0))

    def _off(self, f: Flow, n: fx.Node) -> tuple[Tensor, Tensor]:
        """Where the scale is zero, and where a channel of zeros comes out as zero."""
        call, like = f.graph.calls[n], f.graph.atoms[n]
        size = shape_of(call["input"])[1]

        def zero(part: str, absent: bool) -> Tensor:
            if call.get(part) is None:
                return torch.full((size,), absent)
            return f.value(f.graph.names[call[part]]) == 0

        shift = zero("bias", True)
        flat, clean = zero("weight", False), shift & (zero("running_mean", True) | bool(call.get("use_input_stats")))
        shape = [s if d == 1 else 1 for d, s in enumerate(like.shape)]
        if like.shape[1] == 1:
            return flat.all().view(shape), clean.all().view(shape)
        return (flat & shift).view(shape), clean.view(shape)

    def zero(self, f: Flow, n: fx.Node) -> Tensor:
        if n in f.graph.pinned:
            return no(f.graph.atoms[n])
        flat, clean = self._off(f, n)
        call = f.graph.calls[n]
        zero: Tensor = f.zero_of(call["input"])
        if f.silence((call.get("weight"), call.get("bias")), channels(zero, n, 1)):
            return flat.expand(zero.shape) | zero
        return flat.expand(zero.shape) | (zero & clean)

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        f.need_all(f.graph.calls[n]["input"]) if n in f.graph.pinned else f.need(f.graph.calls[n]["input"], out)


class GroupNorm(Rule):
    """Channels of a group share their statistics: they go together."""

    def link(self, g: Graph, n: fx.Node) -> None:
        call = g.calls[n]
        x, groups = call["input"], call["num_groups"]
        atoms = g.look(x)
        if not only_along(atoms, 1) or not varying(atoms) or g.computed(call, "weight", "bias"):
            PINNED.link(g, n)
            return
        g.atoms[n] = atoms
        inner = channels(atoms, x, 1)
        g.tie(inner.view(groups, -1), inner.view(groups, -1)[:, :1])
        for part in ("weight", "bias"):
            if call.get(part) is not None:
                g.tie(inner, g.axis(g.names[call[part]], 0))

    def zero(self, f: Flow, n: fx.Node) -> Tensor:
        call = f.graph.calls[n]
        if n in f.graph.pinned:
            return no(f.graph.atoms[n])
        zero, size = f.zero_of(call["input"]), shape_of(call["input"])[1]
        shift = torch.ones(size, dtype=torch.bool) if call.get("bias") is None else f.value(
            f.graph.names[call["bias"]]) == 0  # fmt: skip
        flat = torch.zeros(size, dtype=torch.bool) if call.get("weight") is None else f.value(
            f.graph.names[call["weight"]]) == 0  # fmt: skip
        inner = along(reduced(zero, at_axis(zero, 1), "all"), 1, size)
        if f.silence((call.get("weight"), call.get("bias")), inner):
            shift, flat = shift | inner, flat | inner
        whole = inner.view(call["num_groups"], -1).all(1, keepdim=True).expand(-1, size // call["num_groups"]).flatten()
        return reduced(onto(shift & (flat | whole), 1, zero.ndim), f.graph.atoms[n].shape, "all")

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        call = f.graph.calls[n]
        if n in f.graph.pinned:
            f.need_all(call["input"])
            return
        size, groups = shape_of(n)[1], call["num_groups"]
        vector = along(out, 1, size).view(groups, -1).any(1, keepdim=True).expand(-1, size // groups).flatten()
        f.need(call["input"], onto(vector, 1, out.ndim))


class LayerNorm(Rule):
    """Mixes the last axes: channels that lie along them stay."""

    def link(self, g: Graph, n: fx.Node) -> None:
        call = g.calls[n]
        atoms = g.atoms[n] = g.look(call["input"])
        if g.computed(call, "weight", "bias") or any(
            d >= atoms.ndim - len(call["normalized_shape"]) for d in varying(atoms)
        ):
            g.pin(atoms)

    def zero(self, f: Flow, n: fx.Node) -> Tensor:
        call = f.graph.calls[n]
        zero = f.zero_of(call["input"])
        bias = call.get("bias")
        clean = bias is None or (bias in f.graph.names and not f.value(f.graph.names[bias]).any())
        return zero if clean else no(zero)

    def live(self, f: Flow, n: fx.Node, out: Tensor) -> None:
        axes = len(f.graph.calls[n]["normalized_shape"])
        f.need(f.graph.calls[n]["input"], out.any(tuple(range(out.ndim - axes, out.ndim)), keepdim=True))
