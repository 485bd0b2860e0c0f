"""Groups that span tensors, against the float64 oracle on one long tensor that holds them all."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dessilbi import DessiAdamW, DessiLBI, Path, Slices, TargetThreshold, iteration, sharding, transposed_filters
from dessilbi.coupling import channels, joint_norms, tally
from dessilbi.groups import Labels, partition
from tests.oracles import iteration as oracle
from tests.toy import VARIANTS, gradient, start

STEPS = 50
COUPLING = {"lr": 0.05, "kappa": 1.5, "nu": 2.0, "lam": 0.813}
# λ with and without scaling, and what it becomes under way: so that some groups are in and some are out.
LAM = {False: (0.813, 1.157), True: (0.213, 0.4513)}

# Shape, filters, the oracle's filter of every element, and the joint group of every filter. Joint group 0 has members
# everywhere, two of them in one tensor; 5 lies in one tensor alone, and 6 is a single filter, which starts at zero.
MEMBERS = [
    ((4, 3, 2, 2), None, oracle.group_index((4, 3, 2, 2), "filter"), [0, 1, 2, 3]),
    ((5, 2, 3), Slices((0,), kind="filter"), oracle.group_index((5, 2, 3), "filter"), [3, 0, 4, 1, 2]),
    (
        (4, 3, 2),
        transposed_filters(2),
        oracle.group_index((4, 3, 2), "filter", transposed=True, conv_groups=2),
        [0, 0, 2, 5, 5, 1],
    ),
    ((3, 7), None, oracle.group_index((3, 7), "neuron"), [6, 4, 0]),
]
SHAPES = [shape for shape, *_ in MEMBERS]
SIZES = [int(np.prod(shape)) for shape in SHAPES]
LABELS = np.concatenate([np.array(joint)[filters].ravel() for _, _, filters, joint in MEMBERS])


def coupled():
    return channels([(shape, part, torch.tensor(joint)) for shape, part, _, joint in MEMBERS])


def split(x):
    return [part.reshape(shape) for part, shape in zip(np.split(x, np.cumsum(SIZES)[:-1]), SHAPES, strict=True)]


def joined(tensors):
    return np.concatenate([t.detach().double().cpu().numpy().ravel() for t in tensors])


def parameters(dtypes=(torch.float32,) * 4):
    values = [start(shape, seed) for seed, shape in enumerate(SHAPES)]
    w = np.concatenate([v.ravel() for v in values])
    return w, [nn.Parameter(torch.from_numpy(v).to(t)) for v, t in zip(values, dtypes, strict=True)]


def close(actual, expected, size=None):
    error = np.abs(joined(actual) - expected).max() / max(np.abs(expected).max() if size is None else size, 1e-3)
    assert error <= 1e-5


def compare(optimizer, params, reference):
    close(params, reference.W)
    close(map(optimizer.dual, params), reference.V)
    gamma = reference.gamma()
    close(map(optimizer.gamma, params), gamma, size=reference.kappa * np.abs(reference.epsilon * reference.V).max())
    on = np.array([gamma[LABELS == c].any() for c in range(7)])
    for p, (*_, joint) in zip(params, MEMBERS, strict=True):
        assert optimizer.support(p).tolist() == on[joint].tolist()
    return on


def follow(optimizer, reference, params, *, without=lambda k: ()):
    """Give both the same gradients; `without(k)` names the tensors that have none in step k."""
    seen = []
    for k in range(STEPS):
        g = gradient(reference.W, k)
        for i, (p, x) in enumerate(zip(params, split(g), strict=True)):
            p.grad = None if i in without(k) else torch.from_numpy(x.copy()).to(p.dtype)
        if k == 20:
            reference.lam = optimizer.lam = LAM[reference.scaling][1]
            reference.lr = optimizer.param_groups[0]["lr"] = 0.03
        optimizer.step()
        held = {
            name: None if x is None else x.copy() for name in ("W", "V", "u") for x in [getattr(reference, name, None)]
        }
        reference.step(g.astype(np.float64))
        still = np.concatenate([np.full(n, i in without(k)) for i, n in enumerate(SIZES)])
        for name, before in held.items():
            if getattr(reference, name, None) is not None:
                getattr(reference, name)[still] = 0.0 if before is None else before[still]
        if k % 10 == 9:
            seen.append(compare(optimizer, params, reference))
    assert any(on.any() and not on.all() for on in seen)


@pytest.mark.parametrize("scaling", [False, True], ids=["", "scaling"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_dessilbi(variant, scaling):
    w, params = parameters()
    options = {**COUPLING, **VARIANTS[variant], "scaling": scaling, "lam": LAM[scaling][0]}
    follow(DessiLBI([{"params": params, "group": coupled()}], **options), oracle.Oracle(w, LABELS, **options), params)


@pytest.mark.parametrize("scaling", [False, True], ids=["", "scaling"])
def test_dessiadamw(scaling):
    w, params = parameters()
    options = {**COUPLING, "scaling": scaling, "lam": LAM[scaling][0]}
    follow(
        DessiAdamW([{"params": params, "group": coupled()}], **options),
        oracle.AdamWOracle(w, LABELS, **options),
        params,
    )


@pytest.mark.parametrize("scaling", [False, True], ids=["", "scaling"])
def test_size_normalised(scaling):
    w, params = parameters()
    options = {**COUPLING, "momentum": 0.9, "lam": 0.1513 if scaling else 0.413, "scaling": scaling}
    groups = [{"params": params, "group": coupled(), "size_normalised": True}]
    reference = oracle.Oracle(w, LABELS, size_normalised=True, **options)
    optimizer = DessiLBI(groups, **options)
    for k in range(STEPS):
        g = gradient(reference.W, k)
        for p, x in zip(params, split(g), strict=True):
            p.grad = torch.from_numpy(x)
        optimizer.step()
        reference.step(g.astype(np.float64))
    on = compare(optimizer, params, reference)
    assert on.any() and not on.all()  # noqa: PT018


@pytest.mark.parametrize("scaling", [False, True], ids=["", "scaling"])
def test_members_without_a_gradient_still_count(scaling):
    """As under stochastic depth, and before a layer's first gradient: its V, W stay, and are part of the norms."""
    w, params = parameters()
    options = {**COUPLING, "momentum": 0.9, "weight_decay": 0.05, "scaling": scaling, "lam": LAM[scaling][0]}
    follow(
        DessiLBI([{"params": params, "group": coupled()}], **options),
        oracle.Oracle(w, LABELS, **options),
        params,
        without=lambda k: {0, 3} if k < 5 else {k % 4} if k % 3 else (),
    )


