"""A ticket: a sub-network to be trained, as one small file that another data set or seed can take up."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dessilbi import files
from dessilbi.files import array, tensor
from dessilbi.selection import Selection
from dessilbi.wrappers import clean, unwrap

_VERSION = 1


class Ticket:
    """What is kept, the weights it starts from, and where both come from.

    The weights are those of the point it rewinds to (Frankle et al., Linear mode connectivity and the lottery ticket
    hypothesis, ICML 2020), of all parameters and buffers. Weights that the selection takes out are no part of it: on
    disk, a ticket costs a bit for every weight and its value for those that are kept.

    Args:
        selection: what is kept.
        weights: the network's state at the point of rewinding, as `state_dict()` has it.
        facts: plain data: the `data` set that it was found on, and what else is worth knowing.

    Example:
        >>> ticket = Ticket(sel, early_weights, {"data": "mnist"})
        >>> ticket.save("lenet.ticket")
        >>> with Ticket.load("lenet.ticket").place(model, "mnist").apply(model):
        ...     train(model)
    """

    def __init__(self, selection: Selection, weights: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        if "data" not in facts:
            raise ValueError("facts lack 'data': say on which data set the ticket was found")
        self.selection = selection
        self.facts = dict(facts)
        self.weights: dict[str, Tensor] = {}
        for name, value in weights.items():
            value = value.detach().cpu().clone()
            mask = selection.get(name)
            if mask is not None and mask.shape == value.shape:
                value.masked_fill_(~mask.cpu(), 0)
            self.weights[clean(name)] = value
        missing = [name for name in selection if name not in self.weights]
        if missing:
            raise ValueError(f"the weights lack {missing[0]}, which the selection speaks of")

    def __repr__(self) -> str:
        return f"Ticket({self.selection!r}, found on {self.facts['data']})"

    @torch.no_grad()
    def place(self, model: nn.Module, data: str, seed: int = 0) -> Selection:
        """Give a network the weights of the ticket; returns what is to be kept of it, to be applied.

        On another data set than the ticket's, the output layer means something else: its weights stay as the network
        has them, and if its number of classes differs, as many of them in proportion are kept, at places drawn with
        `seed`. Everything else is taken over, and must have the same shape.
        """
        inner = unwrap(model)
        there = {clean(name): value for name, value in inner.state_dict().items()}
        fresh = set() if _classes(data) == _classes(self.facts["data"]) else _head(inner)
        for name, value in self.weights.items():
            if name not in there:
                raise ValueError(f"the ticket has {name!r} and the network has not: it is of another network")
            if name not in fresh and there[name].shape != value.shape:
                raise ValueError(
                    f"{name} has shape {tuple(there[name].shape)} in the network and {tuple(value.shape)} in the "
                    "ticket: take the ticket's model and model_options, and input_shape for data of other channels"
                )
        missing = [name for name in there if name not in self.weights]
        if missing:
            raise ValueError(f"the network has {missing[0]!r} and the ticket has not: it is of another network")
        for name, value in self.weights.items():
            if name not in fresh:
                there[name].copy_(value)
        if not fresh:
            return self.selection
        generator = torch.Generator().manual_seed(seed)
        kept = {name: _drawn(mask, there[name], generator) if name in fresh else mask
                for name, mask in self.selection.items()}  # fmt: skip
        return Selection(kept, self.selection.level, self.selection.source, self.selection.along)

    # -- files ---------------------------------------------------------------------------------------------------

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the ticket; an old file is replaced only when all is on disk."""
        masks, described = self.selection.packed()
        arrays = {f"mask.{name}": packed for name, packed in masks.items()}
        weights = []
        for i, (name, value) in enumerate(self.weights.items()):
            mask = self._mask(name)
            arrays[f"{i}"], dtype = array(value if mask is None else value[mask])
            weights.append({"name": name, "shape": list(value.shape), "dtype": dtype})
        header = {"selection": described, "weights": weights, "facts": self.facts}
        files.save_arrays(file, "ticket", _VERSION, arrays, header)

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Ticket:
        """Read a ticket."""
        arrays, header = files.load_arrays(file, "ticket", _VERSION)
        try:
            masks = {name.removeprefix("mask."): packed for name, packed in arrays.items() if name.startswith("mask.")}
            ticket = cls.__new__(cls)
            ticket.selection, ticket.facts = Selection.unpacked(masks, header["selection"]), dict(header["facts"])
            ticket.weights = {}
            for i, w in enumerate(header["weights"]):
                value, mask = tensor(arrays[f"{i}"], w["dtype"]), ticket.selection.get(w["name"])
                if mask is not None and list(mask.shape) == w["shape"] and mask.ndim > 0:
                    value = torch.zeros(w["shape"], dtype=value.dtype).masked_scatter_(mask, value)
                ticket.weights[w["name"]] = value.view(w["shape"])
            return ticket
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{os.fspath(file)}: damaged ticket file ({error})") from None

    def _mask(self, name: str) -> Tensor | None:
        """The mask of a tensor of which single weights are kept."""
        mask = self.selection.get(name)
        return mask if mask is not None and mask.shape == self.weights[name].shape and mask.ndim > 0 else None


def _classes(data: str) -> str:
    """The name of a data set without a limit such as [:5000], which leaves the classes as they are."""
    return re.sub(r"\[:[^\]]*\]", "", data)


def _head(model: nn.Module) -> set[str]:
    """The names of what the last layer holds: what says which class is which."""
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd))
    ]
    if not layers:
        raise ValueError("the network has no convolution or linear layer: its output layer cannot be told")
    name, module = layers[-1]
    return {clean(f"{name}.{part}".lstrip(".")) for part in module.state_dict()}


def _drawn(mask: Tensor, value: Tensor, generator: torch.Generator) -> Tensor:
    """A mask of the same proportion for a tensor of another shape: at random; of the same shape, the mask itself."""
    shape = value.shape if mask.ndim == value.ndim else value.shape[:1]
    if mask.shape == shape or mask.numel() == 1:
        return mask
    drawn = torch.zeros(shape.numel(), dtype=torch.bool)
    kept = round(int(mask.sum()) / mask.numel() * drawn.numel())
    drawn[torch.randperm(drawn.numel(), generator=generator)[:kept]] = True
    return drawn.view(shape)
