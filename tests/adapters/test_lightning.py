import math

import pytest
import torch
from tests.adapters.toy import BATCH, KEEP, RAMP, X, Y, agrees, by_hand, network, optimizer_of, same
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from dessilbi import DessiLBI, Path

lightning = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed: pip install lightning")

from dessilbi.adapters.lightning import PathCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        self.log("time", float(self.current_epoch))  # a name that the path has for itself
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return optimizer_of(self)


class Batches:
    """A loader that can go on where it was, as torchdata's can."""

    def __init__(self):
        self.at = 0

    def __len__(self):
        return len(X) // BATCH

    def __iter__(self):
        self.at %= len(self)
        while self.at < len(self):
            self.at += 1
            here = slice((self.at - 1) * BATCH, self.at * BATCH)
            yield X[here], Y[here]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(X, Y, strict=True)


def loader(**options):
    return DataLoader(TensorDataset(X, Y), BATCH, **options)


def trainer(tmp_path, *callbacks, **options):
    options = {"max_epochs": 3, "accelerator": "cpu", "devices": 1, **options}
    return lightning.Trainer(
        default_root_dir=tmp_path,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(c, lightning.callbacks.ModelCheckpoint) for c in callbacks),
        **options,
    )


def fit(tmp_path, callback, module=None, data=None, val=None, **options):
    module = module or Module()
    trainer(tmp_path, callback, **options).fit(module, loader() if data is None else data, val)
    return module


def test_the_path_is_that_of_a_plain_loop(tmp_path):
    callback = PathCallback(KEEP, RAMP, early=4, file=tmp_path / "runs" / "a.path")
    module = fit(tmp_path, callback, val=loader())
    path, expected = callback.path, by_hand(3)
    # 16 steps an epoch: 16 ** (i / 4), and the ends of the epochs.
    steps = [1, 2, 4, 8, 16, 32, 48]
    assert [p["point"] for p in path.points] == [s / 16 for s in steps]
    agrees(path, [expected[s - 1] for s in steps], "net.")
    same(Path.load(tmp_path / "runs" / "a.path"), path)
    last = path.points[-1]
    with torch.no_grad():
        each = [F.cross_entropy(module.net(x), y) for x, y in zip(X.split(BATCH), Y.split(BATCH), strict=True)]
    assert last["val_loss"] == pytest.approx(float(torch.stack(each).mean()), rel=1e-5)
    assert 0 < last["train_loss"] < path.points[4]["train_loss"]
    assert last["time"] == pytest.approx(4.8)
    assert last["time_"] == 2
    assert "val_loss" not in path.points[0]


def test_accumulated_gradients(tmp_path):
    callback = PathCallback(KEEP, RAMP, early=2)
    fit(tmp_path, callback, accumulate_grad_batches=3)
    # 16 batches are 6 steps, the last of a single batch: 6 ** (i / 2) is 1 and 2.
    assert [p["point"] for p in callback.path.points] == [3 / 16, 6 / 16, 1, 2, 3]
    expected = by_hand(3, accumulate=3)
    agrees(callback.path, [expected[s - 1] for s in (1, 2, 6, 12, 18)], "net.")


def test_a_run_that_ends_inside_an_epoch(tmp_path):
    callback = PathCallback(KEEP, RAMP, every_n_epochs=2, early=0)
    fit(tmp_path, callback, max_epochs=-1, max_steps=40)
    assert [p["point"] for p in callback.path.points] == [2, 2.5]
    expected = by_hand(3, most=40)
    agrees(callback.path, [expected[31], expected[39]], "net.")


def test_a_stream_needs_a_number_of_steps(tmp_path):
    stream = DataLoader(Stream(), BATCH)
    for epochs in (3, -1):
        with pytest.raises(ValueError, match="max_steps"):
            fit(tmp_path, PathCallback(KEEP), data=stream, max_epochs=epochs)
    callback = PathCallback(KEEP, RAMP, early=2)
    fit(tmp_path, callback, data=stream, max_epochs=-1, max_steps=36)
    assert [p["point"] for p in callback.path.points] == [1 / 36, 6 / 36, 1, 2, 2 + 4 / 36]
    expected = by_hand(3, most=36)
    agrees(callback.path, [expected[s - 1] for s in (1, 6, 16, 32, 36)], "net.")
    callback = PathCallback()
    fit(tmp_path, callback, data=stream)
    assert [p["point"] for p in callback.path.points] == [1, 2, 3]