def test_members_of_several_dtypes_and_layouts():
    w, params = parameters((torch.float32, torch.float64, torch.float32, torch.float64))
    params[0].data = params[0].data.to(memory_format=torch.channels_last)
    params[3].data = params[3].data.T.contiguous().T
    options = {**COUPLING, "momentum": 0.9, "scaling": True, "lam": LAM[True][0]}
    follow(DessiLBI([{"params": params, "group": coupled()}], **options), oracle.Oracle(w, LABELS, **options), params)


def test_in_pieces(monkeypatch):
    from dessilbi.kernels import foreach

    monkeypatch.setattr(foreach, "PIECE", 5)
    for scaling in (False, True):
        test_dessilbi("decay", scaling)


def test_with_other_kinds_in_one_param_group():
    """A second coupling, lone filters, weights and what is not penalised: each goes its own way."""
    w, params = parameters()
    pair = [torch.tensor([0, 1]), torch.tensor([1, 0, 2])]
    shapes = [(2, 4), (3, 5), (3, 2, 2), (4, 3), (6,)]
    others = [nn.Parameter(torch.from_numpy(start(shape, 9))) for shape in shapes]
    second = channels([((2, 4), None, pair[0]), ((3, 5), None, pair[1])])
    first = coupled()
    options = {**COUPLING, "momentum": 0.9, "scaling": True}
    references = [
        oracle.Oracle(w, LABELS, **options),
        oracle.Oracle(
            joined(others[:2]), np.concatenate([i[f].ravel() for i, f in zip(
                [x.numpy() for x in pair], [oracle.group_index(s, "neuron") for s in shapes[:2]], strict=True
            )]), **options,
        ),
        oracle.Oracle(others[2].detach().numpy(), oracle.group_index(shapes[2], "filter"), **options),
        oracle.Oracle(others[3].detach().numpy(), oracle.group_index(shapes[3], "weight"), **options),
        oracle.Oracle(others[4].detach().numpy(), None, **options),
    ]  # fmt: skip
    owned = [params, others[:2], *[[p] for p in others[2:]]]
    order = [params[0], others[0], params[1], others[2], others[3], params[2], others[4], params[3], others[1]]
    kinds = [first[0], second[0], first[1], "filter", "weight", first[2], None, first[3], second[1]]
    optimizer = DessiLBI([{"params": order, "group": kinds}], **options)
    for k in range(STEPS):
        for reference, tensors in zip(references, owned, strict=True):
            g = gradient(reference.W, k)
            reference.step(g.astype(np.float64))
            for p, x in zip(tensors, np.split(g.ravel(), np.cumsum([p.numel() for p in tensors])[:-1]), strict=True):
                p.grad = torch.from_numpy(x.reshape(p.shape))
        optimizer.step()
    for reference, tensors in zip(references, owned, strict=True):
        close(tensors, reference.W.ravel())
        if reference.index is not None:
            close(map(optimizer.dual, tensors), reference.V.ravel())
            assert any(optimizer.support(p).any() for p in tensors)


