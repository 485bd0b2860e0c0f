"""Selections: masks by hand and from an optimizer, for a moment and for good, through a file."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_post_hooks

from dessilbi import DessiAdamW, DessiLBI, Labels, Selection, param_groups
from dessilbi.files import save_arrays
from dessilbi.models import create

T, N = True, False


def trained(model: nn.Module, keep: dict[str, torch.Tensor], **groups: str | None) -> DessiLBI:
    """An optimizer whose support is `keep` for the tensors that are named, and nothing for the others."""
    optimizer = DessiLBI(param_groups(model, **groups), lr=0.1, lam=0.5)  # type: ignore[arg-type]
    for name, p in model.named_parameters():
        if name in keep:
            mask = keep[name].to(p.dtype)
            dual = mask.view(-1, *[1] * (p.ndim - 1)) if mask.ndim == 1 else mask
            optimizer.state[p]["dual"] = dual.expand_as(p).clone()
    return optimizer


# -- for a moment ------------------------------------------------------------------------------------------------


def test_a_masked_filter_is_absent_with_its_bias_and_normalisation() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3))
    nn.init.ones_(model[1].bias)
    nn.init.ones_(model[0].bias)
    nn.init.ones_(model[3].bias)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    addresses = [p.data_ptr() for p in model.parameters()]
    kept, last = torch.tensor([True, False, True]), torch.tensor([False, True])
    optimizer = trained(model, {"0.weight": kept, "3.weight": last})
    x = torch.randn(4, 1, 8, 8)
    model.eval()
    with Selection.of(model, optimizer).applied(model):
        hidden = model[1](model[0](x))
        assert (hidden[:, 1] == 0).all()
        assert (hidden[:, [0, 2]] != 0).any()
        assert torch.equal(model[0].weight[0], before["0.weight"][0])
        assert model[0].bias.tolist() == [1, 0, 1]
        assert model[1].weight.tolist() == [1, 0, 1]
        assert model[1].bias.tolist() == [1, 0, 1]
        assert model[3].bias.tolist() == [0, 1]
        assert (model(x)[:, 0] == 0).all()
        assert [p.data_ptr() for p in model.parameters()] == addresses
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_weights_are_masked_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    keep = torch.tensor([[True, False, True], [False, False, False]])
    optimizer = trained(model, {"0.weight": keep})
    bias = model[0].bias.clone()
    with Selection.of(model, optimizer).applied(model):
        assert torch.equal(model[0].weight != 0, keep)
        assert torch.equal(model[0].bias, bias)
        assert model[1].weight.tolist() == [1, 1]


def test_a_layer_that_is_out_is_zero_altogether() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3))
    selection = Selection.of(model, trained(model, {}, conv="layer"))
    assert selection.level == "layer"
    model.eval()
    nn.init.ones_(model[1].bias)
    with selection.applied(model):
        assert (model(torch.randn(2, 1, 5, 5)) == 0).all()


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_and_grouped_convolutions(groups: int) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=groups), nn.BatchNorm2d(6))
    optimizer = DessiLBI(param_groups(model), lr=0.1, lam=0.5)
    weight = model[0].weight
    kept = torch.tensor([1.0, 0, 1, 0, 0, 1])
    dual = kept.view(groups, 1, 6 // groups, 1, 1).expand(groups, 4 // groups, 6 // groups, 3, 3).reshape_as(weight)
    optimizer.state[weight]["dual"] = dual.clone()
    selection = Selection.of(model, optimizer)
    assert selection["0.weight"].tolist() == kept.bool().tolist()
    model.eval()
    nn.init.ones_(model[1].bias)
    with selection.applied(model):
        out = model(torch.randn(2, 4, 5, 5))
        assert [(out[:, i] != 0).any().item() for i in range(6)] == kept.bool().tolist()


def test_groups_that_are_not_filters_become_elementwise() -> None:
    """Columns, a partition of the user's own, and rows of a transposed convolution, which are its inputs."""
    columns, own, rows = nn.Linear(3, 2), nn.Linear(2, 2), nn.ConvTranspose1d(2, 2, 1)
    model = nn.Sequential(columns, own, rows)
    optimizer = DessiLBI(
        [
            {"params": [columns.weight], "group": "input"},
            {"params": [own.weight], "group": Labels(torch.tensor([[0, 1], [1, 1]]))},
            {"params": [rows.weight], "group": "filter"},
        ],
        lr=0.1,
        lam=0.5,
    )
    optimizer.state[columns.weight]["dual"] = torch.tensor([[1.0, 0, 0], [0, 0, 1]])
    optimizer.state[own.weight]["dual"] = torch.tensor([[0.0, 0], [0, 1]])
    optimizer.state[rows.weight]["dual"] = torch.tensor([[0.0, 1], [0, 0]]).view(2, 2, 1)
    selection = Selection.of(model, optimizer)
    assert selection["0.weight"].tolist() == [[T, N, T], [T, N, T]]
    assert selection["1.weight"].tolist() == [[N, T], [T, T]]
    assert selection["2.weight"].flatten(1).tolist() == [[T, T], [N, N]]
    assert selection.level == "weight"


