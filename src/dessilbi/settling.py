"""When is early? A selection has settled when further training changes it little."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from dessilbi.selection import Selection

WINDOW = 3


def distance(a: Selection, b: Selection) -> float:
    """The Jaccard distance 1 − |A ∩ B| / |A ∪ B| of what two selections keep, of all tensors together."""
    if a.keys() != b.keys():
        raise ValueError(f"selections of different tensors: {', '.join(sorted(a.keys() ^ b.keys()))}")
    both = sum(int((a[name] & b[name]).sum()) for name in a)
    either = sum(int((a[name] | b[name]).sum()) for name in a)
    return 1 - both / either if either else 0.0


class Settling:
    """Watches the selections of one keep fraction, epoch by epoch: early-bird tickets' rule, on the path's ranking.

    They have settled when each of the last `window` changes was smaller than `tolerance`, in Jaccard distance
    (You et al., Drawing early-bird tickets, ICLR 2020, compare masks over the last five epochs). Train with
    ``settle_keep`` to stop a run there.

    Example:
        >>> settling = Settling(tolerance=0.1)
        >>> for epoch in range(1, epochs + 1):
        ...     train(...)
        ...     path.record(epoch)
        ...     settling.add(select(path, keep=0.06))
        ...     if settling.settled:
        ...         break
    """

    def __init__(self, tolerance: float = 0.1, window: int = WINDOW) -> None:
        if not 0 < tolerance <= 1:
            raise ValueError(f"tolerance must be a Jaccard distance in (0, 1], got {tolerance!r}")
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window!r}")
        self.tolerance, self.window = tolerance, window
        self.distances: list[float] = []
        self._last: Selection | None = None

    def add(self, sel: Selection) -> float:
        """The distance to the selection before, NaN for the first one."""
        change = math.nan if self._last is None else distance(self._last, sel)
        self._last = sel
        self.note(change)
        return change

    def note(self, change: float) -> None:
        """A distance that another process measured."""
        if not math.isnan(change):
            self.distances.append(change)

    @property
    def settled(self) -> bool:
        """Whether the last changes were all small."""
        last = self.distances[-self.window :]
        return len(last) == self.window and max(last) < self.tolerance

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: distances, and the last selection at a bit an entry."""
        last = {} if self._last is None else self._last
        masks = {name: [np.packbits(mask.numpy().ravel()), list(mask.shape)] for name, mask in last.items()}
        return {"distances": list(self.distances), "last": masks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.distances = list(state["distances"])
        masks = {
            name: torch.from_numpy(np.unpackbits(bits, count=math.prod(shape)).astype(bool)).view(shape)
            for name, (bits, shape) in state["last"].items()
        }
        self._last = Selection(masks) if masks else None
