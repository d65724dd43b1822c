# SPDX-License-Identifier: Apache-2.0
"""Cases of what modules share beside arguments and results, for two ranks that are one pipeline."""

import contextlib
import copy
import io
import os
import random
import warnings

import pytest
import torch
from multiprocess.steps import train_step
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import lamina
from lamina import _lamina
from lamina.pipeline import other_random

RANK = int(os.environ.get("RANK", 0))
BATCH = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


class Experts(nn.Module):
    """Sets what its parent reads, and reads what its parent sets."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.loss, self.scale, self.seen, self.cache = torch.zeros(()), 1.0, 0, {}

    def forward(self, x):
        self.seen += 1
        self.loss = x.square().mean()
        self.cache["x"] = x
        return self.linear(x) * self.scale


class Parent(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.first, self.experts, self.last = nn.Linear(6, 6), Experts(), nn.Linear(6, 6)
        self.use = use

    def forward(self, x):
        return self.use(self, x)


def child_sets(model, x):
    return model.last(model.experts(model.first(x))) + model.experts.loss


def parent_sets(model, x):
    model.experts.scale = x.mean()
    return model.last(model.experts(model.first(x)))


def child_fills(model, x):
    y = model.experts(model.first(x))
    return model.last(y) + model.experts.cache["x"]


def child_counts(model, x):
    return model.last(model.experts(model.first(x))) * (1 + model.experts.seen % 2)


USES = [child_sets, parent_sets, child_fills, child_counts]


def start(use=None, by_hand=False, **keys):
    """A job with a model whose experts are on rank 1 if it is placed by hand; and a copy of it."""
    if by_hand:
        keys |= {"auto_partition": False, "default_partition": 0}
    lamina.init(**({"partitions": 2, "microbatches": 4, "timeout_s": 30} | keys))
    torch.manual_seed(0)
    module = Parent(use)
    plain = copy.deepcopy(module)
    if by_hand:
        lamina.set_partition(module.experts, 1)
    return lamina.distribute(module), plain


def expected(plain):
    return torch.stack([plain(x).square().mean() for x in BATCH.chunk(4)]).mean().detach()


def case_modules_that_share_attributes_are_on_one_rank():
    for use in USES:
        model, plain = start(use, active_microbatches=1)
        torch.testing.assert_close(train_step(model)(BATCH).reduce_mean(), expected(plain))
        report = model.partition_report()
        assert report["partition"][""] == report["partition"]["experts"] == 0, use
        assert set(report["partition"].values()) == {0, 1}
        assert all("" in nodes and "experts" in nodes for nodes in report["ties"].values()) and report["ties"]
        lamina.shutdown()


def case_attributes_that_cross_ranks_are_an_error_where_modules_are_placed_by_hand():
    for use, name in zip(USES, ("loss", "scale", "cache", "seen"), strict=True):
        model, _ = start(use, by_hand=True)
        says = rf"^experts\.{name} is set on partition \d in a step, and read on partition \d.*set_partition"
        with pytest.raises(lamina.UsageError, match=says):
            train_step(model)(BATCH)
        lamina.shutdown()


def case_a_placement_that_contradicts_the_trace_is_an_error_before_training():
    lamina.init(partitions=2, microbatches=4, timeout_s=30)
    module = Parent(child_sets)
    lamina.set_partition(module, 0)
    lamina.set_partition(module.experts, 1)
    model = lamina.distribute(module)
    with pytest.raises(lamina.ConfigError, match=r'"experts".* have to be together, .* place both in the same one'):
        train_step(model)(BATCH)


def case_a_body_that_reads_what_a_module_of_another_rank_sets_is_told_so():
    for traced in (True, False):
        keys = {} if traced else {"auto_partition": False, "default_partition": 0}
        lamina.init(partitions=2, microbatches=4, timeout_s=30, **keys)
        module = Parent(lambda model, x: model.last(model.experts(model.first(x))))
        lamina.set_partition(module, 0)
        lamina.set_partition(module.experts, 1)
        model = lamina.distribute(module)

        @lamina.step
        def step(x, model=model):
            y = model(x)
            return y.mean() + sum(part.loss for part in (model.module.experts,))

        with pytest.raises(lamina.UsageError, match=r"experts\.loss is set on partition 1 in a step, and read"):
            step(BATCH)
        if RANK == 0:
            with pytest.warns(UserWarning, match=r"experts\.seen is set on partition 1"):
                getattr(module.experts, "seen")  # noqa: B009 -- after the step, for a log
        lamina.shutdown()


class Marks(nn.Module):
    """Sets an attribute in its third step, of which the rank of its child has not heard then."""

    def __init__(self):
        super().__init__()
        self.child, self.turn = nn.Linear(6, 6), 0

    def forward(self, x):
        if self.turn == 2:
            self.mark = True
        y = self.child(x)
        return y, _lamina.is_pending(y)


def case_a_call_that_brings_news_of_attributes_is_predicted_as_any_other_one():
    lamina.init(partitions=2, microbatches=1, auto_partition=False, default_partition=0)
    module = Marks()
    lamina.set_partition(module.child, 1)
    model = lamina.DistributedModel(module)

    @lamina.step
    def step(x):
        y, predicted = model(x)
        model.backward(y.sum())
        return predicted

    predicted = []
    for turn in range(3):
        module.turn = turn
        predicted += step(BATCH)
    assert predicted == [False, True, True]
    if RANK == 1:
        with pytest.warns(UserWarning, match="mark.* is set on partition 0"):
            getattr(module, "mark", None)
    lamina.shutdown()
    lamina.init(partitions=2)


def case_what_shares_attributes_with_a_module_that_is_placed_by_hand_goes_there():
    lamina.init(partitions=2, microbatches=4, timeout_s=30, active_microbatches=1)
    torch.manual_seed(0)
    module = Parent(child_sets)
    plain = copy.deepcopy(module)
    lamina.set_partition(module.experts, 1)
    model = lamina.distribute(module)
    torch.testing.assert_close(train_step(model)(BATCH).reduce_mean(), expected(plain))
    partition = model.partition_report()["partition"]
    assert partition[""] == partition["experts"] == 1


class Keeps(nn.Module):
    """Keeps something in a dictionary over a call of a child."""

    def __init__(self):
        super().__init__()
        self.child, self.last, self.kept = nn.Linear(6, 6), nn.Linear(6, 6), {}

    def forward(self, x):
        self.kept["x"] = x
        y = self.child(x)
        if y.sum().item() > 1e9:
            return y
        return self.last(y) + self.kept["x"]


def kept(**keys):
    lamina.init(partitions=2, microbatches=4, timeout_s=30, auto_partition=False, default_partition=0, **keys)
    torch.manual_seed(0)
    module = Keeps()
    plain = copy.deepcopy(module)
    lamina.set_partition(module.child, 1)
    return lamina.distribute(module), plain


def case_an_object_that_microbatches_change_in_turns_is_an_error():
    model, _ = kept()
    with pytest.raises(lamina.UsageError, match=r"^what is in kept|^what is in .*kept.* was changed by microbatch"):
        train_step(model)(BATCH)


def case_an_object_that_one_microbatch_at_a_time_changes_is_right():
    model, plain = kept(active_microbatches=1)
    torch.testing.assert_close(train_step(model)(BATCH).reduce_mean(), expected(plain))


class Swaps(nn.Module):
    def __init__(self, weighted):
        super().__init__()
        self.inner = Inner()
        self.weighted = weighted

    def forward(self, x):
        return self.weighted(self.inner, x)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.there = parametrizations.weight_norm(nn.Linear(6, 6))
        self.plain = nn.Linear(6, 6)

    def forward(self, x):
        return self.first(self.plain(self.first(x))) + self.there(x)


def swapped(weighted, **keys):
    lamina.init(partitions=2, microbatches=4, timeout_s=30, auto_partition=False, default_partition=0, **keys)
    torch.manual_seed(0)
    module = Swaps(weighted)
    plain = copy.deepcopy(module)
    for part in (module.inner.there, module.inner.plain):
        lamina.set_partition(part, 1)
    return lamina.distribute(module), plain


def own_weight(inner, x):
    return torch.func.functional_call(inner, {"first.weight": inner.first.weight * x.mean()}, (x,))


def foreign_bias(inner, x):
    return torch.func.functional_call(inner, {"plain.bias": torch.ones(6)}, (x,))


def cached(inner, x):
    with parametrize.cached():
        return inner(x)


def cached_around_a_plain_one(inner, x):
    with parametrize.cached():
        return inner.first(inner.plain(x))


def case_swapped_parameters_are_an_error_where_several_microbatches_are_under_way():
    for weighted, says in (
        (own_weight, r"^functional_call\(\) of a part of the model.*active_microbatches to 1"),
        (cached, r"called in parametrize\.cached\(\): set active_microbatches to 1"),
    ):
        model, _ = swapped(weighted)
        with pytest.raises(lamina.UsageError, match=says):
            train_step(model)(BATCH)
        lamina.shutdown()


def case_swapped_parameters_of_this_rank_are_right_with_one_microbatch_at_a_time():
    for weighted in (own_weight, cached_around_a_plain_one):
        model, plain = swapped(weighted, active_microbatches=1)
        torch.testing.assert_close(train_step(model)(BATCH).reduce_mean(), expected(plain))
        lamina.shutdown()


def case_swapped_parameters_of_another_rank_are_an_error():
    for weighted, says in (
        (foreign_bias, r"^inner\.plain\.bias was replaced in a step.* inner\.plain runs on partition 1"),
        (cached, r"inner\.there, .* called in parametrize\.cached\(\), which does not reach it"),
    ):
        model, _ = swapped(weighted, active_microbatches=1)
        with pytest.raises(lamina.UsageError, match=says):
            train_step(model)(BATCH)
        lamina.shutdown()


class Skips(nn.Module):
    """Its encoder leaves something for its decoder."""

    def __init__(self):
        super().__init__()
        self.first, self.encoder, self.decoder = nn.Linear(6, 6), Leaves(), Takes()
        self.decoder.__dict__["encoder"] = self.encoder

    def forward(self, x):
        return self.decoder(self.encoder(self.first(x)), x)


class Leaves(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)
        self.skipped, self.graph = None, True

    def forward(self, x):
        self.skipped = super().forward(x) if self.graph else x.detach()
        return super().forward(x)


class Takes(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)

    def forward(self, x, other):
        return super().forward(other) + self.encoder.skipped


def skips(**keys):
    lamina.init(partitions=2, microbatches=4, timeout_s=30, **keys)
    torch.manual_seed(0)
    module = Skips()
    plain = copy.deepcopy(module)
    plain.decoder.__dict__["encoder"] = plain.encoder
    return module, plain


def case_what_one_module_leaves_for_another_is_there_with_its_gradient():
    module, plain = skips()
    lamina.set_partition(module.encoder, 1)
    model = lamina.distribute(module)
    for _ in range(2):
        torch.testing.assert_close(train_step(model)(BATCH).reduce_mean(), expected(plain))
    partition = model.partition_report()["partition"]
    assert partition["encoder"] == partition["decoder"] == partition[""] == 1


def case_what_one_call_leaves_for_another_on_a_rank_keeps_its_order():
    for dynamic in (False, True):
        module, plain = skips(auto_partition=False, default_partition=0)
        for part in (module.encoder, module.decoder):
            lamina.set_partition(part, 1)
        module.encoder.graph = plain.encoder.graph = False
        if dynamic:
            lamina.set_dynamic(module.encoder)
        step = train_step(lamina.distribute(module))
        if dynamic:
            torch.testing.assert_close(step(BATCH).reduce_mean(), expected(plain))
            continue
        says = r"encoder\.skipped is set in a call of encoder and read in .* decoder.*set_dynamic"
        with pytest.raises(lamina.UsageError, match=says):
            step(BATCH)
        lamina.shutdown()


FOUND = {}


class Filled(nn.Module):
    """Its hooks, which `use` hangs on it, fill something."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def filled(**keys):
    lamina.init(partitions=2, microbatches=4, timeout_s=30, auto_partition=False, default_partition=0, **keys)
    torch.manual_seed(0)
    module = Filled()
    lamina.set_partition(module.second, 1)
    return module, lamina.distribute(module)