@pytest.mark.parametrize(("name", "norms"), [("resnet20", 19), ("vgg16", 13), ("resnet18", 20), ("lenet5", 0)])
def test_the_normalisations_of_the_networks_are_found(name: str, norms: int) -> None:
    model = create(name)
    optimizer = DessiLBI(param_groups(model), lr=0.1)
    with Selection.of(model, optimizer).applied(model):
        off = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d) and not m.weight.any() and not m.bias.any()]
        assert len(off) == norms == len([m for m in model.modules() if isinstance(m, nn.BatchNorm2d)])


def test_restored_after_an_error() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3))
    model[0].weight.data[0, 0, 0, 0] = torch.nan
    before = model[0].weight.detach().clone()
    selection = Selection({"0.weight": torch.zeros(3, dtype=torch.bool)})
    with pytest.raises(RuntimeError, match="inside"), selection.applied(model):
        raise RuntimeError("inside" if not model[0].weight.any() else "not masked")
    assert torch.equal(model[0].weight.view(torch.int32), before.view(torch.int32))


def test_names_through_wrappers() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    selection = Selection({"0.weight": torch.tensor([T, N])})
    for wrapped in (torch.compile(model), nn.DataParallel(model)):
        assert selection.masks(wrapped).keys() == {"0.weight", "0.bias"}
        with selection.applied(wrapped):
            assert not model[0].weight[1].any()


# -- by hand -----------------------------------------------------------------------------------------------------


def test_what_a_selection_says() -> None:
    mixed = Selection({"a": torch.tensor([T, N, N, N]), "b": torch.tensor([[T, T, N], [T, T, T]])})
    assert mixed.keep == 0.6  # 6 of 10
    assert mixed.per_layer() == {"a": 0.25, "b": 5 / 6}
    assert (list(mixed), len(mixed), "b" in mixed, mixed.level, mixed.source) == (["a", "b"], 2, True, "filter", {})
    assert Selection({"b": mixed["b"]}).level == "weight"
    assert Selection({"a": torch.tensor(T), "b": torch.tensor([N])}).level == "layer"
    assert Selection({"a": torch.tensor([T, N])}, level="layer").level == "layer"
    assert Selection({}).keep == 1
    assert repr(mixed) == "Selection(level='filter', 2 tensors, keep=0.6)"
    assert mixed != Selection(mixed)


