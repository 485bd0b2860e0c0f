"""Which layers grow, by how much and until when: decisions on supports that are set by hand."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.surgery.zoo import FOREIGN, difference
from torch import nn
from torch.nn import functional

from dessilbi import profile
from dessilbi.applications.grow import Growth, ratio
from dessilbi.models import create
from dessilbi.surgery.widening import Widening
from dessilbi.training import optimizers, presets
from dessilbi.training.config import Config
from dessilbi.training.growing import Growing, Now
from dessilbi.training.run import Run

LENET = Config(
    model="lenet5",
    model_options={"widths": [4, 5, 6, 7]},
    linear="neuron",
    exclude=("classifier.2",),
    device="cpu",
    epochs=100,
    lam=1.0,
    schedule="step",
    grow_options={"every": 5, "then": 7},
)
CONV1, CONV2, CONV3, FC, OUT = "features.0", "features.3", "features.6", "classifier.0", "classifier.2"
SHAPE = (1, 28, 28)


def lenet_parameters(conv1: int, conv2: int, conv3: int, fc: int) -> int:
    """LeNet-5's parameters, counted on paper."""
    return 26 * conv1 + (25 * conv1 + 1) * conv2 + (25 * conv2 + 1) * conv3 + (conv3 + 1) * fc + (fc + 1) * 10


def growing(config: Config, **changes: Any) -> Config:
    return config.replace(grow_options={**config.grow_options, **changes})


class Session:
    """A network, its optimizer and who lets it grow, moved from decision to decision without training."""

    def __init__(self, config: Config, model: nn.Module | None = None, shape: tuple[int, ...] = SHAPE) -> None:
        torch.manual_seed(0)
        self.model = model or create(config.model, 10, shape[0], **config.model_options)
        self.example = torch.randn(1, *shape)
        self.optimizer = optimizers.build(config, self.model, torch.device("cpu"), shape)
        self.model(self.example).sum().backward()
        self.optimizer.step()
        self.growth = Growth(config)
        self.epoch = 0

    def now(self, loss: float = 1.0) -> Now:
        metrics = {"epoch": self.epoch, "dense": 0.5, "loss": loss, "seconds": 2.0, "evaluation_seconds": 1.0}
        return Now(self.model, self.optimizer, metrics, self.example, self.loss)

    def loss(self, model: nn.Module) -> torch.Tensor:
        return functional.cross_entropy(model(self.example), torch.tensor([3]))

    def select(self, counts: Mapping[str, int]) -> None:
        """Let the first so many filters of these layers be in the support, and no others."""
        for p, _ in self.optimizer.penalised():
            self.optimizer.state[p]["dual"].zero_()
        for path, count in counts.items():
            self.optimizer.state[self.model.get_submodule(path).weight]["dual"][:count] = 100.0

    def go(self, counts: Mapping[str, int] | None = None, epochs: int = 5, loss: float = 1.0) -> dict[str, int]:
        """So many epochs later; how much the network grew."""
        for last in [False] * (epochs - 1) + [True]:
            self.epoch += 1
            if last and counts is not None:
                self.select(counts)
            wide = self.growth.end_epoch(self.now(loss))
            assert last or wide is None
        before, self.model = self.model, wide if wide is not None else self.model
        if wide is not None:
            assert {id(p) for p, _ in self.optimizer.penalised()} <= {id(p) for p in self.model.parameters()}
        return {
            path: len(m.weight) - len(before.get_submodule(path).weight)
            for path, m in self.model.named_modules()
            if isinstance(m, (nn.Conv2d, nn.Linear)) and len(m.weight) != len(before.get_submodule(path).weight)
        }

    @property
    def stopped(self) -> Any:
        return self.growth.history["stopped"]


ALL = {CONV1: 4, CONV2: 5, CONV3: 6, FC: 7}

# -- the ratio ---------------------------------------------------------------------------------------------------


