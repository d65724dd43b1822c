# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer over four ranks: four partitions, or two copies of two partitions, against one process of its."""

import copy
import os
import warnings

import pytest
import pytorch_lightning as pl
import torch
from multiprocess.cases_checkpoints import folder
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lamina
from lamina.errors import UsageError
from lamina.integrations.lightning import LaminaStrategy

RANK = int(os.environ.get("RANK", 0))
PIPELINE, COPIES = {"partitions": 4}, {"partitions": 2}
# Lightning's warnings of few workers and the like.
warnings.filterwarnings("ignore", module="pytorch_lightning|lightning_fabric")


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]
        self.first, self.blocks, self.last = nn.Linear(6, 16), nn.Sequential(*blocks), nn.Linear(16, 1)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.last(self.blocks(self.first(x))) * self.scale

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = functional.mse_loss(self(x), y)
        self.log_dict({"loss": loss, "step": float(self.global_step)}, on_epoch=True, on_step=True)
        self.log("largest", x.max(), reduce_fx="max")
        return {"loss": loss, "seen": x[:, 0]}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Seen(pl.Callback):
    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        assert outputs["seen"].shape == batch[0].shape[:1]
        self.steps.append(float(outputs["loss"]))


def data(samples):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(samples, 6, generator=generator), torch.randn(samples, 1, generator=generator))


def trainer_of(strategy, *callbacks, max_epochs=2, accelerator="cpu", **options):
    options = {"logger": False, "enable_checkpointing": bool(callbacks), "log_every_n_steps": 1} | options
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        strategy=strategy,
        accelerator=accelerator,
        devices=1,
        max_epochs=max_epochs,
        callbacks=[Seen(), *callbacks],
        **quiet,
        **options,
    )


def run(strategy, loader, *callbacks, ckpt_path=None, **options):
    """Trains a model, and gives all that can be seen of it. Its checkpoint is one process's, whoever writes it."""
    torch.manual_seed(0)
    net, trainer = Net().double(), trainer_of(strategy, *callbacks, **options)
    dataset = TensorDataset(*(each.double() for each in loader.dataset.tensors))
    # Lightning's own shuffles where there are copies.
    shares = (
        None if strategy == "auto" else DistributedSampler(dataset, lamina.dp_size(), lamina.dp_rank(), shuffle=False)
    )
    loader = DataLoader(dataset, loader.batch_size, sampler=shares)
    trainer.fit(net, loader, loader, ckpt_path=ckpt_path)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    rows = torch.cat(trainer.predict(net, loader))
    state = trainer._checkpoint_connector.dump_checkpoint()
    kept = {
        key: copy.deepcopy(state[key]) for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step")
    }
    return {"losses": trainer.callbacks[0].steps, "metrics": metrics, "predictions": rows, **kept}


def require_close(found, expected, name="", atol=1e-11):
    if isinstance(expected, dict):
        assert list(found) == list(expected), f"{name}: {list(found)}, {list(expected)}"
        for key in expected:
            require_close(found[key], expected[key], f"{name}.{key}", atol)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), name
        for at, (one, other) in enumerate(zip(found, expected, strict=True)):
            require_close(one, other, f"{name}[{at}]", atol)
    elif isinstance(expected, (float, torch.Tensor)):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=atol, msg=lambda text: f"{name}: {text}")
    else:
        assert found == expected, f"{name}: {found}, {expected}"


def strategy(microbatches=4, **keys):
    return LaminaStrategy(microbatches=microbatches, timeout_s=60, **keys)


def case_a_pipeline_trains_as_one_process():
    loader = DataLoader(data(58), 16)  # the last batch has 10, in four microbatches
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}
    require_close(run(strategy(**PIPELINE), loader, **options), run("auto", loader, **options))


def case_copies_of_a_pipeline_train_as_one_process():
    expected = run("auto", DataLoader(data(48), 16), gradient_clip_val=0.5)
    found = run(strategy(**COPIES), DataLoader(data(48), 8), gradient_clip_val=0.5)
    losses = torch.tensor(lamina.allgather(found.pop("losses"), lamina.DP_GROUP)).mean(0)
    torch.testing.assert_close(losses, torch.tensor(expected.pop("losses")))
    rows = lamina.allgather(found.pop("predictions"), lamina.DP_GROUP)
    require_close(torch.stack(rows, 1).flatten(0, 1), expected.pop("predictions"))
    assert found.pop("metrics")["val_loss"] == pytest.approx(expected.pop("metrics")["val_loss"])
    require_close(found, expected)


def case_a_training_resumes_from_its_checkpoint_in_any_layout():
    whole = run("auto", DataLoader(data(48), 16), max_epochs=3)
    with folder() as path:
        keeps = pl.callbacks.ModelCheckpoint(path, "best", "val_loss", mode="max", save_weights_only=False)
        run(strategy(**PIPELINE), DataLoader(data(48), 16), keeps, max_epochs=1)
        lamina.shutdown()
        assert keeps.best_model_path == str(path / "best.ckpt")
        for kind, rows in (strategy(**COPIES), 8), ("auto", 16):
            resumed = run(kind, DataLoader(data(48), rows), ckpt_path=keeps.best_model_path, max_epochs=3)
            for key in "state_dict", "optimizer_states", "lr_schedulers", "global_step":
                require_close(resumed[key], whole[key], key)


def case_autocast_is_that_of_one_process_with_the_same_microbatches():
    expected = run("auto", DataLoader(data(48), 4), precision="bf16-mixed", accumulate_grad_batches=4)
    lamina.init(microbatches=4, ddp=True, timeout_s=60, **PIPELINE)
    found = run("lamina", DataLoader(data(48), 16), precision="bf16-mixed")
    require_close(found["state_dict"], expected["state_dict"])


class Keeping(Net):
    """Keeps what it has seen, and asks for what is not there."""

    def __init__(self, **asked):
        super().__init__()
        self.seen, self.asked = [], asked
        self.automatic_optimization = not asked.get("manual")
        if asked.get("backward"):
            self.on_before_backward = lambda loss: None

    def training_step(self, batch, batch_idx):
        if self.asked.get("log"):
            self.log("metric", self.asked)
        return super().training_step(batch, batch_idx)


def case_what_is_not_there_is_named():
    loader = DataLoader(data(16), 8)
    for options, said in (
        ({"precision": "16-true"}, "precision='16-true'"),
        ({"sync_batchnorm": True}, "sync_batchnorm"),
    ):
        with pytest.raises(UsageError, match=said):
            trainer_of(strategy(**PIPELINE), **options)
    with pytest.raises(UsageError, match="tensor_parallel_degree is not there"):
        lamina.shutdown()
        trainer_of(strategy(tensor_parallel_degree=2, prescaled_batch=True))
    lamina.shutdown()
    for asked, said in ("manual", "manual optimization"), ("backward", "on_before_backward"), ("log", "of a dict"):
        with pytest.raises(UsageError, match=said):
            trainer_of(strategy(**PIPELINE)).fit(Keeping(**{asked: True}), loader)
    with pytest.raises(UsageError, match="one module"):
        trainer_of(strategy(**PIPELINE)).fit(Net(), loader)
