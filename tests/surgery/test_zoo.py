"""The networks are fit to be tested on: they run, nothing in them is trivially zero, and comparison tells."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from dessilbi.models import names
from tests.surgery import zoo

ALL = {**zoo.FOREIGN, "gru": zoo.GRU}


@pytest.mark.parametrize("name", [*ALL, *(f"built-in {name}" for name in names())])
def test_every_parameter_counts(name):
    # A network whose result does not depend on something would hide mistakes there.
    net = zoo.built_in(name.removeprefix("built-in ")) if name.startswith("built-in") else ALL[name]
    model = net.build()
    assert all(float(p.detach().abs().min()) > 0 for p in model.parameters())
    leaves = [leaf for _, leaf in zoo._leaves(zoo.call(model, net.inputs(3)))]
    assert all(1e-2 < float(leaf.detach().abs().max()) < 1e3 for leaf in leaves)
    generator = torch.Generator().manual_seed(1)
    loss = sum((leaf * torch.randn(leaf.shape, generator=generator)).sum() for leaf in leaves)
    loss.backward()
    effects = {path: float((p.grad * p.detach()).abs().max()) for path, p in model.named_parameters()}
    silent = [path for path, effect in effects.items() if effect < 1e-4]
    # A softmax does not see what is added to all keys.
    assert [path for path in silent if not path.endswith(("key.bias", "in_proj_bias"))] == []


@pytest.mark.parametrize("name", zoo.FOREIGN)
def test_results_do_not_depend_on_the_rest_of_the_batch(name):
    net = zoo.FOREIGN[name]
    if name == "bn_no_running":
        pytest.skip("this one normalises by the batch")
    model, inputs = net.build(), net.inputs(3)
    first = (
        {key: value[:1] for key, value in inputs.items()}
        if isinstance(inputs, dict)
        else tuple(value[:1] for value in inputs)
        if isinstance(inputs, tuple)
        else inputs[:1]
    )
    whole, alone = (zoo._leaves(zoo.evaluate(model, x)) for x in (inputs, first))
    assert zoo.outputs_close([x[:1] for _, x in whole], [x for _, x in alone])


def test_comparison_sees_a_difference_in_every_kind_of_result():
    @dataclass
    class Result:
        logits: Tensor
        loss: None = None

    x = torch.tensor([100.0, 1.0])
    y = torch.tensor([100.0, 1.01])
    for wrap in (lambda t: t, lambda t: (x, t), lambda t: {"a": [t]}, Result):
        assert zoo.outputs_close(wrap(x), wrap(x.clone()))
        assert zoo.difference(wrap(x), wrap(y)) == pytest.approx(1e-4, rel=1e-3)
        assert not zoo.outputs_close(wrap(x), wrap(y))
    with pytest.raises(AssertionError):
        zoo.outputs_close(x, x[:1])
    with pytest.raises(AssertionError):
        zoo.outputs_close(x, x * float("nan"))


def test_random_selections_leave_something_everywhere_and_take_something_away():
    model = zoo.FOREIGN["vgg_flat"].build()
    sel = zoo.FOREIGN["vgg_flat"].selection(model, "filter", keep=0.1)
    assert "classifier.5.weight" not in sel
    assert len(sel) == 5
    for mask in sel.values():
        assert mask.any()
        assert not mask.all()
    sel = zoo.FOREIGN["vgg_flat"].selection(model, "weight", keep=0.3)
    parameters = dict(model.named_parameters())
    assert all(mask.shape == parameters[name].shape and mask.any() for name, mask in sel.items())
    assert any((~mask.flatten(1).any(1)).any() for mask in sel.values())


def test_a_transposed_convolution_has_as_many_filters_as_output_channels():
    assert zoo.width(nn.ConvTranspose2d(4, 6, 2, groups=2)) == 6
