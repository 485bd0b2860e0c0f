"""What is measured, not how long it takes: times are checked only where they are made up."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from dessilbi import latency, timing
from dessilbi.latency import CONTROL, Latency, LatencyError, Row, measure


def two() -> dict[str, nn.Module]:
    small = nn.Sequential(nn.Linear(8, 4, bias=False))
    return {"dense": nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)), "small": small}


@pytest.mark.filterwarnings("ignore:batch .* reads:UserWarning")  # a few rounds of microseconds
@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_a_table(backend):
    networks = two()
    report = measure(networks, torch.randn(3, 8), backend=backend, batches=(1, 5), rounds=3, threads=1)
    assert [(row.name, row.batch) for row in report.rows] == [
        (name, batch) for batch in (1, 5) for name in ("dense", "small", CONTROL)
    ]
    assert report.version.startswith(("torch 2", "onnxruntime 1"))
    assert report.version.startswith(backend)
    assert (report.backend, report.device, report.threads, report.rounds) == (backend, "cpu", 1, 3)
    dense = 8 * 16 + 16 + 2 * 16 + 16 * 4 + 4
    assert [report.row(n, 5).parameters for n in ("dense", "small", CONTROL)] == [dense, 32, dense]
    assert report.row("dense", 1).speed.ratio == 1
    assert report.control(1).speed.seconds > 0
    low, high = report.row("small", 5).speed.ratio_quartiles
    assert low <= report.row("small", 5).speed.ratio <= high
    assert json.loads(json.dumps(report.to_dict()))["rows"][1]["name"] == "small"
    assert networks["dense"].training


@pytest.mark.filterwarnings("ignore:batch .* reads:UserWarning")
@pytest.mark.compile
def test_compiled():
    report = measure(two(), torch.randn(3, 8), backend="torch-compile", batches=(2,), rounds=2, threads=1)
    assert [row.name for row in report.rows] == ["dense", "small", CONTROL]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "torch-compile"])
def test_on_a_gpu(backend):
    x = torch.randn(3, 512)
    dense, half = nn.Sequential(nn.Linear(512, 16384), nn.Linear(16384, 512)), nn.Linear(512, 512)
    networks = {"dense": dense, "half": half}
    report = measure(networks, x, backend=backend, batches=(4096,), rounds=10, device="cuda")
    assert report.device == "cuda"
    assert next(dense.parameters()).device.type == "cpu"
    assert report.row("half", 4096).speed.ratio > 4  # 64 times the work
    print(backend, report.rows)


class Named(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b.unsqueeze(1)


@pytest.mark.filterwarnings("ignore:batch .* reads:UserWarning")  # a few rounds of microseconds
@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_named_inputs(backend):
    example = {"b": torch.randn(2), "a": torch.randn(2, 3)}
    report = measure({"net": Named()}, example, backend=backend, batches=(4,), rounds=2, threads=1)
    assert [row.name for row in report.rows] == ["net", CONTROL]


def made_up(monkeypatch, control):
    """`measure` with a process that finds the copy `control` times as slow."""
    jobs = []

    def process(file, threads):
        jobs.append((json.loads(file.read_text()), threads))
        samples = {"dense": [2.0, 4.0, 2.0], "small": [1.0, 2.0, 0.5], CONTROL: [2 * control, 4 * control, 2 * control]}
        return {"version": "a clock", "samples": [samples]}

    monkeypatch.setattr(latency, "_in_its_own_process", process)
    return jobs


def test_the_first_is_the_reference(monkeypatch, recwarn):
    jobs = made_up(monkeypatch, control=1.04)
    report = measure(two(), torch.randn(3, 8), batches=(7,), rounds=3, threads=5)
    assert report.row("small", 7).speed == timing.Speed(1.0, (0.75, 1.5), 2.0, (2.0, 3.0))
    assert report.control(7).speed.ratio == pytest.approx(1 / 1.04)
    assert report.unsteady() == ()
    assert not recwarn.list
    [(job, threads)] = jobs
    assert job["threads"] == threads == 5
    assert job["networks"][CONTROL] == job["networks"]["dense"] != job["networks"]["small"]


def test_a_control_that_is_off_warns(monkeypatch):
    made_up(monkeypatch, control=1.25)
    with pytest.warns(UserWarning, match="batch 7: a copy of 'dense' reads 0.80 times its speed"):
        report = measure(two(), torch.randn(3, 8), batches=(7,))
    assert report.unsteady() == (7,)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"backend": "tensorrt"}, "'tensorrt'.*onnxruntime"),
        ({"batches": ()}, "batches"),
        ({"batches": (0,)}, "batches"),
        ({"batches": (4, 4)}, "batches"),
        ({"rounds": 0}, "rounds = 0"),
        ({"threads": 0}, "threads = 0"),
        ({"backend": "onnxruntime", "device": "cuda"}, "device = 'cuda'"),
    ],
)
def test_what_cannot_be_measured(wrong, text):
    with pytest.raises(ValueError, match=text):
        measure(two(), torch.randn(3, 8), **wrong)


@pytest.mark.parametrize("names", [(), ("control",)])
def test_names(names):
    with pytest.raises(ValueError, match="candidates"):
        measure(dict.fromkeys(names, nn.Linear(8, 1)), torch.randn(3, 8))


def test_inputs_that_do_not_fit_name_the_network():
    with pytest.raises(ValueError, match="^dense: "):
        measure(two(), torch.randn(3, 9))


def test_a_process_that_fails(tmp_path):
    file = tmp_path / "job.json"
    job = {"backend": "onnxruntime", "device": "cpu", "threads": 1, "networks": {"a": "nowhere.onnx"}, "inputs": []}
    file.write_text(json.dumps(job))
    with pytest.raises(LatencyError, match="nowhere.onnx"):
        latency._in_its_own_process(file, 1)


def test_the_process_of_onnxruntime_has_no_torch(tmp_path):
    code = (
        "import sys; from dessilbi import latency; latency._onnxruntime({'threads': 1});"
        "assert 'torch' not in sys.modules and 'onnxruntime' in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_row_that_was_not_measured():
    speed = timing.Speed(1.0, (1.0, 1.0), 1.0, (1.0, 1.0))
    report = Latency("torch", "torch 2", "cpu", 1, 1, (Row("a", 1, 8, speed),))
    with pytest.raises(KeyError, match="'a' at batch 9"):
        report.row("a", 9)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are chosen on Linux only")
def test_as_many_cores_as_threads():
    code = "import os; from dessilbi.latency import _stay; _stay(1); print(len(os.sched_getaffinity(0)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
