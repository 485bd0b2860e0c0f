"""Small networks travel: in a file without code, through copy and pickle, and into torch.export and torch.compile."""

import copy
import json
import pickle
import warnings

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dessilbi.models import create, names
from dessilbi.surgery import load_shrunk, save_shrunk, shrink
from tests.surgery import nets, zoo
from tests.surgery.zoo import FOREIGN, coherent_selection, difference, evaluate, selection_of

FOREIGN_SAVED = (
    "mlp", "vgg_flat", "conv1d", "autoencoder", "resnet_lambda", "resnet_inline_pad", "resnext", "mobilenet_v2",
    "densenet", "inception", "unet_transposed", "group_norm", "convnext", "vit_hand", "multi_input_output", "tied",
)  # fmt: skip
BUILT_IN_SAVED = ("lenet5", "resnet20", "resnet56", "vgg16", "alexnet", "resnet18", "resnet50_imagenet")


def small_network(net, level="filter"):
    model = net.build()
    return shrink(model, net.selection(model, level), net.inputs(2))


def equal(a, b):
    return difference(a, b) == 0.0


@pytest.mark.parametrize("level", ["filter", "layer"])
@pytest.mark.parametrize("name", BUILT_IN_SAVED)
def test_a_built_in_network_comes_back_by_its_name(name, level, tmp_path):
    net = zoo.built_in(name)
    if level == "layer" and not net.branches:
        pytest.skip("no branches")
    small = small_network(net, level)
    save_shrunk(small, tmp_path / "small", name, zoo.built_in_options(name))
    loaded = load_shrunk(tmp_path / "small")
    assert equal(evaluate(small, net.inputs(3)), evaluate(loaded, net.inputs(3)))
    assert zoo.unchanged(loaded, zoo.snapshot(small))


@pytest.mark.parametrize("level", ["filter", "layer"])
@pytest.mark.parametrize("name", FOREIGN_SAVED)
def test_a_foreign_network_comes_back_through_its_factory(name, level, tmp_path):
    net = FOREIGN[name]
    if level == "layer" and not net.branches:
        pytest.skip("no branches")
    small = small_network(net, level)
    save_shrunk(small, tmp_path / "small")
    loaded = load_shrunk(tmp_path / "small", net.factory)
    assert equal(evaluate(small, net.inputs(3)), evaluate(loaded, net.inputs(3)))
    assert zoo.unchanged(loaded, zoo.snapshot(small))


@pytest.mark.parametrize("off", ["first", "last"])
@pytest.mark.parametrize("name", ["resnet20", "resnet_lambda", "unet_nearest"])
def test_narrow_streams_come_back(name, off, tmp_path):
    net = FOREIGN[name] if name in FOREIGN else zoo.built_in(name)
    model = net.build()
    small = shrink(model, coherent_selection(model, off=off), net.inputs(2))
    save_shrunk(small, tmp_path / "small")
    loaded = load_shrunk(tmp_path / "small", net.factory)
    assert equal(evaluate(small, net.inputs(3)), evaluate(loaded, net.inputs(3)))


def test_a_dropped_plain_layer_comes_back(tmp_path):
    net = zoo.built_in("vgg16")
    model = net.build()
    dropped = {f"features.{i}": torch.zeros(1).bool() for i in (3, 7, 40)}
    small = shrink(model, selection_of(dropped, "layer"), net.inputs(2))
    save_shrunk(small, tmp_path / "small", "vgg16", zoo.built_in_options("vgg16"))
    assert equal(evaluate(small, net.inputs(3)), evaluate(load_shrunk(tmp_path / "small"), net.inputs(3)))


def test_what_was_shrunk_twice_and_trained_in_between_comes_back(tmp_path):
    net = zoo.built_in("resnet20")
    small = small_network(net)
    optimizer = torch.optim.SGD(small.parameters(), lr=0.1)
    small.train()(net.inputs(4)).square().mean().backward()
    optimizer.step()
    again = shrink(small, net.selection(small, "layer", keep=0.7), net.inputs(2))
    assert zoo.parameters(again) < zoo.parameters(small)
    save_shrunk(again, tmp_path / "small", "resnet20", zoo.built_in_options("resnet20"))
    assert equal(evaluate(again, net.inputs(3)), evaluate(load_shrunk(tmp_path / "small"), net.inputs(3)))


def test_what_was_loaded_shrinks_and_trains_on(tmp_path):
    net = zoo.built_in("vgg16")
    small = small_network(net)
    save_shrunk(small, tmp_path / "small", "vgg16", zoo.built_in_options("vgg16"))
    loaded = load_shrunk(tmp_path / "small").eval()
    sel = net.selection(loaded, "filter", seed=4)
    with sel.applied(loaded):
        expected = evaluate(loaded, net.inputs(3))
    assert difference(expected, evaluate(shrink(loaded, sel, net.inputs(2)), net.inputs(3))) <= 1e-5
    loaded.train()(net.inputs(4)).sum().backward()
    assert all(p.grad is not None for p in loaded.parameters())


