"""The threshold λ: constant (`opt.lam = x`), on a schedule, or following a target.

A constant λ makes the result depend on ν, the schedule of the step size, the initial scale and the number of epochs.
`TargetThreshold` asks for what users mean: the fraction of groups to keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dessilbi.coupling import families, joint_norms, partitions
from dessilbi.groups import Partition
from dessilbi.optim import DessiAdamW, DessiLBI
from dessilbi.sharding import whole

# A quantile of a random sample of 2^16 of N numbers lies within 4 standard deviations, 0.4 % of the ranks, of that
# of all N: only the numbers in that band need ordering.
_SAMPLE = 1 << 16
_DEVIATIONS = 4.0
# Up to so many numbers an accelerator sorts in less time than the launches of anything cleverer take.
_SORTED = 1 << 20
_PIECE = 1 << 18


class ScheduledThreshold:
    """λ = schedule(fraction of the run that is done); call `step(fraction_done)` after every optimizer step."""

    def __init__(self, optimizer: DessiLBI | DessiAdamW, schedule: Callable[[float], float]) -> None:
        self.optimizer = optimizer
        self.schedule = schedule

    def step(self, fraction_done: float) -> None:
        self.optimizer.lam = self.schedule(fraction_done)


class TargetThreshold:
    """Set λ so that the support follows a curve: from nothing up to `keep` over the first `ramp` of the run, then held.

    λ is the (k+1)-th largest group norm ‖V_g‖, so that the k largest groups are in the support; groups that tie with
    the (k+1)-th are all out, hence the support never exceeds k. Call `step(fraction_done)` after every optimizer step;
    on an accelerator λ stays there, as a tensor, and nothing waits for it.

    Args:
        optimizer: its penalised parameters share one λ.
        keep: the fraction of groups (of weights, at the weight level) in the support in the end.
        ramp: the part of the run over which the support grows.
        per_layer: keep that fraction in every tensor, each with a λ of its own, instead of in all together. Over all
            together is usually better, and needs norms that compare across layers: see `scaling`. Tensors whose
            groups span them (see `coupling.channels`) are one layer.
    """

    def __init__(
        self, optimizer: DessiLBI | DessiAdamW, keep: float, ramp: float = 0.3, *, per_layer: bool = False
    ) -> None:
        if not 0 < keep <= 1:
            raise ValueError(f"keep must be a fraction in (0, 1], got {keep!r}")
        if not 0 <= ramp <= 1:
            raise ValueError(f"ramp must be a fraction in [0, 1], got {ramp!r}")
        if not optimizer.penalised():
            raise ValueError("optimizer has no penalised parameters: give it a group with group= other than None")
        self.optimizer = optimizer
        self.keep = keep
        self.ramp = ramp
        self.per_layer = per_layer
        self._found: list[tuple[Any, ...]] = []
        self._generator = np.random.default_rng(0)
        self._positions: dict[int, Tensor] = {}
        self._members: list[tuple[dict[str, Any], int, Tensor, Partition]] = []

    def target(self, fraction_done: float) -> float:
        """The fraction to keep when this much of the run is done."""
        if not fraction_done >= 0:
            raise ValueError(f"fraction_done must be a number ≥ 0, got {fraction_done!r}")
        return self.keep * min(1.0, fraction_done / self.ramp) if self.ramp else self.keep

    @torch.no_grad()
    def step(self, fraction_done: float) -> None:
        keep = self.target(fraction_done)
        members = self._penalised()
        norms = self._norms(members)
        if not self.per_layer:
            self.optimizer.lam = self._threshold(norms, keep)
            return
        lams = {
            id(g): torch.zeros(len(g["params"]), dtype=torch.float64, device=p.device)
            for g, _, p, _ in reversed(members)
        }
        for family in families([part for *_, part in members]):
            lam = self._threshold([norms[k] for k in family], keep)
            for k in family:
                group, i, *_ = members[k]
                lams[id(group)][i] = lam
        for group in self.optimizer.param_groups:
            if id(group) in lams:
                group["lam"] = lams[id(group)]

    def _penalised(self) -> list[tuple[dict[str, Any], int, Tensor, Partition]]:
        """Group, place, tensor and partition of every penalised parameter, found anew when the groups change."""
        groups = self.optimizer.param_groups
        found = [(id(g), g["group"], *map(id, g["params"])) for g in groups]
        if found != self._found:
            self._members = []
            for g in groups:
                parts = partitions(g["group"], [p.shape for p in g["params"]])
                self._members += [(g, i, g["params"][i], part) for i, part in enumerate(parts) if part is not None]
            self._found = found
        return self._members

    def _norms(self, members: Sequence[tuple[dict[str, Any], int, Tensor, Partition]]) -> list[Tensor]:
        """‖V_g‖ (over √|g| where λ is size-normalised), or V itself where its elements are the groups.

        A group that spans tensors is there once.
        """
        found: list[Tensor] = []
        grouped = []
        for k, (_, _, p, part) in enumerate(members):
            v = self.optimizer.state.get(p, {}).get("dual")
            found.append(whole(self.optimizer.dual(p) if v is None else v))
            if part.kind == "weight":
                found[k] = part.split(found[k])
            else:
                grouped.append(k)
        joint = joint_norms([members[k][3] for k in grouped], [found[k] for k in grouped])
        for k, norms in zip(grouped, joint, strict=True):
            group, _, p, part = members[k]
            if group["size_normalised"]:
                norms = norms / part.threshold(1.0, p.shape, True)
            found[k] = part.distinct(norms).flatten()
        return found

    def _threshold(self, values: Sequence[Tensor], keep: float) -> float | Tensor:
        total = sum(v.numel() for v in values)
        kept = round(keep * total)
        if kept >= total:
            return 0.0
        if values[0].device.type == "cpu":
            return largest(values, kept + 1, self._generator)
        return self._largest_on_device(values, kept + 1)

    def _largest_on_device(self, values: Sequence[Tensor], rank: int) -> Tensor:
        """As `largest`, with nothing but device work of a fixed size: no wait, and fit for a CUDA graph."""
        x = torch.cat([v.flatten() for v in values]).abs_()
        total = x.numel()
        if total <= _SORTED:
            return x.sort(descending=True).values[rank - 1].double()
        where = self._positions.get(total)
        if where is None:
            where = torch.from_numpy(self._generator.integers(0, total, _SAMPLE)).to(x.device)
            self._positions[total] = where
        sample = x[where].sort(descending=True).values
        first, last, width = _band(rank, total)
        high = sample[first] if first >= 0 else torch.full_like(sample[0], math.inf)
        low = sample[last] if last < _SAMPLE else torch.full_like(sample[0], -math.inf)
        # The j-th number inside the band stands where the running count reaches j: gather these, order them, and take
        # the rank that is left.
        count = ((x <= high) & (x >= low)).cumsum(0, dtype=torch.int32)
        found = torch.searchsorted(count, torch.arange(1, width + 1, dtype=torch.int32, device=x.device))
        inside = torch.where(found < total, x[found.clamp_max(total - 1)], -math.inf)
        ordered = inside.sort(descending=True).values
        left = (rank - 1 - (x > high).sum()).clamp(0, width - 1)
        return ordered.gather(0, left.view(1))[0].double()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to draw the same samples."""
        return {"generator": self._generator.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.bit_generator.state = state["generator"]


def _band(rank: int, total: int) -> tuple[int, int, int]:
    """Ranks in the sample (first, last) that enclose the rank among all, and room for all that lie between."""
    share = rank / total
    spread = _DEVIATIONS * math.sqrt(max(share * (1 - share), 1 / _SAMPLE) / _SAMPLE)
    first = math.floor((share - spread) * _SAMPLE) - 1
    last = math.ceil((share + spread) * _SAMPLE)
    return first, last, min(total, int((last - first + 2 + 8 * math.sqrt(last - first + 2)) * total / _SAMPLE))


def largest(values: Sequence[Tensor], rank: int, generator: np.random.Generator) -> float:
    """The rank-th largest |value| (1 = the largest) over CPU tensors together, exactly; ties count one by one.

    A random sample brackets it; one pass over the data counts what lies above the bracket and collects what lies
    inside; only that is ordered. If the sample misled, the bracket is widened to everything.
    """
    arrays = [_flat(v) for v in values]
    total = sum(a.size for a in arrays)
    if total <= 4 * _SAMPLE:
        return _pick(np.concatenate([np.abs(a) for a in arrays]), rank)
    shares = [round(_SAMPLE * a.size / total) for a in arrays]
    picked = [np.abs(a[generator.integers(0, a.size, n)]) for a, n in zip(arrays, shares, strict=True) if n]
    sample = np.sort(np.concatenate(picked))[::-1]
    first, last, _ = _band(rank, total)
    low, high = sample[last] if last < len(sample) else -np.inf, sample[first] if first >= 0 else np.inf
    pieces = [a[i : i + _PIECE] for a in arrays for i in range(0, a.size, _PIECE)]

    def look(piece: np.ndarray) -> tuple[int, np.ndarray]:
        x = np.abs(piece)
        above = x > x.dtype.type(high)
        band = x >= x.dtype.type(low)
        np.greater(band, above, out=band)
        return int(np.count_nonzero(above)), x[np.flatnonzero(band)]

    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        found = list(pool.map(look, pieces))
    inside = np.concatenate([band for _, band in found])
    left = rank - sum(count for count, _ in found)
    if not 1 <= left <= inside.size:
        return _pick(np.concatenate([np.abs(a) for a in arrays]), rank)
    return _pick(inside, left)


def _flat(v: Tensor) -> np.ndarray:
    """All elements of a CPU tensor, in the order of memory where that makes a view."""
    outermost_first = sorted(range(v.ndim), key=lambda d: v.stride()[d], reverse=True)
    flat: np.ndarray = v.permute(outermost_first).reshape(-1).numpy()
    return flat


def _pick(x: np.ndarray, rank: int) -> float:
    return float(np.partition(x, x.size - rank)[x.size - rank])
