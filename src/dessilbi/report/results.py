"""The page of the results: what the paper reports and what came of it here, recipe by recipe, as Markdown.

Rows of one kind (the same settings, as the recipe has them now) are averaged over their seeds. Rows of `--fast` and
rows measured with other settings stand apart, below the table; what has not been measured says so.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dessilbi import files
from dessilbi.applications import recipe as recipes
from dessilbi.applications.methods import KINDS, Method
from dessilbi.applications.recipe import Recipe, Step, digest
from dessilbi.applications.results import Results, Row, of_recipe

NOT_YET = "not measured yet"

_HEAD = """# Results

Written by `dessilbi results` from the files beside it: do not edit. Accuracies are in %, on the test split at the end
of the last epoch; ours are mean ± standard deviation over the seeds. The difference is that to the paper, in points.
Sizes are parts of the dense network: weights that are not zero, multiply-adds (MACs) of one image, parameters. Time is
that of a row alone, without the rows it starts from. Every row is in the JSON file with its command, commit, seed,
device, date and settings. `dessilbi reproduce NAME` measures a table, and goes on where it was cut off.
"""


def write(folder: str | os.PathLike[str]) -> Path:
    """Write README.md into the folder of the results."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    file = place / "README.md"
    files.write_atomically(file, page(place, [Recipe.load(name) for name in recipes.names()]).encode())
    return file


def page(folder: Path, known: Sequence[Recipe]) -> str:
    """The page of these recipes, whose results lie in a folder."""
    parts = [_HEAD]
    for title in recipes.SECTIONS:
        found = [table(recipe, Results(folder, recipe.name).rows()) for recipe in known if recipe.section == title]
        if found:
            parts += [f"## {title}\n", *found]
    names = {recipe.name for recipe in known}
    return "\n".join([*parts, *_others(folder, names)])


def table(recipe: Recipe, rows: Sequence[Row]) -> str:
    """What a recipe came to."""
    now = {digest(recipe.settings(step)) for step in recipe.steps.values()}
    current = [row for row in rows if digest(row["settings"]) in now]
    fast = [row for row in rows if row["fast"]]
    earlier = [row for row in rows if row not in current and not row["fast"]]
    lines = [f"### {recipe.title}\n"]
    plain = [step for step in recipe.steps.values() if step.kind != "compare"]
    if plain:
        lines += [*_plain(recipe, plain, current), ""]
    compared = [step for step in recipe.steps.values() if step.kind == "compare"]
    if compared:
        lines += [*_grid(compared, current), ""]
    if recipe.note:
        lines += [recipe.note, ""]
    lines += [_measured(current) if current else f"Not measured yet: {_how(recipe)}", ""]
    for title, others in (
        ("Development runs, a quarter of the epochs (`--fast`); not comparable with the table:", fast),
        ("Measured with other settings than the recipe has now:", earlier),
    ):
        if others:
            lines += [title, "", *_list(others), ""]
    return "\n".join(lines)


# -- tables ------------------------------------------------------------------------------------------------------------


def _plain(recipe: Recipe, steps: Sequence[Step], rows: Sequence[Row]) -> list[str]:
    """Row by row: the paper's peers, and the steps."""
    goals = any(step.goal for step in steps)
    lines = [_line(["", "paper", *(["goal"] if goals else []), "ours", "seeds", "difference", "time"])]
    lines.append(_line(["---", *["---:"] * (len(lines[0].split("|")) - 3)]))
    for peer in recipe.peers:
        lines.append(
            _line([f"{peer['name']} (of the paper)", _outcome(peer), *([""] if goals else []), "", "", "", ""])
        )
    for step in steps:
        mine = [row for row in rows if row["row"] == step.name]
        papers = step.paper if isinstance(step.paper, list) else [step.paper]
        for number, paper in enumerate(papers):
            last = number == len(papers) - 1
            goal = step.goal if last else {}
            # The paper's sizes, in order; what was measured at the size of one is the largest network within it.
            found = _last_stages(mine if last else _up_to(mine, paper["parameters"]))
            cells = [_name(step) + (f", growth {number + 1}" if len(papers) > 1 else ""), _outcome(paper)]
            lines.append(_line([*cells, *([_outcome(goal)] if goals else []), *_ours(found, {**goal, **paper})]))
    return lines


