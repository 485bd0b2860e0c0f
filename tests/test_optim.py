"""DessiLBI and DessiAdamW as users of torch.optim expect them."""

import copy
import io
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dessilbi import DessiAdamW, DessiLBI, Labels, param_groups


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3, groups=2), nn.Flatten(), nn.Linear(128, 4)
    )


def batches(n: int, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, 1, 8, 8, generator=g), torch.randint(0, 4, (8,), generator=g)) for _ in range(n)]


def train(model, optimizer, data, scheduler=None):
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if scheduler:
            scheduler.step()
    return [p.detach().clone() for p in model.parameters()]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


MOMENTA = [
    {"momentum": m, "dampening": d, "nesterov": n, "weight_decay": w, "maximize": x}
    for m, d, n, w, x in itertools.product((0, 0.9), (0, 0.4), (False, True), (0, 0.01), (False, True))
    if not n or (m and not d)
]


@pytest.mark.parametrize("options", MOMENTA, ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items() if v))
def test_without_coupling_it_is_sgd_bit_for_bit(options):
    data = batches(10)
    ours, theirs = network(), network()
    a = train(ours, DessiLBI(param_groups(ours), 0.05, nu=math.inf, **options), data)
    b = train(theirs, torch.optim.SGD(theirs.parameters(), 0.05, **options), data)
    assert equal(a, b)


def test_kappa_scales_the_step_of_what_is_not_penalised():
    data = batches(5)
    ours, theirs = network(), network()
    groups = [{"params": list(ours.parameters()), "group": None}]
    a = train(ours, DessiLBI(groups, 0.05, kappa=2.0, momentum=0.9), data)
    b = train(theirs, torch.optim.SGD(theirs.parameters(), 0.1, momentum=0.9), data)
    assert equal(a, b)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_without_coupling_it_is_adamw_bit_for_bit(decay):
    data = batches(10)
    ours, theirs = network(), network()
    a = train(ours, DessiAdamW(param_groups(ours), 0.01, nu=math.inf, weight_decay=decay), data)
    b = train(theirs, torch.optim.AdamW(theirs.parameters(), 0.01, weight_decay=decay, fused=True), data)
    assert equal(a, b)
    third = network()
    c = train(third, DessiAdamW(param_groups(third), 0.01, nu=math.inf, weight_decay=decay, foreach=True), data)
    theirs = network()
    b = train(theirs, torch.optim.AdamW(theirs.parameters(), 0.01, weight_decay=decay), data)
    assert equal(b, c)


@pytest.mark.parametrize("make", [
    lambda ps: DessiLBI(ps, 0.1, nu=5.0, lam=0.01, momentum=0.9, weight_decay=1e-3),
    lambda ps: DessiLBI(ps, 0.1, nu=5.0, lam=0.01, momentum=0.9, scaling=True),
    lambda ps: DessiLBI(ps, 0.1, nu=5.0, lam=0.01),
    lambda ps: DessiAdamW(ps, 0.01, nu=5.0, lam=0.01, scaling=True),
], ids=["momentum", "scaling", "naive", "adamw"])  # fmt: skip
def test_resume_is_bit_for_bit(make):
    data = batches(20)
    whole = network()
    optimizer = make(param_groups(whole))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    expected = train(whole, optimizer, data, scheduler)

    first = network()
    optimizer = make(param_groups(first))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    train(first, optimizer, data[:10], scheduler)
    file = io.BytesIO()
    torch.save([first.state_dict(), optimizer.state_dict(), scheduler.state_dict()], file)
    train(first, optimizer, data[:3])  # what happens after saving must not reach into the file
    file.seek(0)
    weights, state, schedule = torch.load(file, weights_only=True)
    second = network()
    second.load_state_dict(weights)
    again = make(param_groups(second))
    resumed = torch.optim.lr_scheduler.CosineAnnealingLR(again, 20)
    again.load_state_dict(state)
    resumed.load_state_dict(schedule)
    assert equal(train(second, again, data[10:], resumed), expected)
    assert again.time == pytest.approx(
        sum(0.5 * again.defaults["lr"] * (1 + math.cos(math.pi * k / 20)) for k in range(20))
    )


