# SPDX-License-Identifier: Apache-2.0
"""Random numbers of a device, for one rank: of steps, recomputations, traces, evaluations and checkpoints."""

import pathlib
import tempfile

import emulated
import torch
from multiprocess import drawing
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import lamina
from lamina.script_state.generators import Streams
from lamina.tracing.sandbox import Call, undisturbed
from lamina.trainer import Callback, ComposerModel, Trainer

OWN = torch.device("emulated", 0)
ROWS = 4  # of a microbatch


def place():
    """Gives where the device's random numbers are."""
    return torch.emulated.get_rng_state(OWN)


def kept(x):
    """Gives what dropout leaves of ones."""
    return functional.dropout(torch.ones_like(x), 0.5)


class Draws(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.count = count

    def forward(self, x):
        for _ in range(self.count):
            torch.rand(3, device=x.device)
        return x


class Net(nn.Module):
    """Gives what dropouts keep: of its own, of a module after one that draws `count` times, and of its own again."""

    def __init__(self, count):
        super().__init__()
        self.draws, self.drop = Draws(count), nn.Dropout(0.5)

    def forward(self, x):
        return torch.stack([kept(x), self.drop(self.draws(x)), kept(x)])


def dropped(count=0, microbatches=2, before=0, body=None, **keys):
    """By microbatch. `before`: what the process draws on the device before."""
    lamina.init(microbatches=microbatches, timeout_s=60, **keys)
    model = lamina.distribute(Net(count))

    @lamina.step
    def step(x):
        return model(x) if body is None else body(model, x)

    torch.manual_seed(5)
    for _ in range(before):
        torch.rand(3, device=OWN)
    was = place()
    found = step(torch.ones(ROWS * microbatches, 32, device=OWN)).stack().cpu()
    assert torch.equal(place(), was), "the process's own numbers after a step"
    lamina.shutdown()
    return found


def case_dropout_is_that_of_its_microbatch_and_module_alone():
    found = dropped()
    assert torch.equal(dropped(count=3, before=2), found)
    assert torch.equal(dropped(microbatches=1)[0], found[0])
    every = [each for microbatch in found for each in microbatch]
    assert len({each.numpy().tobytes() for each in every}) == len(every)
    assert all(0.3 < each.bool().float().mean() < 0.7 for each in every)


def case_a_seed_of_the_job_says_the_numbers_of_its_steps():
    first = dropped(seed=3)
    assert torch.equal(dropped(seed=3, before=1), first)
    assert not torch.equal(dropped(seed=4), first)


def case_a_seed_by_hand_gives_the_numbers_of_the_plain_program():
    def by_hand(model, x):
        torch.manual_seed(7)
        return model(x)

    def drawn_from(model, x):
        torch.manual_seed(7)
        return torch.cat([kept(x)[None], model(x)])

    torch.manual_seed(7)
    plain = kept(torch.ones(ROWS, 32, device=OWN)).cpu()
    assert torch.equal(dropped(body=by_hand)[0][0], plain)
    own, *of_model = dropped(body=drawn_from)[0]
    assert torch.equal(own, plain)
    assert not any(torch.equal(each, plain) for each in of_model)


def trained(**options):
    return drawing.train(1, batch=drawing.BATCH.to(OWN), **options)


def case_a_part_that_is_computed_again_draws_what_it_drew():
    expected = trained()
    for reentrant in (False, True):
        drawing.assert_same(trained(reentrant=reentrant), expected)
    drawing.assert_different(trained(manual_seed=6), expected)


def case_a_step_is_compared_with_the_plain_model_in_the_same_numbers():
    expected = trained()
    for reentrant in (None, False):
        drawing.assert_same(trained(reentrant=reentrant, verify_steps=2), expected)


def case_a_trace_leaves_the_numbers_where_they_were():
    lamina.init()
    model, x = Net(2).to(OWN), torch.ones(ROWS, 32, device=OWN)
    was, streams = place(), Streams()
    with undisturbed(model, Call((x,), {})):
        model(x)
        assert streams.have_advanced() and not torch.equal(place(), was)
    assert torch.equal(place(), was) and not streams.have_advanced()


class Saved:
    """A job with a checkpoint."""

    def __init__(self, folder, **keys):
        lamina.init(timeout_s=60, **keys)
        torch.manual_seed(0)
        self.folder = folder
        self.model = lamina.DistributedModel(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 1)))
        self.optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(self.model.parameters()))
        self.device = lamina.device()

        @lamina.step
        def step(x):
            loss = self.model(x).square().mean()
            self.model.backward(loss)
            return loss

        self.step = step

    def train(self):
        """The loss of a step, and what the script draws after it."""
        self.optimizer.zero_grad()
        loss = self.step(torch.ones(ROWS, 32, device=self.device)).reduce_mean()
        self.optimizer.step()
        return float(loss), torch.rand(3).tolist(), torch.rand(3, device=self.device).tolist()

    def save(self):
        lamina.save_checkpoint(self.folder, tag="one", model=self.model, optimizer=self.optimizer)

    def resume(self):
        lamina.resume_from_checkpoint(self.folder, tag="one")


