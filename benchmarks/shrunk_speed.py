"""How much faster half of the filters is: `python -m benchmarks.shrunk_speed [--backend onnxruntime] [--rounds 60]`.

ResNet-56 for CIFAR-10 with the first half of the filters of every convolution, against the dense one: made by
`dessilbi.shrink`, and beside it built half as wide by hand. Both compute the same; what their ratios differ by is
either noise or what `shrink` leaves behind. The control is a second copy of the dense network.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import warnings

import torch
from torch import nn

from dessilbi.latency import BACKENDS, Latency, measure
from dessilbi.models import create
from dessilbi.training.environment import commit

NAME, WIDTHS, SHAPE = "resnet56", (16, 32, 64), (3, 32, 32)
GOALS = {64: 2.3, 1: 1.6}


def dense() -> nn.Module:
    """Batch normalisation as after training: with statistics still at zero and one, equality would prove little."""
    torch.manual_seed(0)
    network = create(NAME)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data.uniform_(0.5, 1.5)
            module.bias.data.normal_(0, 0.1)
            module.running_mean.normal_(0, 0.1)  # type: ignore[union-attr, operator]
            module.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr, operator]
    return network.eval()


def by_hand() -> nn.Module:
    return create(NAME, widths=tuple(width // 2 for width in WIDTHS)).eval()


def shrunk(network: nn.Module) -> nn.Module:
    """Without the second half of the filters of every convolution.

    Stage by stage the streams keep their first half, so that every writer of a stream agrees and the shortcuts, which
    carry the old stream in the first channels of the new one, hand over only channels that are kept.
    """
    from dessilbi import Selection, shrink

    masks = {
        f"{name}.weight": torch.arange(module.out_channels) < module.out_channels // 2
        for name, module in network.named_modules()
        if isinstance(module, nn.Conv2d)
    }
    small: nn.Module = shrink(network, Selection(masks, level="filter"), torch.randn(2, *SHAPE))
    return small.eval()


def table(report: Latency) -> str:
    lines = [f"{'':10} {'parameters':>10} {'batch':>5} {'median':>11} {'ratio':>6}  middle half"]
    for row in report.rows:
        low, high = row.speed.ratio_quartiles
        lines.append(
            f"{row.name:10} {row.parameters:10} {row.batch:5} {1e3 * row.speed.seconds:8.3f} ms {row.speed.ratio:6.2f}"
            f"  {low:.2f} - {high:.2f}"
        )
    return "\n".join(lines)


def verdict(report: Latency) -> list[str]:
    """The goals, and how far the shrunk network is from the one made by hand."""
    lines = []
    for batch, goal in GOALS.items():
        ratio = {row.name: row.speed.ratio for row in report.rows if row.batch == batch}
        name = "shrunk" if "shrunk" in ratio else "by hand"
        met = "met" if ratio[name] >= goal else "missed"
        lines.append(f"batch {batch}: {name} {ratio[name]:.2f}x, goal {goal}x: {met}")
        if name == "shrunk":
            lines[-1] += f"; {100 * (ratio['shrunk'] / ratio['by hand'] - 1):+.1f} % against by hand (goal within 3 %)"
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", choices=BACKENDS, default="onnxruntime")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--without-shrink", action="store_true", help="only the network made by hand")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    arguments = parser.parse_args()
    network = dense()
    networks = {"dense": network, "by hand": by_hand()}
    if not arguments.without_shrink:
        networks["shrunk"] = shrunk(network)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        report = measure(
            networks,
            torch.randn(2, *SHAPE),
            backend=arguments.backend,
            batches=tuple(GOALS),
            rounds=arguments.rounds,
            threads=arguments.threads,
            device=arguments.device,
        )
    print(f"{NAME}, {report.version}, {report.device}, {report.threads} threads, {datetime.date.today()}")
    print(table(report))
    if report.backend == "onnxruntime":
        print("\n".join(verdict(report)))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as out:
            command = " ".join(["python -m benchmarks.shrunk_speed", *sys.argv[1:]])
            facts = {"command": command, "date": str(datetime.date.today()), "commit": commit(), "network": NAME}
            json.dump({**facts, "verdict": verdict(report), **report.to_dict()}, out, indent=1)


if __name__ == "__main__":
    main()
