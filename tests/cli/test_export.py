import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file

from dessilbi import timing
from dessilbi.models import create
from dessilbi.training.config import Config
from dessilbi.training.run import Run


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(timing, "_SLOT_SECONDS", 0.001)
    monkeypatch.setattr(timing, "_WARM_SECONDS", 0.001)


@pytest.fixture
def run(cli) -> torch.nn.Module:
    """The network of the run in `run`."""
    network = create("lenet5", 10, 1, widths=[2, 3, 4, 5]).eval()
    made = Run.create("run", Config(data="digits", model_options={"widths": [2, 3, 4, 5]}))
    made.save_checkpoint({"steps": 3, "model": network.state_dict()})
    return network


def test_onnx(cli, run):
    result = cli("export", "run", "--format", "onnx", "-o", "net.onnx")
    assert (result.status, result.err) == (0, "")
    assert result.out.startswith("net.onnx: 0.0")
    assert "opset" in result.out
    assert result.out.count("\n") == 1
    x = torch.randn(4, 1, 8, 8)
    (found,) = onnxruntime.InferenceSession("net.onnx").run(None, {"x": x.numpy()})
    np.testing.assert_allclose(found, run(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_torch(cli, run):
    result = cli("export", "run", "--format", "torch", "-o", "net.pt2")
    assert (result.status, result.err) == (0, "")
    x = torch.randn(4, 1, 8, 8)
    torch.testing.assert_close(torch.export.load("net.pt2").module()(x), run(x))


def test_safetensors(cli, run):
    result = cli("export", "run", "--format", "safetensors", "-o", "net.safetensors")
    assert (result.status, result.err) == (0, "")
    assert "10 tensors, read back identical" in result.out
    read = load_file("net.safetensors")
    assert all(torch.equal(read[name], t) for name, t in run.state_dict().items())


def test_csr(cli, run):
    run.classifier[0].weight.data[:, 1:] = 0
    Run.open("run").save_checkpoint({"steps": 4, "model": run.state_dict()})
    command = ("export", "run", "--format", "csr", "--max-density", "0.3", "--batch", "2", "-o", "net.safetensors")
    result = cli(*command, "--force")
    assert (result.status, result.err) == (0, "")
    lines = [line.split() for line in result.out.splitlines()]
    assert lines[0] == ["layer", "density", "speed", "middle", "half", "control"]
    assert lines[1][:2] == ["classifier.0", "0.250"]
    assert lines[1][-1] == "CSR"
    assert lines[2][0] == "whole"
    assert lines[2][-2:] == ["batch", "2"]

    from dessilbi.conversion import load_csr

    x = torch.randn(4, 1, 8, 8)
    read = load_csr(create("lenet5", 10, 1, widths=[2, 3, 4, 5]), "net.safetensors")
    torch.testing.assert_close(read(x), run(x))


def test_csr_that_is_not_faster_is_not_written(cli, run, tmp_path):
    # Five times four weights: there is nothing to gain.
    result = cli("export", "run", "--format", "csr", "--max-density", "1", "-o", "net.safetensors")
    assert result.status == 1
    assert "left dense" in result.out
    assert "no linear layer is faster as CSR: --force" in result.err
    assert not (tmp_path / "net.safetensors").exists()


def test_what_is_not_verified_is_not_written(cli, run, tmp_path):
    result = cli("export", "run", "--format", "onnx", "--tolerance", "-1", "-o", "net.onnx")
    assert result.status == 1
    assert result.out == ""
    assert "net.onnx: not written: the outputs of onnxruntime differ" in result.err
    assert not (tmp_path / "net.onnx").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ("lenet5 -o x", 2, "--format"),
        ("lenet5 --format onnx", 2, "-o"),
        ("lenet5 --format tflite -o x", 2, "'tflite' is not one of"),
        ("lenet5 --format onnx -o nowhere/x", 1, "there is no folder nowhere"),
        ("nothing --format onnx -o x", 1, "dessilbi models"),
        ("lenet5 --format csr -o x", 1, "no linear layer has at most 0.5"),
    ],
)
def test_wrong_calls(cli, arguments, status, text):
    result = cli("export", *arguments.split())
    assert (result.status, result.out) == (status, "")
    assert text in result.err
    assert result.err.count("\n") == 1


def test_it_teaches(cli):
    result = cli("export", "--help")
    assert (result.status, result.err) == (0, "")
    assert "Examples:" in result.out
