# SPDX-License-Identifier: Apache-2.0
"""Cases for two ranks: the Trainer with each layout that a configuration chooses has the weights of one process."""

import functools

import pytest
import torch
from equivalence.trainer_cases import Model, TrainerCase, check, data_of
from soak import some
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import lamina
from lamina.errors import ConfigError, UsageError
from lamina.model.shards import holder
from lamina.trainer import Algorithm, Callback, ComposerClassifier, DataSpec, Event

NUMBERS = range(3000, 3020)


def require_as_one(seed, **configuration):
    """Random trainings, each beside a loop by hand on one process."""
    for number in some(NUMBERS, 2, seed):
        case = TrainerCase(number, 2, ("copies",))
        wrong = check(case, lamina_config={"timeout_s": 60}, **configuration)
        assert not wrong, f"{case.name}: {wrong}"


def case_full_shard_trains_as_one():
    require_as_one(0, fsdp_config={})


def case_shard_grad_op_trains_as_one():
    require_as_one(1, fsdp_config={"sharding_strategy": "shard_grad_op"})


def case_no_shard_trains_as_one():
    require_as_one(2, fsdp_config={"sharding_strategy": "no_shard"})


def case_stage_0_trains_as_one():
    require_as_one(3, deepspeed_config={})


def case_stage_1_trains_as_one():
    require_as_one(4, deepspeed_config={"zero_optimization": {"stage": 1}})


def case_stage_2_trains_as_one():
    require_as_one(5, deepspeed_config={"zero_optimization": {"stage": 2, "reduce_bucket_size": 7}})