@pytest.mark.parametrize("scaling", [False, True], ids=["", "scaling"])
def test_kernel_and_equations_agree(scaling):
    """The pure functions in float64, to 1e-6 after 100 steps, as of every kernel."""
    _, params = parameters()
    parts = coupled()
    optimizer = DessiLBI([{"params": params, "group": parts}], momentum=0.9, scaling=scaling, **COUPLING)
    w = [p.detach().double() for p in params]
    v, u = [torch.zeros_like(x) for x in w], [None] * 4
    scales = joint_norms(parts, w) if scaling else None
    for k in range(100):
        found = iteration.couple_jointly(w, v, parts, scales=scales, **COUPLING)
        for i, p in enumerate(params):
            g = torch.sin(w[i] + k).float()
            p.grad = g
            w[i], u[i] = iteration.sgd(
                w[i], g.double() + found[i].d, u[i], step=COUPLING["kappa"] * COUPLING["lr"], momentum=0.9
            )
        v = [x.v for x in found]
        scales = [x.scale for x in found] if scaling else None
        optimizer.step()
    for i, p in enumerate(params):
        assert (p.detach().double() - w[i]).norm() <= 1e-6 * w[i].norm()
        assert (optimizer.dual(p).double() - v[i]).norm() <= 1e-6 * v[i].norm()


def test_without_coupling_it_is_sgd():
    _, params = parameters()
    _, theirs = parameters()
    ours = DessiLBI([{"params": params, "group": coupled()}], 0.05, nu=float("inf"), momentum=0.9)
    sgd = torch.optim.SGD(theirs, 0.05, momentum=0.9)
    for k in range(5):
        for p, q in zip(params, theirs, strict=True):
            p.grad, q.grad = torch.sin(p.detach() + k), torch.sin(q.detach() + k)
        ours.step()
        sgd.step()
    assert all(torch.equal(p, q) for p, q in zip(params, theirs, strict=True))


# -- norms and counts --------------------------------------------------------------------------------------------


