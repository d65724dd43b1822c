# SPDX-License-Identifier: Apache-2.0
"""Cases of the Trainer for two ranks: a training that goes on from a checkpoint has the bits of one without an end."""

import itertools
import multiprocessing
import os
import random
import signal
import subprocess

import numpy as np
import pytest
import torch
from multiprocess.cases_checkpoints import folder
from soak import some
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import lamina
from lamina.errors import ConfigError
from lamina.trainer import Algorithm, Callback, ComposerModel, DataSpec, Evaluator, Trainer
from lamina.trainer.monitors import ThresholdStopper
from lamina.trainer.schedulers import LinearScheduler

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
            workers = (each.pid for each in multiprocessing.active_children())
            subprocess.run(["kill", *map(str, (os.getpid(), *workers))], check=True)  # as launchers end a group

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


class Evaluating(Callback):
    """Counts evaluations that have ended, and batches of all, and may end the job in one."""

    def __init__(self, ends_in=None):
        self.evaluations, self.batches, self._ends_in = 0, 0, ends_in

    def eval_batch_end(self, state, logger):
        self.batches += 1
        if self.evaluations == self._ends_in and lamina.rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    def eval_end(self, state, logger):
        self.evaluations += 1

    def state_dict(self):
        return {"evaluations": self.evaluations}

    def load_state_dict(self, state):
        self.evaluations = state["evaluations"]