def test_the_file_is_plain_safetensors_and_holds_no_more_than_the_network(tmp_path):
    net = zoo.Net(lambda: create("vgg16"), zoo.built_in("vgg16").inputs)
    model = net.build()
    small = shrink(model, coherent_selection(model, 0.25), net.inputs(2))
    file = tmp_path / "small.safetensors"
    save_shrunk(small, file, "vgg16")
    with safe_open(str(file), framework="pt") as opened:
        assert opened.keys()
        assert json.loads(opened.metadata()["dessilbi"])["version"] >= 1
    state = sum(value.numel() * value.element_size() for value in small.state_dict().values())
    assert file.stat().st_size < 1.1 * state + 50_000
    assert [path.name for path in tmp_path.iterdir()] == ["small.safetensors"]


def test_half_precision_comes_back(tmp_path):
    net = zoo.built_in("vgg16")
    small = small_network(net).bfloat16()
    save_shrunk(small, tmp_path / "small", "vgg16", zoo.built_in_options("vgg16"))
    loaded = load_shrunk(tmp_path / "small")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert zoo.unchanged(loaded, zoo.snapshot(small))


# -- files that are not what they should be ----------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    net = FOREIGN["vgg_flat"]
    save_shrunk(small_network(net), tmp_path / "small")
    return tmp_path / "small"


def refused(file, factory=None, error=ValueError):
    with pytest.raises(error) as caught:
        load_shrunk(file, factory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rewritten(file, **changes):
    with safe_open(str(file), framework="pt") as opened:
        arrays = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        header = json.loads(opened.metadata()["dessilbi"])
    save_file(arrays, str(file), metadata={"dessilbi": json.dumps({**header, **changes})})


def test_damaged_files(saved):
    whole = saved.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"\x00" * 64, pickle.dumps({"weight": 1})):
        saved.write_bytes(damaged)
        assert str(saved) in refused(saved, FOREIGN["vgg_flat"].factory)


def test_other_files(saved, tmp_path):
    factory = FOREIGN["vgg_flat"].factory
    save_file({"weight": torch.zeros(2)}, str(tmp_path / "weights"))
    assert "weights" in refused(tmp_path / "weights", factory)
    selection_of({"conv": torch.ones(3).bool()}).save(tmp_path / "selection")
    assert "selection" in refused(tmp_path / "selection", factory)
    refused(tmp_path / "missing", factory, FileNotFoundError)
    rewritten(saved, version=1000)
    assert "1000" in refused(saved, factory)


def test_a_file_without_a_name_needs_a_factory(saved):
    assert "factory" in refused(saved)


def test_a_file_of_another_network(saved, tmp_path):
    assert "VggFlat" in refused(saved, FOREIGN["mlp"].factory)
    with pytest.raises((TypeError, ValueError)):
        load_shrunk(saved, lambda: "no network")
    # The same class with fewer layers: the module that is too many is named.
    save_shrunk(small_network(FOREIGN["mlp"]), tmp_path / "mlp")
    assert "net." in refused(tmp_path / "mlp", lambda: nets.MLP((7, 12, 4)))


@pytest.mark.parametrize(("name", "options"), [("resnet999", None), ("os:system", {"command": "true"})])
def test_no_code_is_run_that_a_file_names(saved, name, options, tmp_path):
    # Only built-in names are followed, whatever a file says.
    net = zoo.built_in("vgg16")
    small = small_network(net)
    with pytest.raises(ValueError, match=name):
        save_shrunk(small, tmp_path / "other", name, options)
    save_shrunk(small, tmp_path / "other", "vgg16", zoo.built_in_options("vgg16"))
    with safe_open(str(tmp_path / "other"), framework="pt") as opened:
        header = json.loads(opened.metadata()["dessilbi"])
    assert "vgg16" in header.values()
    key = next(key for key, value in header.items() if value == "vgg16")
    rewritten(tmp_path / "other", **{key: name})
    assert name in refused(tmp_path / "other")


# -- ordinary modules --------------------------------------------------------------------------------------------

EXPORTED = ("resnet20", "vgg16", "mobilenet_v2", "densenet", "unet_transposed", "vit_hand")


@pytest.mark.parametrize("level", ["filter", "layer"])
@pytest.mark.parametrize("name", EXPORTED)
def test_small_networks_copy_pickle_and_export(name, level):
    net = FOREIGN[name] if name in FOREIGN else zoo.built_in(name)
    if level == "layer" and not net.branches:
        pytest.skip("no branches")
    small = small_network(net, level).eval()
    x = net.inputs(2)
    expected = evaluate(small, x)
    assert equal(expected, evaluate(copy.deepcopy(small), x))
    if name != "resnet_lambda":  # which holds a lambda
        assert equal(expected, evaluate(pickle.loads(pickle.dumps(small)), x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(small, (x,))
    assert difference(expected, exported.module()(x)) <= 1e-6


def test_a_small_network_exports_with_a_batch_of_any_size():
    net = zoo.built_in("resnet20")
    small = small_network(net).eval()
    exported = torch.export.export(small, (net.inputs(2),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for batch in (2, 5):
        x = net.inputs(batch)
        assert difference(evaluate(small, x), exported.module()(x)) <= 1e-5


@pytest.mark.compile
def test_a_small_network_compiles():
    net = zoo.built_in("resnet20")
    small = small_network(net).eval()
    compiled = torch.compile(small, fullgraph=True)
    with torch.no_grad():
        assert difference(evaluate(small, net.inputs(2)), compiled(net.inputs(2))) <= 1e-5


def test_every_built_in_network_is_saved_somewhere_here():
    families = {"resnet32", "resnet44", "resnet50", "resnet110", "vgg19"}  # as one that is here, only deeper
    assert set(BUILT_IN_SAVED) | families == set(names())
