"""What a step costs beside torch's own optimizers, on VGG16: `python -m benchmarks.step_cost [--device cuda]`.

Every contender has a copy of the network. Rounds are interleaved, so that all see the same machine; a figure is the
median over rounds, as a ratio to fused SGD with momentum of the same run. Fused SGD stands in the table twice: what
the second differs from 1 is noise.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from dessilbi import DessiLBI, Path, param_groups
from dessilbi.models import create

BATCHES_PER_EPOCH = 50_000 // 64
CONTROL = "SGD fused"


def contenders() -> dict[str, Callable[[nn.Module], torch.optim.Optimizer]]:
    sgd: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-4}
    table: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
        CONTROL: lambda m: torch.optim.SGD(m.parameters(), fused=True, **sgd),
        "SGD fused, again": lambda m: torch.optim.SGD(m.parameters(), fused=True, **sgd),
        "SGD foreach": lambda m: torch.optim.SGD(m.parameters(), foreach=True, **sgd),
        "Adam fused": lambda m: torch.optim.Adam(m.parameters(), 1e-3, fused=True),
    }
    for kernel in ("foreach", "fused"):
        for level in ("filter", "weight"):
            for scaling in (False, True):
                name = f"DessiLBI {kernel}, {level}s{', scaled' if scaling else ''}"
                table[name] = _ours(kernel, level, scaling, sgd)
    return table


def _ours(kernel: str, level: str, scaling: bool, sgd: dict[str, Any]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        groups = param_groups(model, conv=level, linear="neuron" if level == "filter" else "weight")
        return DessiLBI(groups, scaling=scaling, lam=1e-3, **{kernel: True}, **sgd)

    return make


def timed(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Seconds a call, of `repeats` calls in a row."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def measure(device: torch.device, batch: int, rounds: int, batch_rounds: int) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    network = create("vgg16").to(device)
    x, y = torch.randn(batch, 3, 32, 32, device=device), torch.randint(0, 10, (batch,), device=device)
    runs = {}
    for name, make in contenders().items():
        model = copy.deepcopy(network)
        runs[name] = (model, make(model))

    def whole_batch(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    repeats = 20 if device.type == "cuda" else 1
    table: dict[str, dict[str, list[float]]] = {name: {"step": [], "batch": []} for name in runs}
    gc.disable()
    for r in range(batch_rounds + 1):
        for name, (model, optimizer) in runs.items():
            seconds = timed(lambda m=model, o=optimizer: whole_batch(m, o), device, repeats)  # type: ignore[misc]
            if r:
                table[name]["batch"].append(seconds)
    for r in range(rounds + 2):
        for name, (_, optimizer) in runs.items():
            seconds = timed(optimizer.step, device, repeats)
            if r > 1:
                table[name]["step"].append(seconds)
    gc.enable()
    if device.type == "cuda":
        graphs = {name: replays(*run, x, y) for name, run in runs.items() if name in GRAPHED}
        for name in graphs:
            table[name]["graph"] = []
        for _ in range(batch_rounds):
            for name, replay in graphs.items():
                table[name]["graph"].append(timed(replay, device, repeats))
    result = {}
    for name, (model, optimizer) in runs.items():
        row = {key: statistics.median(values) for key, values in table[name].items()}
        result[name] = {**row, "state": state_bytes(optimizer)}
        if isinstance(optimizer, DessiLBI):
            path = Path(model, optimizer)
            result[name]["record"] = statistics.median(timed(lambda p=path: p.record(0), device, 1) for _ in range(5))  # type: ignore[misc]
    return result


GRAPHED = (CONTROL, "SGD fused, again", "Adam fused", "DessiLBI fused, filters", "DessiLBI fused, weights")


def replays(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """A whole batch captured in a CUDA graph; lr and λ become tensors where they are ours, so that they can change."""
    for group in optimizer.param_groups:
        group["capturable"] = True
        if isinstance(optimizer, DessiLBI):
            group["lr"], group["lam"] = (torch.tensor(group[k], device=x.device) for k in ("lr", "lam"))
            group["time"] = group["time"].to(x.device)
    optimizer.zero_grad(set_to_none=True)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return graph.replay


def sweep(device: torch.device, rounds: int) -> list[dict[str, float]]:
    """Cost by number of parameters, in tensors of a million, against what a plain copy of as many bytes moves."""
    rows = []
    for millions in (1, 3, 10, 30, 100, 400) if device.type == "cuda" else (1, 3, 10, 30):
        row: dict[str, float] = {"millions": millions}
        work: dict[str, tuple[Callable[[], Any], int]] = {}
        source = torch.randn(millions << 20, device=device)
        target = torch.empty_like(source)
        work["copy"] = (lambda s=source, t=target: t.copy_(s), 2)  # type: ignore[misc]
        for name, words in ((CONTROL, 5), ("filters", 7), ("weights", 7)):
            params = [nn.Parameter(torch.randn(1024, 1024, device=device)) for _ in range(millions)]
            for p in params:
                p.grad = torch.randn_like(p)
            group = [{"params": params, "group": "neuron" if name == "filters" else "weight"}]
            optimizer: torch.optim.Optimizer = (
                torch.optim.SGD(params, 1e-3, momentum=0.9, fused=True)
                if name == CONTROL
                else DessiLBI(group, 1e-3, momentum=0.9, lam=1e-3, fused=True)
            )
            work[name] = (optimizer.step, words)
        times: dict[str, list[float]] = {name: [] for name in work}
        for r in range(rounds + 2):
            for name, (step, _) in work.items():
                seconds = timed(step, device, 10 if device.type == "cuda" else 1)
                if r > 1:
                    times[name].append(seconds)
        for name, (_, words) in work.items():
            seconds = statistics.median(times[name])
            row[f"{name} ps/parameter"] = 1e12 * seconds / (millions << 20)
            row[f"{name} GB/s"] = 4e-9 * words * (millions << 20) / seconds
        rows.append(row)
        del work, source, target
    return rows


def report(result: dict[str, dict[str, float]]) -> str:
    control = result[CONTROL]
    graphed = "graph" in control
    lines = [
        f"{'':34} {'step':>9} {'ratio':>6} {'batch':>9} {'ratio':>6} {'state':>8} {'record/epoch':>13}"
        + (f" {'in a graph':>10} {'ratio':>6}" if graphed else "")
    ]
    for name, row in result.items():
        record = f"{100 * row['record'] / (row['batch'] * BATCHES_PER_EPOCH):12.3f}%" if "record" in row else ""
        graph = f" {1e3 * row['graph']:7.3f} ms {row['graph'] / control['graph']:6.3f}" if "graph" in row else ""
        lines.append(
            f"{name:34} {1e3 * row['step']:6.3f} ms {row['step'] / control['step']:6.2f} {1e3 * row['batch']:6.2f} ms "
            f"{row['batch'] / control['batch']:6.3f} {row['state'] / 2**20:4.0f} MiB {record:>13}{graph}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15, help="rounds of the step alone")
    parser.add_argument("--batch-rounds", type=int, default=None, help="rounds of a whole batch")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    parser.add_argument("--sweep", action="store_true", help="also the cost by number of parameters")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    batch_rounds = arguments.batch_rounds or (15 if device.type == "cuda" else 3)
    result = measure(device, arguments.batch, arguments.rounds, batch_rounds)
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"VGG16, batch {arguments.batch}, {hardware}, torch {torch.__version__}, {datetime.date.today()}")
    print(report(result))
    rows = sweep(device, arguments.rounds) if arguments.sweep else []
    for row in rows:
        print(", ".join(f"{k} {v:.0f}" for k, v in row.items()))
    if arguments.json:
        facts = {"device": hardware, "torch": torch.__version__, "python": platform.python_version()}
        with open(arguments.json, "w", encoding="utf-8") as out:
            json.dump(
                {**facts, "date": str(datetime.date.today()), "batch": arguments.batch, "rows": result, "sweep": rows},
                out,
                indent=1,
            )


if __name__ == "__main__":
    main()