def test_masks_of_one_entry_of_vectors_and_of_tensors_without_a_module() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model.register_parameter("table", nn.Parameter(torch.ones(3, 2)))
    model.register_parameter("gain", nn.Parameter(torch.ones(())))
    masks = Selection({
        "0.weight": torch.tensor([N]), "2.bias": torch.tensor([T, N]), "table": torch.tensor([T, N, N]),
        "gain": torch.tensor([N]),
    }).masks(model)  # fmt: skip
    assert {name: mask.tolist() for name, mask in masks.items()} == {
        "0.weight": [[N, N, N], [N, N, N]],
        "0.bias": [N, N],
        "1.weight": [N, N],
        "1.bias": [N, N],
        "2.bias": [T, N],
        "table": [[T, T], [N, N], [N, N]],
        "gain": N,
    }


def test_decisions_about_one_parameter_are_joined() -> None:
    """A bias masked by its filter and by itself; a tensor that two modules share."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3, bias=False))
    model[1].weight = model[0].weight
    masks = Selection({
        "0.weight": torch.tensor([T, T, N]), "0.bias": torch.tensor([T, N, T]), "1.weight": torch.tensor([N, T, T])
    }).masks(model)  # fmt: skip
    assert masks.keys() == {"0.weight", "0.bias"}
    assert masks["0.weight"].tolist() == [[N, N], [T, T], [N, N]]
    assert masks["0.bias"].tolist() == [N, N, N]


def test_bad_selections() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3))
    with pytest.raises(ValueError, match=r"'1\.wait', which is no parameter of the model; it has 0\.weight, 0\.bias"):
        Selection({"1.wait": torch.tensor([T])}).masks(model)
    with pytest.raises(ValueError, match=r"0\.weight has shape \(2,\), expected is \(3, 2, 1, 1\) or \(3,\)"):
        Selection({"0.weight": torch.tensor([T, N])}).apply(model)
    with pytest.raises(ValueError, match=r"1\.weight has shape \(2,\), expected is \(3,\)$"):
        Selection({"1.weight": torch.tensor([T, N])}).applied(model).__enter__()
    with pytest.raises(ValueError, match=r"\(2, 2\), expected is"):
        Selection({"0.weight": torch.ones(2, 2) > 0}).masks(model)
    with pytest.raises(TypeError, match=r"mask of a must be a bool tensor, got torch.float32: write `mask != 0`"):
        Selection({"a": torch.ones(3)})
    with pytest.raises(TypeError, match="list"):
        Selection({"a": [True]})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="named"):
        Selection({3: torch.tensor([T])})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="level must be one of weight, filter, layer or None, got 'row'"):
        Selection({}, level="row")
    with pytest.raises(TypeError, match="source"):
        Selection({}, source={"at": object()})
    with pytest.raises(ValueError, match="not a parameter of the model"):
        Selection.of(nn.Linear(2, 2), DessiLBI(nn.Linear(2, 2).parameters(), 0.1))


# -- for good ----------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, 0.01),
    "adamw fused": lambda params: torch.optim.AdamW(params, 0.01, fused=True),
    "dessilbi": lambda params: DessiLBI(params, 0.1, nu=5.0, lam=0.02, momentum=0.9),
    "dessiadamw": lambda params: DessiAdamW(params, 0.01, lam=0.02),
}


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))


SELECTION = Selection({"0.weight": torch.tensor([T, N, T, N]), "4.weight": torch.arange(720).view(5, 144) % 3 > 0})


def steps(model: nn.Module, optimizers: list[torch.optim.Optimizer], count: int = 1, after=lambda: None) -> None:
    torch.manual_seed(2)
    for _ in range(count):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x, y = torch.randn(8, 1, 8, 8), torch.randint(0, 5, (8,))
        F.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
        after()


def zero_by_hand(model: nn.Sequential) -> None:
    with torch.no_grad():
        for p in (model[0].weight, model[0].bias, model[1].weight, model[1].bias):
            p[[1, 3]] = 0
        model[4].weight.view(-1)[::3] = 0


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("order", ["optimizer first", "selection first"])
def test_what_is_out_stays_zero_whatever_the_momentum(kind: str, order: str) -> None:
    """Momentum from before the selection goes on pushing; all other weights move as in a loop that zeroes by hand."""
    model, reference = network(), network()
    by_hand = OPTIMIZERS[kind](reference.parameters())
    addresses = [(id(p), p.data_ptr()) for p in model.parameters()]
    if order == "optimizer first":
        optimizer = OPTIMIZERS[kind](model.parameters())
        steps(model, [optimizer], 3)
        steps(reference, [by_hand], 3)
        SELECTION.apply(model)
    else:
        SELECTION.apply(model)
        optimizer = OPTIMIZERS[kind](model.parameters())
    zero_by_hand(reference)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)
    seen = []
    steps(model, [optimizer], 5, lambda: seen.append([bool(p[[1, 3]].any()) for p in list(model.parameters())[:4]]))
    steps(reference, [by_hand], 5, lambda: zero_by_hand(reference))
    assert seen == 5 * [4 * [False]]
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    moving = [v for key, v in optimizer.state[model[4].weight].items() if key in ("momentum_buffer", "exp_avg")]
    assert moving[0].view(-1)[::3].any()
    assert [(id(p), p.data_ptr()) for p in model.parameters()] == addresses


def test_several_optimizers_and_groups_added_later() -> None:
    model = network()
    first, second = torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.Adam(model[4].parameters(), 0.1)
    other = nn.Linear(2, 2)
    apart = torch.optim.SGD(other.parameters(), 0.1)
    handle = SELECTION.apply(model)
    steps(model, [first, second], 2)
    first.add_param_group({"params": list(model[1].parameters())})
    steps(model, [first, second], 2)
    assert {name for name, p in model.named_parameters() if (p == 0).any()} == SELECTION.masks(model).keys()
    assert (model[1].bias == 0).tolist() == [N, T, N, T]
    before = other.weight.detach().clone()
    other(torch.ones(1, 2)).sum().backward()
    apart.step()
    torch.testing.assert_close(other.weight, before - 0.1)
    handle.remove()


def test_remove_ends_it_and_so_does_the_with() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    steps(model, [optimizer])
    handle = SELECTION.apply(model)
    steps(model, [optimizer])
    assert not model[4].weight.view(-1)[::3].any()
    handle.remove()
    steps(model, [optimizer])
    assert model[4].weight.view(-1)[::3].all()
    with SELECTION.apply(model):
        steps(model, [optimizer])
        assert not model[4].weight.view(-1)[::3].any()
    assert not model[4].weight.view(-1)[::3].any()  # not restored: that is what `applied` is for
    steps(model, [optimizer])
    assert model[4].weight.view(-1)[::3].all()


def test_two_selections_compose() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    steps(model, [optimizer])
    one = SELECTION.apply(model)
    other = Selection({"0.weight": torch.tensor([N, T, T, T])}).apply(model)
    steps(model, [optimizer], 2)
    assert (model[0].bias == 0).tolist() == [T, T, N, T]
    one.remove()
    steps(model, [optimizer], 2)
    assert (model[0].bias == 0).tolist() == [T, N, N, N]
    other.remove()


def test_a_model_that_is_dropped_is_not_kept_alive() -> None:
    gc.collect()  # the models of other tests
    before = len(_global_optimizer_post_hooks)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    handle = SELECTION.apply(model)
    steps(model, [optimizer])
    weight = weakref.ref(model[4].weight)
    assert len(_global_optimizer_post_hooks) == before + 1
    del model, optimizer
    gc.collect()
    assert weight() is None
    assert len(_global_optimizer_post_hooks) == before
    handle.remove()


def test_a_model_moved_after_apply() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with SELECTION.apply(model):
        steps(model, [optimizer])
        model.to(torch.float64)
        optimizer.state.clear()
        model[4].weight.grad = torch.ones_like(model[4].weight)
        optimizer.step()
        assert not model[4].weight.view(-1)[::3].any()


def test_a_skipped_step_of_the_scaler_and_a_closure() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with SELECTION.apply(model):
        for k in range(3):
            loss = model(torch.randn(4, 1, 8, 8)).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss * (float("inf") if k == 1 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            assert not model[4].weight.view(-1)[::3].any()

        def closure():
            optimizer.zero_grad()
            loss = model(torch.randn(4, 1, 8, 8)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        assert not model[4].weight.view(-1)[::3].any()


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    model = network().cuda()
    reference = copy.deepcopy(model)
    x, y = torch.randn(8, 1, 8, 8, device="cuda"), torch.randint(0, 5, (8,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    by_hand = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)

    def step(model, optimizer):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    handle = SELECTION.apply(model)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(model, optimizer)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        step(model, optimizer)
    for _ in range(4):
        graph.replay()
    zero_by_hand(reference)
    for _ in range(7):
        step(reference, by_hand)
        zero_by_hand(reference)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert not model[4].weight.view(-1)[::3].any()
    handle.remove()


@pytest.mark.gpu
def test_a_step_does_not_wait_for_the_device() -> None:
    model = network().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with SELECTION.apply(model):
        for k in range(3):
            model(torch.randn(8, 1, 8, 8, device="cuda")).sum().backward()
            torch.cuda.set_sync_debug_mode("error" if k else "default")
            try:
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")


# -- files -------------------------------------------------------------------------------------------------------


def test_round_trip(tmp_path) -> None:
    masks = {
        "a": torch.arange(13) % 3 == 0, "b": torch.rand(3, 5, 7) > 0.5, "c": torch.tensor(N), "d": torch.ones(0) > 0,
        "e": torch.tensor([T]),
    }  # fmt: skip
    selection = Selection(masks, level="filter", source={"at": 3, "time": 0.5})
    selection.save(tmp_path / "s")
    loaded = Selection.load(tmp_path / "s")
    assert list(loaded) == list(masks)
    assert all(torch.equal(loaded[name], mask) for name, mask in masks.items())
    assert (loaded.level, loaded.source) == ("filter", {"at": 3, "time": 0.5})
    big = Selection({"w": torch.rand(1000, 1000) > 0.9})
    big.save(tmp_path / "s")
    assert (tmp_path / "s").stat().st_size < 1_000_000 / 8 + 1000


def test_bad_files_say_so_in_one_line(tmp_path) -> None:
    file = tmp_path / "a.sel"
    SELECTION.save(file)
    whole = file.read_bytes()
    tensors = [{"name": "a", "shape": [3, 3]}]
    header = {"level": "weight", "source": {}, "tensors": tensors}
    packed = {"0": torch.zeros(2, dtype=torch.uint8).numpy()}
    damaged = [
        ({}, header),
        ({"0": packed["0"][:1]}, header),
        ({"0": packed["0"].astype("int64")}, header),
        (packed, {**header, "level": "rows"}),
        (packed, {**header, "tensors": [{"name": "a", "shape": [-3, -3]}]}),
        (packed, {**header, "tensors": [{"name": 3, "shape": [3, 3]}]}),
        ({**packed, "1": packed["0"]}, {**header, "tensors": tensors * 2}),
        (packed, {"level": "weight"}),
        (packed, {**header, "tensors": 7}),
    ]
    for arrays, described in damaged:
        save_arrays(file, "selection", 1, arrays, described)
        with pytest.raises(ValueError, match=r"a\.sel: damaged selection file") as error:
            Selection.load(file)
        assert "\n" not in str(error.value)
    cases = {
        "truncated": (whole[:-8], "truncated"),
        "empty": (b"", "truncated"),
        "newer": (whole.replace(b'\\"version\\": 1', b'\\"version\\": 9'), "9 is newer"),
        "foreign": (whole.replace(b'\\"kind\\": \\"selection\\"', b'\\"kind\\": \\"sElection\\"'), "not a dessilbi"),
    }
    for data, message in cases.values():
        assert data != whole
        file.write_bytes(data)
        with pytest.raises(ValueError, match=f"a.sel.*{message}") as error:
            Selection.load(file)
        assert "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError):
        Selection.load(tmp_path / "nowhere")
