"""`dessilbi compare`: methods side by side, every one at every fraction with every seed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from .app import typed
from .grid import Several, created, go, grid_given, grid_options, search_of, show
from .options import Sectioned

_METHODS = ("dense", "dessilbi", "magnitude", "magnitude-lamp", "snip", "random")


@click.command(cls=Sectioned)
@click.argument("folder", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option("--method", "methods", type=Several(str), help=f"What is compared.  [{','.join(_METHODS)}]")
@grid_options
@click.option("--cell", nargs=3, type=str, metavar="METHOD KEEP SEED", help="Do this cell of FOLDER and no other.")
@click.option("--todo", is_flag=True, help="Print a command for every cell of FOLDER that is still to do, and stop.")
@click.option("--show", "only_show", is_flag=True, help="Show what FOLDER holds, and do nothing.")
@click.option("--methods", "listed", is_flag=True, help="List the methods, and stop.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    folder: Path | None,
    methods: tuple[str, ...] | None,
    preset: str | None,
    file: Path | None,
    cell: tuple[str, str, str] | None,
    todo: bool,
    only_show: bool,
    listed: bool,
    **options: Any,
) -> None:
    """Compare ways to find a sub-network: a grid of method x fraction kept x seed.

    FOLDER keeps every run and every cell: what lies there is not done again, and a larger grid does only what is new.
    Methods may name an allocation by layer and an epoch: dessilbi@5, magnitude-lamp, magnitude-erk@5.
    --search-keep and --search-epochs are --keep and --epochs of the search by DessiLBI; its other options are those
    of `dessilbi train`.

    \b
    Examples:
      dessilbi compare runs/lenet --preset quick/lenet-digits --method dessilbi@2,magnitude,snip --keep 0.1,0.05
      dessilbi compare runs/lenet --show --figure lenet.svg
      dessilbi compare runs/lenet --jobs 4
      dessilbi compare runs/lenet --todo
      dessilbi compare runs/lenet --cell dessilbi@2 0.05 0
      dessilbi compare --methods
    """
    if listed:
        from dessilbi.applications.methods import KINDS

        width = max(map(len, KINDS))
        click.echo("\n".join(f"{name:{width}}  {kind.words}" for name, kind in KINDS.items()))
        return
    from dessilbi.applications.comparison import Cell, Comparison

    if grid_given(ctx):
        if cell or todo or only_show:
            raise click.UsageError(
                "--cell, --todo and --show are about a FOLDER that is there: leave the rest out", ctx
            )
        search = search_of(ctx, preset, file)
        folder = folder or Path("runs", f"compare-{search.model}-{search.data}".replace("/", "-").replace(":", "-"))
        go(created(ctx, folder, search, methods or _METHODS, options), options, typed(ctx))
        return
    if folder is None:
        raise click.UsageError("name a FOLDER that is there, or say what to compare", ctx)
    comparison = Comparison.open(folder)
    if todo:
        for c in comparison.todo():
            words = ["dessilbi", "compare", str(folder), "--cell", c.method, f"{c.keep:g}", str(c.seed)]
            click.echo(shlex.join(words))
    elif cell:
        try:
            chosen = Cell(cell[0], float(cell[1]), int(cell[2]))
        except ValueError:
            raise click.UsageError(f"--cell {' '.join(cell)}: give a method, a fraction and a seed", ctx) from None
        comparison.do(chosen, click.echo)
    elif only_show:
        show(comparison, options, typed(ctx))
    else:
        go(comparison, options, typed(ctx))