def trainer(layout, workers=0, ends_at=None, seed=1, keys=None, evaluates="2ba", callbacks=(), **options):
    model, data = Model(), Rough()
    torch.manual_seed(3)
    random.seed(3)
    copies = 1 if "partitions" in LAYOUTS[layout] else 2
    loader = DataLoader(data, 8 // copies, num_workers=workers, sampler=lamina.dist.get_sampler(data, shuffle=True))
    made = Trainer(
        model=model,
        train_dataloader=loader,
        eval_dataloader=DataLoader(data, 8, sampler=lamina.dist.get_sampler(data)),
        eval_interval=evaluates,
        max_duration="2ep",
        optimizers=torch.optim.AdamW(model.parameters(), 0.01),
        grad_accum=2,
        seed=seed,
        callbacks=[Counting(ends_at), *callbacks],
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


class Noisy(Dataset):
    """Has generators of its own, of each kind."""

    def __init__(self):
        self.kinds = {"torch": torch.Generator().manual_seed(5), "numpy": [np.random.default_rng(6)]}
        old, python = np.random.RandomState(7), random.Random(8)
        self.draw = lambda: float(old.rand()) + python.random()

    def __len__(self):
        return 12

    def __getitem__(self, number):
        noise = self.kinds["numpy"][0].random() + self.draw()
        return torch.randn(6, generator=self.kinds["torch"]) + 0.1 * noise, number % 3


class Dealt(Sampler):
    def __init__(self):
        self._generator = np.random.default_rng(lamina.dist.get_global_rank())

    def __len__(self):
        return 12

    def __iter__(self):
        return iter(self._generator.permutation(12).tolist())


class Endless(IterableDataset):
    """Splits itself, and draws noise from torch's generator."""

    def __iter__(self):
        for number in range(lamina.dist.get_global_rank(), 24, 2):
            x = torch.randn(6, generator=torch.Generator().manual_seed(number))
            yield x + 0.1 * torch.randn(6), number % 3


class Counted:
    """A loader of another library: has a state, and gives other batches in each epoch."""

    def __init__(self):
        self._at = self._epoch = 0

    def __iter__(self):
        while self._at < 6:
            generator = torch.Generator().manual_seed(100 * self._epoch + 10 * self._at + lamina.dist.get_global_rank())
            self._at += 1
            yield torch.randn(4, 6, generator=generator), torch.arange(4) % 3
        self._at, self._epoch = 0, self._epoch + 1

    def state_dict(self):
        return {"at": self._at, "epoch": self._epoch}

    def load_state_dict(self, state):
        self._at, self._epoch = state["at"], state["epoch"]


def shuffled():
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(2))
    generator = torch.Generator().manual_seed(5 + lamina.dist.get_global_rank())
    return DataLoader(TensorDataset(x, torch.arange(12) % 3), 2, shuffle=True, generator=generator)


def require_goes_on_after(loader_of, stops):
    """`loader_of` gives each rank its own samples, six batches an epoch."""

    def made_of(**options):
        model = Model()
        torch.manual_seed(3)
        loader = DataSpec(loader_of(), already_split=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        given = {"optimizers": optimizer, "max_duration": "2ep", "seed": 1, **KEYS}
        return model, Trainer(model=model, train_dataloader=loader, **given, **options)

    with folder() as path:
        expected, made = made_of(save_folder=path, save_interval=lambda *_: True, save_filename="ep{epoch}-ba{batch}")
        made.fit()
        made.close()
        for stop in stops:
            model, other = made_of(load_path=f"{path}/{stop}")
            other.fit()
            other.close()
            for name, value in expected.state_dict().items():
                assert torch.equal(model.state_dict()[name], value), (stop, name)


def case_generators_of_a_loader_go_on():
    require_goes_on_after(shuffled, ("ep0-ba5", "ep0-ba6", "ep1-ba8"))


def case_generators_that_a_dataset_and_a_sampler_have_go_on():
    require_goes_on_after(lambda: DataLoader(Noisy(), 2, sampler=Dealt()), ("ep0-ba2", "ep1-ba6", "ep1-ba8"))


def case_a_dataset_without_indices_is_read_again():
    require_goes_on_after(lambda: DataLoader(Endless(), 2), ("ep0-ba2", "ep1-ba6", "ep1-ba8"))


def case_a_loader_with_a_state_goes_on_amid_an_epoch_and_with_the_next():
    require_goes_on_after(Counted, ("ep0-ba2", "ep1-ba6", "ep1-ba8"))


def case_a_loader_of_torchdata_goes_on_with_the_next_epoch():
    sampler_of = lamina.dist.get_sampler
    loader_of = lambda data: StatefulDataLoader(data, 2, sampler=sampler_of(data, shuffle=True))  # noqa: E731
    require_goes_on_after(lambda: loader_of(Rough()), ("ep0-ba2", "ep1-ba6", "ep1-ba8"))


def case_a_loader_with_workers_that_stay_trains_for_several_trainers():
    data = Rough()
    sampler = lamina.dist.get_sampler(data)
    loader = DataLoader(data, 4, sampler=sampler, num_workers=1, persistent_workers=True)
    for _ in range(2):
        made = Trainer(model=Model(), train_dataloader=loader, max_duration="2ep", **KEYS)
        made.fit()
        assert made.state.timestamp.batch == BATCHES
        made.close()


class Read(Callback):
    """The values of each batch of all ranks."""

    def __init__(self):
        self.batches = []

    def batch_start(self, state, logger):
        own = [] if state.batch is None else state.batch[0].flatten().tolist()
        self.batches.append(set().union(*lamina.allgather(own, lamina.WORLD)))


def case_a_loader_of_torchdata_goes_on_in_another_layout():
    data = TensorDataset(torch.randn(24, 6, generator=torch.Generator().manual_seed(2)), torch.arange(24) % 3)

    def batches(layout, **options):
        size, read, model = 8 if layout == "partitions" else 4, Read(), Model()
        loader = StatefulDataLoader(data, size, sampler=lamina.dist.get_sampler(data, shuffle=True))
        given = {"callbacks": read, "max_duration": "2ep", "seed": 1, "progress_bar": False}
        given |= {"lamina_config": {"timeout_s": 60} | LAYOUTS[layout], **options}
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        made = Trainer(model=model, train_dataloader=loader, optimizers=optimizer, **given)
        made.fit()
        made.close()
        return read.batches

    for first, then in itertools.permutations(("copies", "partitions")):
        with folder() as path:
            expected = batches(first, save_folder=path, save_interval="1ba", save_filename="ba{batch}")
            for stop in some((1, 2, 4, 5), 1):
                assert batches(then, load_path=f"{path}/ba{stop}") == expected[stop:], (first, then, stop)


class Evaluated(Callback):
    def __init__(self):
        self.seen = []

    def eval_end(self, state, logger):
        self.seen.append(int(state.timestamp.batch))


def case_an_epoch_that_goes_on_with_other_batches_reads_each_sample_once():
    """On one copy or two, with microbatches of any kind; rates and parts of the training go by epochs."""

    def run(path, layout, rows, until, **options):
        model, seen, rates = Model(), Samples(), Rates()
        model.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))  # takes a batch of one sample
        data = TensorDataset(torch.randn(24, 6), torch.arange(24) % 3, torch.arange(24.0))
        loader = DataLoader(data, rows, sampler=lamina.dist.get_sampler(data, shuffle=True))
        given = KEYS | {"optimizers": torch.optim.SGD(model.parameters(), 0.1), "callbacks": [seen, rates], "seed": 1}
        given |= {"schedulers": LinearScheduler(), "lamina_config": {"timeout_s": 60} | LAYOUTS[layout], **options}
        load = {"load_path": path} if until is None else {}
        made = Trainer(model=model, train_dataloader=loader, max_duration="2ep", save_folder=path, **given, **load)
        made.fit() if until is None else made.fit(duration=until)
        made.close()
        return seen.of_all, rates.seen

    kinds = itertools.product((("copies", 4), ("partitions", 8)), (("copies", 3), ("partitions", 5)), ("auto", 2))
    for (first, rows), (then, others), cut in some(list(kinds), 3, seed=7):
        with folder() as path:
            microbatches = {"device_train_microbatch_size": cut}
            before, _ = run(path / "a", first, rows, "1ba", **microbatches)
            after, rates = run(path / "a", then, others, None, **microbatches)
            assert sorted(before + after) == sorted([*range(24)] * 2), (first, then)
            assert rates[0] == pytest.approx(0.1 * (1 - 8 / 48))
            assert sorted(rates, reverse=True) == rates and rates[-1] < 0.02


