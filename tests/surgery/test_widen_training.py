"""What training needs goes along with a wider network: state, masks, modes; and the first step is the one that was due.

New filters for which the gradient is largest are compared with a singular value decomposition by NumPy.
"""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer

from dessilbi import DessiAdamW, DessiLBI, Selection, param_groups
from dessilbi.groups import Labels
from dessilbi.surgery import shrink, widen
from tests.surgery import zoo
from tests.surgery.test_widen import everything, net_of, places
from tests.surgery.zoo import FOREIGN, difference, evaluate, snapshot, unchanged


def dessilbi(model: nn.Module, **options: object) -> DessiLBI:
    groups = param_groups(model, conv="filter", linear="neuron")
    return DessiLBI(groups, 0.05, **{"nu": 10.0, "lam": 0.02, "momentum": 0.9, "weight_decay": 0.01, **options})


OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 1e-3, amsgrad=True),
    "dessilbi": dessilbi,
    "dessilbi by weight": lambda model: DessiLBI(
        param_groups(model, conv="weight", linear="weight"), 0.05, nu=10.0, lam=0.02, momentum=0.9
    ),
    "dessiadamw": lambda model: DessiAdamW(param_groups(model, conv="filter"), 1e-3, nu=10.0, lam=5e-4),
}


def double(net: zoo.Net) -> zoo.Net:
    """In double precision: Adam divides by the root of a mean square, and where that is small, rounding is not."""
    return zoo.Net(lambda: net.build().double(), lambda batch=2: net.inputs(batch).double())


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


def step(net: zoo.Net, model: nn.Module, optimizer: Optimizer, seed: int) -> None:
    out = zoo.call(model.train(), net.inputs(4))
    labels = torch.randint(out.shape[1], (4,), generator=torch.Generator().manual_seed(seed))
    functional.cross_entropy(out, labels).backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(net: zoo.Net, kind: str, steps: int = 4) -> tuple[nn.Module, Optimizer]:
    model = net.factory() if net.inputs(1).dtype == torch.float64 else net.build()
    without_dropout(model)
    optimizer = OPTIMIZERS[kind](model)
    for seed in range(steps):
        step(net, model, optimizer, seed)
    return model, optimizer