def test_by_hand():
    """Two 2×2 matrices whose rows cross: (3, 4 | 0.3, 0.4) and (0, 0 | 12, 0); 3·4·12 make 13."""
    a, b = torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.tensor([[0.0, 0.0], [12.0, 0.0]])
    parts = channels([((2, 2), None, torch.tensor([0, 1])), ((2, 2), None, torch.tensor([1, 0]))])
    norms = joint_norms(parts, [a, b])
    assert [n.flatten().tolist() for n in norms] == [[13.0, 0.5], [0.5, 13.0]]
    shrunk = [part.prox(x, 6.5, n) for part, x, n in zip(parts, (a, b), norms, strict=True)]
    torch.testing.assert_close(shrunk[0], torch.tensor([[1.5, 2.0], [0.0, 0.0]]))
    torch.testing.assert_close(shrunk[1], torch.tensor([[0.0, 0.0], [6.0, 0.0]]))
    assert [int(n) for n in tally(parts, norms)] == [2, 2]
    assert [int(n) for n in tally(parts, joint_norms(parts, shrunk))] == [1, 1]


@settings(max_examples=50, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000), lam=st.floats(0, 4))
def test_norms_prox_and_counts_of_any_coupling(data, seed, lam):
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=4))
    joint = data.draw(
        st.lists(st.integers(0, 4), min_size=sum(n for n, _ in shapes), max_size=sum(n for n, _ in shapes))
    )
    joint = np.unique(joint, return_inverse=True)[1].astype(np.int64)
    index = np.split(joint, np.cumsum([n for n, _ in shapes])[:-1])
    values = [np.random.default_rng(seed + i).standard_normal(shape) for i, shape in enumerate(shapes)]
    labels = np.concatenate([np.repeat(i, shape[1]) for i, shape in zip(index, shapes, strict=True)])
    flat = np.concatenate([v.ravel() for v in values])
    tensors = [torch.from_numpy(v) for v in values]
    parts = channels([(s, None, torch.from_numpy(i)) for s, i in zip(shapes, index, strict=True)])
    norms = joint_norms(parts, tensors)
    expected = oracle.norms(flat, labels)
    for part, n, i, shape in zip(parts, norms, index, shapes, strict=True):
        np.testing.assert_allclose(part.flat(n, shape).numpy(), expected[i], rtol=1e-12)
        assert part.count(shape) == len(i)
        np.testing.assert_array_equal(part.sizes(shape).flatten().numpy(), np.bincount(labels)[i])
    distinct = np.concatenate([part.distinct(n).numpy() for part, n in zip(parts, norms, strict=True)])
    np.testing.assert_allclose(np.sort(distinct), np.sort(expected), rtol=1e-12)
    proxes = [part.prox(x, lam, n) for part, x, n in zip(parts, tensors, norms, strict=True)]
    np.testing.assert_allclose(joined(proxes), oracle.prox(flat, labels, lam), rtol=1e-9, atol=1e-12)
    on = [n * (n > lam) for n in norms]
    assert {int(n) for n in tally(parts, on)} == {int((expected > lam).sum())}


def test_alone_a_tensor_does_not_know_the_norms():
    part = coupled()[0]
    with pytest.raises(TypeError, match="joint_norms"):
        part.norms(torch.ones(4, 3, 2, 2))
    with pytest.raises(ValueError, match="1 of the 4 tensors"):
        joint_norms([part], [torch.ones(4, 3, 2, 2)])


# -- threshold, path ---------------------------------------------------------------------------------------------


def with_duals(duals, kinds, **options):
    """An optimizer whose V are these tensors."""
    params = [nn.Parameter(torch.ones_like(v)) for v in duals]
    optimizer = DessiLBI([{"params": params, "group": kinds, **options}], 1.0, nu=1.0, lam=1e9)
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, v in zip(params, duals, strict=True):
        optimizer.dual(p).copy_(v)
    return optimizer, params


