"""`dessilbi reproduce`: the paper's tables, row by row."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from .app import Interrupted, columns, importable_here, typed
from .grid import Several
from .progress import training_progress

if TYPE_CHECKING:
    from dessilbi.applications.recipe import Recipe
    from dessilbi.applications.reproduction import Reproduction


@click.command()
@click.argument("name", required=False)
@click.option("--seeds", type=click.IntRange(min=1), metavar="N", help="Seeds 0 to N-1.  [those of the recipe]")
@click.option("--seed", "chosen", type=Several(int), help="These seeds instead, such as 3 or 0-4.")
@click.option("--row", "rows", multiple=True, metavar="ROW", help="Only this row, and what it needs; repeatable.")
@click.option("--fast", is_flag=True, help="A quarter of the epochs, for development. Results are kept apart.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Runs that share the device.")
@click.option("--todo", is_flag=True, help="Say what is to do, and stop.")
@click.option("--data-root", metavar="FOLDER", help="Folder of the data sets.  [data]")
@click.option("--device", help="cpu, cuda, cuda:1, or auto.  [auto]")
@click.option("--runs", metavar="FOLDER", default="runs", show_default=True, help="Folder of the run folders.")
@click.option("--results", metavar="FOLDER", default="results", show_default=True, help="Folder of the results.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    name: str | None,
    seeds: int | None,
    chosen: tuple[int, ...] | None,
    rows: tuple[str, ...],
    fast: bool,
    jobs: int,
    todo: bool,
    data_root: str | None,
    device: str | None,
    runs: str,
    results: str,
) -> None:
    """Run the recipe NAME, or list the recipes.

    A recipe is what the paper reports in some rows of its tables, and the runs that measure them here. What was cut
    off goes on with the same command; each outcome goes into RESULTS/NAME.json as soon as it is there, and is not
    measured again. NAME may be a TOML file of your own.

    \b
    Examples:
      dessilbi reproduce
      dessilbi reproduce weights-vgg16 --jobs 4
      dessilbi reproduce weights-vgg16 --row ft120 --seed 3 --fast
      dessilbi reproduce tickets-vgg16 --todo
      dessilbi results
    """
    importable_here()
    from dessilbi.applications.recipe import Recipe
    from dessilbi.applications.reproduction import Reproduction

    if name is None:
        _show_all(results)
        return
    try:
        recipe = Recipe.load(name)
    except ValueError as error:
        raise click.UsageError(str(error), ctx) from None
    place = {key: value for key, value in (("data_root", data_root), ("device", device)) if value is not None}
    numbers = chosen if chosen is not None else tuple(range(seeds or recipe.seeds))
    work = Reproduction(recipe, runs=runs, results=results, fast=fast, place=place, command=typed(ctx), note=click.echo)
    try:
        tasks = work.todo(numbers, rows)
    except ValueError as error:
        raise click.UsageError(str(error), ctx) from None
    if todo:
        for task in tasks:
            click.echo(str(task))
        return
    if not tasks:
        click.echo(f"{recipe.name}: all is measured, see {work.results.file}")
        return
    _go(work, tasks, jobs, typed(ctx))
    click.echo(f"{work.results.file}: show it with dessilbi results" + _other(results))


def _go(work: Reproduction, tasks: Any, jobs: int, command: str) -> None:
    try:
        with training_progress() or nullcontext() as progress:
            work.progress = progress if jobs == 1 else None
            wrong = work.go(tasks, jobs)
    except (KeyboardInterrupt, SystemExit) as stop:
        status = stop.code if isinstance(stop, SystemExit) and isinstance(stop.code, int) else 130
        raise Interrupted(f"interrupted: go on with `{command}`", status) from None
    if wrong:
        raise click.ClickException(f"{len(wrong)} went wrong, and the same command tries again: " + "; ".join(wrong))


def _other(results: str) -> str:
    return "" if results == "results" else f" --results {shlex.quote(results)}"


def _show_all(results: str) -> None:
    from dessilbi.applications import recipe as recipes
    from dessilbi.applications.recipe import Recipe

    rows = [("NAME", "HOURS A SEED", "MEASURED", "WHAT")]
    for name in recipes.names():
        recipe = Recipe.load(name)
        hours = f"{recipe.hours:g}" if recipe.hours else "?"
        rows.append((name, hours, _measured(recipe, results), recipe.title))
    click.echo(columns(rows))


def _measured(recipe: Recipe, results: str) -> str:
    """How much of a recipe, with its seeds, has an outcome."""
    from dessilbi.applications.reproduction import Reproduction

    work, seeds = Reproduction(recipe, results=results), range(recipe.seeds)
    every = len(work.tasks(seeds))
    return f"{every - len(work.todo(seeds))} of {every}"
