"""What a path keeps where something else than the order of entry says how much each layer gets."""

from __future__ import annotations

from dessilbi.baselines.allocation import allocate
from dessilbi.baselines.tensors import selection
from dessilbi.path import Path
from dessilbi.ranking import select
from dessilbi.selection import Selection


def selected(path: Path, keep: float | None = None, allocation: str | None = None) -> Selection:
    """What a path keeps at its end: by the order of entry, or as much of each layer as an allocation gives it.

    The order of entry compares V of all layers with one λ. Layers whose weights are small altogether enter late, and
    at a small `keep` hardly at all; ``allocation="lamp"`` (or any of :data:`~dessilbi.baselines.ALLOCATIONS`) puts
    ‖V_g‖, which has grown with λ passed and without, where magnitude pruning has |w|.
    """
    if allocation is None:
        return select(path, keep=keep)
    if keep is None:
        raise ValueError(f"allocation={allocation!r} needs keep: what is to be shared out between the layers")
    sizes = {name: path.magnitude(name) for name in path.names}
    masks = allocate(sizes, keep, allocation, {name: path.shape(name) for name in sizes})
    return selection(masks, method="dessilbi", keep=keep, allocation=allocation)