def state_by_name(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    return {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}


def index_of(net: zoo.Net, model: nn.Module, extra: dict[str, int]) -> dict[str, list[torch.Tensor]]:
    """Where the old entries of every parameter go, found with an optimizer that numbers them."""
    from tests.surgery.test_widen import numbered

    twin = copy.deepcopy(model)
    optimizer = numbered(twin)
    return places(optimizer, widen(twin, extra, net.inputs(2), optimizer), twin)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_survives_bit_for_bit_and_new_entries_are_zero(kind: str) -> None:
    net = net_of("resnet20") if kind == "dessilbi" else FOREIGN["vgg_flat"]
    model, optimizer = trained(net, kind)
    before = copy.deepcopy(state_by_name(model, optimizer))
    assert before
    extra = everything(net, model, "", 2)
    index = index_of(net, model, extra)
    ours = [id(p) for p, _ in optimizer.penalised()] if "dessi" in kind else []
    gammas = {name: optimizer.gamma(p).clone() for name, p in model.named_parameters() if id(p) in ours}
    wide = widen(model, extra, net.inputs(2), optimizer)
    after, named = state_by_name(wide, optimizer), dict(wide.named_parameters())
    assert after.keys() == before.keys()
    seen = set()
    for name, was in before.items():
        assert after[name].keys() == was.keys()
        for key, value in was.items():
            now = after[name][key]
            if not isinstance(value, torch.Tensor) or value.ndim == 0 or name not in index:
                assert torch.equal(torch.as_tensor(now), torch.as_tensor(value)), (name, key)
                continue
            assert now.shape == named[name].shape
            grid = torch.meshgrid(*index[name], indexing="ij")
            assert torch.equal(now[grid], value), (name, key)
            assert int((now != 0).sum()) == int((value != 0).sum()), (name, key)
            seen.add(key)
    wanted = {"exp_avg", "exp_avg_sq"} if "adam" in kind else {"momentum_buffer"}
    assert seen >= wanted | ({"dual"} if "dessi" in kind else set())
    for name, gamma in gammas.items():
        if name in index:
            now = optimizer.gamma(named[name])
            torch.testing.assert_close(now[torch.meshgrid(*index[name], indexing="ij")], gamma, rtol=1e-5, atol=1e-8)
            assert int((now != 0).sum()) == int((gamma != 0).sum())
    if gammas:
        assert any((g != 0).any() and (g == 0).any() for g in gammas.values()), "the comparison would show nothing"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, "vgg_flat") for kind in OPTIMIZERS),
        *(("dessilbi", n) for n in ("resnet20", "densenet", "mobilenet_v2")),
    ],
)
def test_the_next_step_moves_what_was_there_as_it_would_have(kind: str, name: str) -> None:
    net = double(net_of(name))
    model, optimizer = trained(net, kind)
    twin = copy.deepcopy(model)
    twins = OPTIMIZERS[kind](twin)
    twins.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    extra = everything(net, model, "", 2)
    index = index_of(net, model, extra)
    wide = widen(model, extra, net.inputs(2), optimizer)
    started = {path: p.detach().clone() for path, p in wide.named_parameters()}
    step(net, twin, twins, 9)
    step(net, wide, optimizer, 9)
    for (path, p), q in zip(wide.named_parameters(), twin.parameters(), strict=True):
        there = p[torch.meshgrid(*index[path], indexing="ij")] if path in index else p
        torch.testing.assert_close(there, q, rtol=0, atol=1e-9)
    # What reads new channels starts from zero, and leaves it at once.
    moved = {path: ((started[path] == 0) & (p != 0)).any() for path, p in wide.named_parameters() if path in index}
    assert any(moved.values())
    if "dessi" in kind:  # V too: with one more step it is that of groups that are larger
        for (_, p), (path, q) in zip(wide.named_parameters(), twin.named_parameters(), strict=True):
            if "dual" in optimizer.state[p]:
                dual = optimizer.state[p]["dual"]
                there = dual[torch.meshgrid(*index[path], indexing="ij")] if path in index else dual
                torch.testing.assert_close(there, twins.state[q]["dual"], rtol=0, atol=1e-9)


def test_running_statistics_go_on_as_they_would_have() -> None:
    net = FOREIGN["vgg_flat"]
    model = net.build()
    wide = widen(model, {"features.0": 2, "features.7": 3}, net.inputs(2))
    for network in (model, wide):
        network.train()
        network.classifier.eval()
        zoo.call(network, net.inputs(4))
    for i in (1, 5, 8):
        was, now = model.features[i], wide.features[i]
        torch.testing.assert_close(now.running_mean[: len(was.running_mean)], was.running_mean, rtol=0, atol=1e-6)
        torch.testing.assert_close(now.running_var[: len(was.running_var)], was.running_var, rtol=1e-5, atol=1e-6)
        assert now.num_batches_tracked == was.num_batches_tracked


def test_scaled_thresholds_go_along() -> None:
    # With magnitude scaling Γ = ε ⊙ Prox(V), ε the norms before the last step, one a filter.
    net = net_of("resnet20")
    model = net.build()
    optimizer = dessilbi(model, scaling=True, lam=0.01)
    for seed in range(4):
        step(net, model, optimizer, seed)
    gamma = optimizer.gamma(model.layer1[0].conv1.weight).clone()
    assert (gamma != 0).any()
    wide = widen(model, {"layer1.0.conv1": 3, "conv1": 2}, net.inputs(2), optimizer)
    now = optimizer.gamma(wide.layer1[0].conv1.weight)
    torch.testing.assert_close(now[: len(gamma), : gamma.shape[1]], gamma, rtol=1e-5, atol=1e-8)
    assert (now[len(gamma) :] == 0).all()
    assert (now[:, gamma.shape[1] :] == 0).all()
    step(net, wide, optimizer, 9)
    assert all(p.isfinite().all() for p in wide.parameters())