def case_stage_3_trains_as_one():
    require_as_one(6, deepspeed_config={"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 9}})


def case_modules_that_are_ignored_stay_whole_and_train_as_without():
    weights = []
    for ignores in False, True:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        x = torch.randn(24, 8, dtype=torch.float64)
        data = TensorDataset(x, x[:, :4].argmax(1))
        loader = DataLoader(data, 4, sampler=lamina.dist.get_sampler(data))
        model = ComposerClassifier(layers, num_classes=4)
        config = {"min_params": 1, "ignored_modules": [layers[0]] if ignores else None}
        given = {"optimizers": torch.optim.SGD(model.parameters(), lr=0.1), "fsdp_config": config, "seed": 0}
        trainer = lamina.Trainer(model=model, train_dataloader=loader, max_duration="2ep", dist_timeout=60, **given)
        trainer.fit()
        held = [holder(layer.weight).numel() for layer in (layers[0], layers[2])]
        assert held == ([64, 16] if ignores else [32, 16])
        trainer.close()
        weights.append(nn.utils.parameters_to_vector(layers.parameters()))
    assert torch.allclose(*weights, rtol=0, atol=1e-12)
    with pytest.raises(ConfigError, match=r"ignored_modules'\]: Tanh: it is no module of the model"):
        lamina.Trainer(model=model, max_duration="1ep", fsdp_config={"ignored_modules": nn.Tanh()})


class Measured(Model):
    def get_metrics(self, is_train):
        return {"accuracy": MulticlassAccuracy(3, average="micro")}

    def update_metric(self, batch, outputs, metric):
        metric.update(outputs.softmax(1), batch[1])


def case_each_rank_has_the_metrics_of_those_that_read():
    model, (x, _) = Measured("mean"), data_of(1, 1).tensors
    data = TensorDataset(x, model((x,)).argmax(1))  # one sample, for one of both
    for keys in {}, {"partitions": 2}:
        loader = DataLoader(data, 4, sampler=lamina.dist.get_sampler(data))
        trainer = lamina.Trainer(model=model, eval_dataloader=loader, lamina_config={"timeout_s": 60} | keys)
        trainer.eval()
        assert trainer.state.eval_metric_values == {"accuracy": 1.0}
        trainer.close()


def case_ranks_with_different_arguments_are_told_them():
    given = {"max_duration": f"{1 + lamina.dist.get_global_rank()}ep", "lamina_config": {"timeout_s": 60}}
    with pytest.raises(UsageError, match="max_duration is '1ep' on rank 0 and '2ep' on rank 1"):
        lamina.Trainer(model=Model("mean"), **given)


class Stops(Callback):
    def batch_end(self, state, logger):
        if lamina.rank() == 1:
            state.stop_training()


def case_a_training_that_one_rank_alone_stops_ends_on_all():
    with pytest.raises(UsageError, match="the training has ended on rank 1 alone"):
        trained(Model("mean"), callbacks=Stops())


class Untrained(Model):
    """Its loss has no gradient."""

    def loss(self, outputs, batch):
        return super().loss(outputs, batch).detach()


def case_a_loss_without_a_gradient_is_told_in_each_layout():
    frozen = Model("mean").requires_grad_(False)
    for model in Untrained("mean"), frozen:
        for keys in {}, {"sharded_data_parallel_degree": 2}:
            with pytest.raises(UsageError, match="a loss without a gradient: all parameters are frozen"):
                trained(model, lamina_config={"timeout_s": 60} | keys)


class Ends(Callback):
    """Ends the training's job in it, by its Trainer or by another one."""

    trainer = None

    def batch_end(self, state, logger):
        trained(Model("mean")) if self.trainer is None else self.trainer.close()


def case_a_trainer_ends_in_none_of_its_callbacks():
    for keys, closes in ({}, True), ({}, False), ({"sharded_data_parallel_degree": 2}, True):
        model, data, ends = Model("mean"), data_of(8, 1), Ends()
        trainer = lamina.Trainer(
            model=model,
            train_dataloader=DataLoader(data, 2, sampler=lamina.dist.get_sampler(data)),
            max_duration="1ep",
            optimizers=torch.optim.SGD(model.parameters(), 0.1),
            callbacks=ends,
            lamina_config={"timeout_s": 60} | keys,
        )
        ends.trainer = trainer if closes else None
        with pytest.raises(UsageError, match=r"not in one of its callbacks: state.stop_training\(\) ends it"):
            trainer.fit()
        assert trainer.state.timestamp.batch == 1
        trainer.close()
        require_same(trainer.state.model.state_dict(), model.state_dict())  # without a job, too


class Steep(Model):
    """One whose gradients are far above a norm of 1."""

    def loss(self, outputs, batch):
        return 1000 * super().loss(outputs, batch)


def trained(model, **configuration):
    """The weights after a short training over both ranks."""
    dataset = data_of(16, 1)
    arguments = {
        "train_dataloader": DataLoader(dataset, 4, sampler=lamina.dist.get_sampler(dataset)),
        "max_duration": "2ep",
        "optimizers": torch.optim.SGD(model.parameters(), 1e-4),
        "lamina_config": {"timeout_s": 60},
    }
    trainer = lamina.Trainer(model=model, **arguments | configuration)
    trainer.fit()
    trainer.close()
    return model.state_dict()


def require_same(state, expected):
    for name, value in expected.items():
        assert torch.allclose(state[name], value, rtol=1e-9), name


def case_a_layout_that_shards_clips_nothing_by_itself():
    whole = trained(Steep("mean"))
    require_same(trained(Steep("mean"), fsdp_config={}), whole)
    moved = max((whole[name] - value).norm() for name, value in Model("mean").state_dict().items())
    assert moved > 1e-3, "norms above 1 would have been clipped to steps of 1e-4"


NCCL = {"timeout_s": 60, "ddp_dist_backend": "nccl"}  # Gloo here: units are collectives
LAYOUTS = [{}, {"fsdp_config": {"min_params": 0}, "lamina_config": NCCL}, {"lamina_config": {"partitions": 2}}]


def by_hand(batches):
    """The weights of one process after a step for each batch."""
    model = Model("mean")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches:
        optimizer.zero_grad()
        model.loss(model(batch), batch).mean().backward()
        optimizer.step()
    return model.state_dict()


def require_steps(batches, spec, model=None, **arguments):
    """Nine samples in batches of 8 samples of both ranks: one has a sample in the last batch, the other none."""
    for layout in LAYOUTS:
        new = model() if model else Model("mean")
        data, per_copy = data_of(9, 1), 8 if "partitions" in layout.get("lamina_config", {}) else 4
        loader = DataLoader(data, per_copy, sampler=lamina.dist.get_sampler(data))
        optimizer = torch.optim.SGD(new.parameters(), 0.1)
        given = {"optimizers": optimizer, "max_duration": "1ep", "train_dataloader": DataSpec(loader, **spec)}
        require_same(trained(new, **given | {"device_train_microbatch_size": 3} | arguments | layout), by_hand(batches))


def in_two(rows=slice(None)):
    x, y = data_of(9, 1).tensors
    return [(x[:8][rows], y[:8][rows]), (x[8:], y[8:])]


def case_microbatches_of_a_script_are_of_any_number():
    singles = lambda batch, size: [[part[row : row + 1] for part in batch] for row in range(len(batch[0]))]  # noqa: E731
    require_steps(in_two(), {"split_batch": singles})


class Again(Measured):
    """One whose evaluation runs its forward again."""

    def __init__(self):
        super().__init__("mean")

    def eval_forward(self, batch, outputs=None):
        return self(batch)


def case_metrics_of_a_training_run_forwards_on_a_rank_without_samples():
    require_steps(in_two(), {}, Again)


def case_batches_are_counted_when_they_are_transformed():
    functions = {
        "device_transforms": lambda batch: (*batch, "transformed"),
        "get_num_samples_in_batch": lambda batch: len(batch[0]) if batch[2] else 0,
    }
    require_steps(in_two(), functions)


class Halves(Algorithm):
    """Leaves the first half of a rank's samples."""

    def match(self, event, state):
        return event is Event.AFTER_DATALOADER

    def apply(self, event, state, logger):
        if state.batch is not None:
            state.batch = [part[: -(-len(part) // 2)] for part in state.batch]


def case_what_an_algorithm_leaves_of_a_batch_counts_as_all_of_it():
    require_steps(in_two(slice(4)), {}, algorithms=Halves())


class Weighing(Model):
    """One whose loss reads a parameter, and calls a module."""

    def __init__(self):
        super().__init__("mean")
        self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.last = self.module.pop(3)

    def loss(self, outputs, batch):
        return super().loss(self.last(outputs) * self.temperature, batch)


def case_a_loss_reads_parameters_and_calls_modules():
    data = data_of(5, 2)  # one rank has two batches, the other one
    evaluated = DataLoader(data, 2, sampler=lamina.dist.get_sampler(data))
    expected = trained(Weighing(), eval_dataloader=evaluated)
    for backend in ("auto", "nccl"):
        keys = {"timeout_s": 60, "ddp_dist_backend": backend}
        options = {"fsdp_config": {"min_params": 0}, "lamina_config": keys, "device_train_microbatch_size": 1}
        require_same(trained(Weighing(), eval_dataloader=evaluated, **options), expected)


class OfTokens(Model):
    """One whose loss is a mean over its tokens: the samples of a known class."""

    def __init__(self):
        super().__init__("mean")

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1], ignore_index=-1)


def case_microbatches_and_batches_without_tokens_count_nothing():
    x, y = data_of(16, 1).tensors
    y[[1, 3, 5, 7, 12]] = -1  # all of a rank's first batch; a microbatch of the other one's last
    data, expected = TensorDataset(x, y), OfTokens()
    optimizer = torch.optim.SGD(expected.parameters(), 0.1)
    for batch in DataLoader(data, 8):
        optimizer.zero_grad()
        expected.loss(expected(batch), batch).backward()
        optimizer.step()
    for keys in ({}, {"fsdp_config": {}}, {"lamina_config": {"partitions": 2}}):
        model = OfTokens()
        loader = DataLoader(data, 8 if "lamina_config" in keys else 4, sampler=lamina.dist.get_sampler(data))
        trained(
            model,
            train_dataloader=DataSpec(loader, get_num_tokens_in_batch=lambda batch: int((batch[1] >= 0).sum())),
            max_duration="1ep",
            optimizers=torch.optim.SGD(model.parameters(), 0.1),
            accumulate_train_batch_on_tokens=True,
            device_train_microbatch_size=1,
            **keys,
        )
        require_same(model.state_dict(), expected.state_dict())


def case_an_evaluated_loss_counts_by_tokens_as_a_trained_one():
    x, y = data_of(16, 1).tensors
    y[[1, 2, 3, 5, 6, 7, 12]] = -1
    data, model, found = TensorDataset(x, y), OfTokens(), []
    expected = model.loss(model((x, y)), (x, y)).item()
    for batch_size in (2, 8):
        trainer = lamina.Trainer(
            model=model,
            optimizers=torch.optim.SGD(model.parameters(), 0.1),
            accumulate_train_batch_on_tokens=True,
            lamina_config={"timeout_s": 60},
        )
        loader = DataLoader(data, batch_size, sampler=lamina.dist.get_sampler(data))
        trainer.eval(DataSpec(loader, get_num_tokens_in_batch=lambda batch: int((batch[1] >= 0).sum())))
        found.append(trainer.state.eval_metric_values["loss"])
        trainer.close()
    assert found == pytest.approx([expected, expected], rel=1e-9)


def case_an_evaluation_has_the_same_values_on_a_rank_without_data():
    from torchmetrics import MeanMetric  # takes four seconds

    model, data = Model("mean"), data_of(1, 1)
    model.get_metrics = lambda is_train: {} if is_train else {"mean": MeanMetric()}
    model.update_metric = lambda batch, outputs, metric: metric.update(outputs)
    found = []
    at_the_end = lambda state: found.append(state.eval_metric_values["mean"])  # noqa: E731
    loader = DataLoader(data, 4, sampler=lamina.dist.get_sampler(data))
    trained(model, eval_dataloader=loader, callbacks=CallbackOf(at_the_end))
    assert found == pytest.approx([model(data.tensors).mean().item()], rel=1e-6)


class CallbackOf(Callback):
    """Calls a function at the end of a training."""

    def __init__(self, function):
        self.function = function

    def close(self, state, logger):
        self.function(state)


class Single(Steep):
    """One of float32, with a buffer."""

    def __init__(self):
        super().__init__("mean")
        self.float().register_buffer("scale", torch.tensor(1 / 3))

    def forward(self, batch):
        self.dtypes = (self.module[0].weight.dtype, self.scale.dtype)
        return self.module(batch[0].to(self.dtypes[0])).float() * self.scale


def weights(state):
    return torch.cat([value.double().flatten() for name, value in state.items() if name != "scale"])


def case_each_combination_of_dtypes_trains():
    single, half = torch.float32, torch.bfloat16
    begin, expected = weights(Single().state_dict()), weights(trained(Single()))
    of = lambda mixed, **more: {"fsdp_config": {"mixed_precision": mixed} | more, "precision": "amp_bf16"}  # noqa: E731
    configurations = [
        (of("FULL"), single, single),
        (of("DEFAULT"), single, single),
        (of("PURE"), half, half),
        (of("DEFAULT", sharding_strategy="NO_SHARD"), single, single),
        (of({"param_dtype": "bf16", "reduce_dtype": "fp32"}), half, single),
        (of({"param_dtype": "bf16", "buffer_dtype": "fp32"}, sharding_strategy="NO_SHARD"), half, single),
        (of({"buffer_dtype": "bf16"}), single, half),
        ({"deepspeed_config": {"communication_data_type": "bf16"}}, single, single),
        ({"deepspeed_config": {"bf16": {"enabled": True}, "communication_data_type": "fp32"}}, half, half),
    ]
    for configuration, *dtypes in some(configurations, 5):
        model = Single()
        apart = (weights(trained(model, **configuration)) - expected).norm()
        assert list(model.dtypes) == dtypes, (configuration, model.dtypes)
        # Numbers of 8 bits are 0.4 % apart, in weights far larger than what four steps change in them.
        assert apart <= 0.1 * (expected - begin).norm(), (configuration, apart)


class Scales(Callback):
    """Begins with a loss scale that is too large, which grows soon again, and lists it."""

    def __init__(self):
        self.seen = []

    def fit_start(self, state, logger):
        state.scaler.set_growth_interval(3)
        state.scaler.update(2.0**20)

    def batch_end(self, state, logger):
        self.seen.append(state.scaler.get_scale())


def case_halves_overflow_where_those_of_one_device_do():
    dataset = TensorDataset(*(tensor.float() for tensor in data_of(48, 1).tensors[:1]), data_of(48, 1).tensors[1])
    expected = None
    for copies, given in (
        (1, {"lamina_config": {"timeout_s": 60, "partitions": 2}}),
        (2, {"lamina_config": {"timeout_s": 60}}),
        (2, {"fsdp_config": {"min_params": 1}, "lamina_config": {"timeout_s": 60}}),
    ):
        model, scales, size = Model("mean").float(), Scales(), 8 // copies
        sampler = lamina.dist.get_sampler(dataset, exact=True, batch_size=size)
        given |= {"train_dataloader": DataLoader(dataset, size, sampler=sampler), "device_train_microbatch_size": 2}
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        state = trained(model, optimizers=optimizer, precision="amp_fp16", callbacks=scales, **given)
        expected = expected or (scales.seen, state)
        assert scales.seen == expected[0] and len(set(scales.seen)) > 1, (given, scales.seen, expected[0])
        for name, value in expected[1].items():
            assert torch.allclose(state[name], value, rtol=1e-3, atol=1e-4), (given, name)


def case_a_model_that_was_half_ends_with_its_masters():
    begin, expected = Single().state_dict(), weights(trained(Single()))
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        model = Single()
        configuration = {"sharding_strategy": strategy, "mixed_precision": "PURE"}
        found = trained(model, fsdp_config=configuration, precision="amp_bf16")
        assert {name: value.dtype for name, value in found.items()} == dict.fromkeys(begin, torch.float32)
        assert not torch.equal(weights(found), weights(found).bfloat16().double())
        assert (weights(found) - expected).norm() <= 0.1 * (expected - weights(begin)).norm()


class Counted(torch.nn.Linear):
    """Counts the runs of its forward."""

    runs = 0

    def forward(self, x):
        Counted.runs += 1
        return super().forward(x)


def case_chosen_modules_are_checkpointed_in_a_layout_that_shards():
    model = Model("mean")
    model.module[0].__class__ = Counted
    model.module.activation_checkpointing_fn = lambda module: isinstance(module, Counted)
    configuration = {"activation_checkpointing": True, "activation_cpu_offload": True}
    require_same(trained(model, fsdp_config=configuration), trained(Model("mean")))
    assert Counted.runs == 2 * 4, Counted.runs  # of four batches, each forward again in the backward


class Calls(nn.Module):
    """Counts its calls: in a buffer that it changes, and in one that it replaces."""

    def __init__(self):
        super().__init__()
        self.register_buffer("changed", torch.zeros(1))
        self.register_buffer("replaced", torch.zeros(1))

    def forward(self, x):
        self.changed += 1
        self.replaced = self.replaced + 1
        return x


def case_an_evaluation_leaves_buffers_that_a_forward_replaces():
    model, dataset = Model("mean"), data_of(4, 1)
    model.module.append(Calls())
    loader = DataLoader(dataset, 4, sampler=lamina.dist.get_sampler(dataset))
    trained(model, eval_dataloader=loader)
    assert model.module[-1].changed == model.module[-1].replaced == 4


class WithScale(Model):
    """One with a parameter of its own, a root that is a unit, and one that stays whole."""

    def __init__(self):
        super().__init__("mean")
        self.module._fsdp_wrap = False
        self.more = nn.Linear(3, 3).double()
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.double))

    def forward(self, batch):
        return self.more(super().forward(batch)) * self.scale


class WholeParameters(Callback):
    def fit_start(self, state, logger):
        self.names = {name for name, value in state.model.named_parameters() if holder(value) is value}


def case_a_root_that_is_to_stay_whole_does():
    expected = trained(WithScale())
    for configuration in ({"fsdp_config": {}}, {"fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}}):
        seen = WholeParameters()
        require_same(trained(WithScale(), callbacks=[seen], **configuration), expected)
        whole = [name for name in expected if name.startswith(("module.", "scale"))]
        assert sorted(seen.names) == sorted(whole), seen.names


def case_tied_parameters_are_tied_when_the_job_has_ended():
    for keys in ({}, {"partitions": 2}):
        model = Model("mean")
        model.module = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3)).double()
        model.module[2].weight = model.module[0].weight
        trained(model, lamina_config=keys)
        assert model.module[2].weight is model.module[0].weight


def case_a_job_of_partitions_ends_before_its_first_step():
    model = Model("mean")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lamina.Trainer(
        model=model, optimizers=torch.optim.SGD(model.parameters(), 1), lamina_config={"partitions": 2}
    ).close()
    require_same(model.state_dict(), before)


class Shifted(nn.Module):
    """Has a buffer that is in no checkpoint, and one that its calls set."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 5).double()
        self.register_buffer("shift", torch.arange(5.0), persistent=False)
        self.register_buffer("latest", None)

    def forward(self, x):
        self.latest = x.detach()[0]
        return self.inner(x) + self.shift


def case_buffers_that_no_checkpoint_has_are_there_when_the_job_has_ended():
    for keys in ({}, {"partitions": 2}, {"sharded_data_parallel_degree": 2}):
        model = Model("mean")
        model.module = nn.Sequential(Shifted(), Shifted(), Shifted(), nn.Linear(5, 3).double())
        trained(model, lamina_config=keys)
        for module in model.module[:3]:
            assert torch.equal(module.shift, torch.arange(5.0)) and module.latest.shape == (5,)


def case_compiled_modules_train_in_each_layout():
    def made():
        model = Model("mean")
        model.module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        return model

    dataset = data_of(8, 2)
    compiled = functools.partial(torch.compile, backend="eager")
    expected, inner, outer, whole = trained(made()), made(), made(), made()
    inner.module[0], outer.module = compiled(inner.module[0]), compiled(outer.module)
    shards = {"fsdp_config": {"min_params": 1}}
    for model, given, row in (inner, inner, shards), (outer, outer, shards), (whole, compiled(whole), {}):
        loader = DataLoader(dataset, 4, sampler=lamina.dist.get_sampler(dataset))  # compiled while there are gradients
        trained(given, grad_accum=2, eval_dataloader=loader, **row)
        require_same(model.state_dict(), expected)
