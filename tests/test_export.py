"""Files are read by their own libraries here, not by the code that wrote them."""

import copy
import json
import logging
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from dessilbi.export import to_export, to_onnx, to_safetensors
from dessilbi.models import create


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(4 * 36, 5)
    )


def tiny() -> nn.Module:
    return nn.Linear(6, 10)


def lively(network: nn.Module) -> nn.Module:
    """Batch statistics that are not zero and one."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 2)
    return network


class Named(nn.Module):
    """Two inputs, two outputs, an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        seen = self.words(ids) * mask.unsqueeze(-1)
        return {"scores": self.head(seen.sum(1)), "hidden": seen}


NAMED = {"mask": torch.tensor([[1, 1, 0], [1, 0, 0]]), "ids": torch.tensor([[1, 2, 10], [0, 7, 4]])}


def test_onnx_runs_at_every_batch_size(tmp_path):
    network = lively(create("resnet20")).eval()
    file = tmp_path / "net.onnx"
    facts = to_onnx(network, torch.randn(1, 3, 32, 32), file)
    assert facts["file"] == str(file)
    assert facts["bytes"] == file.stat().st_size
    assert list(tmp_path.iterdir()) == [file]
    read = onnx.load(str(file))
    onnx.checker.check_model(read)
    assert facts["opset"] == next(o.version for o in read.opset_import if o.domain == "")
    assert read.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert len(facts["batches"]) >= 2
    assert not {1, 2} & set(facts["batches"])
    assert 0 <= facts["difference"] < 1e-4
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    for batch in (1, 2, 7):
        x = torch.randn(batch, 3, 32, 32)
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        np.testing.assert_allclose(found, network(x).detach().numpy(), rtol=1e-4, atol=1e-4)


def test_the_model_stays_as_it_is(tmp_path, caplog):
    network = lively(small()).train()
    network[2].eval()
    before = copy.deepcopy(network.state_dict())
    modes = [module.training for module in network.modules()]
    level = logging.getLogger("torch.onnx").level
    to_onnx(network, torch.randn(4, 3, 8, 8), tmp_path / "net.onnx")
    to_export(network, torch.randn(4, 3, 8, 8), tmp_path / "net.pt2")
    assert [module.training for module in network.modules()] == modes
    assert all(torch.equal(before[name], t) for name, t in network.state_dict().items())
    assert logging.getLogger("torch.onnx").level == level


def test_onnx_of_named_inputs(tmp_path):
    file = tmp_path / "named.onnx"
    to_onnx(Named(), NAMED, file)
    session = onnxruntime.InferenceSession(str(file))
    assert {entry.name for entry in session.get_inputs()} == {"ids", "mask"}


def test_outputs_that_differ_leave_no_file(tmp_path, monkeypatch):
    class Wrong(onnxruntime.InferenceSession):
        def run(self, names, given):
            return [2 * value for value in super().run(names, given)]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Wrong)
    old = tmp_path / "old.onnx"
    old.write_text("old")
    for file in (tmp_path / "new.onnx", old):
        with pytest.raises(ValueError, match=r"onnxruntime differ from the network's by 1 of .* tolerance is 0\.0001"):
            to_onnx(tiny(), torch.randn(2, 6), file)
    assert [entry.name for entry in tmp_path.iterdir()] == ["old.onnx"]
    assert old.read_text() == "old"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_a_number_is_a_difference(tmp_path, monkeypatch, value):
    class Wrong(onnxruntime.InferenceSession):
        def run(self, names, given):
            return [np.full_like(v, value) for v in super().run(names, given)]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Wrong)
    with pytest.raises(ValueError, match="by inf of"):
        to_onnx(tiny(), torch.randn(2, 6), tmp_path / "net.onnx")


