"""What a network costs: parameters and multiply-adds, layer by layer, and what it would cost after a selection."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import fx, nn

from dessilbi.selection import Selection
from dessilbi.surgery.graph import Graph, Inputs, call_arguments
from dessilbi.surgery.nodes import full_name, owner, shape_of
from dessilbi.surgery.plan import Plan
from dessilbi.surgery.rules import Affine, Attention, Einsum, Matmul
from dessilbi.surgery.shrinking import check_network, cut_down, fit, masked_copy, values_of
from dessilbi.timing import compare, interleave


class Layer(NamedTuple):
    """A module with parameters or multiply-adds of its own."""

    name: str
    type: str
    parameters: int
    macs: int


class Profile:
    """Parameters and multiply-adds (MACs: one multiplication with its addition) of one call of a network.

    Convolutions, linear layers, matrix products and attention count; normalisation, activations and additions do not,
    which is what :class:`torch.utils.flop_counter.FlopCounterMode` counts, at two operations a MAC.

    Attributes:
        parameters: how many, shared ones once.
        macs: of the whole batch that was given.
        layers: the same by module.
    """

    def __init__(self, model: nn.Module, example_inputs: Inputs) -> None:
        model = check_network(model)
        self._model, self._inputs = model, example_inputs
        self._graph = Graph.of(model, example_inputs)
        self._seconds: float | None = None
        self._tried: set[fx.Node | str] = set()
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        self.parameters = sum(sizes.values())
        costs = multiply_adds(self._graph, None)
        self.macs = sum(costs.values())
        self.layers = list(_layers(model, sizes, costs))

    def __repr__(self) -> str:
        return f"Profile({self.parameters} parameters, {self.macs} MACs)"

    def parameters_of(self, sel: Selection) -> int:
        """The parameters of the network that `shrink` would make; at level "weight", of its weights those kept."""
        plan = self._plan(sel)
        cuts = plan.cuts()
        masks = sel.masks(self._model) if sel.level == "weight" else {}
        total = 0
        for name, shape in {n: p.shape for n, p in self._model.named_parameters()}.items():
            if name in plan.graph.shapes and plan.has(name):
                if name in masks:
                    mask = masks[name]
                    total += int((cuts[name](mask) if name in cuts else mask).sum())
                else:
                    total += (cuts[name].size if name in cuts else shape).numel()
        return total

    def macs_of(self, sel: Selection) -> int:
        """The multiply-adds of the network that `shrink` would make."""
        plan = self._plan(sel)
        return sum(multiply_adds(plan.graph, plan).values())

    def latency_of(self, sel: Selection, rounds: int = 15) -> float:
        """The time in seconds that the shrunk network takes for the example inputs, measured here and now.

        It is timed in turns with the dense network, so that what else the machine does falls on both alike: the
        result is the dense network's time of the first measurement, divided by how many times as fast this one is.
        """
        args, kwargs = call_arguments(self._inputs)
        networks = {"dense": copy.deepcopy(self._model).eval(), "small": cut_down(self._model, sel, self._inputs).model}
        device = next((str(x.device) for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), "cpu")
        with torch.inference_mode():
            work = {name: partial(network.eval(), *args, **kwargs) for name, network in networks.items()}
            speeds = compare(interleave(work, rounds, device=device), "dense")
        if self._seconds is None:
            self._seconds = speeds["dense"].seconds
        return self._seconds / speeds["small"].ratio

    def _plan(self, sel: Selection) -> Plan:
        if sel.level == "layer":
            return fit(*masked_copy(self._model, sel, self._inputs), self._inputs)[1]
        values = values_of(self._model)
        for name, mask in sel.masks(self._model).items():
            values[name] = values[name].detach() * mask
        plan = Plan(self._graph, values)
        untried: set[fx.Node | str] = {*plan.suspects(), *(block.path for block in plan.blocks)}
        untried -= self._tried
        if untried:
            # Once each, to learn which sizes are written into the network's code, and which modules it needs.
            work = copy.deepcopy(self._model).eval()
            with torch.no_grad():
                for name, p in work.named_parameters():
                    p.copy_(values[name])
            plan = fit(work, self._graph, self._inputs)[1]
            self._tried |= untried
        return plan


def profile(model: nn.Module, example_inputs: Inputs) -> Profile:
    """Parameters and multiply-adds of a network, by layer; `select(path, macs=…, cost=profile(…))` takes it."""
    return Profile(model, example_inputs)


def multiply_adds(graph: Graph, plan: Plan | None) -> dict[str, int]:
    """Multiply-adds by the module that an operator belongs to."""
    found: dict[str, int] = {}
    for node in graph.nodes if plan is None else plan.nodes:
        rule = graph.rules[node]
        if isinstance(rule, (Affine, Matmul, Einsum, Attention)) and isinstance(node.meta.get("val"), torch.Tensor):
            path = owner(node)[0]
            found[path] = found.get(path, 0) + _macs(graph, plan, node)
    return found


def _macs(graph: Graph, plan: Plan | None, node: fx.Node) -> int:
    shape: Callable[[fx.Node], torch.Size] = plan.shape if plan is not None else shape_of
    rule, call = graph.rules[node], graph.calls[node]
    out = shape(node)
    if isinstance(rule, Attention):
        q, k, v = (shape(call[part]) for part in ("query", "key", "value"))
        return q.numel() * k[-2] + q[:-1].numel() * k[-2] * v[-1]
    if isinstance(rule, Matmul):
        a, _ = rule.operands(graph, node)
        return out.numel() * shape(a)[-1]
    if isinstance(rule, Einsum):
        operands, letters, output = rule.parts(graph, node)
        return _contractions([shape(x) for x in operands], letters, output)
    assert isinstance(rule, Affine)
    x, name, _ = rule.parts(graph, node)
    axis, groups = rule.channel_axis(graph, node), rule.groups(graph, node)
    if plan is not None and name in graph.grouped:
        groups = plan.groups(name)
    if "conv" not in full_name(node):
        return out.numel() * shape(x)[axis]
    kernel = shape_of(call["weight"])[2:].numel()
    read, written = (out, shape(x)) if not rule.transposed(node) else (shape(x), out)
    return read.numel() * (written[axis] // groups) * kernel


def _contractions(shapes: Sequence[torch.Size], letters: Sequence[str], output: str) -> int:
    """Multiply-adds of a product written with letters, its operands taken in from left to right."""
    sizes = {
        letter: n for word, shape in zip(letters, shapes, strict=True) for letter, n in zip(word, shape, strict=True)
    }
    total, held = 0, set(letters[0])
    for i, word in enumerate(letters[1:], 2):
        held |= set(word)
        total += math.prod(sizes[letter] for letter in held)
        held &= set(output).union(*letters[i:])
    return total


def _layers(model: nn.Module, sizes: dict[str, int], costs: dict[str, int]) -> Iterable[Layer]:
    owned: dict[str, int] = {}
    for name, size in sizes.items():
        path = name.rpartition(".")[0]
        owned[path] = owned.get(path, 0) + size
    for path, module in model.named_modules():
        if path in owned or path in costs:
            yield Layer(path, type(module).__name__, owned.get(path, 0), costs.get(path, 0))
