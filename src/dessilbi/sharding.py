"""Parameters that are spread over ranks (DTensors, as FSDP2's `fully_shard` makes them).

Sharded along the first axis, whole filters, rows and elements lie on one rank: the step works on the local shards and
needs no communication. What would need some (columns, layers, ρ of magnitude scaling) is refused.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from torch import Tensor

from dessilbi.groups import Elements, Partition, Slices


def is_sharded(t: Any) -> bool:
    """Whether this is a DTensor; whoever has one has imported their module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def local(t: Any) -> Any:
    """This rank's part; anything but a DTensor as it is."""
    return t.to_local() if is_sharded(t) else t


def whole(t: Tensor) -> Tensor:
    """The full tensor on every rank: a collective where it is a DTensor, so all ranks must ask."""
    return t.full_tensor() if is_sharded(t) else t  # type: ignore[attr-defined,no-any-return]


def like(part: Tensor, p: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A result computed on the local shard of `p`, as a DTensor of this global shape; unsharded, as it is."""
    if not is_sharded(p):
        return part
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    d: Any = p
    wrapped: Tensor = d.from_local(part, d.device_mesh, d.placements, run_check=False, shape=shape, stride=stride)
    return wrapped


def check(name: str, p: Tensor, part: Partition, scaling: bool) -> None:
    """Raise a ValueError if the groups of a DTensor do not lie whole on one rank."""
    if not is_sharded(p):
        return
    if part.coupling is not None:
        raise ValueError(
            f"{name} is a DTensor, and groups of kind {part.kind!r} span tensors; "
            "use 'filter' or 'neuron', or train with DistributedDataParallel"
        )
    placements = p.placements  # type: ignore[attr-defined]
    if all(x.is_replicate() for x in placements):
        return
    if any(not x.is_replicate() and not x.is_shard(0) for x in placements):
        raise ValueError(f"{name} is sharded as {placements}; DessiLBI takes parameters sharded along dimension 0 only")
    if not isinstance(part, Elements) and not (isinstance(part, Slices) and part.axes == (0,) and part.fold == 1):
        raise ValueError(
            f"{name} is sharded over ranks, and groups of kind {part.kind!r} would reach across them; "
            "use 'weight', 'filter' or 'neuron', leave the parameter out, or train with DistributedDataParallel"
        )
    if scaling:
        raise ValueError(
            f"{name} is sharded over ranks; scaling=True counts groups over the whole tensor: "
            "use scaling=False, or train with DistributedDataParallel"
        )
