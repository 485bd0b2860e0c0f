"""The path an optimizer leaves behind: which groups were in the support when, and how large they were.

What is kept of every penalised tensor at every recorded point:

- the support. It changes little from point to point, so what is stored is which groups changed: the gaps between
  their numbers, a byte each (255 stands for 255 and more to come), deflated. That is close to the entropy of the
  changes: a run of 200 points costs about a byte a weight;
- ‖W_g‖, ‖V_g‖ and ‖Γ_g‖ for groups, or quantiles of |W|, |V| and |Γ| where every weight is a group. There, |V| of
  every weight is kept for the last point only, to 3 %, in a byte.

The rest (the entry of each group, the support at a point) is computed from that.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dessilbi import files
from dessilbi.coupling import Channels, joint_norms
from dessilbi.groups import Partition
from dessilbi.optim import DessiAdamW, DessiLBI
from dessilbi.sharding import whole
from dessilbi.track import ROWS, Codes, Track, cut, encode, filters
from dessilbi.wrappers import clean, unwrap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEVER = -1
QUANTILES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)

_VERSION = 2
# Quantiles are read from an evenly spaced sample of this many weights; a sort of all would cost a step or more.
_SAMPLE = 1 << 14


class Norms(NamedTuple):
    """‖W_g‖, ‖V_g‖, ‖Γ_g‖: each (points, groups), or (points, len(QUANTILES)) at the weight level."""

    w: Tensor
    v: Tensor
    gamma: Tensor


class Path:
    """The record of a run.

    Args:
        model: gives the tensors their names.
        optimizer: the penalised tensors of this optimizer are recorded.

    Example:
        >>> path = Path(model, optimizer)
        >>> for epoch in range(epochs):
        ...     train(...)
        ...     path.record(epoch + 1, accuracy=evaluate(model))
        >>> path.save("run.path")
    """

    def __init__(self, model: nn.Module, optimizer: DessiLBI | DessiAdamW) -> None:
        self._records: list[dict[str, Any]] = []
        self._tracks: dict[str, Track] = {}
        self._attached: list[tuple[str, Tensor, Partition]] = []
        self._last: dict[str, Tensor] = {}
        self._optimizer: DessiLBI | DessiAdamW | None = None
        self.attach(model, optimizer)

    def attach(self, model: nn.Module, optimizer: DessiLBI | DessiAdamW) -> None:
        """Go on recording this model: after `load`, to resume a run. The tensors must be those of the record.

        Where `truncate` cut off the last |V| of single weights, the optimizer's take their place: it is taken to be
        where the record ends.
        """
        names = {id(p): clean(name) for name, p in unwrap(model).named_parameters()}
        attached = []
        for p, part in optimizer.penalised():
            if id(p) not in names:
                raise ValueError(
                    f"the optimizer's penalised parameter of shape {tuple(p.shape)} is not a parameter of the model"
                )
            attached.append((names[id(p)], p, part))
        if not attached:
            raise ValueError("the optimizer penalises nothing: there is no path to record")
        lies = filters(unwrap(model))
        fresh = {name: Track(part.kind, tuple(p.shape), part.count(p.shape)) for name, p, part in attached}
        if self._tracks:
            wanted = {name: (t.kind, t.shape, t.groups) for name, t in self._tracks.items()}
            given = {name: (t.kind, t.shape, t.groups) for name, t in fresh.items()}
            if wanted != given:
                differ = sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name))
                raise ValueError(
                    f"the model does not fit this path: {differ[0]} is {given.get(differ[0], 'missing')}, "
                    f"recorded was {wanted.get(differ[0], 'nothing')}"
                )
        else:
            self._tracks = fresh
        for name, p, part in attached:
            self._tracks[name].cut, self._tracks[name].filters = cut(part), lies.get(id(p), ROWS)
        couplings = list(dict.fromkeys(part.coupling for _, _, part in attached if isinstance(part, Channels)))
        for name, _, part in attached:
            if isinstance(part, Channels):
                self._tracks[name].joint = (couplings.index(part.coupling), part.index.tolist())
        for name, p, part in attached:
            if self._records and part.kind == "weight" and self._tracks[name].codes is None:
                self._tracks[name].codes = Codes.of(whole(optimizer.dual(p)))
        self._attached, self._optimizer = attached, optimizer
        self._last = {
            name: (self.support(name) if self._records else torch.zeros_like(whole(optimizer.support(p)))).to(p.device)
            for name, p, _ in attached
        }

    @torch.no_grad()
    def record(self, point: float, **scalars: float) -> None:
        """Record this moment. `point` is where the run is, in epochs say; scalars (loss, accuracy) go with it."""
        optimizer = self._optimizer
        if optimizer is None:
            raise ValueError("this path was loaded from a file: attach(model, optimizer) before recording")
        lam = optimizer.lam
        shared = not isinstance(lam, list) and not (isinstance(lam, Tensor) and lam.ndim)
        fixed = {"point": float(point), "time": optimizer.time, "lam": float(lam) if shared else math.nan}  # type: ignore[arg-type]
        clash = fixed.keys() & scalars.keys()
        if clash:
            raise ValueError(f"record(…, {clash.pop()}=…): the path keeps that by itself; choose another name")
        coupled = _coupled_norms(optimizer, self._attached)
        grouped = _norms(optimizer, self._attached, coupled)
        found = [
            (
                name,
                whole(optimizer.support(p, coupled.get(name))),
                grouped[name] if name in grouped else _summary(optimizer, p),
            )
            for name, p, _ in self._attached
        ]
        for name, support, norms in found:
            flips = (support ^ self._last[name]).flatten().nonzero().flatten().cpu().numpy()
            self._last[name] = support
            self._tracks[name].changes.append(encode(flips))
            self._tracks[name].norms.append(norms.cpu().numpy())
        for name, p, part in self._attached:
            if part.kind == "weight":
                self._tracks[name].codes = Codes.of(whole(optimizer.dual(p)))
        self._records.append({**fixed, **{k: float(v) for k, v in scalars.items()}})

    def note(self, **scalars: float) -> None:
        """Add scalars to the last recorded point: what was measured only after it."""
        if not self._records:
            raise ValueError("nothing is recorded yet: call record(point) first")
        clash = {"point", "time", "lam"} & scalars.keys()
        if clash:
            raise ValueError(f"note({clash.pop()}=…): the path keeps that by itself; choose another name")
        self._records[-1].update({k: float(v) for k, v in scalars.items()})

    def truncate(self, points: int) -> None:
        """Keep the first points only: those up to the checkpoint from which a run is resumed."""
        if not 0 <= points <= len(self):
            raise ValueError(f"points must be between 0 and {len(self)}, got {points}")
        for track in self._tracks.values():
            del track.changes[points:], track.norms[points:]
            if points < len(self):
                track.codes = None
        del self._records[points:]
        self._last = {
            name: (self.support(name) if points else torch.zeros_like(last)).to(last.device)
            for name, last in self._last.items()
        }

    # -- queries -------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The recorded tensors."""
        return list(self._tracks)

    @property
    def points(self) -> list[dict[str, Any]]:
        """The recorded points: `point`, path `time`, `lam` (NaN where tensors have their own) and the scalars."""
        return [dict(r) for r in self._records]

    def kind(self, name: str) -> str:
        """The kind of groups of a tensor."""
        return self.track(name).kind

    def joint(self, name: str) -> tuple[int, Tensor] | None:
        """Of groups that span tensors, the number of the family of tensors, and in it the group of each filter."""
        joint = self.track(name).joint
        return None if joint is None else (joint[0], torch.tensor(joint[1]))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self.track(name).shape

    def entry(self, name: str) -> Tensor:
        """For every group the index of the first recorded point with it in the support; `NEVER` if there is none."""
        track = self.track(name)
        entry = np.full(track.groups, NEVER, dtype=np.int32)
        for index, (support, flips) in enumerate(track.supports()):
            entered = flips[support[flips]]
            entry[entered[entry[entered] == NEVER]] = index
        return track.outward(entry)

    def support(self, name: str, at: int = -1) -> Tensor:
        """The support at a recorded point (an index into `points`): bool, shaped as the optimizer's."""
        track, index = self.track(name), self.index(at)
        support = np.zeros(track.groups, dtype=bool)
        for flips in itertools.islice(track.flips(), index + 1):
            support[flips] ^= True
        return track.outward(support)

    def norms(self, name: str) -> Norms:
        """‖W_g‖, ‖V_g‖ and ‖Γ_g‖ at every point; at the weight level their `QUANTILES`."""
        track = self.track(name)
        width = len(QUANTILES) if track.kind == "weight" else track.groups
        stacked = np.stack(track.norms) if track.norms else np.zeros((0, 3, width), dtype=np.float32)
        return Norms(*(torch.from_numpy(np.ascontiguousarray(stacked[:, i])) for i in range(3)))

    def magnitude(self, name: str, at: int = -1) -> Tensor:
        """‖V_g‖ of every group at a recorded point, shaped as `support`.

        At the weight level |V| is known at the last point only, to 3 % down to 2⁻¹⁵ of the largest: these values are
        returned for every `at`, and zeros if they were cut off by `truncate` (and not found again by `attach`), or the
        file is older than they are.
        """
        track, index = self.track(name), self.index(at)
        if track.kind != "weight":
            return torch.from_numpy(track.norms[index][1].copy())
        values = np.zeros(track.groups, dtype=np.float32) if track.codes is None else track.codes.values()
        return track.outward(values)

    def keep(self, name: str | None = None) -> Tensor:
        """The fraction of groups in the support at every point, of one tensor or of all together."""
        tracks = list(self._tracks.values()) if name is None else [self.track(name)]
        counts = [[int(support.sum()) for support, _ in t.supports()] for t in tracks]
        total = sum(t.groups for t in tracks)
        return torch.tensor(counts, dtype=torch.float64).view(len(tracks), len(self)).sum(0) / max(1, total)

    def __len__(self) -> int:
        return len(self._records)

    def plot(self, along: str = "epoch") -> Figure:
        """The solution path of every layer, along the points ("epoch") or the path time ("time"), as a figure that
        notebooks show: ‖Γ_g‖ above ‖W_g‖, blue while a group is in the support. Needs matplotlib (dessilbi[plot])."""
        from dessilbi.report.figures import path_figure

        return path_figure(self, along)

    def without(self, names: Iterable[str]) -> Path:
        """The path of the other tensors, to read from."""
        left = copy.copy(self)
        left._attached, left._optimizer, gone = [], None, set(names)
        left._tracks = {name: track for name, track in self._tracks.items() if name not in gone}
        return left

    def track(self, name: str) -> Track:
        """What is recorded of a tensor."""
        if name not in self._tracks:
            raise ValueError(f"no tensor {name!r} in this path; it has {', '.join(self._tracks)}")
        return self._tracks[name]

    def index(self, at: int) -> int:
        """The number of a recorded point, counted from the first."""
        if not -len(self) <= at < len(self):
            raise ValueError(f"at={at} is outside this path of {len(self)} points")
        return at % len(self)

    # -- files ---------------------------------------------------------------------------------------------------

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the record: safetensors with a JSON header, replacing an old file only when all is on disk."""
        arrays: dict[str, np.ndarray] = {}
        for i, track in enumerate(self._tracks.values()):
            arrays |= {f"{i}.{key}": array for key, array in track.arrays().items()}
        tensors = [{"name": name, **track.described()} for name, track in self._tracks.items()]
        files.save_arrays(file, "path", _VERSION, arrays, {"points": self._records, "tensors": tensors})

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Path:
        """Read a record. To go on recording, `attach` it to the resumed model and optimizer."""
        arrays, header = files.load_arrays(file, "path", _VERSION)
        path = cls.__new__(cls)
        path._attached, path._last, path._optimizer = [], {}, None
        try:
            path._records = header["points"]
            path._tracks = {t["name"]: Track.of(t, i, arrays) for i, t in enumerate(header["tensors"])}
        except (zlib.error, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{os.fspath(file)}: damaged path file ({error})") from None
        return path


def early_points(steps: int, count: int = 5) -> list[int]:
    """Log-spaced steps inside the first epoch of `steps` steps, where most of the path happens: 1 ≤ … < steps."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    return sorted({round(steps ** (i / count)) for i in range(count)} - {steps})