class Samples(Callback):
    """The numbers of the samples that all ranks have read."""

    def __init__(self):
        self.of_all = []

    def batch_start(self, state, logger):
        own = [] if state.batch is None else state.batch[2].int().tolist()
        self.of_all += [number for each in lamina.allgather(own, lamina.WORLD) for number in each]


class Rates(Callback):
    def __init__(self):
        self.seen = []

    def batch_start(self, state, logger):
        self.seen.append(state.optimizers[0].param_groups[0]["lr"])


class Own(Callback):
    """Counts for its own rank, in a tensor."""

    def __init__(self):
        self.read = torch.zeros(2)

    def batch_end(self, state, logger):
        self.read += lamina.rank() + 1

    def state_dict(self):
        return {"read": self.read} if self.read.any() else {}

    def load_state_dict(self, state):
        self.read = state["read"]


class Same(Own):
    def batch_end(self, state, logger):
        self.read += 1


class OwnAlgorithm(Algorithm):
    def __init__(self):
        self.calls = {}

    def match(self, event, state):
        return event.value == "batch_end" and lamina.rank() == 1

    def apply(self, event, state, logger):
        self.calls[str(state.timestamp.batch)] = lamina.rank()

    def state_dict(self):
        return self.calls

    def load_state_dict(self, state):
        self.calls = state


def case_states_of_callbacks_and_algorithms_are_those_of_each_rank():
    with folder() as path:
        first, _ = trainer("copies", save_folder=path, callbacks=[Own(), Same()], algorithms=OwnAlgorithm())
        first.fit(duration="2ba")
        first.close()
        own, same, algorithm = Own(), Same(), OwnAlgorithm()
        again, _ = trainer("copies", load_path=path, callbacks=[own, same], algorithms=algorithm)
        assert own.read.tolist() == [2 * (lamina.rank() + 1)] * 2 and same.read.tolist() == [2, 2]
        assert algorithm.calls == ({"1ba": 1, "2ba": 1} if lamina.rank() else {})
        again.close()


