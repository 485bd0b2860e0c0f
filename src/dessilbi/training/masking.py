"""The sparse network for a moment: what is outside the support is zero inside a ``with``, and comes back exactly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dessilbi.groups import Elements, Partition, Slices
from dessilbi.optim import DessiAdamW, DessiLBI

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.GroupNorm)
_WRITERS = (nn.modules.conv._ConvNd, nn.Linear)
_CHANNELS = ("filter", "neuron", "layer")


@contextmanager
def masked(model: nn.Module, optimizer: DessiLBI | DessiAdamW) -> Iterator[None]:
    """Inside the `with`, the model is the sparse one: M ⊙ W, with M the support of Γ.

    Where filters, neurons or whole layers are the groups, a channel that is out is zero altogether: its weights, its
    bias, and the scale and shift of the normalisation that follows. That normalisation is the next one among the
    children of the same module, before any other convolution or linear layer, if it has as many channels. So it is
    found in all networks of :mod:`dessilbi.models`; in a network that orders its modules otherwise the weight and
    bias are masked and the normalisation is left alone, and the channel is then a constant, not absent.

    Parameters keep their addresses, so that a CUDA graph that holds them stays valid. Afterwards every parameter has
    the bits it had.
    """
    masks = _masks(model, optimizer)
    saved = [(p, p.detach().clone()) for p, _ in masks]
    try:
        with torch.no_grad():
            for p, mask in masks:
                p.masked_fill_(~mask, 0)
        yield
    finally:
        with torch.no_grad():
            for p, value in saved:
                p.copy_(value)


@torch.no_grad()
def _masks(model: nn.Module, optimizer: DessiLBI | DessiAdamW) -> list[tuple[Tensor, Tensor]]:
    """The parameters to mask and their elementwise masks, each parameter once."""
    owners = {id(p): (module, name) for module in model.modules() for name, p in module.named_parameters(recurse=False)}
    following = _following_norms(model)
    masks: dict[int, tuple[Tensor, Tensor]] = {}

    def add(p: Tensor | None, mask: Tensor) -> None:
        if p is not None:
            masks[id(p)] = (p, masks[id(p)][1] & mask if id(p) in masks else mask)

    for p, part in optimizer.penalised():
        support = optimizer.support(p)
        add(p, _elementwise(p, part, support))
        module, name = owners.get(id(p), (None, ""))
        if module is None or name != "weight" or part.kind not in _CHANNELS or not isinstance(module, _WRITERS):
            continue
        channels = support.expand(_channels(module)) if part.kind == "layer" else support
        if channels.numel() != _channels(module):
            continue
        add(module.bias, channels)
        norm = following.get(id(module))
        if norm is not None:
            add(norm.weight, channels)  # type: ignore[arg-type]
            add(norm.bias, channels)  # type: ignore[arg-type]
    return list(masks.values())


def _elementwise(p: Tensor, part: Partition, support: Tensor) -> Tensor:
    """One decision a group, spread over the elements of the tensor."""
    if isinstance(part, Elements):
        return support
    mask = torch.empty_like(p, dtype=torch.bool)
    view = part.split(mask)
    if isinstance(part, Slices):
        shape = [n if axis in part.axes else 1 for axis, n in enumerate(view.shape)]
        support = support.view(shape)
    view.copy_(part.spread(support))
    return mask


def _following_norms(model: nn.Module) -> dict[int, nn.Module]:
    """For every convolution and linear layer that has one, the normalisation of its output."""
    found: dict[int, nn.Module] = {}
    for parent in model.modules():
        writer: nn.Module | None = None
        for child in parent.children():
            if isinstance(child, _WRITERS):
                writer = child
            elif isinstance(child, _NORMS) and writer is not None:
                if _normalised(child) == _channels(writer) and child.weight is not None:
                    found[id(writer)] = child
                writer = None
    return found


def _channels(module: nn.Module) -> int:
    return int(module.out_features if isinstance(module, nn.Linear) else module.out_channels)  # type: ignore[arg-type]


def _normalised(module: nn.Module) -> int:
    return int(module.num_channels if isinstance(module, nn.GroupNorm) else module.num_features)  # type: ignore[arg-type]