def is_refused(step, says):
    with pytest.raises(lamina.UsageError, match=says):
        for _ in range(2):
            step(BATCH)
    lamina.shutdown()


def case_what_a_hook_of_another_rank_fills_and_the_body_reads_is_an_error():
    FOUND.clear()
    outputs, closed = [], {}

    def into_closure(module, args, output):
        closed["second"] = output

    def into_global(module, args, output):
        FOUND["second"] = output

    class Collects:
        def __init__(self):
            self.last = None

        def hook(self, module, args, output):
            self.last = output

        @lamina.step
        def step(self, x):
            self.model(x)
            return 0 if self.last is None else self.last.sum()

    for hook, read in (
        (into_closure, lambda: sum(value.sum() for value in closed.values())),
        (into_global, lambda: sum(value.sum() for value in FOUND.values())),
        (lambda module, args, output: outputs.append(output), lambda: sum(value.sum() for value in outputs)),
    ):
        module, model = filled()
        module.second.register_forward_hook(hook)

        @lamina.step
        def step(x, model=model, read=read):
            return model(x).sum() + read()

        is_refused(step, r"closed|FOUND|outputs")

    module, model = filled()
    collects = Collects()
    collects.model = model
    module.second.register_forward_hook(collects.hook)
    is_refused(
        collects.step, r"Collects\.last, which a hook of second changes on partition 1, is used by the step function"
    )


