import shutil

import pytest
import torch
from tests.adapters.toy import BATCH, KEEP, RAMP, X, Y, agrees, by_hand, network, optimizer_of, same
from torch import nn
from torch.nn import functional as F

from dessilbi import DessiAdamW, Path, param_groups

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")

from dessilbi.adapters.huggingface import FILE, DessiLBICallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

DATA = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x, labels):
        scores = self.net(x)
        return {"loss": F.cross_entropy(scores, labels), "logits": scores}


class InOrder(transformers.Trainer):
    """The loop by hand does not shuffle."""

    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(DATA)


def trainer(tmp_path, callback, model=None, optimizer=None, kind=InOrder, data=DATA, **options):
    model = model or Model()
    optimizer = optimizer or optimizer_of(model)
    options = {"num_train_epochs": 3, "save_strategy": "no", "logging_strategy": "no", **options}
    args = transformers.TrainingArguments(
        tmp_path,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        max_grad_norm=0,
        lr_scheduler_type="constant",
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        dataloader_pin_memory=False,
        **options,
    )
    return kind(model, args, train_dataset=data, eval_dataset=DATA, callbacks=[callback], optimizers=(optimizer, None))


def test_the_path_is_that_of_a_plain_loop(tmp_path):
    callback = DessiLBICallback(KEEP, RAMP, early=4, file=tmp_path / "runs" / "a.path")
    training = trainer(tmp_path, callback, logging_strategy="epoch", eval_strategy="epoch")
    training.train()
    path, expected = callback.path, by_hand(3)
    # 16 steps an epoch: 16 ** (i / 4), and the ends of the epochs.
    steps = [1, 2, 4, 8, 16, 32, 48]
    assert [p["point"] for p in path.points] == [s / 16 for s in steps]
    agrees(path, [expected[s - 1] for s in steps], "net.")
    same(Path.load(tmp_path / "runs" / "a.path"), path)
    logged = {record["epoch"]: record for record in training.state.log_history if "loss" in record}
    with torch.no_grad():
        loss = float(F.cross_entropy(training.model.net(X), Y))
    assert path.points[-1]["eval_loss"] == pytest.approx(loss, rel=1e-5)
    assert [p["loss"] for p in path.points[4:]] == [logged[e]["loss"] for e in (1, 2, 3)]
    assert path.points[-1].keys() == {"point", "time", "lam", "loss", "grad_norm", "learning_rate", "eval_loss"}
    assert path.points[0].keys() == {"point", "time", "lam"}


def test_accumulated_gradients(tmp_path):
    callback = DessiLBICallback(KEEP, RAMP, early=2)
    model = Model()
    # Parts of an equal size, so that the mean over a step is that of the loop by hand: 16 batches, 4 steps an epoch.
    trainer(tmp_path, callback, model, gradient_accumulation_steps=4).train()
    assert [p["point"] for p in callback.path.points] == [1 / 4, 2 / 4, 1, 2, 3]
    expected = by_hand(3, accumulate=4)
    agrees(callback.path, [expected[s - 1] for s in (1, 2, 4, 8, 12)], "net.")


def test_a_run_that_ends_inside_an_epoch(tmp_path):
    callback = DessiLBICallback(KEEP, RAMP, every_n_epochs=2, early=0)
    trainer(tmp_path, callback, max_steps=40).train()
    assert [p["point"] for p in callback.path.points] == [2, 2.5]
    expected = by_hand(3, most=40)
    agrees(callback.path, [expected[31], expected[39]], "net.")