def _ours(rows: Sequence[Row], like: Mapping[str, Any]) -> list[str]:
    """Accuracy and size, seeds, difference to the paper, time."""
    if not rows:
        return [NOT_YET, "", "", ""]
    values = [100 * row["accuracy"] for row in rows if row["accuracy"] is not None]
    lost = len(rows) - len(values)
    size = _size({name: _mean(parts) for name in like if (parts := _parts(rows, name, like[name]))})
    said = [_spread(values) + size + _selected(rows)] if values else []
    difference = f"{statistics.fmean(values) - like['accuracy']:+.2f}" if values and "accuracy" in like else ""
    return ["; ".join(said + ([f"{lost} diverged"] if lost else [])), str(len(rows)), difference, _time(rows)]


def _selected(rows: Sequence[Row]) -> str:
    """What Γ has selected in a training that was not pruned, and how good that is as it stands."""
    found = [row for row in rows if row.get("sparse") is not None and row.get("support") is not None]
    if not found:
        return ""
    support, accuracy = (_mean([row[name] for row in found]) for name in ("support", "sparse"))
    return f" ({_percent(support)} selected: {100 * accuracy:.2f})"


def _parts(rows: Sequence[Row], name: str, like: Any) -> list[float]:
    """What rows have of a size, as the paper counts it: as a part of the dense network or as a number."""
    if name not in (*recipes.SIZES, "dropped"):
        return []
    found = [row for row in rows if row.get(name) is not None]
    if name in ("weights", "dropped") or _low(like) > 1:
        return [row[name] for row in found]
    return [row[name] / row[f"dense_{name}"] for row in found if row.get(f"dense_{name}")]


def _up_to(rows: Sequence[Row], parameters: float) -> list[Row]:
    return [row for row in rows if row.get("parameters", 0) <= parameters]


def _last_stages(rows: Sequence[Row]) -> list[Row]:
    """Of each seed the last stage of growth, where there are several."""
    last: dict[int, Row] = {}
    for row in rows:
        if row["seed"] not in last or row.get("stage", 0) >= last[row["seed"]].get("stage", 0):
            last[row["seed"]] = row
    return [last[seed] for seed in sorted(last)]


def _grid(steps: Sequence[Step], rows: Sequence[Row]) -> list[str]:
    """Methods by fractions; below, what ours has over magnitude pruning of the same epoch, paired by seed."""
    grids = [step.grid((0,)) for step in steps]
    methods = list(dict.fromkeys(method for grid in grids for method in grid.methods))
    keeps = sorted({keep for grid in grids for keep in grid.keeps}, reverse=True)
    head = [_line(["kept", *(_percent(keep) for keep in keeps)]), _line(["---", *["---:"] * len(keeps)])]
    lines = list(head)
    for method in methods:
        cells = [_cell([row for row in rows if (row["method"], row["keep"]) == (method, keep)]) for keep in keeps]
        if method == "dense":
            cells = [_cell([row for row in rows if row["method"] == method])] + [""] * (len(keeps) - 1)
        lines.append(_line([method, *cells]))
    pairs = {method: _rival(method) for method in methods if KINDS[Method.parse(method).kind].early}
    for method, rival in pairs.items():
        if rival in methods and rival != method:
            cells = [_over(rows, method, rival, keep) for keep in keeps]
            lines.append(_line([f"{method} − {rival}", *cells]))
    return lines


