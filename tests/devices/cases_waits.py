# SPDX-License-Identifier: Apache-2.0
"""How often the host waits for an accelerator in a step, of one rank."""

import emulated
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import lamina
from lamina import optim
from lamina.trainer import Callback, ComposerModel, Trainer
from lamina.trainer.undisturbed import undisturbed

MICROBATCHES, CLASSES = 3, 5
DEVICE = "emulated:0"


def text():
    """A model of text, and a batch of 6 sequences."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.Embedding(11, 16), layer, nn.Linear(16, CLASSES))
    return model, torch.randint(11, (6, 8)), torch.randint(CLASSES, (6, 8))


def words():
    """One of words alone. It has no LayerNorm: the host's kernel keeps other statistics of halves than devices do."""
    model = nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, CLASSES))
    return model, torch.randint(11, (6, 8)), torch.randint(CLASSES, (6, 8))


def pictures(momentum=0.1):
    """A model of pictures, and a batch of 6 pictures."""
    norms = [nn.BatchNorm2d(4, momentum=momentum), nn.BatchNorm1d(36, momentum=momentum)]
    frozen = nn.BatchNorm2d(4).eval()
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), norms[0], nn.ReLU(), frozen, nn.MaxPool2d(2), nn.Flatten(), norms[1], nn.Linear(36, CLASSES)
    )
    return model, torch.randn(6, 3, 8, 8), torch.randint(CLASSES, (6,))


class Training:
    """A model that trains on a device with one batch; `clip` is called before updates."""

    def __init__(self, make, optimizer, clip=None, device=DEVICE, **config):
        torch.manual_seed(0)
        lamina.init(microbatches=MICROBATCHES, device=device, **config)
        model, *batch = make()
        self.clip = clip or (lambda training: None)
        self.model = lamina.DistributedModel(model.to(device))
        self.optimizer = optimizer(self.model.parameters())
        self.batch = [each.to(device) for each in batch]

    def backward(self, loss):
        self.model.backward(loss)

    def update(self):
        self.optimizer.step()

    def step(self):
        @lamina.step
        def run(x, y):
            loss = functional.cross_entropy(self.model(x).float().flatten(0, -2), y.flatten())
            self.backward(loss)
            return loss

        self.optimizer.zero_grad()
        loss = run(*self.batch).reduce_mean()
        self.clip(self)
        self.update()
        return loss


def waits_of(step, steps=4):
    """How often a step waits, once what the first ones do once is done."""
    for _ in range(3):
        step()
    emulated.reset_counts()
    for _ in range(steps):
        step()
    counts = emulated.counts()
    assert not counts["drains"], counts["drains"]
    assert counts["waits"] % steps == 0, f"{counts['waits']} waits in {steps} steps"
    return counts["waits"] // steps


def distributed(kind, **options):
    return lambda parameters: lamina.DistributedOptimizer(kind(parameters, **options))


OPTIMIZERS = {
    "torch's": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "torch's, distributed": distributed(torch.optim.AdamW, lr=1e-3),
    "SGD": distributed(optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": distributed(optim.AdamW, lr=1e-3),
    "RAdam": distributed(optim.RAdam, lr=1e-3),
}


def case_a_step_waits_for_nothing():
    for name, optimizer in OPTIMIZERS.items():
        for make in (text, pictures):
            training = Training(make, optimizer)
            assert waits_of(training.step) == 0, (name, make.__name__)
            assert isinstance(training.step().item(), float)
            lamina.shutdown()


def clip_masters(training):
    training.optimizer.clip_master_grads(0.5)


def clip_norm(training):
    nn.utils.clip_grad_norm_(training.model.parameters(), 0.5)


def clip_values(training):
    nn.utils.clip_grad_value_(training.model.parameters(), 0.5)


def case_clipping_waits_once():
    for clip, expected in ((clip_masters, 1), (clip_norm, 0), (clip_values, 0)):
        for name in ("torch's, distributed", "AdamW"):
            assert waits_of(Training(text, OPTIMIZERS[name], clip).step) == expected, (clip, name)
            lamina.shutdown()


SCALES = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2**8}}


def scaled(kind):
    return lambda parameters: lamina.DistributedOptimizer(kind(parameters, lr=1e-3), **SCALES)


def case_a_loss_scale_waits_once():
    for config in ({}, {"bf16": True}, {"fp16": True}):
        for kind in (torch.optim.AdamW, optim.AdamW):
            for clip in (None, clip_masters, clip_values):
                assert waits_of(Training(words, scaled(kind), clip, **config).step) == 1, (config, kind, clip)
                lamina.shutdown()