def test_a_stream(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from DATA

    callback = DessiLBICallback(KEEP, RAMP, early=2)
    trainer(tmp_path, callback, kind=transformers.Trainer, data=Stream(), max_steps=36).train()
    # Where an epoch ends, nobody knew before: the early points are spread over the run.
    assert callback.path.points[-1]["time"] == pytest.approx(3.6)
    expected = by_hand(3, most=36)
    times = [round(p["time"] / 0.1) for p in callback.path.points]
    assert times[:2] == [1, 6]
    agrees(callback.path, [expected[s - 1] for s in times], "net.")


def test_without_keep_lam_is_the_users(tmp_path):
    callback, model = DessiLBICallback(early=0), Model()
    optimizer = optimizer_of(model)
    optimizer.lam = 0.02
    trainer(tmp_path, callback, model, optimizer).train()
    assert [p["lam"] for p in callback.path.points] == [0.02] * 3
    v = optimizer.dual(model.net[0].weight)
    assert torch.equal(callback.path.support("net.0.weight"), v.abs() > 0.02)
    assert (v.abs() > 0.02).any()


@pytest.mark.parametrize(("step", "elsewhere"), [(5, False), (16, False), (20, True), (32, False)])
def test_a_resumed_training_goes_on_with_the_same_path(tmp_path, step, elsewhere):
    """Shuffled, with checkpoints between early points, inside an epoch and at its last step (before it is over)."""
    options = {"kind": transformers.Trainer, "num_train_epochs": 4, "logging_strategy": "epoch"}
    whole = DessiLBICallback(KEEP, RAMP, early=4)
    every = 16 if step == 32 else step
    trainer(tmp_path / "a", whole, save_strategy="steps", save_steps=every, **options).train()
    folder = tmp_path / "a" / f"checkpoint-{step}"
    assert len(Path.load(folder / FILE)) == {5: 3, 16: 5, 20: 5, 32: 6}[step]
    resumed = DessiLBICallback(KEEP, RAMP, early=4)
    if elsewhere:
        folder = shutil.move(folder, tmp_path / "elsewhere")
        options["resume_from_checkpoint"] = str(folder)
    trainer(tmp_path / "a", resumed, **options).train(resume_from_checkpoint=str(folder))
    for path in (whole.path, resumed.path):
        for point in path._records:
            for name in ("loss", "grad_norm", "learning_rate"):  # the Trainer does not keep its running sums
                point.pop(name, None)
    same(resumed.path, whole.path)


def test_a_checkpoint_without_a_path(tmp_path):
    trainer(tmp_path, DessiLBICallback(), save_strategy="epoch").train()
    (tmp_path / "checkpoint-32" / FILE).unlink()
    callback = DessiLBICallback(early=4)
    with pytest.warns(UserWarning, match="checkpoint-32.*begins at step 32.*resume_from_checkpoint"):
        trainer(tmp_path, callback).train(resume_from_checkpoint=str(tmp_path / "checkpoint-32"))
    assert [p["point"] for p in callback.path.points] == [3]


def test_best_model_at_end_is_not_the_end_of_the_run(tmp_path):
    """Stopped after two epochs, because the loss was largest after the first, whose weights are loaded."""
    callback = DessiLBICallback(KEEP, RAMP, early=2, every_n_epochs=3)
    training = trainer(
        tmp_path, callback, save_strategy="epoch", eval_strategy="epoch", load_best_model_at_end=True,
        metric_for_best_model="loss", greater_is_better=True,
    )  # fmt: skip
    training.add_callback(transformers.EarlyStoppingCallback(1))
    training.train()
    assert training.state.best_global_step == 16
    assert training.state.global_step == 32
    assert [p["point"] for p in callback.path.points] == [1 / 16, 4 / 16]


def test_a_transformer(tmp_path):
    """A BERT of two layers, AdamW, a schedule and clipping: the support has exactly the size asked for."""
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    optimizer = DessiAdamW(param_groups(model), 1e-3)
    data = [{"input_ids": torch.randint(0, 30, (8,)), "labels": torch.tensor(i % 2)} for i in range(32)]
    callback = DessiLBICallback(0.1, 0.5, early=2)
    args = transformers.TrainingArguments(
        tmp_path, per_device_train_batch_size=4, num_train_epochs=2, use_cpu=True, disable_tqdm=True, report_to="none",
        save_strategy="no", lr_scheduler_type="cosine", warmup_steps=2,
    )  # fmt: skip
    transformers.Trainer(model, args, train_dataset=data, callbacks=[callback], optimizers=(optimizer, None)).train()
    linear = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    path = callback.path
    assert set(path.names) == linear
    weights = sum(model.get_parameter(name).numel() for name in linear)
    # 8 steps an epoch, 16 in all: 8 ** (i / 2) is 1 and 3. The first step has a step size of 0: V is zero.
    assert [p["point"] for p in path.points] == [1 / 8, 3 / 8, 1, 2]
    counts = [sum(int(path.support(name, at).sum()) for name in path.names) for at in range(4)]
    assert counts == [0, *(round(0.1 * min(1, s / 8) * weights) for s in (3, 8, 16))]


def test_the_wrong_optimizer(tmp_path):
    model = Model()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match=r"SGD, and none of them is a DessiLBI.*optimizers=\(DessiAdamW"):
        trainer(tmp_path, DessiLBICallback(), model, sgd).train()


def test_no_path_before_the_training():
    with pytest.raises(ValueError, match="trainer.train"):
        _ = DessiLBICallback().path