def test_loading_state_does_not_share_memory_with_it():
    model = network()
    optimizer = DessiLBI(param_groups(model), 0.1, momentum=0.9, lam=0.0)
    train(model, optimizer, batches(2))
    state = optimizer.state_dict()
    other = DessiLBI(param_groups(network()), 0.1, momentum=0.9, lam=0.0)
    other.load_state_dict(state)
    p, q = (o.penalised()[0][0] for o in (optimizer, other))
    assert other.dual(q).data_ptr() != optimizer.dual(p).data_ptr()


def test_state_moves_across_dtypes_and_half_precision_keeps_float32_state():
    model = network()
    optimizer = DessiLBI(param_groups(model), 0.1, momentum=0.9, lam=0.0, nu=5.0)
    train(model, optimizer, batches(3))
    half = network().bfloat16()
    low = DessiLBI(param_groups(half), 0.1, momentum=0.9, lam=0.0, nu=5.0)
    low.load_state_dict(optimizer.state_dict())
    for (p, _), (q, _) in zip(optimizer.penalised(), low.penalised(), strict=True):
        assert low.dual(q).dtype == torch.float32
        assert torch.equal(low.dual(q), optimizer.dual(p))
        assert low.state[q]["momentum_buffer"].dtype == torch.float32
    double = DessiLBI(param_groups(network().double()), 0.1, momentum=0.9, lam=0.0, nu=5.0)
    double.load_state_dict(low.state_dict())
    assert double.dual(double.penalised()[0][0]).dtype == torch.float64


def test_bfloat16_follows_float32():
    """Rounding W to 8 bits after each step is all that differs: V, in float32, stays close."""
    w, steps = torch.randn(8, 4, 3, 3).bfloat16(), 30
    p, q = nn.Parameter(w.clone()), nn.Parameter(w.float())
    options = {"lr": 0.01, "nu": 3.0, "lam": 0.02, "momentum": 0.9}
    low, full = DessiLBI([p], **options), DessiLBI([q], **options)
    for k in range(steps):
        g = torch.randn(w.shape, generator=torch.Generator().manual_seed(k)).bfloat16()
        p.grad, q.grad = g, g.float()
        low.step()
        full.step()
    assert p.dtype == torch.bfloat16
    assert (low.dual(p) - full.dual(q)).norm() < 0.02 * full.dual(q).norm()
    assert low.support(p).tolist() == full.support(q).tolist()


def test_orthogonal_design_enters_in_order_of_size_at_the_predicted_times():
    """Loss ½‖w − b‖², W at its minimum b: V_g = t·b_g/ν until ‖V_g‖ = λ, so group g enters at t = λν/‖b_g‖."""
    sizes = torch.tensor([2.0, 1.0, 0.5, 4.0, 0.25])
    direction = F.normalize(torch.randn(5, 3, 3, 3).flatten(1)).view(5, 3, 3, 3)
    b = sizes.view(-1, 1, 1, 1) * direction
    lr, nu, lam = 0.01, 50.0, 0.05
    p = nn.Parameter(b.clone())
    optimizer = DessiLBI([p], lr, nu=nu, lam=lam)
    entry = torch.full((5,), math.inf)
    for k in range(1, 1600):
        p.grad = p.detach() - b
        optimizer.step()
        p.data.copy_(b)  # the fast variable at its optimum: the slow one is then exactly an integrator
        entry[optimizer.support(p) & entry.isinf()] = k * lr
    predicted = lam * nu / sizes
    assert entry.argsort().tolist() == (-sizes).argsort().tolist()
    torch.testing.assert_close(entry, predicted, rtol=0, atol=1.5 * lr)


