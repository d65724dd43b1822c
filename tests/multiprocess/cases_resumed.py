# SPDX-License-Identifier: Apache-2.0
"""Cases of the Trainer for two ranks: a training that goes on from a checkpoint has the bits of one without an end."""

import os
import random
import signal

import pytest
import torch
from multiprocess.cases_checkpoints import folder
from soak import some
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lamina
from lamina.errors import ConfigError
from lamina.trainer import Callback, ComposerModel, DataSpec, Evaluator, Trainer

BATCHES = 6  # of two epochs
KEYS = {"progress_bar": False, "lamina_config": {"timeout_s": 60}}
LAYOUTS = {"copies": {}, "partitions": {"partitions": 2}, "shards": {"sharded_data_parallel_degree": 2}}


class Rough(Dataset):
    """Gives each sample with noise of both generators."""

    def __len__(self):
        return 24

    def __getitem__(self, number):
        x = torch.randn(6, generator=torch.Generator().manual_seed(number)) + 0.1 * torch.randn(6)
        return x + 0.1 * random.random(), number % 3


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch):
        return functional.cross_entropy(outputs, batch[1])


class Counting(Callback):
    """Has a state of its own, and may end the job."""

    def __init__(self, ends_at=None):
        self.batches, self._ends_at = 0, ends_at

    def batch_end(self, state, logger):
        self.batches += 1
        if self.batches == self._ends_at and lamina.rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