def case_a_call_of_fit_that_a_job_broke_off_ends_where_it_would_have():
    class Broken(Callback):
        def batch_end(self, state, logger):
            if state.fits == breaks[0] and state.timestamp.batch.value == breaks[1]:
                raise KeyError("as if it was killed")

    def run(path, *calls):
        options = {"run_name": "run", "save_folder": path, "autoresume": True, "save_interval": "1ba"}
        made, _ = trainer("copies", callbacks=[Broken()], **options)
        try:
            for call in calls:
                made.fit(**call)
        finally:
            made.close()
        return made.state.timestamp.batch.value

    for breaks, calls, end in (
        ((0, 3), [{"duration": "4ba"}], 4),
        ((0, 3), [{"duration": "4ba", "reset_time": True}], 4),
        ((1, BATCHES + 1), [{}, {"duration": "2ba"}], BATCHES + 2),
    ):
        with folder() as path:
            with pytest.raises(KeyError):
                run(path, *calls)
            breaks = None, None
            assert run(path, *calls) == end, calls
            assert run(path, *calls) == end, calls
    breaks, twice = (1, 4), [{"duration": "2ba"}] * 2
    with folder() as path:
        with pytest.raises(KeyError):
            run(path, *twice)
        breaks = None, None
        with pytest.raises(ConfigError, match="which call this one is, is not known"):
            run(path, *twice)


def case_what_was_measured_and_evaluated_is_known_after_the_last_batch():
    with folder() as path:
        options = {"save_interval": lambda _, event: event.value == "batch_checkpoint", "save_filename": "ba{batch}"}
        first, _ = trainer("copies", save_folder=path, **options)
        first.fit()
        first.close()
        seen = Evaluated()
        made, _ = trainer("copies", load_path=path / f"ba{BATCHES}")
        made.state.callbacks.append(seen)
        assert made.state.total_loss_dict == first.state.total_loss_dict
        assert made.state.eval_metric_values == first.state.eval_metric_values
        made.fit()  # ends the epoch
        made.close()
        assert not seen.seen


def case_an_evaluation_before_the_first_batch_leaves_no_trace():
    for layout in LAYOUTS:
        expected = ended(*trainer(layout))
        with folder() as path:
            first, _ = trainer(layout, save_folder=path)
            first.fit(duration="1ep")
            first.close()
            made, model = trainer(layout, load_path=path)
            made.eval()
            require_same_bits(ended(made, model), expected)


def case_a_training_that_was_stopped_is_when_it_goes_on():
    with folder() as path:
        options = {"save_folder": path, "save_interval": "1ba", "run_name": "stops", "autoresume": True}
        stops = ThresholdStopper("loss/train/total", "train", 0.0, comp="greater", stop_on_batch=True)
        made, _ = trainer("copies", **options)
        made.state.callbacks.append(stops)
        made.fit()
        assert made.state.timestamp.batch == 1
        again, _ = trainer("copies", **options)
        again.fit()
        assert again.state.timestamp.batch == 1
        with pytest.raises(ConfigError, match="was stopped at 1ba"):
            again.fit()
        again.fit(duration="1ba")
        assert again.state.timestamp.batch == 2
        again.close()


def case_a_training_that_had_ended_ends_again_when_its_job_is_restarted():
    for layout in LAYOUTS:
        with folder() as path:
            options = {"save_folder": path, "run_name": "ended", "autoresume": True}
            expected = ended(*trainer(layout, **options))
            require_same_bits(ended(*trainer(layout, **options)), expected)


