"""`dessilbi latency`: how long networks take, side by side."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import click

from .app import importable_here

if TYPE_CHECKING:
    from dessilbi.latency import Latency

_BACKENDS = ("torch", "torch-compile", "onnxruntime")


class InputShape(click.ParamType[Any]):
    """`3x32x32` as a tuple."""

    name = "shape"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        sizes = value if isinstance(value, tuple) else value.lower().split("x")
        if not all(str(size).isdecimal() and int(size) > 0 for size in sizes):
            self.fail(f"{value!r} is not a shape: write channels x height x width, such as 3x32x32", param, ctx)
        return tuple(int(size) for size in sizes)


input_shape = click.option(
    "--input-shape", type=InputShape(), metavar="CxHxW", help="Shape of one input, where it is not known."
)


@click.command()
@click.argument("targets", metavar="MODEL...", nargs=-1, required=True)
@click.option("--backend", type=click.Choice(_BACKENDS), default="torch", show_default=True, help="What runs them.")
@click.option(
    "--batch",
    "batches",
    type=click.IntRange(min=1),
    multiple=True,
    default=(1, 64),
    show_default="1 and 64",
    help="Batch size; may be given more than once.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Threads of the backend.  [all cores]")
@click.option("--rounds", type=click.IntRange(min=1), default=30, show_default=True, help="How often each is timed.")
@click.option("--device", default="cpu", show_default=True, help="cpu, or cuda for torch and torch-compile.")
@input_shape
@click.option("--json", "raw", is_flag=True, help="All figures, as JSON.")
def command(
    targets: tuple[str, ...],
    backend: str,
    batches: tuple[int, ...],
    threads: int | None,
    rounds: int,
    device: str,
    input_shape: tuple[int, ...] | None,
    raw: bool,
) -> None:
    """Time networks side by side.

    MODEL is a network of `dessilbi models`, package.module:factory, a run folder (its latest checkpoint) or a file by
    save_shrunk. The first is what the others are compared with; its copy, the control, should read 1.00x.

    \b
    Examples:
      dessilbi latency runs/dense runs/pruned --backend onnxruntime --threads 2
      dessilbi latency resnet56 small.safetensors --batch 1 --batch 64 --batch 256
      dessilbi latency resnet20 resnet56 --json
    """
    importable_here()
    import torch

    from dessilbi.latency import measure
    from dessilbi.training.opening import open_network

    networks: dict[str, Any] = {}
    shapes = {}
    for target in targets:
        network, shape, label = open_network(target, input_shape)
        label = label if label not in networks and label != "control" else f"{label} ({len(networks) + 1})"
        networks[label], shapes[label] = network, shape
    shape = shapes[next(iter(shapes))]
    for label, other in shapes.items():
        if other != shape:
            raise ValueError(
                f"{label} takes inputs of {_text(other)} and {targets[0]} of {_text(shape)}: compare alike"
            )
    images = torch.zeros(2, *shape)
    sizes = tuple(dict.fromkeys(batches))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = measure(
            networks, images, backend=backend, batches=sizes, rounds=rounds, threads=threads, device=device
        )
    for warning in caught:
        if warning.category is UserWarning:
            click.echo(f"dessilbi latency: {warning.message}", err=True)
    if raw:
        click.echo(json.dumps(report.to_dict()))
    else:
        _show(report, shape)


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _show(report: Latency, shape: tuple[int, ...]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    table.add_column("model", overflow="fold")
    for heading in ("parameters", "batch", "median", "speed", "middle half"):
        table.add_column(heading, justify="right", no_wrap=True)
    last = None
    for row in report.rows:
        if last not in (None, row.batch):
            table.add_section()
        last = row.batch
        low, high = row.speed.ratio_quartiles
        table.add_row(
            row.name,
            f"{row.parameters:,}",
            str(row.batch),
            f"{1e3 * row.speed.seconds:.3f} ms",
            f"{row.speed.ratio:.2f}x",
            f"{low:.2f} - {high:.2f}",
        )
    title = (
        f"{report.version}, {report.backend}, {report.device}, {report.threads} threads, inputs {_text(shape)},"
        f" {report.rounds} rounds"
    )
    console = Console(highlight=False)
    console.print(title, style="bold", markup=False, soft_wrap=True)
    console.print(table)
