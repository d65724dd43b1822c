# SPDX-License-Identifier: Apache-2.0
"""Cases of states of models and optimizers, of hooks and of their other methods, for two ranks that are one
pipeline."""

import copy
import os

import pytest
import torch
from multiprocess import resuming
from multiprocess.resuming import Run, equal, goes_on, stopped
from multiprocess.steps import train_step
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import lamina
from lamina.deferred_init import delayed, tape
from lamina.job import current
from lamina.model import partitioned

RANK = int(os.environ.get("RANK", 0))
X = resuming.BATCHES[0]


def by_hand(*parts, **options):
    """A model whose parts live on the ranks in turn; it is cut at its first step."""
    lamina.init(partitions=2, microbatches=2, timeout_s=30, auto_partition=False, default_partition=0)
    torch.manual_seed(0)
    module = nn.Sequential(*[part() for part in parts or (linear,) * 3])
    for number, part in enumerate(module):
        lamina.set_partition(part, number % 2)
    return lamina.distribute(module, **options)


def linear():
    return nn.Linear(6, 6)


def refuses(text, function, *args, **kwargs):
    with pytest.raises(lamina.UsageError, match=text):
        function(*args, **kwargs)


def values(model):
    return {name: parameter.detach().clone() for name, parameter in model.local_named_parameters()}


# Names of what is local.


def case_api_each_rank_tells_what_is_its_own():
    model = by_hand(linear, lambda: nn.BatchNorm1d(6), linear)
    train_step(model)(X)
    parameters = [["0.weight", "0.bias", "2.weight", "2.bias"], ["1.weight", "1.bias"]][RANK]
    buffers = [[], ["1.running_mean", "1.running_var", "1.num_batches_tracked"]][RANK]
    modules = [["", "0", "2"], ["1"]][RANK]
    assert [name for name, _ in model.local_named_parameters()] == parameters
    assert [name for name, _ in model.local_named_buffers()] == buffers
    assert [name for name, _ in model.local_named_modules()] == modules
    for unnamed, named in (
        (model.local_parameters(), model.local_named_parameters()),
        (model.local_buffers(), model.local_named_buffers()),
        (model.local_modules(), model.local_named_modules()),
    ):
        assert [id(value) for value in unnamed] == [id(value) for _, value in named]


def case_api_a_local_state_is_marked_as_partial():
    model = by_hand(linear, lambda: nn.BatchNorm1d(6), linear)
    refuses(r"nothing is local before \[model-uncut\]", model.local_state_dict)
    train_step(model)(X)
    state = model.local_state_dict()
    assert state.pop("_smp_is_partial") is True
    whole = model.state_dict()
    assert "_smp_is_partial" not in whole
    assert sorted(state) == sorted(name for name in whole if int(name[0]) % 2 == RANK)
    equal(dict(state), {name: whole[name] for name in state})
    refuses(r"assign=True.*\[state-assign\]", model.load_state_dict, whole, assign=True)


# Loading into the model.


def case_api_a_partial_state_is_loaded_into_the_parts():
    model = by_hand()
    train_step(model)(X)
    saved = copy.deepcopy(model.local_state_dict())
    before = values(model)
    for same in (False, True):
        with torch.no_grad():
            for parameter in model.local_parameters():
                parameter.zero_()
        assert not any(model.load_state_dict(saved, same_partition_load=same))
        equal(values(model), before)


def case_api_a_partial_state_of_another_cut_is_put_together():
    model = by_hand()
    whole = copy.deepcopy(model.state_dict())
    train_step(model)(X)
    other = type(whole)(item for item in whole.items() if item[0].startswith("0") == (RANK == 0))
    other["_smp_is_partial"] = True
    with torch.no_grad():
        for parameter in model.local_parameters():
            parameter.zero_()
    model.load_state_dict(other)
    equal(model.state_dict(), whole)
    text = r"same_partition_load.* partition 0 of 2.* it lacks 2\.weight, which lives here"
    with pytest.raises(lamina.UsageError, match=text):
        model.load_state_dict(other, same_partition_load=True)


def case_api_a_partial_state_of_more_partitions_names_both():
    model = by_hand()
    train_step(model)(X)
    saved = model.local_state_dict()
    saved._metadata["_lamina_saved_by"] = (RANK, 3)
    before = values(model)
    refuses(r"saved by partition \d of 3, and this rank has partition \d of 2", model.load_state_dict, saved)
    equal(values(model), before)
    lamina.shutdown()
    early = by_hand()
    refuses(r"saved by partition \d of 3, and this rank has partition \d of 2", early.load_state_dict, saved)


