"""`dessilbi export`: a network as a file for others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .app import columns, importable_here
from .latency import input_shape

if TYPE_CHECKING:
    from dessilbi.conversion import Conversion

_FORMATS = ("onnx", "torch", "safetensors", "csr")


@click.command()
@click.argument("target", metavar="MODEL")
@click.option("--format", "form", type=click.Choice(_FORMATS), required=True, help="What to write.")
@click.option(
    "-o",
    "--output",
    "file",
    metavar="FILE",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file; one that exists is replaced.",
)
@click.option("--tolerance", type=float, help="Largest difference allowed, relative to the largest output.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="csr: batch size to time at.")
@click.option("--max-density", type=float, default=0.5, show_default=True, help="csr: only layers as sparse as this.")
@click.option("--force", is_flag=True, help="csr: also the layers that are not faster so.")
@input_shape
def command(
    target: str,
    form: str,
    file: Path,
    tolerance: float | None,
    batch: int,
    max_density: float,
    force: bool,
    input_shape: tuple[int, ...] | None,
) -> None:
    """Write a network as ONNX, torch.export, safetensors, or with sparse linear layers (CSR).

    MODEL is a network of `dessilbi models`, package.module:factory, a run folder (its latest checkpoint) or a file by
    save_shrunk. What is written is first read back, and run on random inputs where the format holds a network: FILE
    appears only if the outputs are those of MODEL.

    \b
    Examples:
      dessilbi export runs/pruned --format onnx -o pruned.onnx
      dessilbi export runs/pruned --format torch -o pruned.pt2
      dessilbi export runs/pruned --format safetensors -o pruned.safetensors
      dessilbi export runs/sparse --format csr --max-density 0.1 --batch 64 -o sparse.safetensors
    """
    importable_here()
    import torch

    from dessilbi import conversion, export
    from dessilbi.training.opening import open_network

    if not file.parent.is_dir():
        raise FileNotFoundError(f"{file}: there is no folder {file.parent}: make it first")
    network, shape, label = open_network(target, input_shape)
    images = torch.randn(2, *shape)
    allowed: dict[str, Any] = {} if tolerance is None else {"tolerance": tolerance}
    match form:
        case "onnx":
            facts = export.to_onnx(network, images, file, **allowed)
        case "torch":
            facts = export.to_export(network, images, file, **allowed)
        case "safetensors":
            facts = export.to_safetensors(network, file)
        case _:
            done = conversion.to_csr(network, torch.randn(batch, *shape), max_density=max_density, force=force)
            _show(done, batch)
            if not done.converted:
                raise click.ClickException(f"{label}: no linear layer is faster as CSR: --force converts them anyway")
            facts = conversion.save_csr(done.model, file)
    click.echo(_line(facts))


def _line(facts: dict[str, Any]) -> str:
    parts = [f"{facts['file']}: {facts['bytes'] / 1e6:.2f} MB"]
    if "opset" in facts:
        parts.append(f"opset {facts['opset']}")
    if "tensors" in facts:
        parts.append(f"{facts['tensors']} tensors, read back identical")
    if "difference" in facts:
        equal = f"equal within {facts['difference']:.1e}" if facts["difference"] else "identical"
        parts.append(f"any batch size, outputs {equal} at {', '.join(map(str, facts['batches']))}")
    return ", ".join(parts)


def _show(done: Conversion, batch: int) -> None:
    rows = [["layer", "density", "speed", "middle half", "control", ""]]
    for layer in done.layers:
        low, high = layer.speed.ratio_quartiles
        rows.append(
            [
                layer.name,
                f"{layer.density:.3f}",
                f"{layer.speed.ratio:.2f}x",
                f"{low:.2f} - {high:.2f}",
                f"{layer.control.ratio:.2f}x",
                "CSR" if layer.converted else "left dense",
            ]
        )
    low, high = done.speed.ratio_quartiles
    rows.append(
        [
            "whole",
            "",
            f"{done.speed.ratio:.2f}x",
            f"{low:.2f} - {high:.2f}",
            f"{done.control.ratio:.2f}x",
            f"batch {batch}",
        ]
    )
    click.echo(columns(rows))
