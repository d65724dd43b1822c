# SPDX-License-Identifier: Apache-2.0
"""Cases of the Trainer for three ranks, beside those of tests/equivalence/trainer_cases.py."""

import re

import pytest
import torch
import transformers
from equivalence.trainer_cases import Model, data_of
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

import lamina
from lamina.errors import ConfigError, UsageError
from lamina.trainer import Callback, ComposerModel, DataSpec, Evaluator, HuggingFaceModel, Trainer

RANKS = 3


class Measured(Model):
    """With a metric of numbers, and one that keeps all outputs."""

    def __init__(self):
        super().__init__("mean")

    def get_metrics(self, is_train):
        return {"accuracy": MulticlassAccuracy(3, average="micro"), "auroc": MulticlassAUROC(3)}

    def update_metric(self, batch, outputs, metric):
        metric.update(outputs.softmax(1), batch[1])  # else torchmetrics looks whether a batch seems to be logits


def trainer_of(model, loader, **options):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    defaults = {"max_duration": "1ep", "optimizers": optimizer, "lamina_config": {"timeout_s": 60}, "seed": 1}
    return Trainer(model=model, train_dataloader=loader, **(defaults | options))


def shared(dataset, batch_size, **options):
    return DataLoader(dataset, batch_size, sampler=lamina.dist.get_sampler(dataset, **options))


class Seen(Callback):
    def __init__(self):
        self.batches, self.events = [], []

    def run_event(self, event, state, logger):
        self.events.append(event.value)
        if event.value == "before_train_batch":
            self.batches.append(state.batch)


def case_metrics_are_those_of_one_process_whatever_each_rank_has():
    for samples in (2, 5, 17, 30):  # in the first rank 2 has none
        model, evaluated = Measured(), data_of(samples, 2)
        loader = shared(evaluated, 4)
        trainer = trainer_of(model, shared(data_of(6, 1), 2), eval_dataloader=loader)
        trainer.eval()
        expected = model.get_metrics(is_train=False)
        for metric in expected.values():
            metric.distributed_available_fn = lambda: False
            model.update_metric(evaluated.tensors, model(evaluated.tensors), metric)
            metric.compute()
        values = trainer.state.eval_metric_values
        assert values == pytest.approx({name: metric.compute().item() for name, metric in expected.items()})
        assert all(type(value) is float for value in values.values())
        trainer.close()


def case_metrics_of_the_training_are_those_of_the_whole_batch():
    data, seen = data_of(20, 1), []

    class Looks(Callback):
        def batch_end(self, state, logger):
            seen.append(state.train_metric_values["accuracy"])

    model = Measured()
    trainer_of(model, shared(data, 4), callbacks=Looks(), grad_accum=3).fit()
    alone = Measured()
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for begin, found in zip((0, 12), seen, strict=True):
        batch = [part[begin : begin + 12] for part in data.tensors]
        outputs = alone(batch)
        assert found == pytest.approx((outputs.argmax(1) == batch[1]).double().mean().item())
        optimizer.zero_grad()
        alone.loss(outputs, batch).mean().backward()
        optimizer.step()


def case_evaluators_have_their_metrics_intervals_and_numbers_of_batches():
    data = data_of(12, 2)
    every = [
        Evaluator(label="often", dataloader=shared(data, 2), metric_names=["acc.*"], eval_interval="2ba"),
        Evaluator(label="never", dataloader=shared(data, 2), eval_interval=0),
        Evaluator(label="first", dataloader=shared(data, 2), subset_num_batches=1, eval_interval="0.5dur"),
    ]
    seen = Seen()
    trainer = trainer_of(Measured(), shared(data_of(24, 1), 2), eval_dataloader=every, callbacks=seen)
    trainer.fit()  # of four batches
    assert seen.events.count("eval_start") == 4
    assert seen.events.count("eval_batch_end") == 2 * 2 + 2 * 1
    assert set(trainer.state.eval_metric_values) == {"accuracy", "auroc"}
    assert trainer.state.eval_metrics["often"].keys() == {"accuracy"}
    with pytest.raises(ConfigError, match="no metric is named 'f1'"):
        Evaluator(label="x", dataloader=[], metric_names=["f1"]).metrics_of({"accuracy": None})


class When(Callback):
    """After which batches evaluations have ended, and of how many samples they were."""

    def __init__(self):
        self.batches, self.samples = [], []

    def eval_end(self, state, logger):
        self.batches.append(state.timestamp.batch.value)
        self.samples.append(state.eval_timestamp.sample.value)


