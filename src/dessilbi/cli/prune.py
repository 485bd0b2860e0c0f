"""`dessilbi prune`: what a run selected, cut out of its network, and what that cost and gained."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .app import importable_here, told, typed
from .progress import training_progress
from .train import resumable

if TYPE_CHECKING:
    from dessilbi.training.run import Run

_TRAINED = ("fine-tuned", "retrained")


class Amount(click.ParamType[Any]):
    """A number, or a part of what the dense network has: `50%`."""

    name = "n|part%"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        try:
            number = float(str(value).removesuffix("%"))
        except ValueError:
            self.fail(f"{value!r} is neither a number nor a part of the dense network, such as 50%", param, ctx)
        return str(value) if str(value).endswith("%") else number


_FRACTION = click.FloatRange(0, 1)
_EPOCHS = click.IntRange(min=1)


@click.command()
@click.argument("source", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--level", type=click.Choice(("weight", "filter", "layer")), help="What is selected.")
@click.option("--at", type=_EPOCHS, metavar="EPOCH", help="Path and weights at the end of this epoch.  [the last]")
@click.option("--keep", type=_FRACTION, metavar="F", help="Keep this fraction of the groups.")
@click.option("--params", type=Amount(), help="Parameters that may be left, such as 2e6 or 10%.")
@click.option("--macs", type=Amount(), help="Multiply-adds an image that may be left, such as 6e7 or 50%.")
@click.option("--latency", type=Amount(), help="Seconds that one image may take, such as 0.002 or 50%.")
@click.option("--max-prune", type=_FRACTION, metavar="F", help="The most that a tensor may lose.")
@click.option(
    "--min-keep", type=click.IntRange(min=0), default=1, show_default=True, metavar="N", help="Groups a tensor keeps."
)
@click.option("--finetune", type=_EPOCHS, metavar="N", help="Then fine-tune for N epochs.")
@click.option("--retrain", type=_EPOCHS, metavar="N", help="Then train for N epochs from the initial weights.")
@click.option(
    "--run",
    "folder",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    help="Run folder of the pruned network.  [RUN-LEVEL]",
)
@click.option("--resume", is_flag=True, help="RUN is a pruned one: train it to the end, and complete its table.")
@click.option("--overwrite", is_flag=True, help="Replace a FOLDER that exists.")
@click.option("--data-root", metavar="FOLDER", help="Folder of the data sets.  [the run's]")
@click.option("--device", help="cpu, cuda, cuda:1, or auto.  [the run's]")
@click.option("--rounds", type=click.IntRange(min=0), default=15, show_default=True, help="Timings; 0 for none.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    source: Path,
    level: str | None,
    finetune: int | None,
    retrain: int | None,
    folder: Path | None,
    resume: bool,
    overwrite: bool,
    **options: Any,
) -> None:
    """Prune the network of a run, and fine-tune or retrain what is left.

    Without --keep, --params, --macs or --latency the selection is the support of Γ at that epoch. FOLDER is a run
    folder of its own, with the pruned network, the selection, and a table of what it cost and gained.

    \b
    Examples:
      dessilbi prune runs/quick-lenet-digits --level filter --keep 0.5 --max-prune 0.6 --finetune 5
      dessilbi prune runs/resnet56 --level filter --macs 50% --max-prune 0.6 --finetune 400
      dessilbi prune runs/vgg16 --level weight --at 120 --finetune 400 --run runs/vgg16-ft120
      dessilbi prune runs/vgg16 --level weight --at 120 --retrain 200 --run runs/vgg16-rt120
      dessilbi prune runs/vgg16-ft120 --resume
    """
    given = [p.opts[0] for p in ctx.command.params if p.name and _is_given(ctx, p.name)]
    if resume:
        other = [name for name in given if name not in ("source", "--resume", "--debug")]
        if other:
            raise click.UsageError(f"--resume goes on with what RUN holds: leave out {', '.join(other)}", ctx)
        _finish(source, ctx)
        return
    targets = [name for name in given if name in ("--keep", "--params", "--macs", "--latency")]
    if level is None:
        raise click.UsageError("say what is selected: --level weight, filter or layer", ctx)
    if len(targets) > 1:
        raise click.UsageError(f"{' and '.join(targets)} are {len(targets)} targets: give one of them", ctx)
    if finetune and retrain:
        raise click.UsageError("--finetune goes on from the weights and --retrain starts anew: give one of them", ctx)
    importable_here()
    from dessilbi.applications import sparsify
    from dessilbi.training.run import Run

    at = options["at"]
    folder = folder or source.with_name(f"{source.resolve().name}-{level}" + (f"-{at}" if at else ""))
    with told(ctx):
        made = sparsify.prune(
            Run.open(source),
            folder,
            level=level,
            finetune=finetune,
            retrain=retrain,
            overwrite=overwrite,
            command=typed(ctx),
            note=click.echo,
            **options,
        )
    if finetune or retrain:
        _finish(folder, ctx)
    else:
        show_table(made)
        again = shlex.quote(str(folder))
        click.echo(f"fine-tune it for {made.config.epochs} epochs: dessilbi prune {again} --resume")


def _is_given(ctx: click.Context, name: str) -> bool:
    from click.core import ParameterSource

    return ctx.get_parameter_source(name) not in (None, ParameterSource.DEFAULT)


def _finish(folder: Path, ctx: click.Context) -> None:
    """Train to the end, and show what came of it."""
    importable_here()
    from dessilbi.applications import sparsify
    from dessilbi.training.run import Run

    run = Run.open(folder)
    with resumable(folder, f"dessilbi prune {shlex.quote(str(folder))} --resume"):
        with training_progress() or nullcontext() as progress:
            sparsify.finish(run, progress, typed(ctx))
        if progress:
            show_table(run)


def show_table(run: Run) -> None:
    """The table of a run folder that `prune` made."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from dessilbi.applications.sparsify import read_table

    found = read_table(run)
    timing = found["timing"]
    batches = dict.fromkeys(row["batch"] for row in timing["rows"]) if timing else {}
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("network", no_wrap=True)
    for heading in ("accuracy", "params", "non-zero", "MACs", "file", *(f"ms at {batch}" for batch in batches)):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found["rows"]:
        times = [row["latency"][str(batch)] for batch in batches]
        table.add_row(
            row["network"],
            f"{100 * row['accuracy']:.2f} %",
            *(short(row[name]) for name in ("parameters", "nonzero", "macs", "bytes")),
            *(f"{1e3 * time['seconds']:.3g} {time['ratio']:.2f}x" for time in times),
        )
    config = run.config
    console = Console(highlight=False)
    title = f"{run.folder}: {config.model} on {config.data}, from epoch {found['epoch']:g} of {found['run']}"
    console.print(title, style="bold", markup=False, soft_wrap=True)
    console.print(table)
    if timing:
        controls = ", ".join(f"{row['ratio']:.2f}x" for row in timing["rows"] if row["name"] == "control")
        text = (
            f"timed: {timing['version']}, {timing['device']}, {timing['threads']} threads; a copy of dense: {controls}"
        )
        console.print(text, markup=False, soft_wrap=True)


def short(number: float) -> str:
    """Three digits, and K, M or G."""
    for unit in ("", "K", "M", "G"):
        if number < 999.5 or unit == "G":
            break
        number /= 1000
    return f"{number:.3g}{unit}"