def case_a_grad_scaler_waits_once():
    class Scaled(Training):
        def __init__(self, *args, scaler, **config):
            super().__init__(*args, **config)
            self.scaler = scaler("emulated", init_scale=2.0**8)

        def backward(self, loss):
            self.model.backward(self.scaler.scale(loss))

        def update(self):
            self.scaler.step(self.optimizer)
            self.scaler.update()

    for scaler in (torch.amp.GradScaler, lamina.amp.GradScaler):
        for name in ("torch's", "torch's, distributed", "AdamW"):
            assert waits_of(Scaled(text, OPTIMIZERS[name], scaler=scaler).step) == 1, (scaler, name)
            lamina.shutdown()
        fused = distributed(optim.AdamW, lr=1e-3, fused=True)
        assert waits_of(Scaled(text, fused, scaler=scaler).step) <= 2, scaler
        lamina.shutdown()


def lamb(parameters):
    first, *others = parameters
    groups = [{"params": [first]}, {"params": others, "weight_decay": 0.1}]
    return lamina.DistributedOptimizer(optim.LAMB(groups, lr=1e-2))


def case_lamb_waits_once_more():
    for clip in (None, clip_masters):  # it clips itself
        assert waits_of(Training(text, lamb, clip).step) == 2, clip
        lamina.shutdown()


def case_values_of_a_device_are_looked_at_for_offsets_once():
    training = Training(
        lambda: (nn.Linear(4, CLASSES), torch.randn(6, 4), torch.randint(CLASSES, (6,))), OPTIMIZERS["SGD"]
    )
    weights = torch.rand(MICROBATCHES, device=DEVICE)  # another length than the classes have

    @lamina.step
    def run(x, y, weight):
        training.model.backward(functional.cross_entropy(training.model(x), y) * weight.sum())

    def step():
        run(*training.batch, weights)
        training.update()

    assert waits_of(step) == 0


class Classifier(ComposerModel):
    """A model of the Trainer."""

    def __init__(self, make):
        super().__init__()
        self.layers, *self.batch = make()

    def forward(self, batch):
        return self.layers(batch[0])

    def loss(self, outputs, batch):
        return functional.cross_entropy(outputs.flatten(0, -2), batch[1].flatten())


def waits_of_trainer(make, precision="fp32", callbacks=(), **options):
    """How often a batch waits, after the first ones."""
    torch.manual_seed(0)
    model = Classifier(make)
    waits = []

    class Counts(Callback):
        def batch_end(self, state, logger):
            waits.append(emulated.counts()["waits"])

    data = [[each.to(DEVICE) for each in model.batch]] * 16
    trainer = Trainer(
        model=model.to(DEVICE),
        train_dataloader=DataLoader(data, batch_size=None, sampler=lamina.dist.get_sampler(data, shuffle=False)),
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        max_duration="8ba",
        grad_accum=MICROBATCHES,
        callbacks=[*callbacks, Counts()],
        precision=precision,
        device="gpu",
        seed=1,
        **options,
    )
    trainer.fit()
    loss = trainer.state.total_loss_dict["loss/train/total"]
    assert isinstance(loss, torch.Tensor) and 0 < float(loss) < 10
    trainer.close()
    return waits[-1] - waits[-2]


def case_the_trainer_waits_for_nothing_unless_somebody_reads():
    for make in (text, pictures):
        assert waits_of_trainer(make, progress_bar=False) == 0, make
    assert waits_of_trainer(text) == 0  # the bar reads now and then
    assert waits_of_trainer(text, precision="amp_fp16", progress_bar=False) == 1
    assert waits_of_trainer(text, progress_bar=False, log_to_console=True) == 1
    assert waits_of_trainer(text, progress_bar=False, log_to_console=True, console_log_interval="5ba") == 0


def looks_at_device():
    counts = emulated.counts()
    return counts["waits"] + counts["drained"]


class PutsBack(Callback):
    """Changes buffers where an evaluation would, and counts what that waits."""

    def __init__(self):
        self.waits = []

    def batch_end(self, state, logger):
        before = [buffer.clone() for buffer in state.model.buffers()]
        waited = looks_at_device()
        with undisturbed(state.model), torch.no_grad():
            for buffer in state.model.buffers():
                buffer.add_(1)
        self.waits.append(looks_at_device() - waited)
        for buffer, value in zip(state.model.buffers(), before, strict=True):
            assert torch.equal(buffer, value)


def case_what_an_evaluation_has_changed_is_put_back_without_a_wait():
    puts_back = PutsBack()
    waits_of_trainer(pictures, callbacks=[puts_back])
    assert puts_back.waits == [0] * 8