def test_ratio_against_a_count_by_hand() -> None:
    session = Session(LENET)
    session.select({CONV1: 3, CONV2: 5, CONV3: 0, FC: 2})
    with torch.no_grad():  # of the seven neurons one has no weights at all: it does not count
        session.model.classifier[0].weight[6] = 0
    found = {path: ratio(session.now(), [path]) for path in (CONV1, CONV2, CONV3, FC, OUT)}
    assert found == {CONV1: 3 / 4, CONV2: 1.0, CONV3: 0.0, FC: pytest.approx(2 / 6), OUT: None}


def test_ratio_by_weights_counts_weights() -> None:
    session = Session(LENET.replace(conv="weight", linear="weight", exclude=()))
    for p, _ in session.optimizer.penalised():
        session.optimizer.state[p]["dual"].zero_()
    with torch.no_grad():
        session.optimizer.state[session.model.features[0].weight]["dual"].view(-1)[:30] = -5.0
        session.model.features[0].weight.view(-1)[90:] = 0
    assert ratio(session.now(), [CONV1]) == pytest.approx(30 / 90)


def test_ratio_of_a_stream_is_counted_over_its_layers() -> None:
    config = LENET.replace(model="resnet20", model_options={"widths": [4, 4, 4]}, linear="none", exclude=())
    session = Session(config, shape=(3, 16, 16))
    session.select({"conv1": 1, "layer1.0.conv2": 4, "layer1.1.conv2": 3, "layer1.0.conv1": 2})
    stream = next(s for s in Widening(session.model, session.example).streams if "conv1" in s)
    assert sorted(stream) == ["conv1", "layer1.0.conv2", "layer1.1.conv2", "layer1.2.conv2"]
    assert ratio(session.now(), stream) == (1 + 4 + 3 + 0) / 16
    assert ratio(session.now(), ["layer1.0.conv1"]) == 2 / 4


# -- who grows, and by how much ----------------------------------------------------------------------------------


def test_layers_above_tau_get_a_fraction_of_their_width_or_the_least() -> None:
    # 3 of 4 is not above 0.8, 5 of 6 is; int(0.5 · 6) = 3, and of five and seven 2.5 and 3.5 are cut.
    session = Session(growing(LENET, by=0.5, least=2))
    assert session.go({CONV1: 3, CONV2: 5, CONV3: 5, FC: 7}) == {CONV2: 2, CONV3: 3, FC: 3}
    # The least, where it is more.
    session = Session(growing(LENET, by=0.5, least=6))
    assert session.go({CONV1: 3, CONV2: 5}) == {CONV2: 6}
    session = Session(growing(LENET, by=0.0, least=1))
    assert session.go({FC: 7}) == {FC: 1}


def test_the_threshold_itself_is_not_above() -> None:
    session = Session(growing(LENET, tau=0.75, by=0.0, least=1))
    assert session.go({CONV1: 3, CONV2: 4}) == {CONV2: 1}


def test_thresholds_by_layer() -> None:
    tau = {"default": 0.9, "features": 0.5, "features.6": 1.0}
    settings = Growing(tau=tau)
    assert [settings.threshold(x) for x in (CONV1, CONV3, FC, "features.60", "feature")] == [0.5, 1.0, 0.9, 0.5, 0.9]
    session = Session(growing(LENET, tau=tau, by=0.0, least=1))
    assert session.go({CONV1: 3, CONV2: 2, CONV3: 6, FC: 6}) == {CONV1: 1}
    assert Growing(tau={"classifier": 0.1}).threshold(CONV1) == 0.8


def test_decisions_come_every_so_many_epochs_and_only_then() -> None:
    session = Session(LENET)
    assert session.go({CONV1: 4}, epochs=5) == {CONV1: 2}
    assert session.go({CONV1: 6}, epochs=4) == {}
    assert session.go({CONV1: 6}, epochs=1) == {CONV1: 2}
    assert [stage["epoch"] for stage in session.growth.history["stages"]] == [5, 10]


