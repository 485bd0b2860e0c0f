"""What the weights say: where tensors are provably zero, and which positions the output depends on at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dessilbi.surgery.graph import Graph
from dessilbi.surgery.nodes import aligned, reduced


class Flow:
    """One pass forward for the zeros and one backward for what matters.

    Args:
        graph: of the network.
        values: its parameters and buffers; what a selection leaves out is zero in them.
        silencing: normalisations give nothing where they are given nothing: what of their scales and shifts must be
            zero for that is collected in `silent`, as masks of what stays.
    """

    def __init__(self, graph: Graph, values: Mapping[str, Tensor], silencing: bool = False) -> None:
        self.graph = graph
        self.silencing = silencing
        self.silent: dict[str, Tensor] = {}
        self._values = values
        self._used: dict[str, Tensor] = {}
        self._zero: dict[fx.Node, Any] = {}
        self._live: dict[fx.Node, Any] = {}
        for n in graph.nodes:
            self._zero[n] = graph.rules[n].zero(self, n)
        for n in graph.outputs:
            self.need_all(n)
        for n in reversed(graph.nodes):
            live = self.live_of(n)
            matters = [a & ~z for a, z in zip(live, self._zero[n], strict=True)] if isinstance(live, list) else (
                live & ~self._zero[n])  # fmt: skip
            if any(bool(m.any()) for m in (matters if isinstance(matters, list) else [matters])):
                graph.rules[n].live(self, n, matters)

    # -- what the rules ask --------------------------------------------------------------------------------------

    def value(self, name: str) -> Tensor:
        """A parameter or buffer, on the CPU."""
        return self._values[name].detach().cpu()

    def used(self, name: str) -> Tensor:
        """Where a weight is not zero, by its first two axes."""
        if name not in self._used:
            weight = self._values[name].detach()
            there = weight != 0
            self._used[name] = (there.flatten(2).any(2) if there.ndim > 2 else there).cpu()
        return self._used[name]

    def zero_of(self, node: fx.Node) -> Any:
        """Where a tensor is zero, in the compact form of its atoms."""
        if node not in self._zero:
            atoms, name = self.graph.look(node), self.graph.names.get(node)
            if name is None:
                self._zero[node] = torch.zeros_like(atoms, dtype=torch.bool)
            else:
                self._zero[node] = reduced(self.value(name) == 0, atoms.shape, "all")
        return self._zero[node]

    def live_of(self, node: fx.Node) -> Any:
        """Which positions of a tensor matter."""
        if node not in self._live:
            atoms = self.graph.look(node)
            self._live[node] = (
                [torch.zeros_like(a, dtype=torch.bool) for a in atoms]
                if isinstance(atoms, list)
                else torch.zeros_like(atoms, dtype=torch.bool)
            )
        return self._live[node]

    def silence(self, affine: Sequence[fx.Node | None], off: Tensor) -> bool:
        """Note that a scale and a shift are to be zero here; False if there are none, or if nothing is collected."""
        if not self.silencing or any(x not in self.graph.names for x in affine):
            return False
        for x in affine:
            name = self.graph.names[x]  # type: ignore[index]
            self.silent[name] = self.silent.get(name, torch.ones_like(off)) & ~off
        return True

    # -- what the rules tell -------------------------------------------------------------------------------------

    def need(self, node: fx.Node, where: Tensor) -> None:
        """These positions matter."""
        live = self.live_of(node)
        where = reduced(aligned(where, max(where.ndim, live.ndim)), live.shape, "any")
        self._live[node] = live | where

    def need_part(self, node: fx.Node, index: int, where: Tensor) -> None:
        """These positions of one of several outputs matter."""
        live = self.live_of(node)
        if isinstance(live, list):
            live[index] = live[index] | where
        else:
            self.need_all(node)

    def need_all(self, node: fx.Node) -> None:
        live = self.live_of(node)
        for x in live if isinstance(live, list) else [live]:
            x.fill_(True)