def case_strays_in_a_folder_of_saves_are_left_alone():
    with folder() as path:
        strays = "notes.txt", "others.safetensors", ".nfs0001", "pytorch_model.bin", "runs/events"
        for stray in strays:
            os.makedirs(os.path.join(path, os.path.dirname(stray)), exist_ok=True)
            with open(os.path.join(path, stray), "w") as file:
                file.write("others'")
        options = {"save_folder": path, "run_name": "among", "autoresume": True, "save_num_checkpoints_to_keep": 1}
        expected = ended(*trainer("copies", **options))
        require_same_bits(ended(*trainer("copies", **options)), expected)
        assert all(os.path.exists(os.path.join(path, stray)) for stray in strays)


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
    for workers in 0, 1:
        expected = ended(*trainer("copies", workers))
        with folder() as path:
            options = {"save_folder": path, "run_name": "named", "autoresume": True}
            first, _ = trainer("copies", workers, ends_at=2, **options)
            with pytest.raises(SystemExit) as end:
                first.fit()
            assert end.value.code == 143
            assert 2 <= first.state.timestamp.batch.value <= 3
            require_same_bits(ended(*trainer("copies", workers, **options)), expected)


def case_sigterm_in_an_evaluation_ends_it_and_it_is_made_again():
    ends = itertools.product(LAYOUTS, ((1, "2ba"), (0, "1ep"), (1, "1ep")))
    for layout, (ends_in, evaluates) in some(list(ends), 2, seed=6):
        with folder() as path:
            options = {"evaluates": evaluates, "run_name": "cut", "save_folder": path, "autoresume": True}
            counts = [Evaluating(), Evaluating(ends_in), Evaluating()]
            whole, model = trainer(layout, evaluates=evaluates, callbacks=counts[:1])
            expected = ended(whole, model)
            first, _ = trainer(layout, callbacks=counts[1:2], **options)
            with pytest.raises(SystemExit) as end:
                first.fit()
            assert end.value.code == 143 and counts[1].evaluations == ends_in
            assert counts[1].batches == ends_in * counts[0].batches // counts[0].evaluations + 1
            made, model = trainer(layout, callbacks=counts[2:], **options)
            require_same_bits(ended(made, model), expected)
            assert made.state.eval_metric_values == whole.state.eval_metric_values
            assert counts[2].evaluations == counts[0].evaluations


class Terminated(Callback):
    def fit_start(self, state, logger):
        os.kill(os.getpid(), signal.SIGTERM)


def case_sigterm_before_the_first_step_saves_what_was_loaded():
    for layout in LAYOUTS:
        with folder() as path:
            options = {"run_name": "cut", "save_folder": path, "autoresume": True}
            expected = ended(*trainer(layout, **options))
            again, _ = trainer(layout, callbacks=[Terminated()], **options)
            with pytest.raises(SystemExit) as end:
                again.fit()
            assert end.value.code == 143
            require_same_bits(ended(*trainer(layout, **options)), expected)


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
    with folder() as path:
        made, _ = trainer("copies", save_folder=path, save_weights_only=True)
        made.fit(duration="1ba")
        made.close()
        with pytest.raises(ConfigError, match="has checkpoints"):
            trainer("copies", save_folder=path)
    with folder() as path:
        made, _ = trainer("copies")
        lamina.save_checkpoint(
            path, "other", model=made.state.model, optimizer=made.state.optimizers[0], user_content={"epoch": 1}
        )
        made.close()
        with pytest.raises(ConfigError, match="load_weights_only=True takes its weights"):
            trainer("copies", load_path=path)
        weights, _ = trainer("copies", load_path=path, load_weights_only=True)
        weights.close()
    for wrong, said in (
        ({"autoresume": True}, "run_name"),
        ({"save_folder": "x", "save_interval": "1sp"}, "some epochs or batches"),
        ({"save_folder": "x", "save_filename": "{step}"}, "none of"),
        ({"save_folder": "x", "save_num_checkpoints_to_keep": -2}, "-1 for all"),
    ):
        with pytest.raises(ConfigError, match=said):
            trainer("copies", **wrong)
        assert not lamina.is_initialized()