def test_outputs_of_another_shape_leave_no_file(tmp_path, monkeypatch):
    class Wrong(onnxruntime.InferenceSession):
        def run(self, names, given):
            return [value[:1] for value in super().run(names, given)]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Wrong)
    with pytest.raises(ValueError, match=r"at batch 3 .*\(1, 10\).*\(3, 10\)"):
        to_onnx(tiny(), torch.randn(2, 6), tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())


class FixedBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(2, 6)


@pytest.mark.parametrize("write", [to_onnx, to_export])
def test_a_network_that_cannot_be_exported_is_one_line(tmp_path, write):
    with pytest.raises(ValueError) as caught:
        write(FixedBatch(), torch.randn(2, 6), tmp_path / "net.file")
    assert str(caught.value).startswith("net.file: ")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("write", [to_onnx, to_export])
@pytest.mark.parametrize("wrong", [3, ("x",)])
def test_inputs_that_are_none(tmp_path, write, wrong):
    with pytest.raises((TypeError, ValueError), match="example_inputs"):
        write(small(), wrong, tmp_path / "net.file")


def test_without_the_extra_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"onnxruntime: pip install 'dessilbi\[onnx\]'"):
        to_onnx(small(), torch.randn(2, 3, 8, 8), tmp_path / "net.onnx")


def test_the_import_asks_for_no_extra():
    code = "import sys, dessilbi.export, dessilbi.latency; print([n for n in sys.modules if n.startswith('onnx')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_torch_export_runs_at_every_batch_size(tmp_path, batch):
    network = lively(small())
    file = tmp_path / "net.pt2"
    facts = to_export(network, torch.randn(batch, 3, 8, 8), file)
    assert facts["bytes"] == file.stat().st_size
    assert list(tmp_path.iterdir()) == [file]
    read = torch.export.load(file).module()
    for size in (1, 2, 6):
        x = torch.randn(size, 3, 8, 8)
        torch.testing.assert_close(read(x), network.eval()(x))


def test_torch_export_that_differs_leaves_no_file(tmp_path, monkeypatch):
    load = torch.export.load

    def wrong(file):
        program = load(file)
        for tensor in program.state_dict.values():
            tensor.data.mul_(2)
        return program

    monkeypatch.setattr(torch.export, "load", wrong)
    with pytest.raises(ValueError, match="differ from the network's"):
        to_export(small(), torch.randn(2, 3, 8, 8), tmp_path / "net.pt2")
    assert not list(tmp_path.iterdir())


def test_safetensors(tmp_path):
    network = small()
    network[0].weight.data = network[0].weight.data.to(memory_format=torch.channels_last)  # not contiguous
    network[5].weight.data = network[5].weight.data.bfloat16()
    file = tmp_path / "net.safetensors"
    facts = to_safetensors(network, file)
    read = load_file(file)
    assert facts == {"file": str(file), "bytes": file.stat().st_size, "tensors": len(read)}
    assert read.keys() == network.state_dict().keys()
    assert all(torch.equal(read[name], t) for name, t in network.state_dict().items())
    with safe_open(file, "pt") as opened:
        assert json.loads(opened.metadata()["dessilbi"]) == {"kind": "weights", "version": 1}


def test_shared_tensors_are_written_once_and_tied_again(tmp_path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(64, 8), nn.Linear(8, 64, bias=False)
            self.head.weight = self.words.weight

    network, other = Tied(), Tied()
    file = tmp_path / "tied.safetensors"
    assert to_safetensors(network, file)["tensors"] == 1
    assert file.stat().st_size < 1.5 * 64 * 8 * 4
    load_model(other, file)
    assert torch.equal(other.words.weight, network.words.weight)
    assert other.head.weight is other.words.weight


def test_parts_of_one_memory_are_written_each(tmp_path):
    network = nn.Linear(3, 4)
    network.register_buffer("part", network.weight.detach()[:2])
    network.register_buffer("turned", network.weight.detach().t())
    to_safetensors(network, tmp_path / "net.safetensors")
    read = load_file(tmp_path / "net.safetensors")
    assert all(torch.equal(read[name], t) for name, t in network.state_dict().items())
