"""Training goes on: a step of the small network is the step of the masked one, with momentum and all."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dessilbi import DessiAdamW, DessiLBI, Labels, Selection, param_groups
from dessilbi.surgery import profile, shrink
from tests.surgery import zoo
from tests.surgery.zoo import FOREIGN, coherent_selection, difference, evaluate, random_masks, selection_of

SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}


def decayed(model):
    """Two groups, as they are usually made."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0, "lr": 0.02}]


OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), **SGD),
    "sgd groups": lambda model: torch.optim.SGD(decayed(model), lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.01),
    "adamw amsgrad": lambda model: torch.optim.AdamW(decayed(model), lr=1e-3, amsgrad=True),
    "dessilbi": lambda model: DessiLBI(
        param_groups(model, conv="weight", linear="weight"), 0.05, nu=10.0, lam=0.02, momentum=0.9, weight_decay=0.01
    ),
}
# Adam divides by the root of a mean square: where that is small, rounding is not.
TOLERANCE = {"adam": 1e-4, "adamw amsgrad": 1e-4}


def inner_selection(net, model):
    """Random masks of what is inside the residual blocks."""
    masks = random_masks(model, 0.5, 3)
    return selection_of({path: mask for path, mask in masks.items() if path.endswith("conv1") and "." in path})


CASES = {
    "vgg16": lambda net, model: net.selection(model, "filter"),
    "lenet5": lambda net, model: net.selection(model, "filter"),
    "resnet20 inner": inner_selection,
    "resnet20 coherent": lambda net, model: coherent_selection(model, off="last"),
    "resnet18 branches": lambda net, model: net.selection(model, "layer"),
    "mlp": lambda net, model: net.selection(model, "filter"),
    "inception": lambda net, model: net.selection(model, "filter"),
    "vgg_flat": lambda net, model: net.selection(model, "filter"),
}


def of(case):
    name = case.split()[0]
    return FOREIGN[name] if name in FOREIGN else zoo.built_in(name)


def step(model, optimizer, inputs, seed):
    model.train()
    optimizer.zero_grad()
    output = zoo.call(model, inputs)
    target = torch.randint(0, output.shape[1], (len(output),), generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    loss = F.cross_entropy(output, target)
    loss.backward()
    optimizer.step()
    return float(loss)


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def trained(net, make_optimizer, make_selection):
    """Two steps, then three more with the selection in force; the same every time."""
    model = without_dropout(net.build())
    optimizer = make_optimizer(model)
    for seed in range(2):
        step(model, optimizer, net.inputs(6), seed)
    sel = make_selection(net, model)
    handle = sel.apply(model)
    for seed in range(2, 5):
        step(model, optimizer, net.inputs(6), seed)
    return model, optimizer, sel, handle


def tensors(state):
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.ndim}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_the_next_steps_are_those_of_the_masked_network(case, optimizer):
    net = of(case)
    masked, theirs, _, _ = trained(net, OPTIMIZERS[optimizer], CASES[case])
    model, ours, sel, handle = trained(net, OPTIMIZERS[optimizer], CASES[case])
    assert zoo.unchanged(model, zoo.snapshot(masked))
    moved = [v for p in ours.state for v in tensors(ours.state[p]).values()]
    assert moved
    assert all(value.abs().max() > 0 for value in moved)

    before = zoo.snapshot(model)
    small = shrink(model, sel, net.inputs(6), ours)
    handle.remove()
    assert zoo.unchanged(model, before)
    assert zoo.parameters(small) < zoo.parameters(model)
    tolerance = TOLERANCE.get(optimizer, 1e-5)
    for seed in (5, 6):
        losses = [step(m, o, net.inputs(6), seed) for m, o in ((masked, theirs), (small, ours))]
        assert losses[1] == pytest.approx(losses[0], rel=10 * tolerance)
        assert difference(evaluate(masked, net.inputs(3)), evaluate(small, net.inputs(3))) <= 10 * tolerance