def case_api_partial_on_one_rank_and_full_on_another_is_an_error():
    model = by_hand()
    train_step(model)(X)
    whole, part = model.state_dict(), model.local_state_dict()
    refuses("partition 1 was given a partial .* partition 0 a full", model.load_state_dict, [whole, part][RANK])
    model.load_state_dict(whole | {"_smp_is_partial": False})


def case_api_what_does_not_fit_is_an_error_before_anything_is_written():
    model = by_hand()
    train_step(model)(X)
    before = values(model)
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    missing = {name: value for name, value in state.items() if name != "1.bias"}
    refuses("missing .*1.bias.* lives on partition 1 on rank 1", model.load_state_dict, missing)
    refuses(r"size mismatch for 1\.weight", model.load_state_dict, state | {"1.weight": torch.zeros(2, 6)})
    refuses(r"expected torch.Tensor", model.load_state_dict, state | {"1.weight": "a word"})
    refuses("unexpected .*'3.weight'", model.load_state_dict, state | {"3.weight": torch.zeros(2, 6)})
    part = {name: value for name, value in missing.items() if int(name[0]) % 2 == RANK} | {"_smp_is_partial": True}
    refuses("missing .*1.bias.* lives on partition 1 on rank 1", model.load_state_dict, part)
    equal(values(model), before)
    loaded = model.load_state_dict(missing | {"3.weight": torch.zeros(1)}, strict=False)
    assert loaded.missing_keys == ["1.bias"] and loaded.unexpected_keys == ["3.weight"]
    assert all(value.eq(0).all() == (name != "1.bias") for name, value in model.state_dict().items())


def case_api_arguments_that_differ_are_refused_on_both_ranks_before_anything_is_written():
    model = by_hand()
    optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    train_step(model)(X)
    before, zeros = values(model), {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    for name, usual in (("strict", True), ("assign", False), ("same_partition_load", False)):
        text = f"{name} is {usual} on rank 0 and {not usual} on rank 1"
        refuses(text, model.load_state_dict, zeros, **{name: usual != (RANK == 1)})
    for owner in (model, optimizer):
        refuses("gather_to_rank0 is False on rank 0 and True on rank 1", owner.state_dict, gather_to_rank0=RANK == 1)
    equal(values(model), before)


def case_api_torchs_helpers_see_the_plain_model_and_refuse_parts_of_its_optimizer():
    model = by_hand()
    optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    train_step(model)(X)
    state = get_model_state_dict(model)
    equal(state, model.state_dict())
    set_model_state_dict(model, {name: torch.ones_like(value) for name, value in state.items()})
    assert all(value.eq(1).all() for value in model.state_dict().values())
    refuses("take an optimizer that has the model's own parameters", get_optimizer_state_dict, model, optimizer)
    refuses("state-helpers", set_optimizer_state_dict, model, optimizer, {"state": {}, "param_groups": []})


class Renamed(nn.Linear):
    """Takes states in which its weight had another name, and keeps something that is no tensor."""

    def __init__(self):
        super().__init__(6, 6)
        self.note = "none"

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]

    def _load_from_state_dict(self, state_dict, prefix, *args):
        if prefix + "kernel" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel")
        super()._load_from_state_dict(state_dict, prefix, *args)


def case_api_modules_translate_what_they_load():
    model = by_hand(Renamed, Renamed)
    train_step(model)(X)
    state = {name.replace("weight", "kernel"): value for name, value in model.state_dict().items()}
    state["1._extra_state"] = {"note": "of 1"}
    state["1.kernel"] = torch.ones(6, 6)
    assert not any(model.load_state_dict(state))
    loaded = model.state_dict()
    assert loaded["1._extra_state"] == {"note": "of 1"} and loaded["0._extra_state"] == {"note": "none"}
    assert torch.equal(loaded["1.weight"], torch.ones(6, 6))
    assert model.module[1].note == ("of 1" if RANK == 1 else "none")


class Reported(nn.Linear):
    """Tells how far the cut is while its state is loaded."""

    def __init__(self):
        super().__init__(6, 6)
        self.is_routed = []

    def get_extra_state(self):
        return {}

    def set_extra_state(self, state):
        self.is_routed.append(current.job().routing.is_on)