def case_what_hooks_of_this_rank_fill_and_the_body_reads_needs_one_microbatch_at_a_time():
    kept = {}

    def hook(module, args, output):
        kept["first"] = output

    def body(model):
        @lamina.step
        def step(x):
            y = model(x)
            if y.sum().item() > 1e9:
                return y
            return kept["first"] * 1

        return step

    module, model = filled()
    module.first.register_forward_hook(hook)
    is_refused(body(model), "kept is changed by several microbatches, which run in turns.*active_microbatches to 1")
    kept.clear()
    module, model = filled(active_microbatches=1)
    plain = copy.deepcopy(module.first)
    module.first.register_forward_hook(hook)
    for _ in range(2):
        torch.testing.assert_close(body(model)(BATCH).concat(), plain(BATCH))


def case_a_hook_that_a_body_hangs_on_a_module_is_an_error_unless_it_is_right():
    def step_of(model, part):
        @lamina.step
        def step(x):
            found = []
            handle = part.register_forward_hook(lambda module, args, output: found.append(output))
            y = model(x)
            handle.remove()
            return y.sum() + sum(output.sum() for output in found)

        return step

    module, model = filled(active_microbatches=1)
    is_refused(
        step_of(model, module.second), r"^second\.register_forward_hook\(\) in a step: the module runs on partition 1"
    )
    module, model = filled()
    is_refused(step_of(model, module.first), r"^a hook was hung in a step on first, .*active_microbatches to 1")
    module, model = filled(active_microbatches=1)
    plain = copy.deepcopy(module)
    sums = [plain(x).sum() + plain.first(x).sum() for x in BATCH.chunk(4)]
    for _ in range(2):
        torch.testing.assert_close(step_of(model, module.first)(BATCH).stack(), torch.stack(sums).detach())