def test_groups_that_span_layers_are_joined_anew() -> None:
    net = net_of("resnet20")
    model = net.build()
    groups = param_groups(model, conv="channel", linear=None, example_inputs=net.inputs(2))
    optimizer = DessiLBI(groups, 0.05, nu=10.0, lam=0.02, momentum=0.9)
    for seed in range(3):
        step(net, model, optimizer, seed)
    wide = widen(model, {"conv1": 2}, net.inputs(2), optimizer)
    step(net, wide, optimizer, 9)
    stream = [wide.conv1, *(block.conv2 for block in wide.layer1)]
    supports = [optimizer.support(conv.weight) for conv in stream]
    assert all(len(support) == 18 and torch.equal(support, supports[0]) for support in supports)
    # One norm over the stream: with V of a single member above the threshold the channel is in the support of all.
    with torch.no_grad():
        for conv in stream:
            optimizer.state[conv.weight]["dual"].zero_()
        optimizer.state[wide.layer1[2].conv2.weight]["dual"][17].fill_(1.0)
    assert [optimizer.support(conv.weight).nonzero().flatten().tolist() for conv in stream] == [[17]] * 4


def test_what_is_off_stays_off() -> None:
    net = FOREIGN["tanh_gelu_chain"]  # where a filter of zeros has a gradient
    model = without_dropout(net.build())
    mask = torch.arange(8) % 2 == 0
    Selection({"conv1.weight": mask}).apply(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wide = widen(model, {"conv1": 4, "conv2": 1}, net.inputs(2), optimizer)
    weight = wide.conv1.weight
    before = weight.detach().clone()
    for seed in range(2):
        step(net, wide, optimizer, seed)
    assert (weight[:8][~mask] == 0).all()
    moved = (weight != before).flatten(1).any(1)
    assert moved.tolist() == [*mask.tolist(), True, True, True, True]


def test_modes_types_and_layout_go_along() -> None:
    model = net_of("resnet20").build().double().to(memory_format=torch.channels_last).train()
    model.bn1.eval()
    model.conv1.weight.requires_grad_(False)
    wide = widen(model, {"conv1": 2, "layer1.0.conv1": 1}, torch.randn(1, 3, 16, 16, dtype=torch.float64))
    assert {name: m.training for name, m in wide.named_modules()} == {
        name: m.training for name, m in model.named_modules()
    }
    assert all(m.training for name, m in model.named_modules() if name != "bn1")
    assert {p.dtype for p in wide.parameters()} == {torch.float64}
    assert wide.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert wide.layer1[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert [p.requires_grad for p in wide.parameters()] == [p.requires_grad for p in model.parameters()]


def test_shrinking_the_new_filters_away_gives_the_network_back() -> None:
    net = net_of("resnet20")
    model = net.build()
    wide = widen(model, {"layer1.0.conv1": 3, "layer3.2.conv1": 2}, net.inputs(2))
    masks = {path: torch.arange(n) < m for path, m, n in [("layer1.0.conv1", 16, 19), ("layer3.2.conv1", 64, 66)]}
    back = shrink(wide, zoo.selection_of(masks), net.inputs(2))
    assert unchanged(back, snapshot(model))


# -- filters for which the gradient is largest -------------------------------------------------------------------


def linear_chain(bias: bool = False) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(9, 4, bias=bias), nn.Linear(4, 6, bias=bias)).double()


DATA = torch.randn(40, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
LABELS = torch.randint(6, (40,), generator=torch.Generator().manual_seed(8))


def loss(model: nn.Module) -> torch.Tensor:
    return functional.cross_entropy(model(DATA), LABELS)


def height(model: nn.Module, fed: torch.Tensor) -> float:
    """The squared norm of the gradient of what new filters feed."""
    model.zero_grad()
    loss(model).backward()
    return float(fed.grad[:, 4:].square().sum())


@pytest.mark.parametrize("count", [1, 3])
def test_the_gradient_is_as_large_as_the_singular_values_allow(count: int) -> None:
    model = linear_chain()
    wide = widen(model, {"0": count}, DATA[:2], init="gradmax", loss=loss, generator=torch.Generator().manual_seed(0))
    # M = Σ δ xᵀ, the gradient of a layer straight from the input to the output; ‖M w‖ for k filters w at right angles
    # and of norm √2 is largest for the first right singular vectors.
    logits = (DATA @ model[0].weight.T @ model[1].weight.T).detach().numpy()
    softmax = np.exp(logits - logits.max(1, keepdims=True))
    softmax /= softmax.sum(1, keepdims=True)
    delta = (softmax - np.eye(6)[LABELS.numpy()]) / 40
    singular = np.linalg.svd(delta.T @ DATA.numpy(), compute_uv=False)
    largest = 2 * float((singular[:count] ** 2).sum())
    # Ten steps of orthogonal iteration come this near, with the singular values as far apart as they are here.
    assert 0.97 * largest < height(wide, wide[1].weight) <= largest * (1 + 1e-9)
    filters = wide[0].weight[4:].detach()
    torch.testing.assert_close(filters @ filters.T, 2 * torch.eye(count, dtype=torch.float64), rtol=0, atol=1e-5)
    assert difference(evaluate(model, DATA), evaluate(wide, DATA)) < 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_behind_a_relu_the_gradient_is_never_smaller_than_that_of_random_filters(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(9, 4), nn.ReLU(), nn.Linear(4, 6)).double()
    found = {}
    for init, options in (("zero", {}), ("gradmax", {"loss": loss})):
        generator = torch.Generator().manual_seed(seed)
        wide = widen(model, {"0": 2}, DATA[:2], init=init, generator=generator, **options)
        found[init] = height(wide, wide[2].weight)
    assert found["gradmax"] > found["zero"] > 0


def test_ascent_in_a_network_with_normalisation_leaves_everything_else_alone() -> None:
    net = net_of("resnet20")
    model = net.build().train()
    x, y = net.inputs(6), torch.arange(6)
    before = snapshot(model)

    def batch_loss(network: nn.Module) -> torch.Tensor:
        return functional.cross_entropy(network(x), y)

    def norm(wide: nn.Module) -> float:
        wide.zero_grad()
        batch_loss(wide).backward()
        return float(wide.layer2[0].conv2.weight.grad[:, 32:].norm())

    options = {"generator": torch.Generator().manual_seed(0)}
    drawn = widen(model, {"layer2.0.conv1": 3}, net.inputs(2), **options)
    options = {"generator": torch.Generator().manual_seed(0), "loss": batch_loss, "init": "gradmax"}
    wide = widen(model, {"layer2.0.conv1": 3}, net.inputs(2), **options)
    assert unchanged(model, before)
    assert all(p.grad is None and p.requires_grad for p in wide.parameters())
    for (name, a), b in zip(wide.state_dict().items(), drawn.state_dict().values(), strict=True):
        if name != "layer2.0.conv1.weight":
            assert torch.equal(a, b), name
    assert torch.equal(wide.layer2[0].conv1.weight[:32], model.layer2[0].conv1.weight)
    assert norm(wide) > norm(drawn)


# -- refusals ----------------------------------------------------------------------------------------------------


class Foreign(Optimizer):
    def __init__(self) -> None:
        super().__init__([nn.Parameter(torch.zeros(3))], {})


REFUSALS = {
    "no layer of that name": (ValueError, "did you mean 'features.4'", {"features.44": 2}, {}),
    "no layer at all": (ValueError, "without filters of its own", {"features.1": 2}, {}),
    "a result": (ValueError, "'classifier.5': its channels are outputs", {"classifier.5": 1}, {}),
    "nothing": (ValueError, "number of new filters by layer", {}, {}),
    "no mapping": (ValueError, "number of new filters by layer", ["features.0"], {}),
    "zero": (ValueError, r"extra\['features.0'\]=0: give a whole number of at least 1", {"features.0": 0}, {}),
    "fewer": (ValueError, "at least 1", {"features.0": -3}, {}),
    "half a filter": (TypeError, r"extra\['features.0'\]=1.5: give a whole number", {"features.0": 1.5}, {}),
    "true": (TypeError, "give a whole number", {"features.0": True}, {}),
    "one good and one bad": (ValueError, "without filters of its own", {"features.0": 2, "features.9": 2}, {}),
    "init": (
        ValueError,
        "init='ones': choose one of zero, random, gradmax, split",
        {"features.0": 2},
        {"init": "ones"},
    ),
    "gradmax without a loss": (ValueError, "give loss", {"features.0": 2}, {"init": "gradmax"}),
    "a loss without gradmax": (
        ValueError,
        "loss is not used",
        {"features.0": 2},
        {"loss": lambda model: model(X).sum()},
    ),
    "another optimizer": (ValueError, "not the model's", {"features.0": 2}, {"optimizer": Foreign()}),
    "no optimizer": (TypeError, "must be a torch.optim.Optimizer, got str", {"features.0": 2}, {"optimizer": "sgd"}),
}
X = FOREIGN["vgg_flat"].inputs(2)


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_say_what_to_do_and_change_nothing(case: str) -> None:
    error, words, extra, options = REFUSALS[case]
    net = FOREIGN["vgg_flat"]
    model, optimizer = trained(net, "sgd", 1)
    before, state = snapshot(model), copy.deepcopy(state_by_name(model, optimizer))
    params = [id(p) for p in optimizer.param_groups[0]["params"]]
    with pytest.raises(error, match=words):
        widen(model, extra, net.inputs(2), **{"optimizer": optimizer, **options})
    assert unchanged(model, before)
    assert model.training
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == params
    for name, was in state_by_name(model, optimizer).items():
        assert torch.equal(was["momentum_buffer"], state[name]["momentum_buffer"])


def test_amounts_in_steps() -> None:
    net = FOREIGN["resnext"]
    model = net.build()
    with pytest.raises(ValueError, match=r"extra\['blocks.0.conv2'\]=4: its channels come in steps of 3.*give 6"):
        widen(model, {"blocks.0.conv2": 4}, net.inputs(2))


def test_groups_written_out_element_by_element() -> None:
    net = FOREIGN["mlp"]
    model = net.build()
    weight = model.net[0].weight
    groups = [{"params": [weight], "group": Labels(torch.arange(weight.numel()).view(weight.shape) % 5)}]
    optimizer = DessiLBI([*groups, {"params": [p for p in model.parameters() if p is not weight]}], 0.1)
    with pytest.raises(ValueError, match=r"net\.0\.weight has groups written out element by element"):
        widen(model, {"net.0": 2}, net.inputs(2), optimizer)
    assert optimizer.param_groups[0]["params"][0] is weight
    # Where these stay as they are it may grow.
    widen(model, {"net.4": 2}, net.inputs(2), optimizer)


def test_an_operator_that_is_not_known_is_named() -> None:
    model = zoo.GRU.build()
    with pytest.raises(ValueError, match=r"'conv2': its channels flow into module 'gru' \(GRU\).*is not known here"):
        widen(model, {"conv2": 2}, zoo.GRU.inputs(2))
    assert widen(model, {"conv1": 2}, zoo.GRU.inputs(2)).conv1.out_channels == 8


def test_no_network_and_wrong_inputs() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        widen("vgg_flat", {"features.0": 1}, X)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="could not be run with example_inputs of shape"):
        widen(FOREIGN["vgg_flat"].build(), {"features.0": 1}, torch.zeros(1, 4, 8, 12))