def case_intervals_and_numbers_of_batches_are_those_of_the_latest_who_said_them():
    every, seen = Evaluator(label="few", dataloader=shared(data_of(12, 2), 2)), When()
    options = {"max_duration": "4ba", "eval_dataloader": every, "callbacks": seen}
    for interval, most, expected in (("4ba", -1, [4]), ("1ba", 1, [1, 2, 3, 4])):
        seen.batches, seen.samples = [], []
        trainer = trainer_of(
            Model("mean"), shared(data_of(24, 1), 2), eval_interval=interval, eval_subset_num_batches=most, **options
        )
        trainer.fit()
        assert seen.batches == expected and set(seen.samples) == {12 if most < 0 else 6}
    for read in (trainer.eval, lambda **given: trainer.eval(every, **given)):
        read(subset_num_batches=1)
        assert seen.samples[-1] == 6
    trainer.eval()
    assert seen.samples[-1] == 6
    trainer.eval(every)
    assert seen.samples[-1] == 12 and every.eval_interval is every.subset_num_batches is None


def case_parts_of_a_training_are_evaluated_as_often_as_is_asked():
    for until, interval, expected in (
        ("15ba", "0.1dur", [2, 3, 5, 6, 8, 9, 11, 12, 14, 15]),
        ("7ba", "0.5dur", [4, 7]),
        ("90sp", "0.2dur", [3, 6, 9, 12, 15]),
        ("3ep", "0.25dur", [3, 6, 9, 12]),
        ("2ep", "0.3dur", [3, 5, 8]),  # and not at the end, 3.3 parts
        ("90tok", "0.34dur", [6, 11, 15]),
    ):
        seen = When()
        spec = DataSpec(shared(data_of(24, 1), 2), get_num_tokens_in_batch=lambda batch: len(batch[0]))
        options = {"max_duration": until, "eval_interval": interval, "callbacks": seen}
        trainer_of(Model("mean"), spec, eval_dataloader=shared(data_of(6, 2), 2), **options).fit()
        asked = expected if seen.batches[: len(expected)] == expected else None
        assert asked and len(seen.batches) <= len(expected) + 1, (until, interval, seen.batches)


class Only(IterableDataset):
    """Has samples on rank 1 alone."""

    def __iter__(self):
        own = data_of(5, 2).tensors
        return zip(*own, strict=True) if lamina.rank() == 1 else iter(())


def case_an_evaluation_of_which_one_rank_has_all_is_that_of_one_process():
    model = Model("mean")
    trainer = trainer_of(model, shared(data_of(6, 1), 2), eval_dataloader=DataLoader(Only(), 2))
    trainer.eval()
    batch = data_of(5, 2).tensors
    expected = model.loss(model(batch), batch).mean().item()
    assert trainer.state.eval_metric_values["loss"] == pytest.approx(expected)


class Uneven(IterableDataset):
    """Rank 0 has no sample, rank 1 two, rank 2 seven."""

    def __iter__(self):
        own = data_of(9, 1).tensors
        begin, end = [(0, 0), (0, 2), (2, 9)][lamina.dist.get_global_rank()]
        return zip(own[0][begin:end], own[1][begin:end], strict=True)


def case_ranks_with_any_number_of_batches_train_like_one_that_has_all():
    model, alone = Model("mean"), Model("mean")
    trainer = trainer_of(model, DataLoader(Uneven(), 3), max_duration="2ep")
    trainer.fit()
    x, y = data_of(9, 1).tensors
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for rows in [[0, 1, 2, 3, 4], [5, 6, 7], [8]] * 2:  # batch t of all ranks
        optimizer.zero_grad()
        alone.loss(alone((x[rows],)), (None, y[rows])).mean().backward()
        optimizer.step()
    for name, value in trainer.state.model.state_dict().items():
        torch.testing.assert_close(value, alone.state_dict()[name])
    assert trainer.state.timestamp.batch == 6 and trainer.state.timestamp.sample == 18


def case_a_sampler_gets_its_place_and_repeats_nothing():
    data = data_of(10, 1)
    wrong = DistributedSampler(data, num_replicas=7, rank=5, shuffle=False)  # made for something else
    seen = Seen()
    trainer = trainer_of(Model("mean"), DataLoader(data, 2, sampler=wrong), callbacks=seen)
    trainer.fit()
    own = torch.cat([batch[0] for batch in seen.batches])
    rows = [row for row in range(10) if row % RANKS == lamina.rank()]
    assert torch.equal(own[: len(rows)], data.tensors[0][rows])
    assert trainer.state.timestamp.sample == 10 and trainer.state.dataloader_len == 2


