"""How masks lie on tensors, and what goes with the filters they take out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dessilbi import sharding
from dessilbi.groups import Partition, Slices

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.GroupNorm)
_WRITERS = (nn.modules.conv._ConvNd, nn.Linear)


def elementwise(decisions: Tensor, part: Partition, shape: Sequence[int]) -> Tensor:
    """One decision a group, spread over the elements of the tensor."""
    mask = torch.empty(tuple(shape), dtype=torch.bool, device=decisions.device)
    view = part.split(mask)
    if isinstance(part, Slices):
        decisions = decisions.view([n if axis in part.axes else 1 for axis, n in enumerate(view.shape)])
    else:  # in the shape that `spread` takes, which is that of the norms
        decisions = decisions.view(part.norms(part.split(torch.zeros(tuple(shape), device=decisions.device))).shape)
    view.copy_(part.spread(decisions))
    return mask


def is_mask(part: Partition, lie: Slices) -> bool:
    """Whether one decision a group is a mask as it is: one a filter, or one in all."""
    return isinstance(part, Slices) and (part.axes == () or (part.axes, part.fold) == (lie.axes, lie.fold))


def shard(mask: Tensor, p: Tensor) -> Tensor:
    """This rank's part of a mask."""
    if not sharding.is_sharded(p):
        return mask
    from torch.distributed.tensor import distribute_tensor

    # Every rank has the whole mask: no communication.
    local: Tensor = distribute_tensor(mask, p.device_mesh, p.placements, src_data_rank=None).to_local()  # type: ignore[attr-defined]
    return local


def writers_of(model: nn.Module) -> dict[int, list[tuple[nn.Module, Any]]]:
    """The modules that write channels, and their biases, by their weights."""
    found: dict[int, list[tuple[nn.Module, Any]]] = {}
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) or type(module).__name__ == "HeadAttention":
            weight, bias = module._parameters["in_proj_weight"], module._parameters["in_proj_bias"]
        elif isinstance(module, _WRITERS):
            weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        else:
            continue
        if weight is not None:
            found.setdefault(id(weight), []).append((module, bias))
    return found


def following_norms(model: nn.Module) -> dict[int, nn.Module]:
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