def _rival(method: str) -> str:
    """Magnitude pruning at the same epoch with the same allocation."""
    known = Method.parse(method)
    return "magnitude" + (f"-{known.allocation}" if known.allocation else "") + (f"@{known.at}" if known.at else "")


def _cell(rows: Sequence[Row]) -> str:
    values = [100 * row["accuracy"] for row in rows if row["accuracy"] is not None]
    return f"{_spread(values)} ({len(values)})" if values else NOT_YET


def _over(rows: Sequence[Row], method: str, rival: str, keep: float) -> str:
    mine, theirs = (
        {row["seed"]: row["accuracy"] for row in rows if (row["method"], row["keep"]) == (name, keep)}
        for name in (method, rival)
    )
    both = [s for s in mine if mine[s] is not None and theirs.get(s) is not None]
    return f"{_spread([100 * (mine[s] - theirs[s]) for s in both], '+.2f')} ({len(both)})" if both else ""


def _list(rows: Sequence[Row]) -> list[str]:
    """Rows that are in no table, averaged over the seeds."""
    kinds: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        kinds.setdefault((row["row"], row.get("method"), row.get("keep"), digest(row["settings"])), []).append(row)
    lines = [_line(["", "settings", "ours", "seeds", "time"]), _line(["---", "---", "---:", "---:", "---:"])]
    for (name, method, keep, settings), found in kinds.items():
        label = f"{name}: {method} at {_percent(keep)}" if method else name
        last = _last_stages(found)
        sizes = {"weights": 0.0} if last[0].get("weights") is not None and not method else {}
        ours = _ours(last, sizes)
        lines.append(_line([label, settings, ours[0], ours[1], ours[3]]))
    return lines


# -- sentences ---------------------------------------------------------------------------------------------------------


def _measured(rows: Sequence[Row]) -> str:
    """Where, when and how."""
    devices = list(dict.fromkeys(map(_device, rows)))
    dates = sorted({str(row["date"])[:10] for row in rows})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    commits = sorted(
        {name[:10] + ("+" if name.endswith("+") else "") for row in rows for name in row["commit"].split()}
    )
    jobs = sorted({row["jobs"] for row in rows})
    shared = f", up to {jobs[-1]} runs sharing it" if jobs[-1] > 1 else ""
    commands = "; ".join(f"`{command}`" for command in _all(rows, "command"))
    versions = ", ".join(f"torch {name}" for name in _all(rows, "torch"))
    return f"Measured on {', '.join(devices)}{shared}, {when}, commit {', '.join(commits)}, {versions}: {commands}."


def _device(row: Row) -> str:
    """A GPU by its name; of a processor also how much of it was used."""
    threads = row.get("threads") if row.get("cuda") is None else None
    return str(row["device"]) + (f" ({threads} of {row['cores']} cores)" if threads else "")


def _how(recipe: Recipe) -> str:
    hours = f", about {recipe.hours:g} hours a seed on one H200 ({recipe.hours_from})" if recipe.hours else ""
    return f"`dessilbi reproduce {recipe.name}`{hours}."


def _others(folder: Path, known: set[str]) -> list[str]:
    """The other files of the folder, and results of recipes that this library does not have."""
    own = [file for file in sorted(folder.glob("*.json")) if file.stem not in known]
    strangers = [file for file in own if of_recipe(file)]
    grids = {file: found for file in own if (found := _comparison(file))}
    lines = ["## Comparisons\n"] if grids else []
    for file, found in grids.items():
        lines += [f"### {file.stem}\n", *_compared(found), ""]
    if rest := [file for file in own if file not in strangers and file not in grids]:
        lines += ["## Other measurements\n", *(f"- [{file.name}]({file.name}){_about(file)}" for file in rest), ""]
    for file in strangers:
        lines += [f"## {file.stem}, of a recipe that is not here\n", *_list(Results(folder, file.stem).rows()), ""]
    return lines


def _comparison(file: Path) -> dict[str, Any] | None:
    """What `dessilbi compare --json` has written, if it is that."""
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return known if isinstance(known, dict) and {"grid", "rows", "command"} <= known.keys() else None


