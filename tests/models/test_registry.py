"""Networks by name, the user's own beside the built-in ones, and what is said when a name is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import dessilbi.models
from dessilbi.models import create, input_shape, names

OWN = """
from torch import nn

def plain(num_classes=2, in_channels=1):
    return nn.Linear(in_channels, num_classes)

def fixed():
    return nn.Linear(5, 6)

def classes_only(*, num_classes, bias=True):
    return nn.Linear(3, num_classes, bias=bias)

def open_ended(**kwargs):
    return nn.Linear(kwargs["in_channels"], kwargs["num_classes"])

class Net(nn.Linear):
    def __init__(self, num_classes=10):
        super().__init__(4, num_classes)

    @classmethod
    def wide(cls):
        return cls(99)

def handed_on(**kwargs):
    return Net(**kwargs)

def faulty(**kwargs):
    return nn.Linear("three", 4)

def no_network():
    return 3

ready = Net()
number = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's, called own_nets."""
    (tmp_path / "own_nets.py").write_text(OWN)
    (tmp_path / "needy_nets.py").write_text("import a_package_nobody_has.inside\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_nets", None)


def test_names():
    assert names() == sorted(
        [
            *("lenet5", "vgg16", "vgg19", "alexnet", "resnet18", "resnet50_imagenet"),
            *("resnet20", "resnet32", "resnet44", "resnet50", "resnet56", "resnet110"),
        ]
    )


def test_names_come_without_torch():
    folder = Path(dessilbi.models.__file__).parent
    # The parent package is put in place by hand, because this test is about this folder only.
    script = f"""
import sys, types
package = types.ModuleType("dessilbi")
package.__path__ = [{str(folder.parent)!r}]
sys.modules["dessilbi"] = package
from dessilbi.models import input_shape, names
[input_shape(name) for name in names()]
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("name", "shape"), [("lenet5", (1, 28, 28)), ("resnet50", (3, 32, 32)), ("resnet18", (3, 224, 224))]
)
def test_input_shape(name, shape):
    assert input_shape(name) == shape


def test_defaults_stay_the_networks_own():
    assert create("lenet5").classifier[-1].out_features == 10
    with torch.device("meta"):
        assert create("resnet18").fc.out_features == 1000


@pytest.mark.parametrize(
    ("wrong", "right"), [("resnet65", "resnet56"), ("vgg-16", "vgg16"), ("LeNet", "lenet5"), ("ResNet20", "resnet20")]
)
@pytest.mark.parametrize("function", [create, input_shape])
def test_an_unknown_name_gets_the_nearest(function, wrong, right):
    with pytest.raises(
        ValueError, match=rf"unknown network '{wrong}', did you mean '{right}'\?.*package\.module:factory"
    ):
        function(wrong)


def test_an_unknown_name_far_from_all_gets_the_list():
    with pytest.raises(ValueError, match=r"unknown network 'transformer'; known are alexnet, .* vgg19"):
        create("transformer")


def test_an_argument_a_built_in_does_not_take_is_refused():
    with pytest.raises(TypeError, match="depth"):
        create("vgg16", depth=3)


def test_own_factory_gets_the_sizes(own):
    network = create("own_nets:plain", num_classes=7, in_channels=3)
    assert (network.in_features, network.out_features) == (3, 7)


def test_own_factory_keeps_its_defaults(own):
    network = create("own_nets:plain")
    assert (network.in_features, network.out_features) == (1, 2)


def test_own_factory_is_spared_what_it_does_not_take(own):
    assert create("own_nets:fixed", num_classes=7, in_channels=3).out_features == 6
    assert create("own_nets:classes_only", num_classes=7, in_channels=3).out_features == 7
    assert create("own_nets:Net", num_classes=7, in_channels=3).out_features == 7
    assert create("own_nets:Net.wide", num_classes=7).out_features == 99


def test_own_factory_with_open_arguments(own):
    assert create("own_nets:open_ended", num_classes=7, in_channels=3).in_features == 3
    assert create("own_nets:handed_on", num_classes=7, in_channels=3).out_features == 7


def test_own_factory_gets_what_was_asked_for(own):
    assert create("own_nets:classes_only", num_classes=7, bias=False).bias is None
    with pytest.raises(TypeError, match="widths"):
        create("own_nets:fixed", widths=(3, 4))
    with pytest.raises(TypeError, match="widths"):
        create("own_nets:handed_on", num_classes=7, in_channels=3, widths=(3, 4))


def test_an_error_inside_the_own_factory_comes_through(own):
    with pytest.raises(TypeError, match="str"):
        create("own_nets:faulty", num_classes=7, in_channels=3)


def test_own_network_is_a_module(own):
    with pytest.raises(TypeError, match=r"'own_nets:no_network' made a int; a network is a torch\.nn\.Module"):
        create("own_nets:no_network")


def test_missing_module():
    with pytest.raises(ValueError, match="there is no module 'nowhere_at_all'; install it, or add the folder"):
        create("nowhere_at_all:build")
    with pytest.raises(ValueError, match=r"there is no module 'dessilbi\.models\.nowhere'"):
        create("dessilbi.models.nowhere:build")


def test_own_module_that_needs_another(own):
    with pytest.raises(ValueError, match="no module 'a_package_nobody_has'; 'needy_nets' imports it"):
        create("needy_nets:build")


def test_missing_attribute(own):
    with pytest.raises(ValueError, match=r"module 'own_nets' has no 'plane', did you mean 'plain'\?"):
        create("own_nets:plane")


@pytest.mark.parametrize("attribute", ["ready", "number"])
def test_what_is_not_a_factory(own, attribute):
    with pytest.raises(TypeError, match=f"'own_nets:{attribute}' is an object of type .* name the function or class"):
        create(f"own_nets:{attribute}")


@pytest.mark.parametrize("target", ["own_nets:", ":build", "./own_nets.py:build", ".own_nets:build", "a:b:c", "a b:c"])
def test_what_does_not_read_as_a_factory(target):
    with pytest.raises(ValueError, match=r"write 'package\.module:factory'"):
        create(target)


def test_input_shape_of_an_own_network_is_unknown():
    with pytest.raises(ValueError, match="input shape of 'own_nets:plain' is not known"):
        input_shape("own_nets:plain")


def test_built_in_networks_are_modules_of_their_own():
    first, second = create("lenet5"), create("lenet5")
    assert isinstance(first, nn.Module)
    assert first is not second
