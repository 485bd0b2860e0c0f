"""``measure``: how long networks take, one beside the other.

    report = measure({"dense": dense, "pruned": pruned}, images, backend="onnxruntime", batches=(1, 64), threads=2)
    report.row("pruned", 64).speed.ratio        # how many times as fast as the first
    report.control(64).speed.ratio              # of a copy of the first: what it differs from 1 is noise

A backend gets a process of its own, because thread pools of two disturb one another. In it the networks take turns, in
an order drawn anew in every round. They are handed over as files of torch.export or ONNX.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dessilbi import files, timing

if TYPE_CHECKING:
    from torch import nn

__all__ = ["BACKENDS", "Latency", "LatencyError", "Row", "measure"]

BACKENDS = ("torch", "torch-compile", "onnxruntime")
CONTROL = "control"
_STEADY = (0.95, 1.05)
_KIND, _VERSION = "inputs", 1


class LatencyError(RuntimeError):
    """The process that measures failed."""


@dataclass(frozen=True)
class Row:
    """A network at a batch size."""

    name: str
    parameters: int
    batch: int
    speed: timing.Speed


@dataclass(frozen=True)
class Latency:
    """What was measured. The first of the names is the reference of all ratios; its copy is called ``control``."""

    backend: str
    version: str
    device: str
    threads: int
    rounds: int
    rows: tuple[Row, ...]

    def row(self, name: str, batch: int) -> Row:
        """The figures of one network."""
        for row in self.rows:
            if (row.name, row.batch) == (name, batch):
                return row
        raise KeyError(f"{name!r} at batch {batch} was not measured")

    def control(self, batch: int) -> Row:
        """The figures of the copy of the first network."""
        return self.row(CONTROL, batch)

    def unsteady(self) -> tuple[int, ...]:
        """The batch sizes at which the control is not between 0.95 and 1.05."""
        low, high = _STEADY
        return tuple(row.batch for row in self.rows if row.name == CONTROL and not low <= row.speed.ratio <= high)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        rows = [{**asdict(row), "speed": row.speed._asdict()} for row in self.rows]
        return {**asdict(self), "rows": rows}


def measure(
    candidates: Mapping[str, nn.Module],
    example_inputs: Any,
    *,
    backend: str = "torch",
    batches: Sequence[int] = (1, 64),
    rounds: int = 30,
    threads: int | None = None,
    device: str = "cpu",
) -> Latency:
    """Time networks in eval mode side by side; the first is the reference.

    Args:
        example_inputs: a tensor, a tuple or a dict, batch first; they are redrawn for every batch size.
        backend: ``torch`` (the exported graph, run eagerly), ``torch-compile`` or ``onnxruntime``.
        rounds: how often each is timed.
        threads: of the backend, each on a core of its own; by default all cores that this process may use.
        device: ``cpu``, or ``cuda`` for the two backends of torch.

    Warns where the control does not read 1.0 within 5 %: then something else keeps the machine busy.
    """
    _check(candidates, backend, batches, rounds, threads, device)
    threads = threads or _cores()
    with tempfile.TemporaryDirectory(prefix="dessilbi-") as folder:
        place = Path(folder)
        job = {
            "backend": backend,
            "device": device,
            "threads": threads,
            "rounds": rounds,
            "networks": _write_networks(candidates, example_inputs, backend, device, place),
            "inputs": _write_inputs(example_inputs, batches, place),
        }
        (place / "job.json").write_text(json.dumps(job), encoding="utf-8")
        found = _in_its_own_process(place / "job.json", threads)
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in candidates.items()}
    first = next(iter(candidates))
    sizes[CONTROL] = sizes[first]
    rows = [
        Row(name, sizes[name], batch, speed)
        for batch, samples in zip(batches, found["samples"], strict=True)
        for name, speed in timing.compare(samples, first).items()
    ]
    report = Latency(backend, found["version"], device, threads, rounds, tuple(rows))
    for batch in report.unsteady():
        warnings.warn(
            f"batch {batch}: a copy of {first!r} reads {report.control(batch).speed.ratio:.2f} times its speed, so the"
            " ratios are no better than that: stop what else runs here, or give more rounds",
            stacklevel=2,
        )
    return report


def _check(
    candidates: Mapping[str, nn.Module],
    backend: str,
    batches: Sequence[int],
    rounds: int,
    threads: int | None,
    device: str,
) -> None:
    if not candidates or CONTROL in candidates:
        raise ValueError(f"candidates = {list(candidates)}: give at least one, and none called {CONTROL!r}")
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r}: choose one of {', '.join(BACKENDS)}")
    if not batches or min(batches) < 1 or len(set(batches)) < len(batches):
        raise ValueError(f"batches = {list(batches)}: give different sizes of at least 1")
    if rounds < 1:
        raise ValueError(f"rounds = {rounds}: give at least 1")
    if threads is not None and threads < 1:
        raise ValueError(f"threads = {threads}: give at least 1")
    if backend == "onnxruntime" and device != "cpu":
        raise ValueError(
            f"device = {device!r}: onnxruntime is measured on the CPU; take backend torch or torch-compile"
        )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _write_networks(
    candidates: Mapping[str, nn.Module], example_inputs: Any, backend: str, device: str, place: Path
) -> dict[str, str]:
    from dessilbi import export, inputs

    written = {}
    for number, (name, model) in enumerate(candidates.items()):
        file = place / f"{number}{'.onnx' if backend == 'onnxruntime' else '.pt2'}"
        try:
            if backend == "onnxruntime":
                export.to_onnx(model, example_inputs, file)
            else:
                there = copy.deepcopy(model).eval().to(device)
                file.write_bytes(export.exported(there, inputs.moved(example_inputs, device), file))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        written[name] = str(file)
    return {**written, CONTROL: next(iter(written.values()))}


def _write_inputs(example_inputs: Any, batches: Sequence[int], place: Path) -> list[str]:
    from dessilbi import inputs

    written = []
    for size in batches:
        args, kwargs = inputs.random_like(inputs.moved(example_inputs, "cpu"), size)
        arrays = {name: value.numpy() for name, value in ({str(i): v for i, v in enumerate(args)} | kwargs).items()}
        file = place / f"inputs-{size}.safetensors"
        files.save_arrays(file, _KIND, _VERSION, arrays, {"positional": len(args)})
        written.append(str(file))
    return written


def _in_its_own_process(job: Path, threads: int) -> dict[str, Any]:
    here = str(Path(__file__).resolve().parents[1])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH")))),
    }
    # -P: a file of the current folder must not stand in for a package.
    command = [sys.executable, "-P", "-m", "dessilbi.latency", str(job)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise LatencyError(lines[-1] if lines else f"the measuring process ended with status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


# -- in the process that measures --------------------------------------------------------------------------------------

_Call = Callable[[], Any]
_Loaded = Callable[[list[np.ndarray], dict[str, np.ndarray]], _Call]


def _work(job: Mapping[str, Any]) -> dict[str, Any]:
    """Load every network, then time them at one batch size after the other."""
    if job["device"] == "cpu":
        _stay(job["threads"])
    load, version = (_onnxruntime if job["backend"] == "onnxruntime" else _torch)(job)
    networks: dict[str, _Loaded] = {name: load(file) for name, file in job["networks"].items()}
    samples = []
    for file in job["inputs"]:
        arrays, header = files.load_arrays(file, _KIND, _VERSION)
        args = [arrays.pop(str(i)) for i in range(header["positional"])]
        calls = {name: network(args, arrays) for name, network in networks.items()}
        samples.append(timing.interleave(calls, job["rounds"], device=job["device"]))
    return {"version": version, "samples": samples}


def _stay(threads: int) -> None:
    """Keep to as many cores as there are threads: two of the same network that wander differ by a fifth."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        try:
            core = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            core = str(cpu)
        cores.setdefault(core, cpu)
    if threads < len(cores):
        os.sched_setaffinity(0, list(cores.values())[:threads])