def case_api_a_state_that_came_early_is_loaded_when_calls_have_their_routes_and_before_hooks():
    model = by_hand(Reported, Reported)
    train_step(model)(X)
    saved = copy.deepcopy(model.local_state_dict())
    lamina.shutdown()
    model, seen = by_hand(Reported, Reported), []
    model.register_post_partition_hook(lambda given, _: seen.append(list(given.module[RANK].is_routed)))
    model.load_state_dict(saved)
    lamina.step(lambda x: model(x))(X)
    assert seen == [[True]]


def case_api_a_partial_state_that_comes_early_is_loaded_at_the_cut():
    model = by_hand()
    train_step(model)(X)
    expected, saved = model.state_dict(), copy.deepcopy(model.local_state_dict())
    expected = copy.deepcopy(expected)
    lamina.shutdown()
    torch.manual_seed(9)
    model = by_hand()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(saved)
    refuses("waits for the model to be partitioned", model.state_dict)
    lamina.step(lambda x: model(x))(X)
    equal(model.state_dict(), expected)


# The optimizer.


def case_api_a_training_goes_on_from_whole_states():
    states = copy.deepcopy(stopped(partitions=2).states())
    goes_on(Run().load(states))
    lamina.shutdown()
    goes_on(Run(partitions=2).load(states))
    lamina.shutdown()
    goes_on(Run(partitions=1).load(states))
    lamina.shutdown()
    goes_on(Run(partitions=2).load(stopped().states()))


def case_api_a_training_goes_on_from_partial_states_and_in_a_model_that_is_cut():
    run = stopped(partitions=2)
    model, optimizer = copy.deepcopy((run.model.local_state_dict(), run.optimizer.local_state_dict()))
    assert optimizer["_smp_is_partial"] is True
    later = copy.deepcopy(run.optimizer.save_optimizer_backcompat(gather_if_shard=False))
    run.train(resuming.BATCHES)
    run.model.load_state_dict(model)
    run.optimizer.load_optimizer_backcompat(later, True)
    goes_on(run)
    lamina.shutdown()
    run = Run(partitions=2)
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    refuses("waits for the model to be partitioned", run.optimizer.state_dict)
    refuses("waits for the model to be partitioned", run.optimizer.local_state_dict)
    goes_on(run)


def case_api_the_whole_state_is_that_of_the_plain_optimizer():
    run, plain = stopped(partitions=2), stopped()
    equal(run.states(), plain.states())
    gathered = run.optimizer.state_dict(gather_to_rank0=True)
    equal(gathered, plain.optimizer.state_dict() if RANK == 0 else {})
    named = torch.optim.SGD(plain.model.named_parameters(), lr=0.1)
    ours = lamina.DistributedOptimizer(torch.optim.SGD(run.model.named_parameters(), lr=0.1))
    equal(ours.state_dict(), named.state_dict())
    local = lamina.DistributedOptimizer(torch.optim.SGD(run.model.local_parameters(), lr=0.1))
    equal(local.state_dict(), torch.optim.SGD(plain.model.parameters(), lr=0.1).state_dict())


def case_api_options_that_are_loaded_early_are_there_at_once_and_may_be_changed():
    states = copy.deepcopy(stopped(partitions=2).states())
    states["optimizer"]["param_groups"][0]["lr"] = 0.5
    lamina.shutdown()
    run = Run(partitions=2).load(states)
    group = run.optimizer.param_groups[0]
    assert group["lr"] == 0.5
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.1)
    assert group["lr"] == scheduler.get_last_lr()[0] == 0.05
    run.train(resuming.BATCHES[:1])
    assert run.optimizer.param_groups[0] is group and group["lr"] == 0.05
    assert run.optimizer.state_dict()["state"][0]["step"] == 4


def case_api_an_optimizer_of_all_parameters_at_once_is_refused():
    model = by_hand()
    refuses("LBFGS measures all parameters", lamina.DistributedOptimizer, torch.optim.LBFGS(model.parameters()))


def case_api_the_whole_state_is_part_of_a_larger_modules_and_knows_no_new_module():
    model = by_hand()
    train_step(model)(X)
    larger = nn.ModuleDict({"inner": model}).state_dict()
    equal(dict(larger), {f"inner.{name}": value for name, value in model.state_dict().items()})
    model.module[2] = linear()
    refuses("2 came into the model after it was cut", model.state_dict)