def _compared(known: Mapping[str, Any]) -> list[str]:
    """Its table: methods at fractions, and what each ticket cost to find, in dense trainings."""
    grid, rows = known["grid"], known["rows"]
    head = ["method", "kept", "ours", "seeds", f"to {grid['reference']}", "found at", "cost"]
    lines = [_line(head), _line(["---", *["---:"] * (len(head) - 1)])]
    for row in rows:
        ours = f"{100 * row['mean']:.2f}" + (f" ± {100 * row['sd']:.2f}" if row["sd"] is not None else "")
        gap = "" if row["difference"] is None else f"{100 * row['difference']:+.2f}"
        gap += "" if row["difference_sd"] is None else f" ± {100 * row['difference_sd']:.2f}"
        lines.append(_line([row["method"], _percent(row["keep"]), ours, str(row["seeds"]), gap, f"{row['at']:.3g}",
                            f"{row['cost']:.2f}"]))  # fmt: skip
    where = ", ".join(str(known[name]) for name in ("device", "date") if known.get(name))
    search, missing = grid["search"], known.get("missing")
    left = f" {missing} cells have not been measured." if missing else ""
    return [*lines, "", f"{search['model']} on {search['data']}, {grid['epochs']} epochs: measured on {where}, commit "
            f"{str(known.get('commit'))[:10]}: `{known['command']}`.{left}"]  # fmt: skip


def _about(file: Path) -> str:
    """What a file that is no recipe's says of itself."""
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return ": not JSON"
    facts = [str(known[name]) for name in ("device", "date") if known.get(name)] if isinstance(known, dict) else []
    command = f" `{known['command']}`" if isinstance(known, dict) and known.get("command") else ""
    return (": " + ", ".join(facts) if facts else "") + command


def _name(step: Step) -> str:
    """FT 120 for a step that is called ft120."""
    if step.words:
        return step.words
    head = step.name.rstrip("0123456789")
    return f"{head.upper()} {step.name[len(head) :]}" if head in ("ft", "rt") else step.name


def _outcome(figure: Mapping[str, Any]) -> str:
    return f"{figure['accuracy']:.2f}{_size(figure)}" if "accuracy" in figure else ""


def _size(figure: Mapping[str, Any]) -> str:
    """`` at 5 % of the weights``."""
    words = []
    for name, what in (("weights", "weights"), ("macs", "MACs"), ("parameters", "parameters")):
        if name in figure:
            value = figure[name]
            words.append(f"{_count(value)} {what}" if _low(value) > 1 else f"{_percent(value)} of the {what}")
    if "dropped" in figure:
        words.append(f"{figure['dropped']:.3g} layers dropped")
    return " at " + ", ".join(words) if words else ""


def _count(value: float) -> str:
    return f"{value / 1e6:.3g} M"


def _percent(value: Any) -> str:
    parts = value if isinstance(value, list) else [value]
    return "–".join(f"{100 * part:.3g}" for part in parts) + " %"


def _low(value: Any) -> float:
    return float(min(value)) if isinstance(value, list) else float(value)


def _spread(values: Sequence[float], form: str = ".2f") -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{form}}{spread}"


def _time(rows: Sequence[Row]) -> str:
    known = [row["seconds"] for row in rows if row.get("seconds") is not None]
    if not known:
        return ""
    seconds = _mean(known)
    amount = (
        f"{seconds:.0f} s"
        if seconds < 600
        else f"{seconds / 60:.0f} min"
        if seconds < 36000
        else f"{seconds / 3600:.1f} h"
    )
    jobs = max(row["jobs"] for row in rows)
    return amount + (f", {jobs} at a time" if jobs > 1 else "")


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def _all(rows: Iterable[Row], name: str) -> list[str]:
    return list(dict.fromkeys(str(row[name]) for row in rows))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