def test_streams_whose_writers_disagree_keep_their_masks():
    # The stream keeps a channel that one of its writers has off: that writer must not wake up.
    net = zoo.built_in("resnet20")
    make = OPTIMIZERS["sgd"]
    masked, theirs, _, _ = trained(net, make, lambda net, model: net.selection(model, "filter"))
    model, ours, sel, handle = trained(net, make, lambda net, model: net.selection(model, "filter"))
    small = shrink(model, sel, net.inputs(6), ours)
    handle.remove()
    for seed in (5, 6):
        step(masked, theirs, net.inputs(6), seed)
        step(small, ours, net.inputs(6), seed)
        assert difference(evaluate(masked, net.inputs(3)), evaluate(small, net.inputs(3))) <= 1e-4


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_optimizer_holds_the_small_network_and_what_it_knew_of_it(optimizer):
    net = zoo.built_in("vgg16")
    model, ours, sel, _ = trained(net, OPTIMIZERS[optimizer], CASES["vgg16"])
    groups = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in ours.param_groups])
    names = {id(p): name for name, p in model.named_parameters()}
    members = [[names[id(p)] for p in g["params"]] for g in ours.param_groups]
    states = {names[id(p)]: {k: v.clone() for k, v in tensors(s).items()} for p, s in ours.state.items()}
    counts = {names[id(p)]: s["step"] for p, s in ours.state.items() if "step" in s}

    small = shrink(model, sel, net.inputs(2), ours)
    own = {id(p): name for name, p in small.named_parameters()}
    assert [[own[id(p)] for p in g["params"]] for g in ours.param_groups] == members
    assert [{k: v for k, v in g.items() if k != "params"} for g in ours.param_groups] == groups
    assert set(map(id, ours.state)) <= set(own)

    # A convolution's rows are its own filters, its columns those of the convolution before.
    first, second = sel["features.0.weight"], sel["features.3.weight"]
    keeps = {
        "features.0.weight": lambda x: x[first],
        "features.1.weight": lambda x: x[first],
        "features.1.bias": lambda x: x[first],
        "features.3.weight": lambda x: x[second][:, first],
        "features.4.bias": lambda x: x[second],
        "classifier.2.weight": lambda x: x[:, sel["classifier.0.weight"]],
        "classifier.2.bias": lambda x: x,
    }
    parameters = dict(small.named_parameters())
    for name, keep in keeps.items():
        state = ours.state[parameters[name]]
        assert torch.equal(parameters[name], keep(dict(model.named_parameters())[name]))
        assert set(tensors(state)) == set(states[name])
        for key, value in tensors(state).items():
            assert torch.equal(value, keep(states[name][key])), (name, key)
        assert counts.get(name) == state.get("step")


def test_parameters_of_a_removed_branch_leave_the_optimizer():
    net = zoo.built_in("resnet20")
    model, ours, sel, _ = trained(
        net,
        OPTIMIZERS["sgd groups"],
        lambda net, model: selection_of({f"layer1.1.conv{i}": torch.zeros(1).bool() for i in (1, 2)}, "layer"),
    )
    small = shrink(model, sel, net.inputs(2), ours)
    held = [id(p) for group in ours.param_groups for p in group["params"]]
    assert sorted(held) == sorted(map(id, small.parameters()))
    assert len(ours.param_groups) == 2
    assert {id(p) for p in ours.state} <= set(held)


def test_support_and_dual_of_dessilbi_follow():
    net = zoo.built_in("vgg16")
    model, ours, sel, _ = trained(net, OPTIMIZERS["dessilbi"], CASES["vgg16"])
    weight = model.features[3].weight
    rows, columns = sel["features.3.weight"], sel["features.0.weight"]
    dual, support = ours.dual(weight).clone(), ours.support(weight).clone()
    assert dual.abs().max() > 0
    time = ours.time
    small = shrink(model, sel, net.inputs(2), ours)
    weight = small.features[3].weight
    assert torch.equal(ours.dual(weight), dual[rows][:, columns])
    assert torch.equal(ours.support(weight), support[rows][:, columns])
    assert ours.time == time


def chain():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4)
    )


