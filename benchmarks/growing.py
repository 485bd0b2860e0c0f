"""LeNet-5 grown on MNIST from two filters a layer, and the control in which all layers grow alike to the same sizes.

    OMP_NUM_THREADS=2 python -m benchmarks.growing [--seeds 0 1 2] [--json results/growing_lenet_2cores.json]

Every run is a process of its own, so that `wall` and `cpu` are seconds of all that it takes, imports and reading the
data included. Runs that are there in --folder are not repeated.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dessilbi.applications.grow import read_growth
from dessilbi.training.environment import commit
from dessilbi.training.run import Run

PRESET = "grow/lenet-mnist"
BY_HAND = 61_706
_MAIN = "import sys; from dessilbi.cli import main; sys.exit(main(sys.argv[1:]))"


def grown(folder: Path, *arguments: str) -> dict[str, Any]:
    """One run of `dessilbi grow`, and what came of it."""
    file = folder.with_suffix(".json")
    if not file.is_file():
        before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        command = [sys.executable, "-c", _MAIN, "grow", *arguments, "--run", str(folder), "--overwrite"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        file.write_text(json.dumps(row(folder, wall, cpu, *arguments)))
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def row(folder: Path, wall: float, cpu: float, *arguments: str) -> dict[str, Any]:
    """What a run came to, as the table has it."""
    run = Run.open(folder)
    stages = read_growth(run)["stages"]
    return {
        "command": " ".join(["dessilbi", "grow", *arguments]),
        "seed": run.config.seed,
        "policy": run.config.grow_options.get("policy", "ratio"),
        "accuracy": stages[-1]["accuracy"],
        "parameters": stages[-1]["parameters"],
        "macs": stages[-1]["macs"],
        "widths": list(stages[-1]["widths"].values()),
        "epochs": stages[-1]["epoch"],
        "wall": round(wall, 1),
        "cpu": round(cpu, 1),
        "stages": [{name: stage[name] for name in ("epoch", "parameters", "accuracy")} for stage in stages],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/growing"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed in args.seeds:
        ours = args.folder / f"grown-{seed}"
        rows.append(grown(ours, "--preset", PRESET, "--seed", str(seed)))
        rows.append(grown(args.folder / f"uniform-{seed}", "--control", str(ours)))
        for found in rows[-2:]:
            print(
                f"{found['policy']:8} seed {seed}  {100 * found['accuracy']:.2f} %  {found['parameters']} parameters "
                f"(by hand: {BY_HAND})  {found['wall']:.0f} s, {found['cpu']:.0f} s of CPU time"
            )
    if args.json:
        facts = {
            "command": " ".join(["python", "-m", "benchmarks.growing", *sys.argv[1:]]),
            "commit": commit(),
            "date": datetime.date.today().isoformat(),
            "threads": os.environ.get("OMP_NUM_THREADS", f"{os.cpu_count()} (default)"),
        }
        args.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