def _coupled_norms(
    optimizer: DessiLBI | DessiAdamW, attached: Sequence[tuple[str, Tensor, Partition]]
) -> dict[str, Tensor]:
    """‖V_g‖ of the tensors whose groups span tensors: read once for all, not by each of the others again."""
    names = [name for name, _, part in attached if part.coupling is not None]
    parts = [part for *_, part in attached if part.coupling is not None]
    duals = (optimizer.dual(p) for _, p, part in attached if part.coupling is not None)
    return dict(zip(names, joint_norms(parts, duals), strict=True))


def _norms(
    optimizer: DessiLBI | DessiAdamW, attached: Sequence[tuple[str, Tensor, Partition]], coupled: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Norms of W, V and Γ by group, of the tensors that have groups: (3, groups), float32."""
    grouped = [(name, p, part) for name, p, part in attached if part.kind != "weight"]
    parts = [part for *_, part in grouped]
    of_w = joint_norms(parts, (whole(p.detach()).to(torch.float32) for _, p, _ in grouped))
    of_v = joint_norms(parts, (whole(optimizer.dual(p)) for _, p, _ in grouped))
    of_gamma = joint_norms(parts, (whole(optimizer.gamma(p, coupled.get(name))) for name, p, _ in grouped))
    return {
        name: torch.stack([x.flatten().float() for x in norms])
        for (name, _, _), *norms in zip(grouped, of_w, of_v, of_gamma, strict=True)
    }


def _summary(optimizer: DessiLBI | DessiAdamW, p: Tensor) -> Tensor:
    """Quantiles of |W|, |V| and |Γ|: (3, quantiles), float32."""
    stride = max(1, p.numel() // _SAMPLE)
    # An odd stride, so that the sample does not keep to a few places of every kernel.
    where = torch.arange(0, p.numel(), stride | 1, device=p.device)
    group = optimizer.options(p)
    w = whole(p.detach()).reshape(-1)[where].abs().float()
    v = whole(optimizer.dual(p)).reshape(-1)[where].abs().float()
    shrunk = (v - optimizer.threshold(p)).clamp_min(0) * group["kappa"]
    scale = optimizer.scale(p)
    if scale is not None:
        shrunk = shrunk * scale.reshape(-1)[where].float()
    if where.numel() == 0:
        return torch.zeros(3, len(QUANTILES))
    levels = torch.tensor(QUANTILES, device=p.device)
    return torch.quantile(torch.stack([w, v, shrunk]), levels, dim=1).T