@pytest.mark.parametrize("optimizer", [DessiLBI, DessiAdamW])
@pytest.mark.parametrize("kind", ["weight", "filter", "input", "layer", "channel", "labels"])
def test_v_of_groups_of_every_kind_is_cut_like_its_parameter(kind, optimizer):
    torch.manual_seed(0)
    model, x = chain(), torch.randn(4, 3, 6, 6)
    if kind == "labels":
        weights = [(p, Labels(torch.arange(p.numel()).view(p.shape) % 5)) for p in model.parameters() if p.ndim == 4]
        groups = [{"params": [p], "group": labels} for p, labels in weights]
        groups.append({"params": [p for p in model.parameters() if p.ndim != 4], "group": None})
    else:
        groups = param_groups(model, conv=kind, linear="neuron", example_inputs=x)
    ours = optimizer(groups, 0.05, nu=5.0, lam=0.01)
    for seed in range(3):
        step(model, ours, x, seed)
    first, second = torch.arange(6) % 2 == 0, torch.arange(8) >= 3
    v = {name: ours.dual(p).clone() for name, p in model.named_parameters() if name in ("0.weight", "3.weight")}
    assert all(bool((values != 0).all()) for values in v.values())
    small = shrink(model, Selection({"0.weight": first, "3.weight": second}), x, ours)
    now = dict(small.named_parameters())
    assert torch.equal(ours.dual(now["0.weight"]), v["0.weight"][first])
    assert torch.equal(ours.dual(now["3.weight"]), v["3.weight"][second][:, first])
    if kind == "labels":  # an element keeps its company
        before = (torch.arange(8 * 6 * 9) % 5).view(8, 6, 3, 3)[second][:, first]
        after = next(part for p, part in ours.penalised() if p is now["3.weight"]).index
        pairs = torch.stack([before.flatten(), after.flatten()]).unique(dim=1)
        assert pairs.shape[1] == len(before.unique()) == len(after.unique())
    groups_left = {"weight": 5 * 3 * 9, "filter": 5, "input": 3, "layer": 1, "channel": 5, "labels": 5}
    assert ours.support(now["3.weight"]).numel() == groups_left[kind]
    before = now["3.weight"].clone()
    step(small, ours, x, 3)
    assert not torch.equal(before, now["3.weight"])


def test_schedulers_and_state_dicts_go_on():
    net = zoo.built_in("vgg16")
    model, ours, sel, _ = trained(net, OPTIMIZERS["sgd groups"], CASES["vgg16"])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(ours, 0.5)
    small = shrink(model, sel, net.inputs(2), ours)
    step(small, ours, net.inputs(4), 0)
    scheduler.step()
    assert [group["lr"] for group in ours.param_groups] == pytest.approx([0.025, 0.01])
    again = OPTIMIZERS["sgd groups"](small)
    again.load_state_dict(ours.state_dict())
    assert len(again.state) == len(ours.state)


def test_an_optimizer_whose_state_cannot_be_cut_is_refused():
    net = FOREIGN["mlp"]
    model = net.build()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(TypeError, match="LBFGS.*make a new one"):
        shrink(model, net.selection(model, "filter"), net.inputs(2), optimizer=optimizer)
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())


@pytest.mark.parametrize("wrap", [lambda m: torch.compile(m, backend="eager"), nn.DataParallel])
def test_a_wrapped_network_is_shrunk_itself(wrap):
    net = FOREIGN["mlp"]
    model = net.build()
    sel = net.selection(model, "filter")
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    step(model, optimizer, net.inputs(6), 0)
    small = shrink(wrap(model.eval()), sel, net.inputs(2), optimizer=optimizer)
    assert type(small) is type(model)
    assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, small.parameters()))
    with sel.applied(wrap(model)):
        assert zoo.outputs_close(zoo.evaluate(model, net.inputs(3)), zoo.evaluate(small, net.inputs(3)))
    report = profile(wrap(model), net.inputs(2))
    assert report.parameters_of(sel) == zoo.parameters(small)


def test_without_an_optimizer_the_small_network_trains():
    net = zoo.built_in("resnet20")
    model = net.build()
    small = shrink(model, net.selection(model, "filter"), net.inputs(2))
    optimizer = torch.optim.SGD(small.parameters(), lr=0.01)
    losses = [step(small, optimizer, net.inputs(8), 0) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert all(p.grad is not None for p in small.parameters())