def test_the_whole_stream_grows() -> None:
    config = LENET.replace(model="resnet20", model_options={"widths": [4, 6, 6]}, linear="none", exclude=())
    session = Session(growing(config, tau=0.9, least=3), shape=(3, 16, 16))
    grew = session.go({"conv1": 4, **{f"layer1.{i}.conv2": 4 for i in range(3)}, "layer3.2.conv1": 6})
    first = {"conv1": 3, **{f"layer1.{i}.conv2": 3 for i in range(3)}}
    carried = {f"layer{stage}.{i}.conv2": 3 for stage in (2, 3) for i in range(3)}
    assert grew == {**first, **carried, "layer3.2.conv1": 3}
    assert session.growth.history["stages"][0]["grew"] == {"conv1": 3, "layer3.2.conv1": 3}


def test_a_layer_with_a_single_filter_grows_and_counts_for_the_budget() -> None:
    config = LENET.replace(model_options={"widths": [1, 1, 6, 7]})
    session = Session(growing(config, by=2.0, least=1, params=2000))
    assert ratio(session.now(), [CONV1]) == 0.0
    grew = session.go({CONV1: 1, CONV2: 1, CONV3: 6})
    widths = [len(session.model.get_submodule(path).weight) for path in (CONV1, CONV2, CONV3, FC)]
    assert list(grew) == [CONV1, CONV2, CONV3]
    size = sum(p.numel() for p in session.model.parameters())
    assert 1500 < size == lenet_parameters(*widths) <= 2000
    assert session.growth.history["streams"] == [[CONV1], [CONV2], [CONV3], [FC]]


def test_uniform_growth_takes_no_notice() -> None:
    session = Session(growing(LENET, policy="uniform", by=1.0))
    assert session.go({}) == {CONV1: 4, CONV2: 5, CONV3: 6, FC: 7}


# -- until when --------------------------------------------------------------------------------------------------


def test_growth_is_over_when_no_layer_grew() -> None:
    session = Session(LENET)
    assert session.go(ALL)
    assert session.growth.end is None
    assert session.go({CONV1: 3}) == {}
    assert session.stopped == "no layer is short of filters"
    assert session.growth.end == 10 + 7
    assert session.go(ALL, epochs=5) == {}  # nothing is decided any more
    assert len(session.growth.history["stages"]) == 2
    session.go(ALL, epochs=2)
    assert [stage["epoch"] for stage in session.growth.history["stages"]] == [5, 10, 17]


def test_growth_is_over_after_so_many() -> None:
    session = Session(growing(LENET, growths=2))
    assert session.go(ALL)
    assert session.go({CONV1: 6})
    assert session.go({CONV1: 8}) == {}
    assert session.stopped == "growths"
    assert session.growth.end == 15 + 7


def test_growth_is_over_when_there_is_no_time_for_another() -> None:
    # After 15 epochs 5 + 7 more would be 27: with 26 there is no time.
    for epochs, decisions in ((27, 3), (26, 2)):
        session = Session(LENET.replace(epochs=epochs))
        grew = [bool(session.go({CONV1: 4 + 2 * i})) for i in range(3)]
        assert sum(grew) == decisions
        assert session.stopped == (None if decisions == 3 else "epochs")


def test_growth_is_over_when_the_loss_is_flat() -> None:
    session = Session(growing(LENET, flat=0.1))
    assert session.go(ALL, loss=2.0)
    assert session.go({CONV1: 6}, loss=1.79)  # a fall by 10.5 %
    assert session.go({CONV1: 8}, loss=1.62) == {}  # by 9.5 %
    assert session.stopped == "flat loss"