def test_target_threshold_counts_joint_groups():
    torch.manual_seed(0)
    perm = torch.randperm(30)
    duals = [torch.randn(30, 3, 3, 3), torch.randn(30, 20), torch.randn(50, 4)]
    parts = channels([((30, 3, 3, 3), None, torch.arange(30)), ((30, 20), None, perm)])
    optimizer, params = with_duals(duals, [*parts, "neuron"])
    joint = (duals[0].flatten(1).square().sum(1) + duals[1].square().sum(1)[perm.argsort()]).sqrt()
    lone = duals[2].norm(dim=1)
    everything = torch.cat([joint, lone]).sort(descending=True).values
    for keep in (0.05, 0.4, 0.9):
        TargetThreshold(optimizer, keep, ramp=0).step(1.0)
        assert optimizer.lam == pytest.approx(float(everything[round(80 * keep)]), rel=1e-6)
        on = optimizer.support(params[0])
        assert torch.equal(optimizer.support(params[1]), on[perm])
        assert int(on.sum()) + int(optimizer.support(params[2]).sum()) == round(80 * keep)
    TargetThreshold(optimizer, 0.5, ramp=0, per_layer=True).step(1.0)
    assert [int(optimizer.support(p).sum()) for p in params] == [15, 15, 25]
    assert optimizer.threshold(params[0]) == optimizer.threshold(params[1])


def test_target_threshold_size_normalised():
    duals = [torch.full((2, 2), 1.0), torch.full((2, 6), 1.0), torch.full((2, 4), 0.9)]
    duals[0][1] = duals[1][1] = 0.5
    parts = channels([((2, 2), None, torch.tensor([0, 1])), ((2, 6), None, torch.tensor([0, 1]))])
    optimizer, params = with_duals(duals, [*parts, "neuron"], size_normalised=True)
    TargetThreshold(optimizer, 0.75, ramp=0).step(1.0)  # root mean squares 1, 0.5 and twice 0.9
    assert optimizer.lam == pytest.approx(0.5)
    assert [optimizer.support(p).tolist() for p in params] == [[True, False], [True, False], [True, True]]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 1)
        self.inner = nn.Conv2d(6, 4, 3, padding=1)
        self.out = nn.Conv2d(4, 6, 3, padding=1)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.stem(x).relu()
        return self.head((x + self.out(self.inner(x).relu())).mean((2, 3)))


def block_groups(model, order=None):
    order = torch.arange(6) if order is None else order
    stream = channels([(model.stem.weight.shape, None, order), (model.out.weight.shape, None, order)])
    named = dict(model.named_parameters())
    kinds = {"stem.weight": stream[0], "inner.weight": "filter", "out.weight": stream[1], "head.weight": "weight"}
    biases = [p for name, p in named.items() if name not in kinds]
    penalised = [(name, named[name]) for name in kinds]
    return [
        {"params": penalised, "group": list(kinds.values())},
        {"params": [("b" + str(i), p) for i, p in enumerate(biases)], "group": None},
    ]


def train(model, optimizer, steps, seed):
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x, y = torch.randn(8, 2, 5, 5, generator=g), torch.randint(0, 3, (8,), generator=g)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def block(cls=DessiLBI, **options):
    torch.manual_seed(1)
    model = Block()
    return model, cls(block_groups(model), 0.1, nu=2.0, lam=0.1, scaling=True, **options)


def test_path(tmp_path):
    model, optimizer = block(momentum=0.9)
    path, copies = Path(model, optimizer), []
    names = ("stem.weight", "out.weight")
    weights = [model.stem.weight, model.out.weight]
    for k in range(6):
        train(model, optimizer, 5, k)
        path.record(k)
        copies.append([[x.detach().flatten(1) for x in map(of, weights)] for of in (
            torch.clone, lambda p: optimizer.dual(p).clone(), optimizer.gamma
        )])  # fmt: skip
    path.save(tmp_path / "a.path")
    for recorded in (path, Path.load(tmp_path / "a.path")):
        for name in names:
            assert recorded.kind(name) == "channel"
            for i, norms in enumerate(recorded.norms(name)):
                expected = torch.stack([torch.cat(c[i], dim=1).norm(dim=1) for c in copies])
                torch.testing.assert_close(norms, expected)
            on = torch.stack([recorded.support(name, at) for at in range(6)])
            assert torch.equal(on, recorded.norms(name).gamma > 0)
        assert torch.equal(recorded.entry(names[0]), recorded.entry(names[1]))
        assert on.any() and not on.all()  # noqa: PT018


