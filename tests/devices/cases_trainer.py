# SPDX-License-Identifier: Apache-2.0
"""The Trainer on one accelerator trains as on the host."""

import collections
import tempfile

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

import lamina
from lamina.composer.monitors import MemoryMonitor
from lamina.trainer import Callback, ComposerModel, DataSpec, Trainer

CLASSES = 7


class Block(nn.Module):
    """A layer of a language model that looks back."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.second(x))


class Language(ComposerModel):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(CLASSES, 16), nn.Embedding(12, 16)
        self.blocks = nn.Sequential(Block(16, 2), Block(16, 2))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, batch):
        places = torch.arange(batch["words"].shape[1], device=batch["words"].device)
        return self.head(self.blocks(self.words(batch["words"]) + self.places(places)))

    def loss(self, outputs, batch):
        return functional.cross_entropy(outputs[:, :-1].flatten(0, 1), batch["words"][:, 1:].flatten())

    def get_metrics(self, is_train):
        return {"accuracy": MulticlassAccuracy(CLASSES, average="micro")}

    def update_metric(self, batch, outputs, metric):
        metric.update(outputs[:, :-1].flatten(0, 1), batch["words"][:, 1:].flatten())


class Pictures(ComposerModel):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 7),
        )

    def forward(self, batch):
        return self.layers(batch["pictures"])

    def loss(self, outputs, batch):
        return functional.cross_entropy(outputs, batch["of"])

    def get_metrics(self, is_train):
        return {"accuracy": MulticlassAccuracy(CLASSES, average="micro")}

    def update_metric(self, batch, outputs, metric):
        metric.update(outputs, batch["of"])


class Seen(Callback):
    """The devices of all that a training has."""

    def __init__(self):
        self.devices, self.losses = collections.defaultdict(set), []

    def run_event(self, event, state, logger):
        if event.value == "after_loss":
            tensors = {"batch": state.batch, "outputs": {"": state.outputs}, "loss": {"": state.loss}}
            for name, held in tensors.items():
                self.devices[name] |= {each.device for each in held.values()}
        if event.value == "after_train_batch":
            self.devices["model"] |= {each.device for each in (*state.model.parameters(), *state.model.buffers())}
            self.devices["gradients"] |= {each.grad.device for each in state.model.parameters()}
            self.devices["metrics"] |= {each.device for each in state.train_metrics.values()}
        self.keep_losses(event, state)
        if event.value == "eval_batch_end":
            self.devices["evaluated"] |= {each.device for each in state.batch.values()}

    def keep_losses(self, event, state):
        if event.value == "batch_end":
            self.losses.append(float(state.total_loss_dict["loss/train/total"]))


def data_of(kind, batches=4):
    generator = torch.Generator().manual_seed(5)
    if kind is Language:
        return [{"words": torch.randint(CLASSES, (6, 12), generator=generator)} for _ in range(batches)]
    return [
        {
            "pictures": torch.randn(6, 3, 8, 8, generator=generator),
            "of": torch.randint(CLASSES, (6,), generator=generator),
        }
        for _ in range(batches)
    ]


def trained(kind, device, precision="fp32", monitors=(), seen=Seen, **options):
    torch.manual_seed(3)
    model, seen, data = kind(), seen(), data_of(kind)
    options = {"max_duration": "2ep"} | options
    loaders = [
        DataLoader(part, batch_size=None, sampler=lamina.dist.get_sampler(part, shuffle=False))
        for part in (data, data[:2])
    ]
    trainer = Trainer(
        model=model,
        train_dataloader=loaders[0],
        eval_dataloader=loaders[1],
        optimizers=torch.optim.AdamW(model.parameters(), 1e-2),
        grad_accum=2,
        callbacks=[seen, *monitors],
        device=device,
        precision=precision,
        seed=1,
        progress_bar=False,
        **options,
    )
    trainer.fit()
    values = {name: each.to("cpu", copy=True) for name, each in trainer.state.model.state_dict().items()}
    return seen, values, trainer.state


def case_trains_as_on_the_host():
    for kind in (Language, Pictures):
        expected, values, state_there = trained(kind, "cpu")
        measured = dict(state_there.eval_metric_values)
        seen, found, state = trained(kind, "gpu")
        own = {torch.device("emulated", 0)}
        names = ("batch", "outputs", "loss", "model", "gradients", "metrics", "evaluated")
        assert dict(seen.devices) == dict.fromkeys(names, own), kind
        states = state.optimizers[0].state.values()
        assert {
            each.device for one in states for each in one.values() if isinstance(each, torch.Tensor) and each.dim()
        } == own
        torch.testing.assert_close(seen.losses, expected.losses, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found, values, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(dict(state.eval_metric_values), measured, rtol=1e-4, atol=1e-5)


def case_half_precision_is_that_of_the_device():
    for precision in ("amp_bf16", "amp_fp16"):
        seen, _, state = trained(Language, "gpu", precision)
        assert seen.losses[-1] < seen.losses[0]
        assert state.precision.value == precision
        assert state.scaler.get_scale() >= 1


def case_an_optimizer_with_states_goes_on_with_them():
    torch.manual_seed(3)
    model, data = Pictures(), data_of(Pictures)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    options = {"model": model, "optimizers": optimizer, "max_duration": "1ep", "seed": 1, "precision": "fp32"}
    moments = []
    for device in ("cpu", "gpu", "cpu"):
        trainer = Trainer(**options, train_dataloader=DataLoader(data, batch_size=None), device=device)
        trainer.fit()
        trainer.close()
        (state,) = [optimizer.state[each] for each in model.parameters() if each is model.layers[0].weight]
        moments.append((int(state["step"]), state["exp_avg"].device.type, model.layers[0].weight.device.type))
    assert moments == [(4, "cpu", "cpu"), (8, "emulated", "emulated"), (12, "cpu", "cpu")]


def case_transforms_see_a_batch_on_the_device():
    devices = []

    def transform(batch):
        devices.extend(each.device.type for each in batch.values())
        return batch

    model = Pictures()
    spec = DataSpec(DataLoader(data_of(Pictures), batch_size=None), device_transforms=transform)
    trainer = Trainer(
        model=model, train_dataloader=spec, optimizers=torch.optim.SGD(model.parameters(), 0.1), max_duration="1ba"
    )
    trainer.fit()
    assert set(devices) == {"emulated"}
    outputs = trainer.predict(DataLoader(data_of(Pictures), batch_size=None))
    assert [each.device.type for each in outputs] == ["cpu"] * 4


class Kept:
    """A logger that keeps what it is told."""

    def __init__(self):
        self.numbers = {}

    def log(self, step, values):
        self.numbers |= values

    def close(self):
        pass


def case_a_monitor_has_the_memory_of_the_device():
    for device, is_there in (("gpu", True), ("cpu", False)):
        kept = Kept()
        trained(Pictures, device, loggers=[kept], monitors=[MemoryMonitor()])
        assert ("memory/allocated_mem" in kept.numbers) == is_there, sorted(kept.numbers)
        assert kept.numbers["memory/peak_process_mem"] > 0


def case_a_training_goes_on_on_another_device():
    for kind in (Language, Pictures):
        with tempfile.TemporaryDirectory() as folder:
            _, expected, _ = trained(kind, "cpu")
            trained(kind, "gpu", max_duration="1ep", save_folder=folder)
            _, found, _ = trained(kind, "cpu", load_path=folder)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
