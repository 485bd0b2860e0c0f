"""A comparison of methods: a grid of method x fraction kept x seed, in a folder, cell by cell.

    comparison = Comparison.create("runs/compare", Grid(search, methods=("dense", "dessilbi@2", "magnitude"), …))
    comparison.go(jobs=2)
    table = comparison.table()

Each cell finds a selection, trains what is left, and leaves one small file; what lies there is not done again, so that
a grid that was cut off goes on, and one that was enlarged does what is new. Methods share the runs that they need.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from dessilbi import files
from dessilbi.applications import tickets
from dessilbi.applications.bench import Bench, Found, Note
from dessilbi.applications.methods import Method
from dessilbi.training.config import Config, differences
from dessilbi.training.environment import commit
from dessilbi.training.session import TrainingDiverged

_VERSION = 1
_GRID = "comparison.json"

Table = dict[str, Any]


class Cell(NamedTuple):
    """One entry of the grid."""

    method: str
    keep: float
    seed: int

    def __str__(self) -> str:
        return f"{self.method}-{self.keep:g}-{self.seed}"


@dataclass(frozen=True)
class Grid:
    """What is compared.

    Args:
        search: the configuration of the DessiLBI run that looks for tickets: also the network, the data and what is
            sparse, for all methods.
        methods: names, see :mod:`~dessilbi.applications.methods`. The network that nothing is pruned of, ``dense``, has
            one cell a seed.
        keeps: fractions of the groups to keep.
        seeds: of the initialisation and the order of the images.
        epochs: of the final training, and of dense networks.
        rewind: the epoch whose weights tickets start from; None: they go on from where they were found, fine-tuned.
        repeats: how many random tickets a cell of a random method trains.
        reference: the method that the others are paired with; by default ``magnitude``, or where it is not among them
            the first that prunes by the magnitudes of a trained network, such as ``magnitude-lamp``.
        source: the data set from which tickets are ``transferred``.
    """

    search: Config
    methods: tuple[str, ...]
    keeps: tuple[float, ...]
    seeds: tuple[int, ...] = (0,)
    epochs: int = 160
    rewind: int | None = tickets.REWIND
    repeats: int = 5
    reference: str = ""
    source: str | None = None

    def __post_init__(self) -> None:
        for name in ("methods", "keeps", "seeds"):
            values = tuple(dict.fromkeys(getattr(self, name)))
            if not values:
                raise ValueError(f"{name} is empty: give at least one")
            object.__setattr__(self, name, values)
        for keep in self.keeps:
            if not 0 < keep < 1:
                raise ValueError(f"keep={keep!r}: must be a fraction in (0, 1), such as 0.05")
            if float(f"{keep:g}") != keep:
                raise ValueError(f"keep={keep!r}: cells are named by it: give six digits at most, {keep:g}")
        for name, least in (("epochs", 1), ("repeats", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be at least {least}")
        if self.rewind is not None and not 0 <= self.rewind <= min(self.epochs, self.search.epochs):
            raise ValueError(
                f"rewind={self.rewind!r}: must be an epoch of the search and of dense training, from 0 to "
                f"{min(self.epochs, self.search.epochs)}"
            )
        if not self.search.ours:
            raise ValueError(f"optimizer={self.search.optimizer!r} leaves no path: search with 'dessilbi'")
        for at in (Method.parse(name) for name in self.methods):
            limit = self.epochs if at.kind in ("magnitude", "iterative") else self.search.epochs
            if at.at is not None and at.at > limit:
                raise ValueError(f"{at.kind}@{at.at}: its run has only {limit} epochs")
            if at.kind == "transferred" and self.source is None:
                raise ValueError("method 'transferred' needs a source: the data set that the ticket is found on")

        if self.reference not in self.methods:
            object.__setattr__(self, "reference", self._reference())

    def _reference(self) -> str:
        by_magnitude = [name for name in self.methods if Method.parse(name).kind == "magnitude"]
        late = [name for name in by_magnitude if Method.parse(name).at is None]
        return next(iter(["magnitude"] if "magnitude" in late else late or by_magnitude), "magnitude")

    def cells(self) -> Iterator[Cell]:
        """All of them; neighbours are of different seeds, which share no runs, so that they can go side by side."""
        for method in self.methods:
            for keep in self.keeps if method != "dense" else (1.0,):
                for seed in self.seeds:
                    yield Cell(method, keep, seed)

    def bench(self, folder: FilePath, seed: int, note: Note) -> Bench:
        """Where the runs of a seed lie."""
        points = tuple(sorted({m.at for m in map(Method.parse, self.methods) if m.at is not None}))
        config, source = self.search.replace(seed=seed), None
        if self.source is not None:
            found_on = config.replace(data=self.source, input_shape=None)
            shape = tickets.common_shape(found_on, config.data)
            found_on, config = (c.replace(input_shape=shape) for c in (found_on, config))
            source = Bench(folder / f"seed-{seed}" / "source", found_on, self.epochs, self.rewind, points, None, note)
        return Bench(folder / f"seed-{seed}", config, self.epochs, self.rewind, points, source, note)

    def to_dict(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**plain, "search": self.search.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Grid:
        known: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**{**known, "search": Config.from_dict(values["search"])})


class Comparison:
    """A grid and its folder."""

    def __init__(self, folder: str | os.PathLike[str], grid: Grid) -> None:
        self.folder = FilePath(folder)
        self.grid = grid

    @classmethod
    def create(cls, folder: str | os.PathLike[str], grid: Grid) -> Comparison:
        """A new folder; or one that is there, if its runs are of the same kind: then its grid is this one from now on,
        and what has been done of it stays done."""
        place = FilePath(folder)
        if (place / _GRID).is_file():
            old = cls.open(place).grid
            found = differences(old.search, grid.search) + [
                f"{name}: {getattr(old, name)!r} -> {getattr(grid, name)!r}"
                for name in ("epochs", "rewind", "repeats", "source")
                if getattr(old, name) != getattr(grid, name)
            ]
            if found:
                raise ValueError(
                    f"{place}: holds a comparison of other runs ({'; '.join(found)}): choose another folder"
                )
        elif place.exists() and (not place.is_dir() or any(not f.name.startswith(".") for f in place.iterdir())):
            raise FileExistsError(f"{place}: is no comparison: choose another folder")
        place.mkdir(parents=True, exist_ok=True)
        made = cls(place, grid)
        data = json.dumps({"version": _VERSION, **grid.to_dict()}, indent=1) + "\n"
        files.write_atomically(place / _GRID, data.encode())
        return made

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Comparison:
        """A folder that exists."""
        file = FilePath(folder) / _GRID
        if not file.is_file():
            raise FileNotFoundError(f"{folder}: is no comparison (it has no {_GRID})")
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            version = values.pop("version")
            if version > _VERSION:
                raise ValueError(f"its format {version} is newer than {_VERSION}, the last this version reads")
            return cls(folder, Grid.from_dict(values))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file}: not a comparison ({error})") from None

    # -- doing it ------------------------------------------------------------------------------------------------

    def file(self, cell: Cell) -> FilePath:
        """Where the outcome of a cell lies."""
        return self.folder / "cells" / f"{cell}.json"

    def outcome(self, cell: Cell) -> dict[str, Any] | None:
        """What came of a cell; None if it has not been done, or went wrong."""
        try:
            found: dict[str, Any] = json.loads(self.file(cell).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if "error" not in found else None

    def todo(self) -> list[Cell]:
        """The cells that have not been done."""
        return [cell for cell in self.grid.cells() if self.outcome(cell) is None]

    def go(self, jobs: int = 1, backend: str | None = None, note: Note = lambda _: None) -> list[str]:
        """Do what is to do, `jobs` cells at a time; returns what went wrong, a line a cell.

        `backend` is one of joblib's: "loky" (processes here) if left out; "dask", of the client that is connected;
        "ray", of the cluster that `RAY_ADDRESS` names; or one that you registered. All machines must see the folder.
        """
        from joblib import Parallel, delayed, parallel_config

        if jobs == 0:
            raise ValueError("jobs=0: give at least 1, or -1 for one a core")
        if backend == "ray":
            try:
                from ray.util.joblib import register_ray
            except ImportError:
                raise ValueError("backend='ray': Ray is not installed: pip install ray, or leave backend out") from None
            register_ray()
        todo = self.todo()
        if todo:
            self.grid.bench(self.folder, todo[0].seed, note).check()
        with parallel_config(backend=backend or "loky"):
            found = Parallel(n_jobs=jobs)(delayed(_do)(self.folder, cell, note) for cell in todo)
        return [line for line in found if line]

    def do(self, cell: Cell, note: Note = lambda _: None) -> dict[str, Any]:
        """Do a cell, unless it has been done; any number of processes may."""
        from filelock import FileLock

        if cell not in set(self.grid.cells()):
            raise ValueError(f"{self.folder}: there is no cell {cell}")
        file = self.file(cell)
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_name(f".{file.name}.lock")):
            known = self.outcome(cell)
            if known is not None:
                return known
            try:
                found = self._measure(cell, note)
            except (ValueError, TrainingDiverged) as error:
                self._write(cell, {**cell._asdict(), "error": str(error)})
                raise
            self._write(cell, found)
            return found

    def _write(self, cell: Cell, outcome: Mapping[str, Any]) -> None:
        files.write_atomically(self.file(cell), (json.dumps(outcome, indent=1) + "\n").encode())

    def _measure(self, cell: Cell, note: Note) -> dict[str, Any]:
        bench, method = self.grid.bench(self.folder, cell.seed, note), Method.parse(cell.method)
        repeats = self.grid.repeats if method.by_chance else 1
        accuracies = []
        for repeat in range(repeats):
            found = method.find(bench, cell.keep, repeat)
            run = found.run
            if method.kind != "dense":
                name = f"{cell.method}-{cell.keep:g}" + (f"-{repeat}" if repeats > 1 else "")
                run = bench.train(name, bench.ticket(found, method=cell.method))
            accuracies.append(run.metrics()[-1]["dense"])
        return {
            **cell._asdict(),
            "accuracies": accuracies,
            "at": found.epoch,
            "kept": found.selection.keep,
            "emptied": tickets.emptied(found.selection),
            **_costs(bench, found),
            "run": str(run.folder.relative_to(self.folder)),
            "commit": commit(),
        }

    # -- reading it ----------------------------------------------------------------------------------------------

    def table(self) -> Table:
        """What is there so far: a row for every method and fraction that has a cell.

        `mean` and `sd` are over the seeds (and over the repeats of random tickets); `difference` is that to the
        reference at the same fraction, paired by seed; `cost` is what it took to find the ticket, in units of one dense
        training, and `macs` the same in multiply-adds.
        """
        done = {cell: found for cell in self.grid.cells() if (found := self.outcome(cell)) is not None}
        rows: list[dict[str, Any]] = []
        for method, keep in dict.fromkeys((cell.method, cell.keep) for cell in done):
            mine = {cell.seed: found for cell, found in done.items() if (cell.method, cell.keep) == (method, keep)}
            theirs = {s: done[c] for s in mine if (c := Cell(self.grid.reference, keep, s)) in done}
            pairs = [_mean(mine[s]["accuracies"]) - _mean(found["accuracies"]) for s, found in theirs.items()]
            every = [a for found in mine.values() for a in found["accuracies"]]
            rows.append(
                {
                    "method": method,
                    "keep": keep,
                    "seeds": len(mine),
                    "accuracies": every,
                    "mean": _mean(every),
                    "sd": _sd(every),
                    "difference": _mean(pairs) if pairs and method != self.grid.reference else None,
                    "difference_sd": _sd(pairs) if pairs and method != self.grid.reference else None,
                    "at": _mean([found["at"] for found in mine.values()]),
                    "cost": _mean([found["cost"] for found in mine.values()]),
                    "macs": _mean([found["macs"] for found in mine.values()]),
                    "emptied": max(len(found["emptied"]) for found in mine.values()),
                }
            )
        rows.sort(key=lambda row: (-row["keep"], self.grid.methods.index(row["method"])))
        return {
            "version": _VERSION,
            "grid": self.grid.to_dict(),
            "commits": sorted({str(found["commit"]) for found in done.values()}),
            "missing": len(self.todo()),
            "rows": rows,
        }


def _do(folder: FilePath, cell: Cell, note: Note) -> str | None:
    """A cell, in a process of its own or not; what went wrong."""
    try:
        Comparison.open(folder).do(cell, note)
    except (ValueError, TrainingDiverged) as error:
        return f"{cell}: {error}"
    return None


def _costs(bench: Bench, found: Found) -> dict[str, Any]:
    """What finding it took. Weights to rewind to must have been trained as well."""
    steps = max(found.steps, (bench.rewind or 0) * bench.steps_per_epoch)
    dense = bench.epochs * bench.steps_per_epoch
    return {"steps": steps, "cost": steps / dense, "macs": steps * bench.search_config.batch * bench.macs}


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def _sd(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None
