import pytest
import torch
from torch import nn

from dessilbi import Selection, save_shrunk, shrink
from dessilbi.models import create
from dessilbi.training.config import Config
from dessilbi.training.opening import open_network
from dessilbi.training.run import Run


def a_run(folder, network, **options) -> Run:
    run = Run.create(folder, Config(**options))
    run.save_checkpoint({"steps": 1, "model": create("lenet5", 10, 1).state_dict()})
    run.save_checkpoint({"steps": 12, "model": network.state_dict()})
    return run


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(t, other.state_dict()[name]) for name, t in one.state_dict().items())


def test_a_built_in_network():
    network, shape, label = open_network("resnet20")
    assert (type(network).__name__, shape, label) == ("CifarResNet", (3, 32, 32), "resnet20")
    assert not network.training
    assert open_network("resnet20", (3, 64, 64))[1] == (3, 64, 64)


@pytest.mark.parametrize(
    ("data", "model", "options", "shape", "classes"),
    [
        ("cifar100", "resnet20", {}, (3, 32, 32), 100),
        ("digits", "lenet5", {"widths": [2, 3, 4, 5]}, (1, 8, 8), 10),
        ("mnist", "resnet20", {}, (1, 28, 28), 10),
        ("imagenet", "resnet18", {}, (3, 224, 224), 17),  # as many as the folders there were
    ],
)
def test_the_latest_checkpoint_of_a_run(tmp_path, data, model, options, shape, classes):
    network = create(model, classes, shape[0], **options)
    a_run(tmp_path / "run", network, data=data, model=model, model_options=options)
    opened, found, label = open_network(tmp_path / "run")
    assert (found, label) == (shape, str(tmp_path / "run"))
    assert same(network, opened)
    assert not opened.training


def test_a_network_of_ones_own(tmp_path):
    with pytest.raises(ValueError, match=r"not known: state it, such as --input-shape"):
        open_network("dessilbi.models.lenet:LeNet5")
    network, shape, label = open_network("dessilbi.models.lenet:LeNet5", (1, 20, 20))
    assert (type(network).__name__, shape, label) == ("LeNet5", (1, 20, 20), "dessilbi.models.lenet:LeNet5")
    a_run(tmp_path / "run", network, model="dessilbi.models.lenet:LeNet5", data="mnist")
    assert open_network(tmp_path / "run")[1] == (1, 28, 28)


@pytest.fixture(scope="module")
def small() -> nn.Module:
    """A LeNet-5 with three of its six first filters."""
    mask = torch.arange(6) < 3
    return shrink(create("lenet5"), Selection({"features.0.weight": mask}, level="filter"), torch.randn(2, 1, 28, 28))


def test_a_shrunk_network(tmp_path, small):
    file = tmp_path / "small.safetensors"
    save_shrunk(small, file, "lenet5")
    network, shape, label = open_network(file)
    assert (shape, label) == ((1, 28, 28), str(file))
    assert network.features[0].out_channels == 3
    assert same(small, network)
    assert not network.training
    save_shrunk(small, file, "lenet5", {"in_channels": 1}, {"input_shape": [1, 32, 32]})
    assert open_network(file)[1] == (1, 32, 32)
    file.write_bytes(b"something else")
    with pytest.raises(ValueError, match="small.safetensors"):
        open_network(file)


def test_a_run_that_starts_from_a_shrunk_network(tmp_path, small):
    folder = tmp_path / "run"
    run = Run.create(folder, Config(model="lenet5", data="mnist"))
    save_shrunk(small, folder / "network.safetensors", "lenet5")
    trained = {name: t + 1 for name, t in small.state_dict().items()}
    run.save_checkpoint({"steps": 5, "model": trained})
    network, shape, _ = open_network(folder)
    assert shape == (1, 28, 28)
    assert network.features[0].out_channels == 3
    assert all(torch.equal(t, trained[name]) for name, t in network.state_dict().items())


def test_nothing_of_the_kind(tmp_path):
    with pytest.raises(ValueError, match="lenet6: did you mean 'lenet5'"):
        open_network("lenet6")
    with pytest.raises(FileNotFoundError, match="is not a run folder"):
        open_network(tmp_path)
    Run.create(tmp_path / "new", Config())
    with pytest.raises(ValueError, match="no checkpoint yet"):
        open_network(tmp_path / "new")
    a_run(tmp_path / "other", create("resnet20"), model="lenet5", data="mnist")
    with pytest.raises(ValueError, match="of another network than 'lenet5'") as caught:
        open_network(tmp_path / "other")
    assert "\n" not in str(caught.value)
