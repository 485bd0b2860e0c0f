"""What the commands that compare methods share: the options of a grid, doing its cells, its table."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from .app import Interrupted, importable_here
from .options import ConfigOption, configuration, given, search_options

if TYPE_CHECKING:
    from dessilbi.applications.comparison import Comparison

_F = TypeVar("_F", bound=Callable[..., Any])


class Several(click.ParamType[Any]):
    """Values with commas between them; whole numbers also as `0-4`."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.name = {str: "name,…", float: "f,…", int: "n,…"}[kind]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        found: list[Any] = []
        for word in str(value).split(","):
            between = re.fullmatch(r"(\d+)-(\d+)", word) if self.kind is int else None
            try:
                found += range(int(between[1]), int(between[2]) + 1) if between else [self.kind(word.strip())]
            except ValueError:
                self.fail(f"{word!r} of {value!r} is no {'whole ' if self.kind is int else ''}number", param, ctx)
        return tuple(found)


class _Rewind(click.ParamType[Any]):
    name = "epoch|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value in (None, "none"):
            return None
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither an epoch nor the word none", param, ctx)


REWIND = click.option(
    "--rewind",
    type=_Rewind(),
    default=2,
    show_default=True,
    help="Tickets start from the weights at the end of this epoch; none: from those where they were found, fine-tuned.",
)
KEEPS = click.option("--keep", "keeps", type=Several(float), help="Fractions to keep, such as 0.1,0.05,0.02.")

_OPTIONS = (
    click.option("--preset", metavar="NAME", help="Search as one of `dessilbi presets`."),
    click.option(
        "--config",
        "file",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="TOML file of the search; what it sets goes over the preset.",
    ),
    KEEPS,
    click.option("--seed", "seeds", type=Several(int), default="0", show_default=True, help="Seeds, such as 0-4."),
    click.option(
        "--epochs", type=click.IntRange(min=1), metavar="N", help="Of the final training.  [those of the search]"
    ),
    REWIND,
    click.option(
        "--repeats",
        type=click.IntRange(min=1),
        default=5,
        show_default=True,
        help="Random tickets a random cell trains.",
    ),
    click.option("--jobs", type=int, default=1, show_default=True, help="Cells at a time."),
    click.option("--backend", help="Of joblib: loky (processes here), or one that is registered: dask, ray.  [loky]"),
    click.option(
        "--figure",
        metavar="FILE",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Draw accuracy against keep: .png, .svg or .pdf.",
    ),
    click.option(
        "--json",
        "table_file",
        metavar="FILE",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Write the table with all numbers.",
    ),
)


def grid_options(function: _F) -> _F:
    """The options of a grid, those of its search among them."""
    function = search_options(function)
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def grid_given(ctx: click.Context) -> bool:
    """Whether any option was given that says what the grid is."""
    names = {
        "preset",
        "file",
        "methods",
        "keeps",
        "seeds",
        "epochs",
        "rewind",
        "repeats",
        "source",
        "target",
        "at",
        "allocation",
    }
    mine = [p for p in ctx.command.params if p.name in names or isinstance(p, ConfigOption)]
    return any(ctx.get_parameter_source(p.name or "") is not ParameterSource.DEFAULT for p in mine)


def search_of(ctx: click.Context, preset: str | None, file: Path | None) -> Any:
    """The configuration of the search."""
    try:
        return configuration(None, preset, file, given(ctx))
    except ValueError as error:
        raise click.UsageError(str(error), ctx) from None


def created(
    ctx: click.Context,
    folder: Path,
    search: Any,
    methods: Sequence[str],
    options: Mapping[str, Any],
    source: str | None = None,
) -> Comparison:
    """The comparison of these methods, in its folder."""
    if ":" in search.model:
        importable_here()
    from dessilbi.applications.comparison import Comparison, Grid

    try:
        grid = Grid(
            search,
            methods=tuple(methods),
            keeps=options["keeps"] or (0.1, 0.05, 0.02),
            seeds=options["seeds"],
            epochs=options["epochs"] or search.epochs,
            rewind=options["rewind"],
            repeats=options["repeats"],
            source=source,
        )
    except ValueError as error:
        raise click.UsageError(str(error), ctx) from None
    return Comparison.create(folder, grid)


def go(comparison: Comparison, options: Mapping[str, Any], command: str) -> None:
    """Do what is to do, then show the table and write what was asked for."""
    again = f"dessilbi compare {shlex.quote(str(comparison.folder))}"
    try:
        wrong = comparison.go(options["jobs"], options["backend"], click.echo)
    except (KeyboardInterrupt, SystemExit):
        raise Interrupted(f"interrupted: go on with `{again}`") from None
    show(comparison, options, command)
    if wrong:
        raise click.ClickException(f"{len(wrong)} cells went wrong, and {again} tries them again: " + "; ".join(wrong))


def show(comparison: Comparison, options: Mapping[str, Any], command: str) -> None:
    """The table on the terminal, and as files where they were asked for."""
    table = comparison.table()
    if options["figure"]:
        from dessilbi.report.comparison import draw

        draw(table, options["figure"])
    if options["table_file"]:
        from dessilbi import files
        from dessilbi.training.environment import versions

        here = versions()
        device = _hardware(comparison.grid.search.device, here["cores"])
        found = {"command": command, "date": f"{date.today()}", "device": device, **here, **table}
        files.write_atomically(options["table_file"], (json.dumps(found, indent=1) + "\n").encode())
    _print(comparison.folder, table)


def _hardware(name: str, cores: int) -> str:
    import torch

    from dessilbi.training.distribution import find_device

    try:
        device = find_device(name)
    except ValueError:  # done elsewhere, shown here
        return name
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {cores} cores"


def _print(folder: Path, found: Mapping[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    grid, search = found["grid"], found["grid"]["search"]
    total = grid["epochs"]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True)
    headings = ("keep", "seeds", "accuracy %", f"to {grid['reference']}", "found at", "cost", "MACs", "lost")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found["rows"]:
        table.add_row(
            row["method"],
            f"{row['keep']:g}",
            str(row["seeds"]),
            _spread(row["mean"], row["sd"], "{:.2f}"),
            _spread(row["difference"], row["difference_sd"], "{:+.2f}"),
            f"{row['at']:.3g}",
            f"{row['cost']:.2f}",
            f"{row['macs']:.2e}",
            str(row["emptied"] or ""),
        )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    start = "fine-tuned where they were found" if grid["rewind"] is None else f"rewound to epoch {grid['rewind']}"
    title = f"{folder}: {search['model']} on {search['data']}, {start}, trained for {total} epochs"
    console.print(title, style="bold", markup=False, soft_wrap=True)
    console.print(table)
    console.print(
        f"mean ± standard deviation; paired by seed; cost in trainings of {total} epochs; lost: layers that are empty",
        markup=False,
        soft_wrap=True,
    )
    for row in found["rows"]:
        if row["method"].startswith("dessilbi") and "@" not in row["method"]:
            saved = search["epochs"] - row["at"]
            text = f"stopped after {row['at']:.3g} of {search['epochs']} epochs of the search, {saved:.3g} saved"
            console.print(f"{row['method']}, keep {row['keep']:g}: {text}", markup=False, soft_wrap=True)
    if found["missing"]:
        console.print(f"{found['missing']} cells are still to do", markup=False)


def _spread(mean: float | None, sd: float | None, form: str) -> str:
    if mean is None:
        return ""
    return form.format(100 * mean) + (f" ± {100 * sd:.2f}" if sd is not None else "")
