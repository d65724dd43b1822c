# SPDX-License-Identifier: Apache-2.0
"""Scripts as users write them, for one rank and for several."""

import json
import shutil
import sys

import pytest
import torch
from soak import some

# On the text of Python's licence, 33 windows of it: two ranks have 17 and 16.
SCRIPT = """
import json
import pathlib
import sysconfig

import torch
from composer import ComposerModel, Time, Trainer
from composer.utils import dist
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

text = pathlib.Path(sysconfig.get_path("stdlib"), "LICENSE.txt").read_text()
letters = sorted(set(text))
codes = torch.tensor([letters.index(letter) for letter in text])
windows = codes[: 33 * 17].reshape(33, 17)
dataset = TensorDataset(windows[:, :-1], windows[:, 1:])


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(len(letters), 32)
        self.layer = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.head = torch.nn.Linear(32, len(letters))

    def forward(self, tokens):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layer(self.embedding(tokens), mask, is_causal=True))


class MyComposerModel(ComposerModel):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def forward(self, batch):
        return self.model(batch[0])

    def loss(self, outputs, batch):
        return functional.cross_entropy(outputs.flatten(0, 1), batch[1].flatten())


torch.manual_seed(0)
model = MyComposerModel().double()
sampler = dist.get_sampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=8 // dist.get_world_size(), sampler=sampler)
trainer = Trainer(
    model=model,
    train_dataloader=loader,
    eval_dataloader=DataLoader(dataset, batch_size=5, sampler=dist.get_sampler(dataset)),
    max_duration="2ep",
    optimizers=torch.optim.AdamW(model.parameters(), lr=0.003),
    grad_accum=2,
)
trainer.fit()
state = trainer.state.model.state_dict()
if dist.get_global_rank() == 0:
    sums = {name: value.sum().item() for name, value in state.items()}
    values, time = trainer.state.eval_metric_values, trainer.state.timestamp
    print(json.dumps([sums, values, int(time.batch), int(time.sample), time == Time(10, "ba")]))
trainer.close()
"""


def said_by(launcher, script, ranks):
    program = launcher.folder / "program.py"
    program.write_text(script)
    run = launcher.run("run", "-n", ranks, program, env={"LAMINA_PYTHON": sys.executable})
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_a_script_on_real_text_trains_alike_on_one_rank_and_on_two(launcher):
    (sums, evaluated, *counts), (sums_of_two, evaluated_by_two, *counts_of_two) = (
        said_by(launcher, SCRIPT, ranks) for ranks in (1, 2)
    )
    assert counts_of_two == counts == [10, 66, True]
    assert sums_of_two == pytest.approx(sums, rel=1e-9)
    assert evaluated_by_two == pytest.approx(evaluated, rel=1e-9)


BESIDE = """
import json
import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import lamina
from lamina.trainer import ComposerModel


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.net[2].eval()  # a mode of its own
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, batch):
        self.calls += 1
        torch.rand(()) if not self.training else None
        return self.net(batch[0])

    def loss(self, outputs, batch):
        return functional.mse_loss(outputs, batch[1])


torch.manual_seed(0)
dataset = TensorDataset(torch.randn(24, 4), torch.randn(24, 2))
model = Model()
loader = DataLoader(dataset, 4, sampler=lamina.dist.get_sampler(dataset, shuffle=True))
evaluated = DataLoader(dataset, 4, sampler=lamina.dist.get_sampler(dataset))
other = {"eval_dataloader": evaluated, "eval_interval": "1ba"} if sys.argv[1] == "evaluating" else {}
trainer = lamina.Trainer(
    model=model, train_dataloader=loader, max_duration="2ep", optimizers=torch.optim.SGD(model.parameters(), 0.1),
    seed=5, **other
)
trainer.fit()
bits = {name: value.flatten().tolist() for name, value in trainer.state.model.state_dict().items()}
if lamina.rank() == 0:
    print(json.dumps([bits, torch.rand(1).item()]))
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_has_the_same_bits_with_evaluations_and_without(launcher, ranks):
    program = launcher.folder / "program.py"
    program.write_text(BESIDE)
    environment = {"LAMINA_PYTHON": sys.executable}
    runs = [launcher.run("run", "-n", ranks, program, word, env=environment) for word in ("evaluating", "alone")]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert runs[0].stdout == runs[1].stdout


# It saves after each batch. A rank may be killed in the fifth, where nothing tells of it before.
KILLED = """
import os
import pathlib
import signal
import sys

import torch
from composer import Callback, Trainer
from composer.models import ComposerClassifier
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

layout, victim = sys.argv[1:]
killed = pathlib.Path("killed")


class Kill(Callback):
    def before_train_batch(self, state, logger):
        if state.timestamp.batch == 4 and dist.get_global_rank() == int(victim) and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(0)
model = ComposerClassifier(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3)), num_classes=3)
data = TensorDataset(torch.randn(24, 6), torch.arange(24) % 3)
copies = dist.get_world_size() if layout == "copies" else 1
trainer = Trainer(
    model=model,
    train_dataloader=DataLoader(data, 8 // copies, sampler=dist.get_sampler(data, shuffle=True)),
    max_duration="3ep",
    optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
    callbacks=Kill(),
    save_folder="saved",
    save_interval="1ba",
    run_name="one",
    autoresume=True,
    seed=5,
    progress_bar=False,
    lamina_config={"timeout_s": 60} | ({} if layout == "copies" else {"partitions": 2}),
)
trainer.fit()
trainer.close()
if dist.get_global_rank() == 0:
    torch.save([model.state_dict(), int(trainer.state.timestamp.batch)], "trained.pt")
"""


@pytest.mark.parametrize(("layout", "victim"), some([("copies", 1), ("partitions", 0), ("partitions", 1)], 1))
def test_goes_on_where_a_rank_was_killed_with_the_bits_of_an_uninterrupted_training(launcher, layout, victim):
    program = launcher.folder / "program.py"
    program.write_text(KILLED)
    found = []
    for killed in (-1, victim):
        words = ("run", "-n", 2, "--restarts", 1, program, layout, killed)
        run = launcher.run(*words)
        assert run.returncode == 0, run.stderr
        found.append(torch.load(launcher.folder / "trained.pt"))
        shutil.rmtree(launcher.folder / "saved")
    assert (launcher.folder / "killed").exists() and found[1][1] == found[0][1] == 9
    for name, value in found[0][0].items():
        assert torch.equal(found[1][0][name], value), name
