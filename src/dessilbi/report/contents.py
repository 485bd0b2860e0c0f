"""What a report is about, as plain data: run folders, path files and comparisons of tickets, read and packed."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from dessilbi.path import QUANTILES, Path
from dessilbi.report.packing import pack_norms, pack_supports
from dessilbi.selection import Selection
from dessilbi.training.config import Config
from dessilbi.training.run import Run

Plain = dict[str, Any]
Target = str | os.PathLike[str]


def contents(targets: Iterable[Target]) -> Plain:
    """What the page shows of run folders, comparisons and files that `Path.save` wrote, in the order given."""
    runs, comparisons = [], []
    for target in targets:
        place = FilePath(target)
        if place.is_file():
            runs.append(of_path(Path.load(place), place.name))
        elif (place / "comparison.json").is_file():
            comparisons.append(of_comparison(place))
        else:
            runs.append(of_run(Run.open(place)))
    if not runs and not comparisons:
        raise ValueError("nothing to report: give at least one run folder, comparison or path file")
    _tell_apart(runs + comparisons)
    found: Plain = finite({"runs": runs, "comparisons": comparisons, "quantiles": QUANTILES})
    return found


def of_run(run: Run) -> Plain:
    """All that a run folder has."""
    from dessilbi.applications.grow import read_growth
    from dessilbi.applications.sparsify import read_table

    path = Path.load(run.path_file) if run.path_file.is_file() else None
    return {
        "name": run.folder.resolve().name,
        "folder": str(run.folder),
        "status": run.status,
        "config": {name: told(value) for name, value in run.config.to_dict().items()},
        "defaults": {name: told(value) for name, value in Config().to_dict().items()},
        "toml": run.config.to_toml(),
        "environment": run.environment,
        "scaling": run.config.scaling if run.config.ours else None,
        "metrics": columns(run.metrics()),
        **_of_path(path),
        "pruned": read_table(run) if run.table_file.is_file() else None,
        "growth": read_growth(run) if run.growth_file.is_file() else None,
        "selection": of_selection(Selection.load(run.selection_file)) if run.selection_file.is_file() else None,
    }


def of_path(path: Path, name: str) -> Plain:
    """A path without a run folder: what it recorded is all there is."""
    return {"name": name, "folder": "", "status": "", "config": {}, "environment": {}, "metrics": {}, **_of_path(path)}


def of_selection(sel: Selection) -> list[Plain]:
    """How many filters or neurons of each tensor a selection keeps; one that keeps any weight of a filter keeps it."""
    layers = []
    for name, mask in sel.items():
        rows = mask.flatten(1).any(1) if mask.ndim > 1 else mask
        layers.append({"name": name, "width": rows.numel(), "wide": int(rows.sum())})
    return layers


def of_comparison(folder: Target) -> Plain:
    """The table of a comparison of tickets."""
    from dessilbi.applications.comparison import Comparison

    place = FilePath(folder)
    table = Comparison.open(place).table()
    return {"name": place.resolve().name, "folder": str(place), **table}


def _of_path(path: Path | None) -> Plain:
    if path is None or not len(path):
        return {"points": {}, "layers": []}
    return {"points": columns(path.points), "layers": [_layer(path, name) for name in path.names]}


def _layer(path: Path, name: str) -> Plain:
    kind, shape = path.kind(name), path.shape(name)
    norms = path.norms(name)
    packed = {which: pack_norms(values.numpy()) for which, values in norms._asdict().items()}
    layer: Plain = {
        "name": name,
        "kind": kind,
        "shape": list(shape),
        "parameters": math.prod(shape),
        "norms": {which: text for which, (text, _) in packed.items()},
        "tops": {which: top for which, (_, top) in packed.items()},
    }
    width, kept, wide, supports = _counts(path, name)
    layer |= {"groups": math.prod(shape), "kept": kept, "width": width, "wide": wide}
    if supports is not None:  # otherwise quantiles stand for the groups
        layer |= {"groups": supports.shape[1], "supports": pack_supports(supports)}
    return layer


def _counts(path: Path, name: str) -> tuple[int, list[int], list[int], np.ndarray | None]:
    """The width of a tensor (its filters, neurons or other groups), and at every point how many of its groups are
    selected and how wide what is selected is; and the supports where groups are not single weights."""
    kind, width = path.kind(name), path.shape(name)[0]
    if kind == "weight":
        return width, *_live(path, name), None
    supports = history(path, name)
    kept = supports.sum(axis=1).tolist()
    if kind == "layer":
        return width, kept, [width * k for k in kept], supports
    return supports.shape[1], kept, kept, supports


def _live(path: Path, name: str) -> tuple[list[int], list[int]]:
    """How many weights are in the support at every point, and how many rows (filters, neurons) have any there."""
    shape = path.shape(name)
    row = math.prod(shape[1:])
    counts, kept, wide = np.zeros(shape[0], dtype=np.int64), [], []
    for support, flips in path.track(name).supports():
        counts += np.bincount(flips // row, weights=2.0 * support[flips] - 1, minlength=shape[0]).astype(np.int64)
        kept.append(int(counts.sum()))
        wide.append(int((counts > 0).sum()))
    return kept, wide


def widths_of(path: Path, name: str) -> tuple[int, int]:
    """How many filters or neurons a tensor has, and how many of them are selected in the end."""
    width, _, wide, _ = _counts(path, name)
    return width, wide[-1]


def history(path: Path, name: str) -> np.ndarray:
    """The support of a tensor's groups at every point: (points, groups) bool."""
    track = path.track(name)
    supports = [support.copy() for support, _ in track.supports()]
    return np.stack(supports) if supports else np.zeros((0, track.groups), dtype=bool)


def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Rows as columns; None where a row has no such entry."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def told(value: Any) -> str:
    """A value of a configuration as people read it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return "[" + ", ".join(map(told, value)) + "]"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} = {told(v)}" for k, v in value.items()) or "–"
    return "–" if value is None else str(value)


def finite(value: Any) -> Any:
    """The same with None for infinities and NaN, for which JSON has no word."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, (list, tuple)) else value


def _tell_apart(shown: list[Plain]) -> None:
    """Give things of the same name another one."""
    names = [thing["name"] for thing in shown]
    for number, thing in enumerate(shown, 1):
        if names.count(thing["name"]) > 1:
            thing["name"] = thing["folder"] or f"{thing['name']} ({number})"