# -- saving, copying ---------------------------------------------------------------------------------------------


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("cls", [DessiLBI, DessiAdamW])
def test_resume_bit_for_bit(cls):
    whole, optimizer = block(cls)
    train(whole, optimizer, 5, 0)
    train(whole, optimizer, 5, 1)
    first, optimizer = block(cls)
    train(first, optimizer, 5, 0)
    buffer = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    saved = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    second, again = block(cls)
    second.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    train(second, again, 5, 1)
    assert equal(whole, second)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_of_an_optimizer_go_on(copied):
    model, optimizer = block(momentum=0.9)
    train(model, optimizer, 5, 0)
    twin, other = copied((model, optimizer))
    for m, o in ((model, optimizer), (twin, other)):
        train(m, o, 5, 1)
    assert equal(model, twin)
    parts = [part for p in (twin.stem.weight, twin.out.weight) for part in [other.partition(p)]]
    assert parts[0].coupling is parts[1].coupling is not optimizer.partition(model.stem.weight).coupling


def test_state_of_other_couplings_is_refused():
    model, optimizer = block()
    train(model, optimizer, 1, 0)
    description = optimizer.state_dict()["param_groups"][0]["group"]
    assert [d if isinstance(d, str) else d["kind"] for d in description] == ["channel", "filter", "channel", "weight"]
    other = DessiLBI(block_groups(model, torch.tensor([1, 0, 2, 3, 4, 5])), 0.1)
    with pytest.raises(ValueError, match="same groups"):
        other.load_state_dict(optimizer.state_dict())
    lone = DessiLBI([{**block_groups(model)[0], "group": "filter", "params": [model.stem.weight]}], 0.1)
    with pytest.raises(ValueError, match="same groups"):
        lone.load_state_dict(optimizer.state_dict())


def test_scaling_switched_on_under_way_and_parameters_added_late():
    """What each member holds is completed when it is needed."""
    model = Block()
    groups = block_groups(model)
    optimizer = DessiLBI(groups[1:], 0.1, nu=2.0, lam=0.1)
    optimizer.add_param_group(groups[0])
    train(model, optimizer, 3, 0)
    optimizer.param_groups[1]["scaling"] = True
    before = [p.detach().clone() for p in (model.stem.weight, model.out.weight)]
    train(model, optimizer, 1, 1)
    expected = torch.cat([x.flatten(1) for x in before], dim=1).norm(dim=1)
    for p in (model.stem.weight, model.out.weight):
        torch.testing.assert_close(optimizer.scale(p).flatten(), expected)


# -- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([], "members is empty"),
        ([((2, 3), None, torch.tensor([0, 1, 2]))], r"members\[0\].*\(3,\).*2 filters"),
        ([((2, 3), None, torch.tensor([0.0, 1.0]))], "integers.*float32"),
        ([((2, 3), None, torch.tensor([0, -1]))], "-1"),
        ([((2, 3), None, torch.tensor([0, 1])), ((1, 3), None, torch.tensor([3]))], "joint group 2"),
        ([((3,), None, torch.tensor([0, 1, 2]))], r"\(3,\)"),
        ([((0, 3), None, torch.zeros(0, dtype=torch.long))], "no filters"),
        ([((4, 3, 2, 2), coupled()[0], torch.arange(4))], "partition of one tensor"),
    ],
)
def test_bad_members(members, words):
    with pytest.raises(ValueError, match=words):
        channels(members)