def case_a_checkpoint_goes_on_with_the_numbers_of_the_device():
    with tempfile.TemporaryDirectory() as folder:
        job = Saved(folder)
        job.train()
        job.save()
        expected = [job.train(), job.train()]
        lamina.shutdown()
        job = Saved(folder)
        torch.rand(7, device=OWN)
        job.resume()
        assert [job.train(), job.train()] == expected
        lamina.shutdown()


def case_a_checkpoint_of_a_device_loads_on_the_host_and_back():
    with tempfile.TemporaryDirectory() as folder:
        job = Saved(folder)
        job.train()
        job.save()
        host = torch.rand(3)
        lamina.shutdown()
        job = Saved(folder, device="cpu")
        job.resume()
        assert torch.equal(torch.rand(3), host)
        job.train()
        job.save()
        host = torch.rand(3)
        lamina.shutdown()
        job = Saved(folder)
        was = place()
        job.resume()
        assert torch.equal(torch.rand(3), host)
        assert torch.equal(place(), was), "a checkpoint of the host says nothing of them"
        lamina.shutdown()


class Dropping(ComposerModel):
    """Draws in evaluations, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 1))

    def forward(self, batch):
        if not self.training:
            torch.rand(3, device=batch.device)
        return self.net(batch)

    def loss(self, outputs, batch):
        return outputs.square().mean()

    def eval_forward(self, batch, outputs=None):
        return self(batch)

    def get_metrics(self, is_train):
        return {}

    def update_metric(self, batch, outputs, metric):
        pass


class DrawsToo(Callback):
    """A script that draws on the device after each batch."""

    def __init__(self):
        self.drawn = []

    def batch_end(self, state, logger):
        self.drawn.append(torch.rand(2, device=OWN).tolist())


def fitted(epochs=2, **options):
    """Returns what a training comes to: the model, and what a callback has drawn."""
    model, callback = Dropping(), DrawsToo()
    generator = torch.Generator().manual_seed(1)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(torch.randn(12, 6, generator=generator), batch_size=4),
        optimizers=torch.optim.AdamW(model.parameters(), 1e-2),
        max_duration=f"{epochs}ep",
        device_train_microbatch_size=2,
        callbacks=[callback],
        device="gpu",
        precision="fp32",
        seed=1,
        progress_bar=False,
        **options,
    )
    trainer.fit()
    values = {name: each.cpu() for name, each in trainer.state.model.state_dict().items()}
    trainer.close()
    return values, callback.drawn


def assert_same(found, expected):
    assert found[1] == expected[1][-len(found[1]) :]
    for name, value in expected[0].items():
        assert torch.equal(found[0][name], value), name


def case_an_evaluation_leaves_the_training_as_it_was():
    expected = fitted()
    data = torch.ones(8, 6)
    assert_same(fitted(eval_dataloader=DataLoader(data, batch_size=4), eval_interval="1ba"), expected)


def case_a_training_of_the_trainer_goes_on_with_its_bits():
    expected = fitted()
    with tempfile.TemporaryDirectory() as folder:
        fitted(epochs=1, save_folder=folder)
        (saved,) = (path for path in pathlib.Path(folder).iterdir() if path.is_dir())
        assert saved.exists()
        assert_same(fitted(load_path=folder), expected)


def case_no_device_but_the_ranks_is_touched():
    assert emulated.counts()["contexts"] == [0]