class NoSync(TorchDispatchMode):
    """Fails on whatever reads a tensor's value on the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tensors", [False, True], ids=["floats", "tensors"])
@pytest.mark.parametrize("cls", [DessiLBI, DessiAdamW])
@pytest.mark.parametrize("scaling", [False, True])
def test_a_step_waits_for_nothing(cls, scaling, tensors):
    model = network()
    first, rest = model[0].weight, [p for p in model.parameters() if p is not model[0].weight]
    groups = [{"params": [first], "group": Labels(torch.arange(54).view(6, 1, 3, 3) // 2)}, {"params": rest}]
    lr, lam = (torch.tensor(0.1), torch.tensor(0.02)) if tensors else (0.1, 0.02)
    optimizer = cls(groups, lr, lam=lam, scaling=scaling, **({"momentum": 0.9} if cls is DessiLBI else {}))
    for x, y in batches(3):
        F.cross_entropy(model(x), y).backward()
        with NoSync():
            optimizer.step()


def test_tensor_lr_and_lam_are_read_anew_every_step():
    runs = []
    for make in (float, lambda x: torch.tensor(x, dtype=torch.float64)):
        model = network()
        optimizer = DessiLBI(param_groups(model), make(0.1), lam=make(0.02), momentum=0.9, nu=5.0)
        for k, batch in enumerate(batches(6)):
            if k == 3:
                optimizer.lam = 0.05
                for group in optimizer.param_groups:
                    group["lr"] = group["lr"].fill_(0.03) if isinstance(group["lr"], torch.Tensor) else 0.03
            train(model, optimizer, [batch])
        runs.append([p.detach() for p in model.parameters()])
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_lam_of_one_entry_a_parameter():
    p, q = (nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    optimizer = DessiLBI([p, q], 1.0, lam=torch.tensor([0.0, 10.0]), nu=1.0)
    p.grad, q.grad = torch.zeros(4, 4), torch.zeros(4, 4)
    optimizer.step()
    assert optimizer.support(p).all()
    assert not optimizer.support(q).any()


def test_several_groups_with_their_own_settings():
    model = network()
    conv, linear, rest = param_groups(model)
    groups = [{**conv, "lam": 0.0, "nu": 10.0, "kappa": 2.0}, {**linear, "lam": 1e9}, rest]
    optimizer = DessiLBI(groups, 0.05, momentum=0.9)
    train(model, optimizer, batches(3))
    assert optimizer.support(model[0].weight).all()
    assert not optimizer.support(model[5].weight).any()
    assert optimizer.lam == [0.0, 1e9]


def test_gradient_accumulation_and_closure():
    data = batches(4)
    a, b = network(), network()
    one, two = (DessiLBI(param_groups(m), 0.1, momentum=0.9) for m in (a, b))
    for x, y in data:
        F.cross_entropy(a(x), y).backward()
    one.step()

    def closure():
        two.zero_grad()
        loss = sum(F.cross_entropy(b(x), y) for x, y in data)
        loss.backward()
        return loss

    assert two.step(closure).detach() > 0
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_amp_with_grad_scaler_skips_overflow_and_unscales():
    model = network()
    optimizer = DessiLBI(param_groups(model), 0.1, momentum=0.9, nu=5.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    (x, y), before = batches(1)[0], [p.detach().clone() for p in model.parameters()]
    scaler.scale(F.cross_entropy(model(x), y) * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert equal(before, [p.detach() for p in model.parameters()])
    assert not optimizer.state
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    assert not equal(before, [p.detach() for p in model.parameters()])
    assert all(p.isfinite().all() for p in model.parameters())


def test_add_param_group_late():
    model = network()
    groups = param_groups(model)
    optimizer = DessiLBI(groups[:1], 0.1, momentum=0.9, lam=0.01)
    train(model, optimizer, batches(2))
    optimizer.add_param_group(groups[1])
    train(model, optimizer, batches(2))
    assert optimizer.dual(model[5].weight).any()


def test_gamma_dual_and_support_before_the_first_step():
    model = network()
    optimizer = DessiLBI(param_groups(model), 0.1)
    w = model[0].weight
    assert torch.equal(optimizer.gamma(w), torch.zeros_like(w))
    assert optimizer.support(w).shape == (6,)
    assert not optimizer.state


def test_state_is_momentum_and_one_tensor():
    model = network()
    optimizer = DessiLBI(param_groups(model), 0.1, momentum=0.9)
    train(model, optimizer, batches(1))
    assert {k for p, _ in optimizer.penalised() for k in optimizer.state[p]} == {"dual", "momentum_buffer"}
    assert set(optimizer.state[model[0].bias]) == {"momentum_buffer"}


def test_copies_and_pickles():
    model = network()
    optimizer = DessiLBI(param_groups(model), 0.1, momentum=0.9)
    train(model, optimizer, batches(2))
    m, o = copy.deepcopy((model, optimizer))
    assert equal(train(m, o, batches(3)), train(model, optimizer, batches(3)))
    assert isinstance(pickle.loads(pickle.dumps(optimizer)).param_groups[0]["group"], str)


def test_empty_groups_and_unused_parameters():
    p, unused = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3, 3))
    optimizer = DessiLBI([{"params": []}, {"params": [p, unused]}], 0.1)
    p.grad = torch.ones(3, 3)
    optimizer.step()
    assert torch.equal(unused, torch.ones(3, 3))
    assert optimizer.support(unused).shape == (3, 3)
    empty = nn.Parameter(torch.ones(0, 4))
    empty.grad = torch.ones(0, 4)
    optimizer.add_param_group({"params": [empty], "group": "neuron"})
    optimizer.step()


@pytest.mark.compile
def test_step_under_torch_compile():
    data = batches(6)
    runs = []
    for wrap in (lambda step: step, torch.compile):
        model = network()
        optimizer = DessiLBI(param_groups(model), torch.tensor(0.1), lam=0.01, momentum=0.9, nu=5.0)
        step = wrap(optimizer.step)
        for x, y in data:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            step()
        runs.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*runs, rtol=1e-4, atol=1e-5)


# -- param_groups ------------------------------------------------------------------------------------------------


def test_param_groups_sorts_by_role():
    model = nn.ModuleDict({
        "conv": nn.Conv1d(2, 4, 3), "grouped": nn.Conv2d(4, 4, 3, groups=2),
        "up": nn.ConvTranspose2d(4, 6, 2, groups=2), "fc": nn.Linear(4, 3), "norm": nn.BatchNorm1d(4),
        "attention": nn.MultiheadAttention(4, 2), "words": nn.Embedding(5, 4),
    })  # fmt: skip
    groups = param_groups(model)
    found = {name: g["group"] for g in groups for name, _ in g["params"]}
    assert found["conv.weight"] == found["grouped.weight"] == "filter"
    assert found["up.weight"].count((4, 3, 2, 2)) == 6
    assert found["fc.weight"] == found["attention.in_proj_weight"] == found["attention.out_proj.weight"] == "weight"
    assert found["norm.weight"] is found["conv.bias"] is found["words.weight"] is None
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    inputs = {name: g["group"] for g in param_groups(model, conv="input") for name, _ in g["params"]}
    assert inputs["grouped.weight"].count((4, 2, 3, 3)) == 4
    assert inputs["up.weight"].count((4, 3, 2, 2)) == 4
    DessiLBI(groups, 0.1)


def test_param_groups_exclude_and_tied_weights():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert [len(g["params"]) for g in param_groups(model)] == [1, 2]
    assert param_groups(model, exclude="0")[0]["group"] is None
    assert param_groups(model, exclude=[model[0].weight])[0]["group"] is None
    with pytest.raises(ValueError, match="'head'"):
        param_groups(model, exclude=["head"])
    with pytest.raises(ValueError, match="lazy"):
        param_groups(nn.LazyLinear(3))


# -- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, "lr .*-1.0"), ({"lr": math.nan}, "lr .*nan"), ({"lr": math.inf}, "lr .*inf"),
        ({"kappa": 0.0}, "kappa .*0.0"), ({"kappa": math.nan}, "kappa"),
        ({"nu": 0.0}, "nu .*0.0"), ({"nu": -3.0}, "nu .*-3.0"),
        ({"nu": math.nan}, "nu"), ({"lam": -0.1}, "lam .*-0.1"), ({"lam": math.nan}, "lam"),
        ({"momentum": 1.0}, "momentum .*1.0"), ({"momentum": -0.1}, "momentum .*-0.1"),
        ({"weight_decay": -1e-4}, "weight_decay .*-0.0001"), ({"beta_min": 0.0}, "beta_min .*0.0"),
        ({"nesterov": True}, "nesterov"), ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov"),
        ({"fused": True, "foreach": True}, "fused"),
    ],
)  # fmt: skip
def test_bad_options_name_argument_and_value(options, words):
    with pytest.raises(ValueError, match=words):
        DessiLBI([nn.Parameter(torch.ones(2, 2))], **{"lr": 0.1, **options})
    with pytest.raises(ValueError, match=words):
        DessiLBI([{"params": [nn.Parameter(torch.ones(2, 2))], **options}], lr=0.1)


def test_bad_types():
    with pytest.raises(TypeError, match="lr .*'fast'"):
        DessiLBI([nn.Parameter(torch.ones(2, 2))], "fast")
    with pytest.raises(ValueError, match="betas .*1.0"):
        DessiAdamW([nn.Parameter(torch.ones(2, 2))], betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="complex"):
        DessiLBI([nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))], 0.1)
    with pytest.raises(ValueError, match="2 entries for 1"):
        DessiLBI([nn.Parameter(torch.ones(2, 2))], 0.1, lam=torch.zeros(2))
    with pytest.raises(ValueError, match="empty"):
        DessiLBI([], 0.1)


def test_bad_groups_and_parameters():
    bias, weight = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"params\[0\].*filter.*\(4,\)"):
        DessiLBI([{"params": [bias], "group": "filter"}], 0.1)
    with pytest.raises(ValueError, match="bias.*neuron"):
        DessiLBI([{"params": [("bias", bias)], "group": "neuron"}], 0.1)
    with pytest.raises(ValueError, match="'channels'"):
        DessiLBI([{"params": [weight], "group": "channels"}], 0.1)
    with pytest.raises(ValueError, match=r"\(4, 4\).*twice"):
        DessiLBI([{"params": [weight]}, {"params": [weight]}], 0.1)
    with pytest.raises(ValueError, match="twice"):
        DessiLBI([weight, weight], 0.1)
    with pytest.raises(ValueError, match="not penalised"):
        DessiLBI([{"params": [bias]}], 0.1).gamma(bias)
    with pytest.raises(ValueError, match="not one of"):
        DessiLBI([weight], 0.1).gamma(bias)


def test_state_of_other_groups_is_refused():
    w = nn.Parameter(torch.ones(4, 4))
    saved = DessiLBI([{"params": [w], "group": "neuron"}], 0.1).state_dict()
    with pytest.raises(ValueError, match="group 0.*'neuron'.*'input'"):
        DessiLBI([{"params": [w], "group": "input"}], 0.1).load_state_dict(saved)
    label = [Labels(torch.arange(16).view(4, 4) // k) for k in (2, 4)]
    saved = DessiLBI([{"params": [w], "group": label[0]}], 0.1).state_dict()
    DessiLBI([{"params": [w], "group": label[0]}], 0.1).load_state_dict(saved)
    with pytest.raises(ValueError, match="group 0"):
        DessiLBI([{"params": [w], "group": label[1]}], 0.1).load_state_dict(saved)


def test_sparse_gradients_are_refused():
    words = nn.Embedding(4, 3, sparse=True)
    words(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse"):
        DessiLBI(words.parameters(), 0.1).step()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_gradients(bad):
    p = nn.Parameter(torch.ones(3, 3))
    optimizer = DessiLBI([("fc.weight", p)], 0.1, error_if_nonfinite=True)
    p.grad = torch.full((3, 3), 3e38)  # large, but finite: not an error
    optimizer.step()
    before, v = p.detach().clone(), optimizer.dual(p).clone()
    p.grad = torch.ones(3, 3)
    p.grad[1, 1] = bad
    with pytest.raises(ValueError, match="fc.weight"):
        optimizer.step()
    assert torch.equal(p, before)
    assert torch.equal(optimizer.dual(p), v)
    q = nn.Parameter(torch.ones(3, 3))
    plain = DessiLBI([q], 0.1)
    q.grad = p.grad.clone()
    plain.step()  # as torch does
    assert not q.isfinite().all()
    assert np.isfinite(plain.dual(q).numpy()).all()  # V integrates W before the step