def case_api_an_update_in_a_step_body_is_refused():
    model = by_hand()
    optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    train_step(model)(X)
    before = values(model)

    for update in (optimizer.step, optimizer.zero_grad, model.zero_grad):

        @lamina.step
        def updates(x, update=update):
            model(x)
            update()

        refuses(r"(step|zero_grad)\(\) inside a step function", updates, X)
    equal(values(model), before)


def case_api_states_that_do_not_fit_the_optimizer():
    run = stopped(partitions=2)
    whole, part = copy.deepcopy((run.optimizer.state_dict(), run.optimizer.local_state_dict()))
    refuses("1 parameter groups, the optimizer 2", run.optimizer.load_state_dict, whole | {"param_groups": [{}]})
    for load in (run.optimizer.load_state_dict, None):
        if load is None:
            lamina.shutdown()
            load = Run(partitions=2).optimizer.load_state_dict
        shorter = copy.deepcopy(whole)
        shorter["param_groups"][1]["params"].pop()
        refuses(r"group 1 has \d parameters in the state and \d in the optimizer", load, shorter)
        moved = part | {"_lamina_saved_by": (RANK, 3)}
        refuses(r"saved by partition \d of 3, and this rank has partition \d of 2", load, moved)


def case_api_a_partial_state_that_lacks_a_parameter_names_it_and_its_owner():
    run = stopped(partitions=2)
    part = copy.deepcopy(run.optimizer.local_state_dict())
    for group in part["param_groups"]:
        group["params"] = [name for name in group["params"] if name != "unused.weight"]
    owner = run.model._life.model.owner_of("unused.weight")
    refuses(rf"lack unused\.weight, .* on partition {owner} on rank {owner}", run.optimizer.load_state_dict, part)
    whole = run.optimizer.state_dict()
    refuses(
        "partition 0 was given a partial",
        run.optimizer.load_state_dict,
        [run.optimizer.local_state_dict(), whole][RANK],
    )


# Files.


def folder(name):
    """One for both ranks, in the launch's own."""
    path = os.path.join(os.environ["DIR"], name)
    os.makedirs(path, exist_ok=True)
    return path


def case_api_checkpoints_in_files_as_scripts_write_them():
    run = stopped(partitions=2)
    path = folder("both kinds") + "/checkpoint.pt"
    if lamina.dp_rank() == 0:
        part = {"model": run.model.local_state_dict(), "optimizer": run.optimizer.local_state_dict()}
        lamina.save(part, path, partial=True)
        whole = {"model": run.model.state_dict(gather_to_rank0=True), "optimizer": run.optimizer.state_dict()}
        lamina.save(whole, path, partial=False)
    lamina.barrier()
    assert sorted(os.listdir(os.path.dirname(path))) == ["checkpoint.pt", "checkpoint.pt_0", "checkpoint.pt_1"]
    goes_on(Run().load(torch.load(path, weights_only=True)))
    for partial in (True, False):
        lamina.shutdown()
        run = Run(partitions=2)
        goes_on(run.load(lamina.load(path, partial=partial)))


def case_api_files_of_another_number_of_ranks_say_so():
    run = stopped(partitions=2)
    path = folder("of two ranks") + "/checkpoint.pt"
    lamina.save(run.model.local_state_dict(), path, v3=RANK == 0)
    lamina.save(run.model.local_state_dict(), path)
    lamina.shutdown()
    lamina.init(partitions=1, microbatches=1, timeout_s=30)
    refuses("_0 was saved by a job of pp 2 x tp 1 ranks, this one has pp 1 x tp 1: .*partial=False", lamina.load, path)
    refuses("was saved by a job of pp 2 x tp 1 .*this one has pp 1", lamina.load, path, v3=True)


# Hooks.


def case_api_hooks_run_once_when_the_model_is_cut_and_at_the_end_of_a_step():
    model = by_hand()
    optimizer = lamina.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    calls, bodies = [], []

    def at_the_cut(given, of):
        calls.append(("cut", given is model, of is optimizer, model.partitioned, len(list(model.local_parameters()))))

    def at_the_end(given, of):
        calls.append(("end", given is model, of is optimizer, next(model.local_parameters()).grad is not None))

    model.register_post_partition_hook(at_the_cut)
    model.register_post_partition_hook(lambda *_: calls.append("never")).remove()
    model.register_post_step_hook(at_the_end)

    @lamina.step
    def step(x):
        bodies.append(len(calls))
        model.backward(model(x).sum())

    step(X)
    assert calls == [("cut", True, True, True, [4, 2][RANK]), ("end", True, True, True)] and bodies == [1, 1]
    calls.clear()
    step(X)
    assert calls == []
    model.register_post_step_hook(at_the_end).remove()
    step(X)
    model.register_post_step_hook(at_the_end)
    step(X)
    assert calls == [("end", True, True, True)]
    model.register_post_partition_hook(at_the_cut)
    assert calls[-1][0] == "cut"
    refuses("NoneType", model.register_post_step_hook, None)