def test_without_keep_lam_is_the_users(tmp_path):
    class Fixed(Module):
        def configure_optimizers(self):
            self.optimizer = optimizer_of(self)
            self.optimizer.lam = 0.02
            return self.optimizer

    callback = PathCallback(early=0)
    module = fit(tmp_path, callback, Fixed())
    assert [p["lam"] for p in callback.path.points] == [0.02] * 3
    v = module.optimizer.dual(module.net[0].weight)
    assert torch.equal(callback.path.support("net.0.weight"), v.abs() > 0.02)
    assert (v.abs() > 0.02).any()


@pytest.mark.parametrize(
    ("saves", "validated", "step"),
    [
        ({"every_n_epochs": 1}, False, 32),  # at the end of the training epoch
        ({"every_n_epochs": 1, "save_on_train_epoch_end": False}, True, 32),  # after validation, before that
        ({"every_n_train_steps": 16}, False, 32),  # after the last batch, before both
        ({"every_n_train_steps": 5}, False, 5),  # between two early points
        ({"every_n_train_steps": 5}, False, 20),
    ],
)
def test_a_resumed_fit_goes_on_with_the_same_path(tmp_path, saves, validated, step):
    checkpoints = lightning.callbacks.ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, **saves)
    val = loader() if validated else None
    whole = PathCallback(KEEP, RAMP, early=4)
    trainer(tmp_path, whole, checkpoints, max_epochs=4).fit(Module(), Batches(), val)
    resumed = PathCallback(KEEP, RAMP, early=4)
    file = tmp_path / f"step={step}.ckpt"
    assert torch.load(file, weights_only=True)["callbacks"][resumed.state_key].keys() == {"path"}
    trainer(tmp_path, resumed, max_epochs=4).fit(Module(), Batches(), val, ckpt_path=file)
    if validated or "every_n_train_steps" in saves:
        # Of an epoch that is not over, Lightning's checkpoints do not hold the sums behind what is logged on_epoch.
        at = [p["point"] for p in whole.path.points].index(math.ceil(step / 16))
        there = resumed.path._records[at].pop("train_loss", None)
        assert whole.path._records[at].pop("train_loss") != there
        assert (there is None) == (step == 32)  # and no older value in its place
    same(resumed.path, whole.path)


def test_a_second_fit_begins_a_new_path(tmp_path):
    callback = PathCallback(KEEP, early=0)
    fit(tmp_path, callback)
    first = callback.path
    fit(tmp_path, callback)
    same(callback.path, first)
    assert callback.path is not first


class Two(lightning.LightningModule):
    """Two optimizers by hand, as in a GAN; ours steps once a batch."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.net, self.other = network(), nn.Linear(6, 1)

    def training_step(self, batch, batch_idx):
        ours, theirs = self.optimizers()
        x, y = batch
        for optimizer, loss in ((ours, F.cross_entropy(self.net(x), y)), (theirs, self.other(x).square().mean())):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        return optimizer_of(self.net), torch.optim.SGD(self.other.parameters(), 0.1)


def test_manual_optimization(tmp_path):
    callback = PathCallback(KEEP, RAMP, early=2)
    fit(tmp_path, callback, Two())
    expected = by_hand(3)
    assert [p["point"] for p in callback.path.points] == [1 / 16, 4 / 16, 1, 2, 3]
    agrees(callback.path, [expected[s - 1] for s in (1, 4, 16, 32, 48)], "net.")


def test_the_wrong_optimizer(tmp_path):
    class Plain(Module):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    with pytest.raises(ValueError, match="SGD, and none of them is a DessiLBI.*configure_optimizers"):
        fit(tmp_path, PathCallback(), Plain())

    class Twice(Two):
        def configure_optimizers(self):
            return optimizer_of(self.net), DessiLBI(self.other.parameters(), 0.1)

    with pytest.raises(ValueError, match="one path belongs to one optimizer"):
        fit(tmp_path, PathCallback(), Twice())


def test_no_path_before_the_fit():
    with pytest.raises(ValueError, match="trainer.fit"):
        _ = PathCallback().path


def test_under_its_other_name(tmp_path):
    """`pytorch_lightning` has a Trainer and a Callback of its own."""
    pl = pytest.importorskip("pytorch_lightning", reason="not installed: pip install pytorch-lightning")

    class Other(pl.LightningModule):
        __init__, training_step = Module.__init__, Module.training_step
        configure_optimizers = Module.configure_optimizers

    Other.__init__ = lambda self: (pl.LightningModule.__init__(self), setattr(self, "net", network()))[0]
    callback = PathCallback(KEEP, RAMP, early=0)
    pl.Trainer(
        default_root_dir=tmp_path, callbacks=[callback], max_epochs=3, accelerator="cpu", devices=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    ).fit(Other(), loader())  # fmt: skip
    expected = by_hand(3)
    agrees(callback.path, [expected[15], expected[31], expected[47]], "net.")