def test_a_budget_of_parameters_is_filled_and_not_passed() -> None:
    budget = 2 * lenet_parameters(4, 5, 6, 7)
    session = Session(growing(LENET, by=1.0, params=budget))
    assert session.go(ALL)
    widths = [len(session.model.get_submodule(path).weight) for path in (CONV1, CONV2, CONV3, FC)]
    size = sum(p.numel() for p in session.model.parameters())
    assert size == lenet_parameters(*widths) <= budget
    # All grow by the same part, as much as fits: with one more of any that was still due it would not.
    parts = [extra / w for extra, w in zip((w - o for w, o in zip(widths, (4, 5, 6, 7), strict=True)), (4, 5, 6, 7),
                                           strict=True)]  # fmt: skip
    assert max(parts) - min(parts) < 1 / 4
    assert lenet_parameters(*(math.ceil(o * (1 + max(parts))) + 1 for o in (4, 5, 6, 7))) > budget
    assert session.growth.history["full"]
    assert session.go({CONV1: 99}) == {}
    assert session.stopped == "budget"


def test_a_budget_that_not_even_the_least_fits_into() -> None:
    session = Session(growing(LENET, params=lenet_parameters(4, 5, 6, 7) + 10))
    assert session.go(ALL) == {}
    assert session.stopped == "budget"


def test_a_budget_of_multiply_adds() -> None:
    session = Session(growing(LENET, by=1.0, macs=300_000))
    before = profile(session.model, session.example).macs
    assert session.go(ALL)
    after = profile(session.model, session.example).macs
    assert before < 250_000 < after <= 300_000
    assert session.go({}) == {}
    assert session.stopped == "budget"


def test_a_list_of_budgets_is_one_for_each_growth() -> None:
    budgets = [2000, 4000, 8000]
    session = Session(growing(LENET, params=budgets))
    sizes = []
    for counts in ({CONV1: 4, CONV2: 5}, {CONV3: 3}, ALL):
        assert session.go(counts)
        sizes.append(sum(p.numel() for p in session.model.parameters()))
    assert all(0.9 * budget < size <= budget for size, budget in zip(sizes, budgets, strict=True))
    # Nobody was above τ in the second: who came nearest grew.
    assert list(session.growth.history["stages"][1]["grew"]) == [CONV3]
    assert session.go(ALL) == {}
    assert session.stopped == "growths"


def test_layers_whose_sizes_are_written_into_the_code_are_left_alone() -> None:
    net = FOREIGN["unequal_split"]
    config = LENET.replace(exclude=("fc",), linear="none")
    model = net.factory()
    session = Session(growing(config, least=1, by=0.0), model, (3, 6, 8))
    assert session.go({"conv1": 9, "out": 6}) == {"out": 1}
    history = session.growth.history
    assert history["rigid"] == ["conv1"]
    assert [stream[0] for stream in history["streams"]] == ["a", "out"]
    assert set(history["stages"][0]["ratios"]) == {"a", "out"}
    assert session.go({"conv1": 9, "a": 5, "b": 5, "c": 5}) == {"a": 1, "b": 1, "c": 1}
    assert session.go({"conv1": 9}) == {}
    assert session.stopped == "no layer is short of filters"


@pytest.mark.parametrize("init", ["zero", "random", "split", "gradmax"])
def test_starts_of_new_filters(init: str) -> None:
    session = Session(growing(LENET, init=init, least=3, by=0.0))
    session.model.eval()
    before = session.model(session.example)
    assert session.go({CONV2: 5}) == {CONV2: 3}
    after = session.model(session.example)
    assert (difference(before, after) < 1e-5) == (init != "random")
    read, wrote = session.model.features[6].weight, session.model.features[3].weight
    assert (wrote.flatten(1).norm(dim=1) > 0).all()
    zero = (read.flatten(2).abs().sum((0, 2)) == 0).sum()
    assert int(zero) == (3 if init in ("zero", "gradmax") else 0)


