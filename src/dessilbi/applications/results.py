"""What recipes came to: results/NAME.json, a row for every step and seed that was carried out.

    version, recipe     1, its name
    settings            by a short name: what decides a row's numbers (`Recipe.settings`)
    rows                a list, each with
        row             the step; `stage` is the growth, `method` and `keep` the cell of a comparison, where it has them
        seed, settings  whose settings these are; `fast`: with a quarter of the epochs
        accuracy        on the test split, as a fraction, at the end of the last epoch; null with an `error`
        sparse, support accuracy of the network that Γ selects after training, and the fraction of groups in it
        weights         weights that are not zero, as a part of the dense network; `parameters`, `macs` and `dropped`
                        are counts, `dense_parameters` and `dense_macs` those of the dense network
        seconds         of training and evaluating this step, without the steps before it, `jobs` sharing the device
        command, commit, date, device, torch, …

Rows are merged one by one: the same step with the same settings and seed is there once, the newest. Whatever else is
there stays. Other files in the folder are none of this module's business.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dessilbi import files
from dessilbi.applications.recipe import digest

_VERSION = 1

Row = dict[str, Any]


class Results:
    """The file of one recipe. Any number of processes may add to it."""

    def __init__(self, folder: str | os.PathLike[str], recipe: str) -> None:
        self.file = Path(folder) / f"{recipe}.json"
        self.recipe = recipe

    def rows(self) -> list[Row]:
        """What is there, each row with its settings in full."""
        known = self._read()
        return [{**row, "settings": known["settings"][row["settings"]]} for row in known["rows"]]

    def find(self, **facts: Any) -> list[Row]:
        """The rows of which all this is true."""
        return [row for row in self.rows() if all(row.get(name) == value for name, value in facts.items())]

    def add(self, rows: Iterable[Row]) -> None:
        """Put rows in, each with its settings in full."""
        from filelock import FileLock

        self.file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.file.with_name(f".{self.file.name}.lock")):
            known = self._read()
            found = {_identity(row): row for row in known["rows"]}
            for row in rows:
                name = digest(row["settings"])
                known["settings"][name] = dict(row["settings"])
                row = {**row, "settings": name}
                before = found.get(_identity(row))
                if before is None or before["date"] <= row["date"]:
                    found[_identity(row)] = row
            known["rows"] = sorted(found.values(), key=lambda row: [str(part) for part in _identity(row)])
            files.write_atomically(self.file, _json(known).encode())

    def _read(self) -> dict[str, Any]:
        try:
            text = self.file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {"version": _VERSION, "recipe": self.recipe, "settings": {}, "rows": []}
        try:
            known: dict[str, Any] = json.loads(text)
            if known["recipe"] != self.recipe:
                raise ValueError(f"it is of the recipe {known['recipe']!r}")
            if known["version"] > _VERSION:
                raise ValueError(f"its format {known['version']} is newer than {_VERSION}, the last this version reads")
            missing = {row["settings"] for row in known["rows"]} - known["settings"].keys()
            if missing:
                raise ValueError(f"it has no settings {', '.join(sorted(missing))}")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.file}: not the results of a recipe ({error})") from None
        return known


def of_recipe(file: Path) -> bool:
    """Whether a JSON file is one of these."""
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(known, dict) and {"recipe", "settings", "rows"} <= known.keys()


def merge(source: str | os.PathLike[str], folder: str | os.PathLike[str]) -> dict[str, int]:
    """Take over the rows that lie in another folder; how many, by recipe."""
    place = Path(source)
    if not place.is_dir():
        raise FileNotFoundError(f"{place}: no such folder of results")
    found: dict[str, int] = {}
    for file in sorted(place.rglob("*.json")):
        if of_recipe(file):
            rows = Results(file.parent, file.stem).rows()
            Results(folder, file.stem).add(rows)
            found[file.stem] = found.get(file.stem, 0) + len(rows)
    if not found:
        raise ValueError(f"{place}: holds no results of recipes")
    return found


def _identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("row", "method", "keep", "stage", "settings", "seed"))


def _json(known: Mapping[str, Any]) -> str:
    """A row a line, so that two versions of the file can be compared."""
    head = {name: value for name, value in known.items() if name not in ("rows", "settings")}
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    kinds = ",\n  ".join(
        f"{json.dumps(name)}: {json.dumps(value)}" for name, value in sorted(known["settings"].items())
    )
    rows = ",\n  ".join(json.dumps(row) for row in known["rows"])
    return "{\n " + ",\n ".join([*lines, f'"settings": {{\n  {kinds}\n }}', f'"rows": [\n  {rows}\n ]']) + "\n}\n"
