"""Sizes and costs: those that torch counts, of the network and of what a selection would leave of it."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dessilbi.models import create, names
from dessilbi.surgery import profile, shrink
from tests.surgery import zoo
from tests.surgery.zoo import FOREIGN, coherent_selection

# Those whose work torch's counter sees all of: fused attention is not among it on a CPU.
COUNTED = (
    "mlp", "vgg_flat", "conv1d", "conv3d", "autoencoder", "resnet_lambda", "mobilenet_v2", "mobilenet_v3", "resnext",
    "densenet", "inception", "shufflenet_v1", "unet_transposed", "convnext", "tied", "vit_plain", "multi_input_output",
)  # fmt: skip


def counted(model, inputs):
    """What torch counts: two operations a multiply-add."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        zoo.call(model.eval(), inputs)
    assert counter.get_total_flops() % 2 == 0
    return counter.get_total_flops() // 2


def of(name):
    return FOREIGN[name] if name in FOREIGN else zoo.built_in(name)


@pytest.mark.parametrize("name", [*names(), *COUNTED])
def test_parameters_and_macs_are_those_of_torch(name):
    net = of(name)
    model = net.build()
    before = zoo.snapshot(model)
    report = profile(model, net.inputs(2))
    assert report.parameters == zoo.parameters(model)
    assert report.macs == counted(model, net.inputs(2))
    assert isinstance(report.macs, int)
    assert isinstance(report.parameters, int)
    assert zoo.unchanged(model, before)


@pytest.mark.parametrize(("name", "macs"), [("resnet56", 125.5e6), ("vgg16", 313e6), ("lenet5", 0.42e6)])
def test_macs_of_the_literature(name, macs):
    shape = (1, 28, 28) if name == "lenet5" else (3, 32, 32)
    assert profile(create(name), torch.zeros(1, *shape)).macs == pytest.approx(macs, rel=0.01)


def test_layers_and_their_sum():
    net = zoo.built_in("vgg16")
    model = net.build()
    report = profile(model, net.inputs(4))
    layers = {name: (kind, parameters, macs) for name, kind, parameters, macs in report.layers}
    first, second = model.features[0], model.features[3]
    assert layers["features.0"] == ("Conv2d", first.weight.numel(), 4 * 32 * 32 * 9 * 3 * first.out_channels)
    assert layers["features.3"][2] == 4 * 32 * 32 * 9 * first.out_channels * second.out_channels
    assert layers["features.1"] == ("BatchNorm2d", 2 * first.out_channels, 0)
    assert layers["classifier.2"] == ("Linear", 12 * 10 + 10, 4 * 12 * 10)
    assert sum(parameters for _, parameters, _ in layers.values()) == report.parameters
    assert sum(macs for _, _, macs in layers.values()) == report.macs


def test_a_model_in_training_stays_as_it_is():
    net = zoo.built_in("resnet20")
    model = net.build().train()
    before = zoo.snapshot(model)
    report = profile(model, net.inputs(2))
    assert model.training
    assert zoo.unchanged(model, before)
    assert report.macs == counted(model, net.inputs(2))


@pytest.mark.parametrize("level", ["filter", "layer", "coherent"])
@pytest.mark.parametrize(
    "name",
    ["resnet20", "resnet18", "vgg16", "alexnet", "mlp", "vgg_flat", "mobilenet_v2", "resnext", "densenet", "inception",
     "unet_transposed", "vit_hand", "sigmoid_chain", "group_norm"],
)  # fmt: skip
def test_what_a_selection_would_leave(name, level):
    net = of(name)
    if level == "layer" and not net.branches:
        pytest.skip("no branches")
    model = net.build()
    before = zoo.snapshot(model)
    sel = coherent_selection(model) if level == "coherent" else net.selection(model, level)
    report = profile(model, net.inputs(2))
    predicted = report.parameters_of(sel), report.macs_of(sel)
    assert zoo.unchanged(model, before)
    small = profile(shrink(model, sel, net.inputs(2)), net.inputs(2))
    assert predicted == (small.parameters, small.macs)


@pytest.mark.parametrize("name", ["resnet20", "vgg16", "mlp"])
def test_single_weights_count_as_parameters_but_save_no_work(name):
    net = of(name)
    model = net.build()
    sel = net.selection(model, "weight")
    report = profile(model, net.inputs(2))
    gone = sum(int((~mask).sum()) for mask in sel.masks(model).values())
    assert report.parameters_of(sel) == report.parameters - gone
    assert report.macs_of(sel) == profile(shrink(model, sel, net.inputs(2)), net.inputs(2)).macs


def test_what_dropping_layers_of_a_plain_network_would_leave():
    net = zoo.built_in("vgg16")
    model = net.build()
    sel = zoo.selection_of({f"features.{i}": torch.zeros(1).bool() for i in (3, 7, 40)}, "layer")
    report = profile(model, net.inputs(2))
    small = profile(shrink(model, sel, net.inputs(2)), net.inputs(2))
    assert (report.parameters_of(sel), report.macs_of(sel)) == (small.parameters, small.macs)


def test_latency_is_seconds_and_falls():
    net = zoo.Net(lambda: create("vgg16"), zoo.built_in("vgg16").inputs)
    model = net.build()
    report = profile(model, net.inputs(4))
    dense, small = (report.latency_of(coherent_selection(model, keep)) for keep in (1.0, 0.1))
    assert isinstance(small, float)
    assert 0 < small < dense < 60


def test_latency_does_not_change_with_what_else_the_machine_does(monkeypatch):
    """Everything takes ten times as long at the second measurement: the dense network's copy as well."""
    from dessilbi.surgery import costs

    slow = iter([1.0, 10.0])

    def interleave(work, rounds, device):
        factor = next(slow)
        return {"dense": [0.5 * factor] * rounds, "small": [0.2 * factor] * rounds}

    monkeypatch.setattr(costs, "interleave", interleave)
    net = zoo.FOREIGN["mlp"]
    model = net.build()
    report = profile(model, net.inputs(2))
    sel = net.selection(model, "filter")
    assert [report.latency_of(sel), report.latency_of(sel)] == pytest.approx([0.2, 0.2])