def case_api_a_hook_may_load_a_checkpoint():
    states = copy.deepcopy(stopped(partitions=2).states())
    lamina.shutdown()
    run = Run(partitions=2)

    def load(model, optimizer):
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])

    run.model.register_post_partition_hook(load)
    goes_on(run)


# cpu().


class WithHidden(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("offset", torch.randn(6), persistent=False)
        self.register_buffer("late", None)

    def forward(self, x):
        self.late = torch.full((6,), 2.0) if self.late is None else self.late
        return super().forward(x) + self.offset + self.late


def case_api_cpu_brings_the_model_together_until_the_next_step():
    model = by_hand(linear, WithHidden, linear)
    plain = copy.deepcopy(model.module)
    for _ in range(2):
        train_step(model)(X)
        assert model.cpu() is model
        plain.load_state_dict(model.state_dict(), strict=False)
        whole = model.get_module()
        assert torch.equal(whole(X), plain(X)) and torch.equal(whole[1].offset, plain[1].offset)
        assert torch.equal(copy.deepcopy(whole)(X), plain(X))
        equal(whole.state_dict(), model.state_dict())
        assert all(parameter.sum().isfinite() for parameter in model.double().float().parameters())
    train_step(model)(X)
    foreign = model.module[1 - RANK].weight
    refuses("lives in partition", foreign.sum)
    with pytest.raises(lamina.UsageError, match="inside a step function"):
        model.module[1 - RANK](X)


# The module inside.


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


def case_api_modules_are_reached_through_their_wrappers():
    lamina.init(partitions=2, microbatches=2, timeout_s=30)
    inner = nn.Sequential(linear(), linear())
    model = lamina.distribute(Wrapper(Wrapper(inner)))
    assert model.get_module() is model.module and model.module.module.module is inner
    unwrapped = model
    while hasattr(unwrapped, "module"):
        unwrapped = unwrapped.module
    assert unwrapped is inner
    train_step(model)(X)
    assert list(model.state_dict()) == [
        f"module.module.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")
    ]


# Parameters that wait for the cut.


def late():
    """A model whose parameters wait, built on each rank from another seed, and that of rank 0 as it would be."""
    torch.manual_seed(0)
    expected = resuming.Net()
    torch.manual_seed(RANK)
    with lamina.delay_param_initialization():
        module = resuming.Net()
    return module, expected


def case_api_delayed_parameters_get_the_values_of_rank_0():
    before, tape.SMALL_BYTES = tape.SMALL_BYTES, 0
    portion, partitioned.PORTION_BYTES = partitioned.PORTION_BYTES, 200  # several
    try:
        lamina.init(partitions=2, microbatches=1, timeout_s=30)
        module, expected = late()
        model = lamina.distribute(module)
        run = lamina.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        assert all(map(delayed.is_delayed, model.parameters()))
        lamina.step(lambda x: model(x))(X)
        assert not any(map(delayed.is_delayed, model.parameters())) and len(run.param_groups[0]["params"]) > 0
        ours, theirs = model.state_dict(), expected.state_dict()
        equal({n: v for n, v in ours.items() if "norm" not in n}, {n: v for n, v in theirs.items() if "norm" not in n})
        foreign = next(p for n, p in model.named_parameters() if not model._life.model.owns(n))
        refuses("lives in partition", foreign.sum)
        lamina.shutdown()
        lamina.init(partitions=2, microbatches=1, timeout_s=30)
        module, _ = late()
        model = lamina.distribute(module)
        zeros = {name: torch.zeros_like(value) for name, value in theirs.items()}
        model.load_state_dict(zeros)
        lamina.step(lambda x: model(x))(X)
        assert not any(value.any() for name, value in model.state_dict().items() if "norm" not in name)
    finally:
        tape.SMALL_BYTES, partitioned.PORTION_BYTES = before, portion