class Draws(Widening):
    """As importing a package may do, in one process and not in the next."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        torch.rand(3)


def test_the_same_seed_grows_the_same_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dessilbi.applications.grow.Widening", Draws)
    found = []
    for seed in (0, 0, 1):
        session = Session(LENET.replace(seed=seed))
        torch.manual_seed(len(found))  # what else draws random numbers plays no part
        state = torch.get_rng_state()
        session.go({CONV1: 4})
        assert torch.equal(torch.get_rng_state(), state)
        found.append(session.model.features[0].weight[4:].detach())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


# -- the step size -----------------------------------------------------------------------------------------------


def test_the_step_size_falls_when_growth_is_over() -> None:
    session = Session(LENET.replace(lr=0.2, lr_drop=4.0, warmup=1.0))
    lr = session.growth.step_size
    assert [lr(step, 10) for step in (0, 4, 9, 10, 49)] == pytest.approx([0.02, 0.1, 0.2, 0.2, 0.2])
    session.go(ALL)
    assert [lr(step, 10) for step in (50, 51, 99)] == [0.2] * 3  # no second warm-up
    session.go({})
    assert session.stopped
    assert [lr(step, 10) for step in (100, 169)] == pytest.approx([0.05] * 2)


def test_with_a_cosine_every_size_is_trained_to_the_end() -> None:
    session = Session(LENET.replace(lr=0.2, schedule="cosine"))
    lr = session.growth.step_size

    def cosine(part: float) -> float:
        return 0.1 * (1 + math.cos(math.pi * part))

    assert [lr(step, 10) for step in (0, 25, 49)] == pytest.approx([cosine(x) for x in (0, 0.5, 0.98)])
    session.go(ALL)
    assert [lr(step, 10) for step in (50, 75, 99)] == pytest.approx([cosine(x) for x in (0, 0.5, 0.98)])
    session.go({})
    assert [lr(step, 10) for step in (100, 135, 169)] == pytest.approx([cosine(x) for x in (0, 0.5, 69 / 70)])


# -- what is written down ----------------------------------------------------------------------------------------


def test_the_history(tmp_path: Path) -> None:
    session = Session(growing(LENET, least=2, by=0.0))
    session.go({CONV1: 4, FC: 3}, loss=2.0)
    session.go({}, loss=1.5)
    run = Run(tmp_path, LENET)
    session.growth.write(run)
    found = json.loads(run.growth_file.read_text())
    assert found["version"] == 1
    assert found["settings"]["every"] == 5
    assert found["streams"] == [[CONV1], [CONV2], [CONV3], [FC]]
    assert (found["stopped"], found["end"]) == ("no layer is short of filters", 17)
    first, second = found["stages"]
    assert first["ratios"] == {CONV1: 1.0, CONV2: 0.0, CONV3: 0.0, FC: pytest.approx(3 / 7)}
    assert first["grew"] == {CONV1: 2}
    assert first["widths"] == {CONV1: 4, CONV2: 5, CONV3: 6, FC: 7, OUT: 10}
    assert second["widths"] == {CONV1: 6, CONV2: 5, CONV3: 6, FC: 7, OUT: 10}
    assert [stage["parameters"] for stage in found["stages"]] == [
        lenet_parameters(4, 5, 6, 7), lenet_parameters(6, 5, 6, 7),
    ]  # fmt: skip
    assert second["macs"] == profile(session.model, session.example).macs
    assert (second["accuracy"], second["loss"], second["epoch"]) == (0.5, 1.5, 10)
    # Three seconds an epoch, as said, and what the decisions themselves took.
    assert 15 <= first["seconds"] < 30 <= second["seconds"] < 60
    again = Growth(LENET)
    again.load_state_dict(session.growth.state_dict())
    assert again.state_dict() == session.growth.state_dict()
    assert again.end == 17


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speed": 3}, "grow_options has 'speed': known are every, tau, by"),
        ({"every": 0}, "every=0: must be a whole number of at least 1"),
        ({"every": 2.5}, "every=2.5"),
        ({"tau": 1.5}, "tau=1.5: must be a number of at least 0 and at most 1"),
        ({"tau": {"features": -1}}, "tau of features=-1"),
        ({"tau": "high"}, "tau='high'"),
        ({"by": -0.1}, "by=-0.1"),
        ({"least": True}, "least=True"),
        ({"growths": 0}, "growths=0"),
        ({"params": [1000, 0]}, "params=0"),
        ({"macs": 1e6}, "macs=1000000.0"),
        ({"flat": math.nan}, "flat=nan"),
        ({"policy": "greedy"}, "policy='greedy': must be one of ratio, uniform"),
        ({"init": "ones"}, "init='ones': must be one of zero, random, gradmax, split"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("[", r"\[").replace("(", r"\(")):
        LENET.replace(grow_options=options)


def test_a_run_that_is_too_short_to_grow() -> None:
    Growth(LENET.replace(epochs=12))
    with pytest.raises(ValueError, match="epochs=11 with grow_options every=5 and then=7: there is no time to grow"):
        Growth(LENET.replace(epochs=11))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "sgd"}, "which selects nothing: take 'dessilbi' or 'dessiadamw'"),
        ({"keep": 0.3}, "a target would fix how much is selected; give lam"),
        ({"patience": 3}, "patience=3"),
        ({"method": "l1"}, "leave one of them out"),
    ],
)
def test_configurations_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LENET.replace(**changes)


# -- the paper's experiments -------------------------------------------------------------------------------------

SEEDS = {
    "vgg16": ([8] * 13, 2_960_000),
    "vgg19": (
        [1, 1, 2, 2, 4, 4, 4, 4, 8, 8, 8, 8, 8, 8, 8, 8],
        [110_000, 200_000, 400_000, 820_000, 1_410_000, 2_000_000],
    ),
    "resnet56": ([8] * 55, 2_690_000),
}


@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
@pytest.mark.parametrize("network", SEEDS)
def test_presets_of_the_paper(network: str, data: str) -> None:
    config = presets.get(f"grow/{network}-{data}")
    assert (config.lr, config.nu, config.kappa, config.batch, config.data) == (0.01, 100.0, 1.0, 128, data)
    assert (config.schedule, config.lr_drop, config.conv, config.linear) == ("step", 10.0, "filter", "none")
    settings = Growing.of(config.grow_options)
    assert (settings.every, settings.tau, settings.then, settings.policy) == (10, 0.8, 30, "ratio")
    widths, budget = SEEDS[network]
    assert settings.params == (3_370_000 if (network, data) == ("resnet56", "cifar100") else budget)
    classes = 10 if data == "cifar10" else 100
    model = create(config.model, classes, 3, **config.model_options)
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert [m.out_channels for m in convolutions] == widths
    befores = [3, *widths[:-1]]
    expected = sum(9 * i * o + 2 * o for i, o in zip(befores, widths, strict=True))
    expected += 9 * classes if network == "resnet56" else 9 * 512 + 513 * classes
    assert sum(p.numel() for p in model.parameters()) == expected
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, classes)
    # All of its convolutions can grow, a residual network's three streams each by itself.
    streams = Widening(model.eval(), torch.zeros(1, 3, 32, 32)).streams
    growing_layers = [path for stream in streams for path in stream if path not in ("classifier.0",)]
    assert len(growing_layers) == len(widths)
    if network == "resnet56":
        assert sorted(len(stream) for stream in streams) == [1] * 27 + [9, 9, 10]


def test_presets_for_a_gpu_differ_in_speed_only_from_those_of_the_paper() -> None:
    for network, (_, budget) in SEEDS.items():
        fast, paper = (presets.get(f"grow/{network}-cifar10{end}") for end in ("-fast", ""))
        assert fast.model_options == paper.model_options
        assert fast.grow_options["params"] == budget
        assert fast.compile == "graph"
