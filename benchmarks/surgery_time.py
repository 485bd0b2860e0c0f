"""How long surgery takes: the graph of a network, `shrink` with every second filter off, and `widen` by an eighth of
every layer, the state of an optimizer with momentum and V included.

    python -m benchmarks.surgery_time [--networks resnet50_imagenet vgg16] [--json FILE]

`first` is the first call in a fresh process, imports of torch.export included; the others are medians of those
after it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from dessilbi import DessiLBI, Selection, param_groups, shrink, widen
from dessilbi.models import create, input_shape
from dessilbi.surgery.graph import Graph
from dessilbi.surgery.widening import Widening
from dessilbi.training.environment import commit

ROUNDS = 7


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def measure(name: str) -> dict[str, float]:
    """Seconds for one network, in this process."""
    torch.set_num_threads(2)
    model, x = create(name), torch.randn(1, *input_shape(name))
    sel = Selection({key: torch.arange(len(p)) % 2 == 0 for key, p in model.named_parameters() if p.ndim == 4})
    first = seconds(lambda: Graph.of(model, x))
    widening = Widening(model, x)
    extra = {stream[0]: max(1, widening.width(stream[0]) // 8) for stream in widening.streams}
    graph, small, wide = [], [], []
    for _ in range(ROUNDS):
        graph.append(seconds(lambda: Graph.of(model, x)))
        small.append(seconds(lambda: shrink(model, sel, x)))
        optimizer = trained(model)
        wide.append(seconds(lambda optimizer=optimizer: widen(model, extra, x, optimizer)))
    found = {"graph": graph, "shrink": small, "widen": wide}
    return {"first": first, **{name: statistics.median(times) for name, times in found.items()}}


def trained(model: nn.Module) -> DessiLBI:
    """An optimizer that has taken a step, so that its state is there."""
    optimizer = DessiLBI(param_groups(model, conv="filter", linear="neuron"), 0.0, momentum=0.9)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["resnet50_imagenet", "resnet56", "vgg16"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one)))
        return
    found = {}
    for name in args.networks:
        command = [sys.executable, "-m", "benchmarks.surgery_time", "--one", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, "  ".join(f"{key} {value:.2f} s" for key, value in found[name].items()))
    if args.json:
        command = " ".join(["python -m benchmarks.surgery_time", *sys.argv[1:]])
        facts = {"command": command, "date": str(datetime.date.today()), "commit": commit(), "torch": torch.__version__}
        args.json.write_text(json.dumps({**facts, "threads": 2, "seconds": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
