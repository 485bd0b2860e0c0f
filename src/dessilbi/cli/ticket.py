"""`dessilbi ticket`: winning tickets by early stopping, found, trained, taken elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from .app import Suggesting, importable_here, told, typed
from .grid import REWIND, Several, created, go, grid_options, search_of
from .options import Sectioned
from .train import train_shown


@click.group(cls=Suggesting)
def command() -> None:
    """Find sub-networks at an early epoch, and train them.

    \b
    Examples:
      dessilbi train --preset paper/vgg16-ticket --keep-epochs 2 --keep-epochs 5 --run runs/search
      dessilbi ticket find runs/search --at 5 --keep 0.06 -o vgg16.ticket
      dessilbi ticket train vgg16.ticket
      dessilbi ticket sweep --preset paper/vgg16-ticket --at 2,3,5,10 --keep 0.1,0.05,0.02
      dessilbi ticket transfer --source 'cifar10[0-4]' --target 'cifar10[5-9]' --preset paper/vgg16-ticket --at 5
    """


@command.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--at", type=click.IntRange(min=1), metavar="EPOCH", help="Where the selection is made.  [the last]")
@click.option("--keep", type=click.FloatRange(0, 1), metavar="F", help="Fraction kept.  [the support of Γ]")
@click.option("--allocation", help="How much of it each layer gets: lamp, erk, uniform.  [the order of entry]")
@REWIND
@click.option("-o", "--output", required=True, metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
@click.pass_context
def find(
    ctx: click.Context,
    /,
    run: Path,
    at: int | None,
    keep: float | None,
    allocation: str | None,
    rewind: int | None,
    output: Path,
) -> None:
    """Write the ticket that a run of DessiLBI has found by the end of an epoch.

    The run needs checkpoints of both epochs: `dessilbi train --keep-epochs 2 --keep-epochs 5`.

    \b
    Examples:
      dessilbi ticket find runs/search --at 5 --keep 0.06 -o vgg16.ticket
      dessilbi ticket find runs/search --at 5 --keep 0.06 --rewind 0 -o from-the-start.ticket
    """
    importable_here()
    from dessilbi.applications import tickets
    from dessilbi.training.run import Run

    with told(ctx):
        ticket = tickets.find(Run.open(run), at=at, keep=keep, allocation=allocation, rewind=rewind)
    ticket.save(output)
    click.echo(_described(ticket))
    click.echo(f"{output}: {output.stat().st_size / 1e6:.2f} MB; train it: dessilbi ticket train {output}")


@command.command("show")
@click.argument("file", type=click.Path(path_type=Path))
def show_ticket(file: Path) -> None:
    """Say what a ticket keeps and where it comes from; FILE may be the folder of a run that trains one.

    \b
    Examples:
      dessilbi ticket show vgg16.ticket
    """
    from dessilbi.applications import tickets

    ticket = tickets.load(file)
    click.echo(_described(ticket))
    for name, kept in ticket.selection.per_layer().items():
        click.echo(f"  {name}  {100 * kept:.3g} %")


@command.command("train")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--data", metavar="NAME", help="Another data set.  [the ticket's]")
@click.option("--data-root", metavar="FOLDER", help="Folder of the data sets.  [that of the search]")
@click.option("--seed", type=int, metavar="N", help="Of the order of the images.  [that of the search]")
@click.option("--epochs", type=click.IntRange(min=1), default=160, show_default=True, metavar="N")
@click.option("--device", help="cpu, cuda, cuda:1, or auto.  [that of the search]")
@click.option("--run", "folder", metavar="FOLDER", type=click.Path(file_okay=False, path_type=Path), help="Run folder.")
@click.option("--resume", is_flag=True, help="Go on with the run in FOLDER.")
@click.option("--overwrite", is_flag=True, help="Start anew in a FOLDER that exists; what is there goes.")
@click.pass_context
def train_ticket(
    ctx: click.Context,
    /,
    file: Path,
    data: str | None,
    data_root: str | None,
    seed: int | None,
    epochs: int,
    device: str | None,
    folder: Path | None,
    resume: bool,
    overwrite: bool,
) -> None:
    """Train a ticket with SGD, what it leaves out at zero throughout: on its data or others, with any seed.

    On other data the output layer starts anew; images are brought to what the network takes.

    \b
    Examples:
      dessilbi ticket train vgg16.ticket
      dessilbi ticket train lenet.ticket --data fashion-mnist --seed 1 --run runs/other
      dessilbi ticket train lenet.ticket --run runs/other --resume
    """
    if resume and overwrite:
        raise click.UsageError("--resume goes on and --overwrite starts anew: give one of them", ctx)
    importable_here()
    from dessilbi.applications import tickets
    from dessilbi.training.run import Run

    folder = folder or Path("runs", f"{file.resolve().stem}-{data or 'trained'}")
    if resume:
        config = Run.open(folder).config
    else:
        place = {"data_root": data_root, "seed": seed, "device": device}
        config = tickets.training(tickets.load(file), epochs, data)
        config = config.replace(**{name: value for name, value in place.items() if value is not None})
        config = config.replace(ticket=str(tickets.file_of(file)))
    train_shown(config, folder, resume, overwrite, typed(ctx))


_AT = click.option("--at", type=Several(int), help="Epochs at which selections are made, such as 2,3,5,10.")
_ALLOCATION = click.option(
    "--allocation", help="How much each layer gets: lamp, erk, uniform, global.  [the order of entry decides]"
)


@command.command(cls=Sectioned)
@click.argument("folder", required=False, type=click.Path(file_okay=False, path_type=Path))
@_AT
@_ALLOCATION
@grid_options
@click.pass_context
def sweep(
    ctx: click.Context,
    /,
    folder: Path | None,
    at: tuple[int, ...] | None,
    allocation: str | None,
    preset: str | None,
    file: Path | None,
    **options: Any,
) -> None:
    """Find and train a ticket for every epoch and every fraction; all in one search.

    Beside them stand the ticket of the epoch where the stopping rule fires, and the dense network. FOLDER is a
    comparison: `dessilbi compare FOLDER` goes on with it, and its tickets lie in the folders of their runs.

    \b
    Examples:
      dessilbi ticket sweep --preset quick/lenet-digits --at 1,2,5 --keep 0.1,0.05
    """
    search = search_of(ctx, preset, file)
    folder = folder or Path("runs", f"sweep-{search.model}-{search.data}".replace("/", "-").replace(":", "-"))
    name = f"dessilbi-{allocation}" if allocation else "dessilbi"
    methods = ("dense", *(f"{name}@{epoch}" for epoch in at or (1, 2, 5)), name)
    go(created(ctx, folder, search, methods, options), options, typed(ctx))


@command.command(cls=Sectioned)
@click.argument("folder", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option("--source", required=True, metavar="DATA", help="Where tickets are found, such as mnist or cifar10[0-4].")
@click.option("--target", required=True, metavar="DATA", help="Where they are trained.")
@_AT
@_ALLOCATION
@grid_options
@click.pass_context
def transfer(
    ctx: click.Context,
    /,
    folder: Path | None,
    source: str,
    target: str,
    at: tuple[int, ...] | None,
    allocation: str | None,
    preset: str | None,
    file: Path | None,
    **options: Any,
) -> None:
    """Train tickets of one data set on another: beside the target's own tickets, and random ones.

    \b
    Examples:
      dessilbi ticket transfer --source mnist --target fashion-mnist --preset quick/lenet-mnist --at 2
      dessilbi ticket transfer --source 'cifar10[0-4]' --target 'cifar10[5-9]' --preset paper/vgg16-ticket --at 5
    """
    search = search_of(ctx, preset, file).replace(data=target)
    names = f"transfer-{search.model}-{source}-{target}"
    folder = folder or Path("runs", names.replace("/", "-").replace(":", "-"))
    shares = f"-{allocation}" if allocation else ""
    points = [f"{shares}@{epoch}" for epoch in at or ()] or [shares]
    methods = ["dense"] + [f"{kind}{p}" for p in points for kind in ("dessilbi", "transferred", "random-like")]
    go(created(ctx, folder, search, [*methods, "random"], options, source), options, typed(ctx))


def _described(ticket: Any) -> str:
    facts, kept = ticket.facts, ticket.selection.keep
    start = "where it was found" if facts.get("rewind") is None else f"epoch {facts['rewind']}"
    model = facts.get("config", {}).get("model", "a network")
    return (
        f"{facts.get('method', 'ticket')}: {100 * kept:.4g} % of {model}, found on {facts['data']} at epoch "
        f"{facts.get('at', float('nan')):g}, starting from {start}"
    )
