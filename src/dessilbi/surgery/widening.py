"""``widen``: more filters in some layers, and a network that computes what it computed before."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from dessilbi.groups import Labels
from dessilbi.surgery import state
from dessilbi.surgery.costs import multiply_adds
from dessilbi.surgery.graph import FIXED, Graph, Inputs
from dessilbi.surgery.nodes import inside, owner
from dessilbi.surgery.shrinking import check_network, same_outputs
from dessilbi.surgery.widening_network import Grew, Start, ascend, doubled, fill, stretched
from dessilbi.surgery.widening_plan import Layer, Stretch, carried, chosen, layers_of, streams, sums, templates
from dessilbi.surgery.widening_values import regroup

INITS = ("zero", "random", "gradmax", "split")


def widen(
    model: nn.Module,
    extra: Mapping[str, int],
    example_inputs: Inputs,
    optimizer: Optimizer | None = None,
    *,
    init: str = "zero",
    generator: torch.Generator | None = None,
    loss: Callable[[nn.Module], Tensor] | None = None,
) -> nn.Module:
    """A wider copy of the network, with the same outputs.

    New filters are drawn as He et al. (2015) do, and what they feed gets weights of zero for them: the outputs are what
    they were, in training mode too, and the first gradient of these weights is not zero. New entries of normalisations
    are the identity, new biases zero. With a filter come its normalisation's entries and the input channels of whatever
    reads it: behind a concatenation where they belong, behind a flattening as many as a channel has pixels; a depthwise
    convolution gets more groups.

    A residual stream grows as a whole: naming any layer that writes it is enough, and of several amounts the largest
    counts. A shortcut that pads (option A) carries the new channels over, so that the streams behind grow by as many at
    least; those are new ones there too. Convolutions in groups keep their groups, which get wider: the amount must be
    a multiple of their number.

    Args:
        model: any network that torch.export can follow. It is not changed.
        extra: how many filters or neurons a layer gets, by the layer's path: ``{"features.3": 8}``.
        example_inputs: a tensor, a tuple of positional or a dict of keyword arguments for the network.
        optimizer: of the network; it is moved over to the new parameters. Momentum, V and all other state of what
            was there stays, that of new entries is zero.
        init: how new filters start. "zero": as above. "random": what they feed gets small random weights (the outputs
            then change a little). "split": they are copies of filters chosen at random, and what reads both gets half
            of the old weight for each, plus and minus a small random amount (NASH; the outputs stay). "gradmax": as
            "zero", but the filters are those for which the gradient of the weights that they feed is largest
            (:mod:`dessilbi.surgery.widening_ascent`; needs `loss`).
        generator: on the CPU, for the random numbers.
        loss: gives a network's loss, on a batch of the training data: ``lambda net: cross_entropy(net(x), y)``.

    Where a selection is in force (`sel.apply(model)`), it is so on the new network as well; new filters are free.
    """
    return Widening(model, example_inputs).apply(extra, optimizer, init=init, generator=generator, loss=loss)


class Widening:
    """What a network can grow by, and what that costs; `apply` does it.

    Args:
        model, example_inputs: as in :func:`widen`.
    """

    def __init__(self, model: nn.Module, example_inputs: Inputs) -> None:
        check_network(model)
        self.model, self.example_inputs = model, example_inputs
        self.graph = Graph.of(model, example_inputs)
        self._layers = {layer.path: layer for layer in layers_of(self.graph)}
        self._start = Start(model, example_inputs, self.graph, self._layers)
        self._sums = {node: set(classes.tolist()) for node, classes in sums(self.graph)}
        self._doubled: dict[tuple[str, ...], Widening] = {}

    @property
    def streams(self) -> list[list[str]]:
        """The layers that can grow; those that write the same channels, and grow together, as one entry."""
        can = {path: layer for path, layer in self._layers.items() if self._why_not(layer) is None}
        single = [[path] for path, layer in can.items() if len(layer.atoms) == 1]
        return sorted([*streams(self.graph, can), *single], key=lambda stream: list(can).index(stream[0]))

    @property
    def widths(self) -> dict[str, int]:
        """How many filters or neurons every layer has."""
        return {path: len(layer.atoms) for path, layer in self._layers.items()}

    def width(self, path: str) -> int:
        """How many one has that can grow."""
        return len(self._layer(path).atoms)

    def multiple(self, path: str) -> int:
        """What the amount for a layer must be a multiple of."""
        layer = self._layer(path)
        if len(layer.atoms) == 1:
            return 1
        classes, wanted = self.graph.classes[layer.atoms], templates(self.graph, layer)
        return int(torch.isin(classes, wanted).sum())

    def rigid(self, path: str) -> bool:
        """Whether sizes written into the network's code keep a layer from growing, which only trying it out tells."""
        try:
            self._grow({path: self.multiple(path)}, None)
        except ValueError:
            return True
        return False

    def parameters(self, extra: Mapping[str, int]) -> int:
        """How many parameters the wider network would have."""
        single, rest = self._single(extra)
        if single:
            return self._with_two(single).parameters(rest)
        sizes = self._stretch(extra).sizes() if extra else {}
        return sum(sizes.get(name, p.shape).numel() for name, p in self.model.named_parameters())

    def macs(self, extra: Mapping[str, int]) -> int:
        """Its multiply-adds, of the example inputs."""
        single, rest = self._single(extra)
        if single:
            return self._with_two(single).macs(rest)
        return sum(multiply_adds(self.graph, self._stretch(extra) if extra else None).values())

    def apply(
        self,
        extra: Mapping[str, int],
        optimizer: Optimizer | None = None,
        *,
        init: str = "zero",
        generator: torch.Generator | None = None,
        loss: Callable[[nn.Module], Tensor] | None = None,
    ) -> nn.Module:
        """As :func:`widen`."""
        if init not in INITS:
            raise ValueError(f"init={init!r}: choose one of {', '.join(INITS)}")
        if (init == "gradmax") != (loss is not None):
            raise ValueError(
                f"init={init!r}: "
                + ("give loss, a function of a network" if loss is None else "loss is not used; leave it out")
            )
        generator = generator or _generator()
        single, rest = self._single(extra)
        if single:
            grew = doubled(self._start, single)
            if rest:  # what is to be refused is, before anything changes
                self._with_two(single)._grow(rest, None)
        else:
            grew = self._grow(extra, generator if init == "split" else None)
        fill(grew, self.model, init, generator)
        if init != "random" and not self._same(grew.model):
            raise RuntimeError(
                "the wider network does not compute what the network computes; nothing was changed. Its forward may "
                "use sizes in a way that the exported graph does not show: please report it"
            )
        if loss is not None:
            ascend(grew, loss)
        if optimizer is not None:
            self._check_groups(optimizer, grew)
            state.move(optimizer, self.model, grew.model, grew.insertions, lambda group, names: regroup(
                group, names, grew.plan.graph))  # fmt: skip
        state.carry_masks(self.model, grew.model, grew.insertions, set())
        if single and rest:
            further = Widening(grew.model, self.example_inputs)
            return further.apply(rest, optimizer, init=init, generator=generator, loss=loss)
        return grew.model

    # -- how much ------------------------------------------------------------------------------------------------

    def _layer(self, path: str) -> Layer:
        if path not in self._layers:
            from difflib import get_close_matches

            near = get_close_matches(str(path), self._layers, n=1)
            there = path in dict(self.model.named_modules())
            what = "a layer without filters of its own" if there else "not a layer of this network"
            advice = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(self._layers)}"
            raise ValueError(f"extra names {path!r}, {what}: {advice}")
        layer = self._layers[path]
        reason = self._why_not(layer)
        if reason is not None:
            raise ValueError(f"extra names {path!r}: {reason}; name another layer")
        return layer

    def _why_not(self, layer: Layer) -> str | None:
        """What keeps a layer as wide as it is."""
        graph, classes = self.graph, set(self.graph.classes[layer.atoms].tolist())
        if len(layer.atoms) == 1:
            try:
                base = self._with_two((layer.path,))
            except ValueError as error:
                return str(error)
            return base._why_not(base._layers[layer.path])
        if classes == {FIXED}:
            return "its channels are outputs of the network, or an operator needs all of them as they are"
        for blocked in graph.blocked:
            if classes & set(graph.classes[blocked.atoms].flatten().tolist()) - {FIXED}:
                path, kind = owner(blocked.node)
                return f"its channels flow into module {path!r} ({kind}), whose {blocked.node.target} is not known here"
        touched = {
            name.rpartition(".")[0]
            for (name, _), atoms in graph.axes.items()
            if classes & set(graph.classes[atoms].tolist()) - {FIXED}
        }
        for place_ in (*graph.attention, *graph.rigid):
            if any(inside(path, place_) for path in touched):
                return f"its channels are those of the attention {place_!r}, which keeps its width"
        for node, summed in self._sums.items():
            if classes & summed:
                return f"module {owner(node)[0]!r} adds up its channels, and would count new ones"
        if not len(templates(graph, layer)):
            return "its channels meet convolutions in groups that they cannot be dealt out to"
        return None

    def _stretch(self, extra: Mapping[str, int], generator: torch.Generator | None = None) -> Stretch:
        """What the network would be; with a generator the channels that new ones are copies of are drawn."""
        if not isinstance(extra, Mapping) or not extra:
            raise ValueError(f"extra={extra!r}: give the number of new filters by layer, such as {{'features.3': 8}}")
        asked = {path: (self._layer(path), _amount(path, n)) for path, n in extra.items()}
        order = {path: i for i, path in enumerate(self._layers)}
        own = torch.zeros(len(self.graph.classes), dtype=torch.long)
        for path in sorted(asked, key=order.__getitem__):
            layer, amount = asked[path]
            missing = amount - int(carried(self.graph, own)[self.graph.classes[layer.atoms]].sum())
            step = self.multiple(path)
            if missing > 0:
                if missing % step:
                    raise ValueError(
                        f"extra[{path!r}]={amount}: its channels come in steps of {step} (groups, or pixels of a "
                        f"channel): give {amount + step - missing % step}"
                    )
                count = missing // step
                if generator is None:
                    own[templates(self.graph, layer)] += count
                else:
                    drawn = chosen(self.graph, layer, count, generator)
                    own.index_add_(0, drawn, torch.ones_like(drawn))
        return Stretch(self.graph, carried(self.graph, own))

    def _single(self, extra: Mapping[str, int]) -> tuple[tuple[str, ...], Mapping[str, int]]:
        """The layers to grow that have one filter, and what is still to come when they have two."""
        known = extra if isinstance(extra, Mapping) else {}
        single = tuple(path for path in self._layers if path in known and len(self._layers[path].atoms) == 1)
        if not single:
            return (), extra
        rest = {path: _amount(path, n) - (path in single) for path, n in extra.items() if self._layer(path)}
        return single, {path: n for path, n in rest.items() if n}

    def _with_two(self, paths: tuple[str, ...]) -> Widening:
        """The network with two filters in layers that have one."""
        if paths not in self._doubled:
            self._doubled[paths] = Widening(doubled(self._start, paths).model, self.example_inputs)
        return self._doubled[paths]

    def _grow(self, extra: Mapping[str, int], generator: torch.Generator | None) -> Grew:
        stretch = self._stretch(extra, generator)
        grew = stretched(self._start, stretch)
        if grew is None:
            modules = sorted({repr(owner(node)[0]) for node in stretch.suspects()})
            raise ValueError(
                f"extra={dict(extra)!r}: the network cannot grow there: sizes are written into the code of "
                f"{', '.join(modules) or 'a module'}; name other layers, or other amounts"
            )
        return grew

    # -- what has to hold ----------------------------------------------------------------------------------------

    def _same(self, wide: nn.Module) -> bool:
        # On the CPU: a GPU may round to ten bits (TF32), and otherwise for other shapes.
        models = [copy.deepcopy(m).cpu() if any(p.is_cuda for p in m.parameters()) else m for m in (self.model, wide)]
        inputs = tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, self.example_inputs)
        training = [m for model in models for m in model.modules() if m.training]
        try:
            return same_outputs(models[0].eval(), models[1].eval(), inputs)
        finally:
            for module in training:
                module.training = True

    def _check_groups(self, optimizer: Optimizer, grew: Grew) -> None:
        names = {id(p): name for name, p in self.model.named_parameters()}
        for group in getattr(optimizer, "param_groups", ()):
            kinds = group.get("group")
            for i, p in enumerate(group["params"]):
                kind = kinds[i] if isinstance(kinds, (list, tuple)) else kinds
                if isinstance(kind, Labels) and names.get(id(p)) in grew.insertions:
                    raise ValueError(
                        f"optimizer: {names[id(p)]} has groups written out element by element (Labels), which say "
                        "nothing of new filters: make a new optimizer for the wider network"
                    )


def _amount(path: str, n: Any) -> int:
    try:
        if isinstance(n, bool):
            raise TypeError
        amount = operator.index(n)
    except TypeError:
        raise TypeError(f"extra[{path!r}]={n!r}: give a whole number") from None
    if amount < 1:
        raise ValueError(f"extra[{path!r}]={amount}: give a whole number of at least 1")
    return amount


def _generator() -> torch.Generator:
    """Seeded by torch's own."""
    return torch.Generator().manual_seed(int(torch.randint(2**62, ())))