def trainer(layout, workers=0, ends_at=None, seed=1, keys=None, **options):
    model, data = Model(), Rough()
    torch.manual_seed(3)
    random.seed(3)
    copies = 1 if "partitions" in LAYOUTS[layout] else 2
    loader = DataLoader(data, 8 // copies, num_workers=workers, sampler=lamina.dist.get_sampler(data, shuffle=True))
    made = Trainer(
        model=model,
        train_dataloader=loader,
        eval_dataloader=DataLoader(data, 8, sampler=lamina.dist.get_sampler(data)),
        eval_interval="2ba",
        max_duration="2ep",
        optimizers=torch.optim.AdamW(model.parameters(), 0.01),
        grad_accum=2,
        seed=seed,
        callbacks=Counting(ends_at),
        progress_bar=False,
        lamina_config={"timeout_s": 60, "sdp_param_persistence_threshold": 0} | LAYOUTS[layout] | (keys or {}),
        **options,
    )
    return made, model


def ended(made, model, fits=True):
    if fits:
        made.fit()
    (counting,) = (each for each in made.state.callbacks if isinstance(each, Counting))
    batches, counted = made.state.timestamp.batch.value, counting.batches
    made.close()
    return model.state_dict(), (batches, counted)


def require_same_bits(found, expected):
    assert found[1] == expected[1] == (BATCHES, BATCHES)
    for name, value in expected[0].items():
        assert torch.equal(found[0][name], value), name


def goes_on(layout, stops, workers=0):
    expected = ended(*trainer(layout, workers))
    for stop in stops:
        with folder() as path:
            first, _ = trainer(layout, workers, save_folder=path, save_interval="1ba")
            first.fit(duration=f"{stop}ba")
            first.close()
            require_same_bits(ended(*trainer(layout, workers, load_path=path)), expected)


def case_copies_go_on_after_any_batch():
    goes_on("copies", some(range(1, BATCHES), 3))


def case_partitions_go_on_after_any_batch():
    goes_on("partitions", some(range(1, BATCHES), 2, seed=1))


def case_shards_go_on_after_any_batch():
    goes_on("shards", some(range(1, BATCHES), 2, seed=2))


def case_a_seed_that_is_drawn_counts_as_one_that_is_given():
    for layout in some(LAYOUTS, 2, seed=5):
        made, model = trainer(layout, seed=None)
        drawn = made.state.seed
        expected = ended(made, model)
        require_same_bits(ended(*trainer(layout, seed=drawn)), expected)
        require_same_bits(ended(*trainer(layout, seed=1, keys={"seed": drawn})), expected)


def case_a_training_without_a_seed_goes_on_after_any_batch():
    for layout in some(LAYOUTS, 1):
        with folder() as path:
            expected = ended(
                *trainer(layout, seed=None, save_folder=path, save_interval="1ba", save_filename="ba{batch}")
            )
            for stop in some(range(1, BATCHES), 2, seed=4):
                require_same_bits(ended(*trainer(layout, seed=None, load_path=f"{path}/ba{stop}")), expected)


def case_a_loader_with_workers_is_read_again():
    goes_on("copies", some(range(1, BATCHES), 1, seed=3), workers=1)


def case_another_layout_goes_on_with_the_same_batches():
    with folder() as path:
        first, _ = trainer("copies", save_folder=path)
        first.fit(duration="1ep")
        first.close()
        made, _ = trainer("partitions", load_path=path)
        assert made.state.timestamp.batch == 3 and made.state.timestamp.epoch == 1
        made.fit()
        assert made.state.timestamp.batch == BATCHES


def case_a_second_fit_goes_on_amid_the_epoch():
    for layout in ("copies", "partitions"):
        expected = ended(*trainer(layout))
        made, model = trainer(layout)
        for _ in range(3):
            made.fit(duration="2ba")  # two of them end amid an epoch
        require_same_bits(ended(made, model, fits=False), expected)


def case_generators_of_a_loader_go_on():
    def made_of(**options):
        model = Model()
        x = torch.randn(12, 6, generator=torch.Generator().manual_seed(2))
        generator = torch.Generator().manual_seed(5 + lamina.dist.get_global_rank())
        data = TensorDataset(x, torch.arange(12) % 3)
        loader = DataSpec(DataLoader(data, 2, shuffle=True, generator=generator), already_split=True)
        return model, Trainer(model=model, train_dataloader=loader, max_duration="2ep", seed=1, **KEYS, **options)

    expected, made = made_of()
    made.fit()
    made.close()
    for stop in ("5ba", "6ba", "8ba"):
        with folder() as path:
            _, first = made_of(save_folder=path, save_interval="1ba")
            first.fit(duration=stop)
            first.close()
            model, other = made_of(load_path=path)
            other.fit()
            other.close()
            for name, value in expected.state_dict().items():
                assert torch.equal(model.state_dict()[name], value), (stop, name)


def case_the_loss_scale_goes_on():
    with folder() as path:
        first, _ = trainer("copies", precision="amp_fp16", save_folder=path)
        first.state.scaler.update(512.0)
        first.fit(duration="1ep")
        scale = first.state.scaler.get_scale()
        first.close()
        made, _ = trainer("copies", precision="amp_fp16", load_path=path)
        assert made.state.scaler.get_scale() == scale <= 512
        made.close()


def case_an_evaluation_of_other_data_leaves_the_trainers_own():
    made, _ = trainer("copies")
    data = Rough()
    other = DataLoader(data, 8, sampler=lamina.dist.get_sampler(data))
    made.eval(Evaluator(label="other", dataloader=other))
    assert [each.label for each in made.state.evaluators] == ["eval"]
    made.fit(duration="1ep")
    made.close()


def case_sigterm_on_one_rank_ends_the_batch_and_saves_on_all():
    expected = ended(*trainer("copies"))
    with folder() as path:
        options = {"save_folder": path, "run_name": "named", "autoresume": True}
        first, _ = trainer("copies", ends_at=2, **options)
        with pytest.raises(SystemExit) as end:
            first.fit()
        assert end.value.code == 143
        assert 2 <= first.state.timestamp.batch.value <= 3
        require_same_bits(ended(*trainer("copies", **options)), expected)


def case_sigterm_in_the_last_batch_is_not_lost():
    with folder() as path:
        made, _ = trainer("copies", ends_at=BATCHES, save_folder=path)
        with pytest.raises(SystemExit) as end:
            made.fit()
        assert end.value.code == 143 and made.state.timestamp.batch == BATCHES


def case_checkpoints_have_their_names_and_as_many_stay():
    with folder() as path:
        made, _ = trainer(
            "copies",
            save_folder=path,
            save_filename="{run_name}-{epoch}-{batch}-rank{rank}.pt",
            run_name="mine",
            save_interval="2ba",
            save_num_checkpoints_to_keep=2,
        )
        made.fit()
        made.close()
        names = sorted(place.name for place in path.iterdir() if place.is_dir())
        assert names == ["mine-1-6_partial", "mine-2-6_partial"], names
        one, _ = trainer("copies", load_path=path / "mine-1-6_partial")
        assert (one.state.timestamp.batch, one.state.timestamp.epoch) == (BATCHES, 1)
        with pytest.raises(ConfigError, match="has checkpoints"):
            trainer("copies", save_folder=path)
        weights, _ = trainer("copies", load_path=path / "mine-1-6_partial", load_weights_only=True)
        assert weights.state.timestamp.batch == 0
        weights.close()
    for wrong, said in (
        ({"autoresume": True}, "run_name"),
        ({"save_folder": "x", "save_interval": "1sp"}, "ep or ba"),
        ({"save_folder": "x", "save_filename": "{step}"}, "none of"),
        ({"save_folder": "x", "save_num_checkpoints_to_keep": 0}, "-1 for all"),
    ):
        with pytest.raises(ConfigError, match=said):
            trainer("copies", **wrong)
        assert not lamina.is_initialized()
