"""What cannot be right is refused in one line that says what to do, and nothing has changed."""

import warnings

import pytest
import torch
from torch import nn

from dessilbi.selection import Selection
from dessilbi.surgery import profile, shrink
from tests.surgery import zoo
from tests.surgery.zoo import FOREIGN, difference, evaluate, selection_of


@pytest.fixture
def net():
    return zoo.built_in("resnet20")


@pytest.fixture
def model(net):
    return net.build()


@pytest.fixture
def sel(net, model):
    return net.selection(model, "filter")


def refused(error, model, *args):
    """The message of the error, after a look at whether anything has changed."""
    before = zoo.snapshot(model)
    with pytest.raises(error) as caught:
        shrink(model, *args)
    assert zoo.unchanged(model, before)
    assert str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_selection_for_other_names(net, model):
    sel = Selection({"features.0.weight": torch.tensor([True, False])})
    assert "features.0.weight" in str(refused(ValueError, model, sel, net.inputs(2)))
    # A module is not a parameter.
    sel = Selection({"conv1": torch.arange(16) > 2})
    assert "conv1" in str(refused(ValueError, model, sel, net.inputs(2)))


@pytest.mark.parametrize("shape", [(15,), (3,), (16, 3), (16, 3, 3, 3, 1), (3, 16, 3, 3)])
def test_a_selection_of_other_shapes(net, model, shape):
    sel = Selection({"conv1.weight": torch.ones(shape, dtype=torch.bool)})
    message = str(refused(ValueError, model, sel, net.inputs(2)))
    assert "conv1.weight" in message
    assert str(shape) in message
    assert "16" in message


@pytest.mark.parametrize(
    "inputs",
    [
        torch.zeros(2, 5, 16, 16),  # channels
        torch.zeros(2, 3),
        torch.zeros(2, 3, 16, 16, dtype=torch.long),
        (torch.zeros(2, 3, 16, 16), torch.zeros(2)),
        (),
        {"image": torch.zeros(2, 3, 16, 16)},
    ],
    ids=["channels", "dimensions", "dtype", "too many", "none", "keyword"],
)
@pytest.mark.parametrize("what", ["shrink", "profile"])
def test_example_inputs_that_the_network_does_not_take(model, sel, inputs, what):
    before = zoo.snapshot(model)
    with pytest.raises(ValueError, match="example_inputs") as caught:
        shrink(model, sel, inputs) if what == "shrink" else profile(model, inputs)
    assert caught.value.__cause__ is not None  # what the network itself said
    assert "\n" not in str(caught.value)
    assert zoo.unchanged(model, before)


def test_example_inputs_of_the_wrong_size_for_a_flattened_map():
    net = FOREIGN["vgg_flat"]
    model = net.build()
    error = refused(ValueError, model, net.selection(model, "filter"), torch.zeros(2, 3, 12, 12))
    assert "example_inputs" in str(error)
    assert error.__cause__ is not None


@pytest.mark.parametrize("inputs", [None, "image", 3, object()])
def test_example_inputs_that_are_none(model, sel, inputs):
    assert "example_inputs" in str(refused(TypeError, model, sel, inputs))


def test_arguments_of_other_types(net, model, sel):
    refused(TypeError, model, {"conv1.weight": torch.ones(16).bool()}, net.inputs(2))
    refused(TypeError, model, None, net.inputs(2))
    refused(TypeError, model, sel, net.inputs(2), model.parameters())
    with pytest.raises(TypeError, match="str"):
        shrink("resnet20", sel, net.inputs(2))
    with pytest.raises(TypeError, match="str"):
        profile("resnet20", net.inputs(2))


def test_an_optimizer_of_another_network(net, model, sel):
    optimizer = torch.optim.SGD(net.build(1).parameters(), lr=0.1)
    held = [id(p) for p in optimizer.param_groups[0]["params"]]
    assert "optimizer" in str(refused(ValueError, model, sel, net.inputs(2), optimizer))
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == held


def test_an_optimizer_of_a_part_of_the_network_will_do(net, model, sel):
    optimizer = torch.optim.SGD(model.fc.parameters(), lr=0.1)
    small = shrink(model, sel, net.inputs(2), optimizer)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in small.fc.parameters()]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("vgg16", "features.7"),
        ("vgg16", "features.0"),
        ("vgg16", "classifier.0"),
        ("mlp", "net.2"),
        ("lenet5", "features.3"),
    ],
)
def test_a_layer_that_is_needed_keeps_one_filter(name, layer):
    net = FOREIGN[name] if name in FOREIGN else zoo.built_in(name)
    model = net.build()
    empty = selection_of({layer: torch.zeros(zoo.width(model.get_submodule(layer))).bool()}, "filter")
    with empty.applied(model):
        expected = evaluate(model, net.inputs(3))
    with pytest.warns(UserWarning, match=layer.replace(".", r"\.")) as caught:
        small = shrink(model, empty, net.inputs(2))
    assert len([w for w in caught if layer in str(w.message)]) == 1
    assert zoo.width(small.get_submodule(layer)) == 1
    assert difference(expected, evaluate(small, net.inputs(3))) <= 1e-5


def test_an_emptied_branch_of_a_concatenation():
    # Nothing needs this layer: it goes, or one filter of it is left.
    net = FOREIGN["inception"]
    model = net.build()
    empty = selection_of({"mixed1.branch1.conv": torch.zeros(4).bool()}, "filter")
    with empty.applied(model):
        expected = evaluate(model, net.inputs(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = shrink(model, empty, net.inputs(2))
    assert difference(expected, evaluate(small, net.inputs(3))) <= 1e-5
    assert small.fc.in_features == 23
    assert small.get_submodule("mixed2.branch1.conv").in_channels in (19, 20)


def test_everything_off_leaves_a_network_that_runs():
    net = zoo.built_in("vgg16")
    model = net.build()
    masks = {path: torch.zeros(zoo.width(layer)).bool() for path, layer in zoo.writers(model).items()}
    del masks["classifier.2"]
    with pytest.warns(UserWarning, match="features"):
        small = shrink(model, selection_of(masks, "filter"), net.inputs(2))
    assert {zoo.width(layer) for path, layer in zoo.writers(small).items() if path != "classifier.2"} == {1}
    with selection_of(masks, "filter").applied(model):
        assert difference(evaluate(model, net.inputs(3)), evaluate(small, net.inputs(3))) <= 1e-5


def test_a_network_that_fails_for_reasons_of_its_own():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            raise RuntimeError("nothing works")

    error = refused(ValueError, Broken(), selection_of({"conv": torch.arange(4) > 1}), torch.zeros(1, 3, 8, 8))
    assert "nothing works" in f"{error} {error.__cause__}"
