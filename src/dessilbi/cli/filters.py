"""`dessilbi filters`: the filters of a layer as images."""

from __future__ import annotations

from pathlib import Path

import click

from .app import importable_here


def _epochs(ctx: click.Context, option: click.Parameter, value: str | None) -> list[int]:
    try:
        epochs = [int(part) for part in value.split(",")] if value else []
    except ValueError:
        epochs = [0]
    if value and min(epochs) < 1:
        raise click.BadParameter(f"{value!r}: give epochs counted from 1, such as 20,40,80", ctx, option)
    return epochs


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--layer", required=True, metavar="NAME", help="A layer of the path, such as features.0.")
@click.option("--epochs", metavar="N,N,…", callback=_epochs, help="[those of --keep-epochs, and the last]")
@click.option("--count", type=click.IntRange(min=1), default=6, show_default=True, help="Selected ones, and others.")
@click.option("--image", type=click.IntRange(min=0), metavar="N", help="Of the test split, to take gradients at.  [0]")
@click.option(
    "-o",
    "--output",
    "out",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="An .html or .png file.  [RUN/filters-NAME.html]",
)
def command(run: Path, layer: str, epochs: list[int], count: int, image: int | None, out: Path | None) -> None:
    """See the filters of a layer along the path: those that Γ selected, beside others.

    Kernels of a first layer, sorted by when they entered; images that excite a filter most (activation maximisation);
    what of an image excites it (guided backpropagation). The run must have kept checkpoints of these epochs.

    \b
    Examples:
      dessilbi train --preset quick/lenet-digits --conv filter --keep 0.3 --keep-epochs 2 --keep-epochs 5 \\
          --run runs/digits
      dessilbi filters runs/digits --layer features.0
      dessilbi filters runs/digits --layer features.6 --epochs 2,5,10 -o filters.png
    """
    importable_here()
    from dessilbi.report.filters import sheet
    from dessilbi.training.run import Run

    place = out or run / f"filters-{layer.removesuffix('.weight').replace('/', '-')}.html"
    if place.suffix.lower() not in (".html", ".png"):
        raise click.BadParameter(f"{place}: must end in .html or .png", param_hint="--output")
    click.echo(sheet(Run.open(run), layer, epochs, count, image).save(place))