def test_bad_param_groups():
    _, params = parameters()
    parts = coupled()
    with pytest.raises(ValueError, match="3 of the 4 tensors"):
        DessiLBI([{"params": params[:3], "group": parts[:3]}], 0.1)
    with pytest.raises(ValueError, match="3 of the 4 tensors"):  # one param group, not two
        DessiLBI([{"params": params[:3], "group": parts[:3]}, {"params": params[3:], "group": parts[3:]}], 0.1)
    with pytest.raises(ValueError, match="3 entries for 4 parameters"):
        DessiLBI([{"params": params, "group": parts[:3]}], 0.1)
    with pytest.raises(ValueError, match=r"\(5, 2, 3\) does not fit one of \(4, 3, 2, 2\)"):
        DessiLBI([{"params": params, "group": [parts[1], parts[0], *parts[2:]]}], 0.1)
    with pytest.raises(ValueError, match="two parameters"):
        DessiLBI([{"params": [*params, nn.Parameter(torch.ones(3, 7))], "group": [*parts, parts[3]]}], 0.1)
    with pytest.raises(ValueError, match="Channels"):
        partition(parts[0], (4, 3, 2))


def test_lists_of_plain_kinds():
    """A list needs no coupling; the filters of one tensor may share groups without another."""
    a, b, c = (nn.Parameter(torch.randn(s)) for s in [(4, 3), (2, 3, 3), (4, 2)])
    (alone,) = channels([((4, 2), None, torch.tensor([0, 1, 1, 0]))])
    optimizer = DessiLBI([{"params": [a, b, c], "group": ["neuron", None, alone]}], 0.1, nu=1.0, lam=0.1, momentum=0.9)
    labelled = DessiLBI([{"params": [d := nn.Parameter(c.detach().clone())],
                          "group": Labels(torch.tensor([[0, 0], [1, 1], [1, 1], [0, 0]]))}],
                        0.1, nu=1.0, lam=0.1, momentum=0.9)  # fmt: skip
    for _ in range(20):
        for p in (a, b, c, d):
            p.grad = torch.ones_like(p)
        optimizer.step()
        labelled.step()
    assert [p is a or p is c for p, _ in optimizer.penalised()] == [True, True]
    torch.testing.assert_close(c, d)
    torch.testing.assert_close(optimizer.gamma(c), labelled.gamma(d))
    assert optimizer.gamma(c).any()


def test_fused_says_why_not():
    _, params = parameters()
    optimizer = DessiLBI([{"params": params, "group": coupled()}], 0.1, fused=True)
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="fused=True.*'channel'"):
        optimizer.step()


def test_sharded_tensors_are_refused(monkeypatch):
    monkeypatch.setattr(sharding, "is_sharded", lambda t: True)
    with pytest.raises(ValueError, match="conv.weight .*'channel'"):
        sharding.check("conv.weight", torch.ones(4, 3, 2, 2), coupled()[0], scaling=False)


@pytest.mark.gpu
@pytest.mark.parametrize("cls", [DessiLBI, DessiAdamW])
def test_on_a_gpu_nothing_waits_and_runs_repeat(cls):
    options = {**COUPLING, "scaling": True, **({"momentum": 0.9} if cls is DessiLBI else {})}
    runs = []
    for device in ("cpu", "cuda", "cuda"):
        _, params = parameters()
        params = [nn.Parameter(p.detach().to(device)) for p in params]
        optimizer = cls([{"params": params, "group": coupled()}], **options)
        threshold = TargetThreshold(optimizer, 0.5, ramp=0.5)
        for k in range(30):
            for i, p in enumerate(params):
                p.grad = None if k % 4 == i and k > 2 else torch.sin(p.detach() + k)
            if k > 2 and device == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            optimizer.step()
            threshold.step(k / 30)
            torch.cuda.set_sync_debug_mode("default")
        runs.append([x.detach().cpu() for p in params for x in (p, optimizer.dual(p), optimizer.gamma(p))])
        assert 0 < sum(int(optimizer.support(p).sum()) for p in params)
    for x, y, z in zip(*runs, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-4, atol=1e-5)
        assert torch.equal(y, z)