def case_ranks_that_would_read_the_same_are_refused():
    data = data_of(12, 1)
    for loader in DataLoader(data, 2), DataLoader(data, 2, sampler=RandomSampler(data)):
        with pytest.raises(ConfigError, match=r"world_size\(3\) > 1 but dataloader does not use DistributedSampler"):
            trainer_of(Model("mean"), loader).fit()
        trainer = trainer_of(Model("mean"), DataSpec(loader, already_split=True))
        trainer.fit()
        assert trainer.state.timestamp.sample == 36


def case_the_next_trainer_goes_on_with_the_model_and_ends_the_one_before():
    model, data = Model("mean"), data_of(12, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    ended = Seen()
    ended.close = lambda state, logger: ended.events.append("close")
    sharded = {"timeout_s": 60, "sharded_data_parallel_degree": RANKS, "sdp_param_persistence_threshold": 0}
    first = trainer_of(model, shared(data, 2), optimizers=optimizer, lamina_config=sharded, callbacks=ended)
    first.fit()
    assert ended.events[-1] == "fit_end"
    second = trainer_of(model, shared(data, 2), optimizers=optimizer)
    assert ended.events[-1] == "close"
    with pytest.raises(UsageError, match="another one was made after it"):
        first.fit(duration="1ep")
    second.fit()
    second.close()
    second.close()
    alone = Model("mean")
    optimizer_alone = torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9)
    of_both = [(alone, optimizer_alone)] * 4 + [(alone, optimizer_alone), (model, optimizer)]  # by hand after the end
    for number, (each, steps) in enumerate(of_both):
        steps.zero_grad()
        batch = [part[number % 2 * 6 : number % 2 * 6 + 6] for part in data.tensors] if number < 4 else data.tensors
        each.loss(each(batch), batch).mean().backward()
        steps.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, alone.state_dict()[name])


def case_a_trainer_that_cannot_be_made_leaves_no_job():
    model = Model("mean")
    sharded = {"timeout_s": 60, "sharded_data_parallel_degree": RANKS, "sdp_param_persistence_threshold": 0}
    with pytest.raises(UsageError, match="LBFGS"):
        trainer_of(
            model, shared(data_of(6, 1), 2), optimizers=torch.optim.LBFGS(model.parameters()), lamina_config=sharded
        )
    assert not lamina.is_initialized()
    trainer_of(Model("mean"), shared(data_of(6, 1), 2)).fit()


def case_a_training_goes_on_for_a_duration_or_begins_anew():
    trainer = trainer_of(Model("mean"), shared(data_of(12, 1), 2), max_duration=None)
    with pytest.raises(ConfigError, match="no max_duration"):
        trainer.fit()
    trainer.fit(duration="1ba")
    trainer.fit(duration=1)
    assert trainer.state.timestamp.batch == 2 and trainer.state.timestamp.epoch == 1
    with pytest.raises(ConfigError, match="has passed"):
        trainer.fit()
    trainer.fit(duration="3sp", reset_time=True)
    assert trainer.state.timestamp.batch == 1
    trainer.fit(train_dataloader=shared(data_of(6, 1), 1), train_subset_num_batches=1, duration="1ep", grad_accum=1)
    assert trainer.state.timestamp.batch == 2 and trainer.state.dataloader_len == 1


def case_what_a_loader_gave_no_batch_of_is_told():
    trainer = trainer_of(Model("mean"), DataLoader(data_of(2, 1), 1, drop_last=True, sampler=sampler_of(2)))
    with pytest.raises(UsageError, match="gave no batch"):
        trainer.fit()


WRONG = [
    ({"get_num_samples_in_batch": lambda batch: -1}, "DataSpec: get_num_samples_in_batch gave -1 of a batch"),
    ({"get_num_samples_in_batch": lambda batch: None}, "DataSpec: get_num_samples_in_batch gave None of a batch"),
    ({"get_num_tokens_in_batch": lambda batch: batch[0] > 0}, "DataSpec: get_num_tokens_in_batch gave tensor"),
    ({"split_batch": lambda batch, size: 3}, "DataSpec: split_batch gave 3: it returns a list"),
    ({"split_batch": lambda batch, size: []}, "split_batch gave microbatches of [] samples of a batch of 2"),
    ({"split_batch": lambda batch, size: [batch] * 2}, "split_batch gave microbatches of [2, 2] samples of a batch"),
]