def case_random_numbers_that_are_not_torchs_are_told_of():
    class Draws(nn.Linear):
        def forward(self, x):
            return super().forward(x) * random.random()

    other_random._told = False
    lamina.init(partitions=2, microbatches=4, timeout_s=30, auto_partition=False, default_partition=0)
    module = nn.Sequential(nn.Linear(6, 6), Draws(6, 6))
    lamina.set_partition(module[1], 1)
    step = train_step(lamina.distribute(module))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            step(BATCH)
    told = [str(each.message) for each in caught if "Python's random" in str(each.message)]
    assert len(told) == (1 if RANK == 1 else 0)


def case_tensors_in_attributes_that_ranks_made_apart_are_told_of():
    class Masked(nn.Linear):
        def __init__(self):
            super().__init__(6, 6)
            self.alike, self.apart = torch.ones(3), torch.full((), RANK)

        def forward(self, x):
            return super().forward(x) * self.alike[0] + self.apart

    lamina.init(partitions=2, microbatches=4, timeout_s=30)
    model = lamina.distribute(nn.Sequential(Masked(), nn.Linear(6, 6)))
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        train_step(model)(BATCH)
    assert ("lamina: 0.apart: tensors in attributes, which differ" in said.getvalue()) == (RANK == 0)


MASKS = {}


def case_what_each_rank_fills_for_itself_is_no_error():
    """A cache, and a log of hooks."""
    log = []

    def mask(size):
        if size not in MASKS:
            MASKS[size] = torch.ones(size)
        return MASKS[size]

    class Masks(nn.Linear):
        calls = 0

        def forward(self, x):
            Masks.calls += 1
            return super().forward(x) * mask(x.shape[-1])

    lamina.init(partitions=2, microbatches=4, timeout_s=30, auto_partition=False, default_partition=0)
    module = nn.Sequential(Masks(6, 6), Masks(6, 6))
    lamina.set_partition(module[1], 1)
    model = lamina.distribute(module)
    for part in module:
        part.register_forward_hook(lambda module, args, output: log.append(output.sum().item()))
    step = train_step(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            step(BATCH)
    assert len(log) == Masks.calls == 8
    told = sorted(
        str(each.message).partition(" ")[0] for each in caught if "each rank has its own" in str(each.message)
    )
    assert told == ["Masks.calls", "log"], "and nothing of MASKS"


class Scripted(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = make(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)))
        self.last = nn.Linear(6, 6)

    def forward(self, x):
        return self.last(self.second(self.first(x)))


def case_scripted_and_traced_modules_train_on_any_rank():
    makes = (torch.jit.script, lambda module: torch.jit.trace(module, (BATCH[:2],)))
    for make in makes:
        for by_hand in (True, False):
            keys = {"auto_partition": False, "default_partition": 0} if by_hand else {}
            lamina.init(partitions=2, microbatches=4, timeout_s=30, **keys)
            torch.manual_seed(0)
            plain = Scripted(lambda module: module)
            torch.manual_seed(0)
            module = Scripted(make)
            lamina.set_partition(module.second, 1)
            model = lamina.distribute(module)
            ours, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, plain))
            lamina.DistributedOptimizer(ours)
            for _ in range(3):
                loss = plain(BATCH).square().mean()
                loss.backward()
                torch.testing.assert_close(train_step(model)(BATCH).reduce_mean(), loss.detach())
                for optimizer in (ours, theirs):
                    optimizer.step()
                    optimizer.zero_grad()
            state = model.state_dict()
            assert all(torch.allclose(state[name], value) for name, value in plain.state_dict().items())
            lamina.shutdown()