def _onnxruntime(job: Mapping[str, Any]) -> tuple[Callable[[str], _Loaded], str]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = job["threads"]
    options.inter_op_num_threads = 1
    # Threads of one session that still wait busily would slow down the next one.
    options.add_session_config_entry("session.force_spinning_stop", "1")

    def load(file: str) -> _Loaded:
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        names = [entry.name for entry in session.get_inputs()]

        def bind(args: list[np.ndarray], kwargs: dict[str, np.ndarray]) -> _Call:
            given = {k: v for k, v in kwargs.items() if k in names} or dict(zip(names, args, strict=True))
            return functools.partial(session.run, None, given)

        return bind

    return load, f"onnxruntime {onnxruntime.__version__}"


def _torch(job: Mapping[str, Any]) -> tuple[Callable[[str], _Loaded], str]:
    import torch

    torch.set_num_threads(job["threads"])
    torch.autograd.grad_mode.inference_mode(True).__enter__()

    def load(file: str) -> _Loaded:
        network: Callable[..., Any] = torch.export.load(file).module(check_guards=False)
        if job["backend"] == "torch-compile":
            network = torch.compile(network, dynamic=False)

        def bind(args: list[np.ndarray], kwargs: dict[str, np.ndarray]) -> _Call:
            def there(value: np.ndarray) -> torch.Tensor:
                return torch.from_numpy(value).to(job["device"])

            return functools.partial(network, *map(there, args), **{k: there(v) for k, v in kwargs.items()})

        return bind

    return load, f"torch {torch.__version__}"


if __name__ == "__main__":
    print(json.dumps(_work(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