def case_wrong_counts_and_cuts_of_batches_are_told():
    for options, said in WRONG:
        spec = DataSpec(shared(data_of(6, 1), 2), **options)
        trainer = trainer_of(Model("mean"), spec, device_train_microbatch_size=1)
        with pytest.raises(UsageError, match=re.escape(said)):
            trainer.fit()


class Halves(Callback):
    """Halves how much counts of a batch, after it was counted."""

    def before_train_batch(self, state, logger):
        state.batch = (*state.batch[:-1], state.batch[-1] // 2)


def case_microbatches_weigh_by_what_their_batch_counts_when_it_is_cut():
    found = []
    for callback in (), Halves():
        data = TensorDataset(*data_of(12, 1).tensors, torch.arange(2, 26, 2))
        spec = DataSpec(shared(data, 2), get_num_tokens_in_batch=lambda batch: batch[2].sum())
        model = Model("mean")
        options = {"device_train_microbatch_size": 1, "accumulate_train_batch_on_tokens": True}
        trainer = trainer_of(model, spec, callbacks=callback, **options)
        trainer.fit()
        found.append(trainer.state.model.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value)


def sampler_of(samples):
    return lamina.dist.get_sampler(TensorDataset(torch.zeros(samples)))


def case_all_wrong_arguments_are_named_at_once():
    model = Model("mean")
    with pytest.raises(ConfigError) as several:
        Trainer(model=nn.Linear(2, 2), max_duration="x", sede=1, autoresume=True)
    assert all(name in str(several.value) for name in ("seed", "autoresume", "a Linear", "'x' is no time"))
    assert not lamina.is_initialized()
    with pytest.warns(UserWarning, match=r"SGD\(lr=0.1\)"):
        trainer = Trainer(model=model, max_duration=1)
    with pytest.raises(ConfigError, match="no train_dataloader"):
        trainer.fit()
    with pytest.raises(ConfigError, match="no eval_dataloader"):
        trainer.eval()


def of_words(lengths):
    """Texts of different lengths, without padding in their labels."""
    generator = torch.Generator().manual_seed(4)
    words = torch.randint(5, 40, (len(lengths), max(lengths)), generator=generator)
    labels = words.clone()
    for row, length in zip(labels, lengths, strict=True):
        row[length:] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(words, labels, strict=True)]


def case_models_of_transformers_count_by_tokens():
    def small():
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=40,
            n_positions=16,
            n_embd=8,
            n_layer=1,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        return transformers.GPT2LMHeadModel(config).double()

    texts = of_words([9, 2, 5, 7, 3, 9, 2, 2, 4, 8])
    counts = lambda batch: (batch["labels"][:, 1:] != -100).sum().item()  # noqa: E731
    model, alone = HuggingFaceModel(small()), small()
    spec = DataSpec(shared(texts, 2), get_num_tokens_in_batch=counts)
    seen = {"callbacks": Seen(), "device_train_microbatch_size": 1, "accumulate_train_batch_on_tokens": True}
    trainer = trainer_of(model, spec, **seen)
    trainer.fit()
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for begin in (0, 6):
        batch = torch.utils.data.default_collate(texts[begin : begin + 6])
        optimizer.zero_grad()
        alone(**batch).loss.backward()
        optimizer.step()
    state = trainer.state.model.state_dict()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(state[f"model.{name}"], value)
    assert trainer.state.timestamp.token == sum(map(counts, (torch.utils.data.default_collate(texts),)))


def case_microbatches_have_their_own_batch_outputs_and_loss():
    found = []

    class Looks(Callback):
        def after_loss(self, state, logger):
            found.append((len(state.batch[0]), len(state.outputs), state.loss.shape))

        def after_train_batch(self, state, logger):
            found.append(len(state.batch[0]))

    trainer_of(Model("mean"), shared(data_of(15, 1), 5), callbacks=Looks(), device_train_microbatch_size=2).fit()
    assert found == [(2, 2, (2,)), (2, 2, (2,)), (1, 1, (1,)), 5]


def case_a_model_without_a_loss_is_no_model():
    with pytest.raises(TypeError, match="abstract"):
        type("Half", (ComposerModel,), {"forward": None})()
