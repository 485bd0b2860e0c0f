"""How long surgery takes: the graph of a network, and `shrink` with every second filter off.

    python -m benchmarks.surgery_time [--networks resnet50_imagenet vgg16] [--json FILE]

`first` is the first call in a fresh process, imports of torch.export included; `graph` and `shrink` are medians of the
calls after it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from dessilbi import Selection, shrink
from dessilbi.models import create, input_shape
from dessilbi.surgery.graph import Graph

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
    graph, small = [], []
    for _ in range(ROUNDS):
        graph.append(seconds(lambda: Graph.of(model, x)))
        small.append(seconds(lambda: shrink(model, sel, x)))
    return {"first": first, "graph": statistics.median(graph), "shrink": statistics.median(small)}


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
        args.json.write_text(json.dumps({"command": " ".join(sys.argv), "seconds": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
