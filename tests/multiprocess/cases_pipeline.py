# SPDX-License-Identifier: Apache-2.0
"""Cases of steps, errors and placement for two ranks that are one pipeline. Each begins without a job; every rank runs
it."""

import collections
import copy
import dataclasses
import os
import threading
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lamina

RANK = int(os.environ.get("RANK", 0))
OTHER = 1 - RANK
BATCH = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Four layers, of which two stay behind the first; the last is a list's."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.rest = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 1)])
        self.register_buffer("offset", torch.ones(6), persistent=False)

    def forward(self, x):
        x = F.gelu(self.first(x)) + self.offset
        x = F.gelu(self.second(x)) + x
        return self.rest[1](F.gelu(self.rest[0](x)))


def start(**keys):
    lamina.init(**({"partitions": 2, "microbatches": 4, "timeout_s": 30} | keys))


def by_hand(**keys):
    start(auto_partition=False, default_partition=0, **keys)


def seeded(make=Net, seed=0):
    torch.manual_seed(seed)
    return make()


def two(second):
    """A model whose part "0" is on rank 0, and `second` on rank 1."""
    model = nn.Sequential(nn.Linear(6, 6), second)
    lamina.set_partition(second, 1)
    return model


class Adds(nn.Linear):
    """Adds a loss up in this thread's own value, which keeps a graph that begins on another rank."""

    own = threading.local()

    def forward(self, x):
        y = super().forward(x).tanh()
        Adds.own.sum = getattr(Adds.own, "sum", 0) + y.square().mean()
        return y + 0 * Adds.own.sum


def case_values_of_threads_with_graphs_go_when_the_job_ends():
    start()
    train = train_step(lamina.distribute(nn.Sequential(*(Adds(6, 6) for _ in range(4)))))
    train(BATCH)
    lamina.shutdown()


def train_step(model):
    @lamina.step
    def step(x):
        loss = model(x).square().mean()
        loss /= 2  # in place
        model.backward(loss)
        return loss

    return step


def forward_step(model):
    return lamina.step(lambda x: model(x))


def everywhere(value):
    """True where `value` holds on every rank."""
    return all(lamina.allgather(value, lamina.WORLD))


def case_it_trains_like_the_plain_loop():
    trains_like_the_plain_loop(lambda parameters: torch.optim.SGD(parameters, lr=0.1))


def ready_made(samples):
    start()
    torch.manual_seed(0)
    net = Net()
    plain = copy.deepcopy(net)
    model = lamina.DistributedModel(net, average_grads_across_microbatches=samples is not None)

    @lamina.step
    def train(x, factor):
        loss = model(x).square().mean() * factor
        model.backward(loss)
        return loss

    pieces = lamina.Microbatches(BATCH.split([4, 1, 3]), samples)
    parts = 1.0 if samples else lamina.Microbatches([4 / 8, 1 / 8, 3 / 8])
    losses = train(pieces, parts)
    loss = plain(BATCH).square().mean()
    loss.backward()
    torch.testing.assert_close(losses.reduce_mean() if samples else losses.reduce_sum(), loss.detach())
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])
    for wrong, said in (
        (lamina.Microbatches(BATCH.split(1)), "8 Microbatches, where"),
        (BATCH, "different numbers"),
    ):
        second = lamina.Microbatches([1.0] * 3) if wrong is BATCH else 1.0
        first = lamina.Microbatches(BATCH.split(2)) if wrong is BATCH else wrong
        with pytest.raises(lamina.UsageError, match=said):
            train(first, second)
    lamina.shutdown()


def case_microbatches_may_come_ready_made_in_any_sizes():
    ready_made([4, 1, 3])
    ready_made(None)
    for items, counts in (([], None), ([1, 2], [1])):
        with pytest.raises(lamina.UsageError, match="Microbatches of"):
            lamina.Microbatches(items, counts)


def case_with_lamina_s_optimizers_it_trains_like_the_plain_loop():
    """Also where an optimizer divides by the norm of all gradients, of which a rank has a part."""
    trains_like_the_plain_loop(lambda parameters: lamina.optim.AdamW(parameters, lr=0.01))
    trains_like_the_plain_loop(lambda parameters: lamina.optim.LAMB(parameters, lr=0.1, max_grad_norm=0.01))
    trains_like_the_plain_loop(lambda parameters: lamina.optim.NovoGrad(parameters, lr=0.01))


def trains_like_the_plain_loop(make):
    start()
    plain = seeded()
    model = lamina.distribute(copy.deepcopy(plain))
    optimizers = [make(m.parameters()) for m in (plain, model)]
    lamina.DistributedOptimizer(optimizers[1])
    step = train_step(model)
    for _ in range(3):
        expected = plain(BATCH).square().mean() / 2
        expected.backward()
        loss = step(BATCH).reduce_mean()
        assert torch.allclose(loss, expected, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    local = dict(model.local_named_parameters())
    assert 0 < len(local) < 8
    for name, parameter in local.items():
        assert torch.allclose(parameter, plain.get_parameter(name), atol=1e-6), name
    lamina.shutdown()


def case_the_state_is_whole_and_loads_into_the_plain_model():
    start()
    plain = seeded()
    model = lamina.distribute(copy.deepcopy(plain))
    assert not model.partitioned
    forward_step(model)(BATCH)
    assert model.partitioned
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    other = seeded(seed=3)
    other.load_state_dict(state)
    assert torch.equal(other(BATCH), plain(BATCH))
    gathered = model.state_dict(gather_to_rank0=True)
    assert list(gathered) == (list(state) if RANK == 0 else [])


def case_a_whole_state_is_loaded_into_the_parts():
    start()
    plain = seeded(seed=3)
    model = lamina.distribute(seeded())
    forward_step(model)(BATCH)
    model.load_state_dict(plain.state_dict())
    output = forward_step(model)(BATCH).concat()
    assert torch.allclose(output, plain(BATCH), atol=1e-6)
    with pytest.raises(RuntimeError, match=r"missing.*first.weight.*unexpected.*'nonsense'"):
        model.load_state_dict({"nonsense": torch.ones(1)})


def case_values_are_those_of_rank_0():
    start()
    model = lamina.distribute(seeded(seed=RANK))
    forward_step(model)(BATCH)
    expected = seeded(seed=0).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def case_models_of_different_structure_are_an_error_that_names_the_difference():
    start()
    model = lamina.distribute(nn.Sequential(nn.Linear(6, 6 + RANK)))
    with pytest.raises(lamina.UsageError, match=r"rank 1 built .*'0.weight': \(7, 6\).* instead of .*\(6, 6\)"):
        forward_step(model)(BATCH)


def case_outputs_are_on_every_rank():
    start()
    model = lamina.distribute(seeded())

    @lamina.step
    def step(x):
        y = model(x)
        return {"y": y, "none": None}, [y.shape[0], "word"]

    by_name, (sizes, words) = step(BATCH)
    assert by_name["y"].concat().shape == (8, 1) and by_name["none"] is None
    assert sizes == [2] * 4 and words == ["word"] * 4
    reduced = by_name["y"].reduce_mean()
    reduced.mul_(2)
    assert not reduced.requires_grad


def case_a_model_moved_before_it_is_cut_gives_its_outputs_to_every_rank():
    start()
    plain = seeded()
    model = lamina.distribute(copy.deepcopy(plain)).to("meta").to(torch.device("meta"))
    output = forward_step(model)(BATCH).concat()
    assert output.device == BATCH.device and torch.allclose(output, plain(BATCH), atol=1e-6)
    assert all(torch.equal(output, other) for other in lamina.allgather(output, lamina.PP_GROUP))


def case_only_the_inputs_of_pp_rank_0_matter():
    start()
    embedding = nn.Embedding(6, 6)
    model = lamina.distribute(nn.Sequential(embedding, nn.Linear(6, 6), nn.Linear(6, 6)))
    step = forward_step(model)
    tokens = torch.arange(8).view(4, 2) % 6
    inputs = [(tokens,), (torch.empty(3, 0),)][RANK]
    assert step(*inputs).concat().shape == (4, 2, 6)
    inputs = [(tokens,), ()][RANK]
    assert step(*inputs).concat().shape == (4, 2, 6)


def case_arguments_that_do_not_fit_are_an_error_everywhere_and_the_next_step_works():
    start()
    model = lamina.distribute(seeded())
    step = lamina.step(lambda x, weights: model(x))
    with pytest.raises(lamina.UsageError, match=r"argument weights of shape \(6,\) cannot be split") as caught:
        step(BATCH, torch.ones(6))
    assert isinstance(caught.value, lamina.RemoteError) == (RANK == 1)
    assert len(step(BATCH, torch.ones(8)).outputs) == 4


def case_an_uneven_batch_trains_as_one_of_the_plain_model_and_all_ranks_have_its_means():
    for schedule in ("simple", "interleaved", "zero_bubble"):
        start(schedule=schedule)
        plain, model = seeded(), lamina.distribute(seeded())
        step = train_step(model)
        for size in (8, 7, 5, 3, 1):
            plain.zero_grad()
            model.zero_grad()
            expected = plain(BATCH[:size]).square().mean() / 2
            expected.backward()
            loss = step(BATCH[:size])
            assert sum(loss.samples) == size and max(loss.samples) - min(loss.samples) <= 1
            torch.testing.assert_close(loss.reduce_mean(), expected.detach())
            for name, parameter in model.local_named_parameters():
                torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
        lamina.shutdown()


class OddError(ValueError):
    def __init__(self, number, *, color):
        super().__init__(f"{number} is {color}")
        self.color = color


class Raises(nn.Linear):
    def forward(self, x):
        raise OddError(3, color="red")


def case_an_error_in_a_module_keeps_its_type_on_every_rank():
    by_hand()
    model = lamina.distribute(two(Raises(6, 6)))
    for _ in range(2):
        with pytest.raises(OddError, match="3 is red") as caught:
            forward_step(model)(BATCH)
        assert caught.value.color == "red"
        if RANK == 0:
            assert isinstance(caught.value, lamina.RemoteError)
            assert caught.value.rank == 1
            assert "in forward" in caught.value.remote_traceback


def case_an_error_in_the_step_body_keeps_its_type_on_every_rank():
    start()
    model = lamina.distribute(seeded())

    @lamina.step
    def step(x):
        model(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        step(BATCH)
    assert isinstance(caught.value, lamina.RemoteError) == (RANK == 1)
    assert forward_step(model)(BATCH).concat().shape == (8, 1)


def case_an_error_may_be_caught_in_the_step_body():
    by_hand()
    model = lamina.distribute(two(Raises(6, 6)))

    @lamina.step
    def step(x):
        try:
            model(x)
        except OddError as error:
            return error.color, error.rank

    assert step(BATCH) == (["red"] * 4, [1] * 4)


def case_an_error_in_backward_keeps_its_type():
    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            raise ZeroDivisionError("in backward")

    class Layer(nn.Linear):
        def forward(self, x):
            return Refuses.apply(super().forward(x))

    by_hand()
    model = lamina.distribute(two(Layer(6, 6)))
    with pytest.raises(ZeroDivisionError, match="in backward"):
        train_step(model)(BATCH)
    assert forward_step(model)(BATCH).concat().shape == (8, 6)


class TakesAnything(nn.Linear):
    def forward(self, x, **anything):
        return super().forward(x)


def case_an_argument_that_cannot_be_sent_is_named():
    by_hand()
    model = lamina.distribute(two(TakesAnything(6, 6)))

    @lamina.step
    def step(x):
        return model.module[1](x, key=lambda: None)

    with pytest.raises(lamina.UsageError, match=r"builtins\.function cannot be sent to another rank"):
        step(BATCH)


class AppendsTo(nn.Linear):
    def forward(self, x, seen):
        seen.append(self.out_features)
        return super().forward(x)


def case_what_a_remote_module_puts_into_an_object_comes_back_with_its_gradient():
    by_hand()
    torch.manual_seed(0)
    model = lamina.distribute(two(Collects(6, 6)))
    plain = copy.deepcopy(model.module)

    def run(module, x):
        seen = {"list": [], "first": x}
        held = seen["list"]
        first = module[1](x, seen)
        output = module[1](first, seen)
        assert seen["list"] is held and len(held) == 2 and seen["first"] is x and seen["calls"] == 2
        return output.sum() + (held[0] * held[1]).sum()

    @lamina.step
    def step(x):
        loss = run(model.module, x)
        model.backward(loss)
        return loss

    expected = torch.stack([run(plain, x) for x in BATCH.split(2)])
    expected.mean().backward()
    for _ in range(2):
        model.zero_grad()
        torch.testing.assert_close(step(BATCH).stack(), expected.detach())
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


class Collects(nn.Linear):
    """Fills an object that it is given."""

    def forward(self, x, seen):
        output = super().forward(x)
        seen["list"].append(output * 2)
        seen["calls"] = len(seen["list"])
        return output


def case_an_object_of_two_microbatches_changed_at_once_is_an_error():
    by_hand()
    model, shared = lamina.distribute(two(AppendsTo(6, 6))), []

    @lamina.step
    def step(x):
        return model.module[1](x, shared)

    with pytest.raises(lamina.UsageError, match=r"^1: its argument 1 was changed .* give each microbatch an object"):
        step(BATCH)
    assert lamina.step(lambda x: model.module[0](x))(BATCH).concat().shape == (8, 6)


@dataclasses.dataclass
class Hidden:
    states: torch.Tensor
    scale: float
    module: nn.Module


class ReadsObject(nn.Linear):
    def forward(self, hidden, *, extra):
        assert hidden.module is self.reference, "a module of the model is the receiver's own"
        return Hidden(super().forward(hidden.states) * hidden.scale * extra["x"][0], 1.0, hidden.module)


def case_objects_travel_with_their_tensors_and_gradients():
    by_hand()
    torch.manual_seed(0)
    second = ReadsObject(6, 6)
    model = two(second)
    first = model[0]
    second.__dict__["reference"] = first
    plain = copy.deepcopy([first, second])
    wrapped = lamina.distribute(model)

    @lamina.step
    def step(x):
        hidden = Hidden(first(x), 2.0, first)
        output = second(hidden, extra={"x": (x.new_tensor(3.0),)})
        assert output.module is first
        loss = output.states.square().mean()
        wrapped.backward(loss)
        return loss

    loss = step(BATCH).reduce_mean()
    plain[1].__dict__["reference"] = plain[0]
    hidden = Hidden(plain[0](BATCH), 2.0, plain[0])
    expected = plain[1](hidden, extra={"x": (torch.tensor(3.0),)}).states.square().mean()
    expected.backward()
    assert torch.allclose(loss, expected)
    assert torch.allclose(model[RANK].weight.grad, plain[RANK].weight.grad, atol=1e-5)


class Flags(nn.Sequential):
    def forward(self, x):
        return super().forward(x), [module.training for module in self.modules()], torch.is_grad_enabled()


def case_training_flags_and_grad_mode_travel_with_a_call():
    by_hand()
    inner = Flags(nn.Linear(6, 6), nn.Dropout(), nn.Dropout())
    model = lamina.distribute(two(inner))
    step = lamina.step(lambda x: model(x)[1:])
    if RANK == 0:  # what the others set does not matter
        model.eval()
    with torch.no_grad() if RANK == 0 else torch.enable_grad():
        assert step(BATCH) == ([[False] * 4] * 4, [False] * 4) or step(BATCH)[1] == [False] * 4
    model.train()
    inner[1].eval()
    flags, grad = step(BATCH)
    assert [list(column) for column in zip(*flags, strict=True)] == [[True, True, False, True]] * 4
    assert grad == [True] * 4


class Casts(nn.Linear):
    def forward(self, x):
        return super().forward(x), torch.is_autocast_enabled("cpu")


def case_autocast_travels_with_a_call():
    by_hand()
    module = seeded(lambda: two(Casts(6, 6)))
    second = module[1]
    plain = copy.deepcopy(module)
    model = lamina.distribute(module)

    @lamina.step
    def step(x):
        with torch.autocast("cpu", dtype=torch.float16):
            output, on = model(x)
        _, off = second(x)
        model.backward(output.float().square().mean())
        return output, on, off

    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    lamina.DistributedOptimizer(optimizers[1])
    for _ in range(2):  # in the second step nothing that was cast in the first may be used
        output, on, off = step(BATCH)
        with torch.autocast("cpu", dtype=torch.float16):
            expected, _ = plain(BATCH)
        expected.float().square().mean().backward()
        assert on == [True] * 4 and off == [False] * 4
        assert output.concat().dtype == torch.float16
        assert torch.allclose(output.concat(), expected, atol=1e-2)
        assert torch.allclose(module[RANK].weight.grad, plain[RANK].weight.grad, atol=1e-2)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    @lamina.step
    def whole_step(x):
        return model(x)

    with torch.autocast("cpu", dtype=torch.float16):
        output, on = whole_step(BATCH)
    assert output.concat().dtype == torch.float16 and on == [True] * 4


def case_an_encoder_is_evaluated_with_a_padding_mask():
    start()
    plain = seeded(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 4)).eval()
    model = lamina.distribute(copy.deepcopy(plain))
    padded = torch.tensor([[False, False, True]]).expand(8, 3)
    x = torch.randn(8, 3, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output = lamina.step(lambda x, padded: model(x, src_key_padding_mask=padded))(x, padded).concat()
        expected = plain(x, src_key_padding_mask=padded)
    assert len(list(model.local_parameters())) < len(list(plain.parameters()))
    assert torch.allclose(output[:, :2], expected[:, :2], atol=1e-5)


def case_hooks_run_on_the_owner_only():
    by_hand()
    model = two(nn.Linear(6, 6))
    calls = []
    for part in model:
        part.register_forward_hook(lambda module, args, output: calls.append(module))
    wrapped = lamina.distribute(model)
    forward_step(wrapped)(BATCH)
    assert calls == [model[RANK]] * 4


def case_calls_outside_a_step_are_errors_that_say_so():
    start()
    model = lamina.distribute(seeded())
    with pytest.raises(lamina.UsageError, match=r"@lamina\.step"):
        model(BATCH)
    with pytest.raises(lamina.UsageError, match=r"@lamina\.step"):
        model.backward(torch.ones(1, requires_grad=True))
    forward_step(model)(BATCH)
    parts = (model.module.first, model.module.second, *model.module.rest)
    foreign = [module for module in parts if not _is_local(model, module)]
    assert foreign
    with pytest.raises(lamina.UsageError, match=r"lives on rank .*step function"):
        foreign[0](BATCH)


def case_values_owned_elsewhere_are_gone_and_say_so():
    start()
    module = seeded()
    model = lamina.distribute(module)
    forward_step(model)(BATCH)
    local = {id(parameter) for parameter in model.local_parameters()}
    foreign = [(n, p) for n, p in module.named_parameters() if id(p) not in local]
    assert len(foreign) in (2, 4, 6)
    for name, parameter in foreign:
        assert isinstance(parameter, nn.Parameter) and parameter.dtype == torch.float32 and parameter.requires_grad
        assert parameter.shape == seeded().get_parameter(name).shape
        with pytest.raises(Exception, match=name):
            parameter.sum()


def _is_local(model, module):
    return any(part is module for part in model.local_modules())


def case_before_partition_nothing_is_local():
    start()
    model = lamina.distribute(seeded())
    with pytest.raises(lamina.UsageError, match="first call of a step function"):
        model.local_parameters()
    assert len(list(model.parameters())) == 8 and len(model.state_dict()) == 8


def case_optimizers_made_before_and_after_keep_their_live_groups():
    by_hand()
    module = two(nn.Linear(6, 6))
    early = lamina.DistributedOptimizer(torch.optim.AdamW(module.parameters(), lr=0.1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(early, lambda step: 0.5**step)
    groups = early.param_groups
    model = lamina.distribute(module)
    train_step(model)(BATCH)
    late = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    for optimizer in (early, late):
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in module[RANK].parameters()]
        optimizer.step()
    scheduler.step()
    assert early.param_groups is groups and groups[0]["lr"] == 0.05


def case_schedulers_take_the_optimizer_that_trains_like_the_plain_one():
    by_hand()
    module = seeded(lambda: two(nn.Linear(6, 6)))
    plain = copy.deepcopy(module)
    model = lamina.distribute(module)
    ours = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    assert isinstance(ours, torch.optim.Optimizer)
    schedules = torch.optim.lr_scheduler
    for make in (
        lambda optimizer: schedules.LambdaLR(optimizer, lambda step: 0.5**step),
        lambda optimizer: schedules.OneCycleLR(optimizer, max_lr=0.1, total_steps=4),
        lambda optimizer: schedules.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
    ):
        pairs = [(optimizer, make(optimizer)) for optimizer in (ours, theirs)]
        for set_to_none in (True, False):
            loss = train_step(model)(BATCH).reduce_mean()
            expected = plain(BATCH).square().mean() / 2
            expected.backward()
            for optimizer, scheduler in pairs:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
                scheduler.step(*([1.0] if isinstance(scheduler, schedules.ReduceLROnPlateau) else []))
            assert torch.allclose(loss, expected, atol=1e-6)
            assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
            assert all((p.grad is None) == set_to_none for p in model.local_parameters())
    for name, parameter in model.local_named_parameters():
        assert torch.allclose(parameter, plain.get_parameter(name), atol=1e-5), name


def case_before_partition_every_rank_has_the_whole_module_to_set_up():
    start()
    model = lamina.distribute(seeded())
    assert [name for name, _ in model.get_module().named_children()] == ["first", "second", "rest"]
    lamina.set_partition(model.get_module().second, 1)
    lamina.set_activation_checkpointing(model.get_module().rest)  # a ModuleList
    model.zero_grad(set_to_none=True)
    optimizer = lamina.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    optimizer.zero_grad(set_to_none=True)
    plain = seeded()
    plain(BATCH).square().mean().div(2).backward()
    train_step(model)(BATCH)
    for name, parameter in model.local_named_parameters():
        assert torch.allclose(parameter.grad, plain.get_parameter(name).grad, atol=1e-6), name


def case_placement_by_hand():
    by_hand()
    with lamina.partition(1):
        first = nn.Linear(6, 6)
        with lamina.partition(0):
            second = nn.Linear(6, 6)
    third = nn.Sequential(nn.Linear(6, 6))
    lamina.set_partition(third, 1)
    model = lamina.distribute(nn.Sequential(first, second, third))
    forward_step(model)(BATCH)
    assert [_is_local(model, m) for m in (model.module, first, second, third, third[0])] == [
        owner == RANK for owner in (0, 1, 0, 1, 1)
    ]
    with pytest.raises(lamina.UsageError, match="no partition 2"):
        lamina.set_partition(first, 2)
    with pytest.raises(lamina.UsageError, match="after the model was partitioned"):
        lamina.set_partition(first, 1)


def case_contexts_are_ignored_where_lamina_places():
    def built():
        with lamina.partition(1):
            return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))

    reports = []
    for build in (built, lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))):
        start()
        model = lamina.distribute(build())
        forward_step(model)(BATCH)
        reports.append(model.partition_report()["partition"])
        lamina.shutdown()
    assert reports[0] == reports[1] and set(reports[0].values()) == {0, 1}


def case_shared_parameters_placed_apart_are_an_error_on_every_rank():
    by_hand()
    module = two(nn.Linear(6, 6))
    module[1].weight = module[0].weight
    model = lamina.distribute(module)
    with pytest.raises(lamina.ConfigError, match="share"):
        forward_step(model)(BATCH)


def case_shared_parameters_live_together():
    start()
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    module[3].weight = module[0].weight
    plain = copy.deepcopy(module)
    model = lamina.distribute(module)
    optimizer = lamina.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train_step(model)(BATCH)
    assert _is_local(model, module[0]) == _is_local(model, module[3])
    (plain(BATCH).square().mean() / 2).backward()
    for name, parameter in model.local_named_parameters():
        assert torch.allclose(parameter.grad, plain.get_parameter(name).grad, atol=1e-6), name
    optimizer.step()
    state = model.state_dict()
    assert torch.equal(state["0.weight"], state["3.weight"])


def case_the_root_may_live_elsewhere():
    start(auto_partition=False, default_partition=1)
    plain = seeded()
    model = lamina.distribute(copy.deepcopy(plain))
    assert torch.allclose(forward_step(model)(BATCH).concat(), plain(BATCH), atol=1e-6)
    assert len(list(model.local_parameters())) == (0, 8)[RANK]


def case_steps_as_methods_with_an_object_as_argument():
    start()
    model = lamina.distribute(seeded())

    class Trainer:
        @lamina.step(non_split_inputs=["whole"])
        def run(self, model, x, whole):
            model.backward(model(x).sum())
            return whole.shape[0]

    assert Trainer().run(model, BATCH, BATCH) == [8] * 4


def case_a_step_without_model():
    start()
    assert lamina.step(lambda x: x.sum())(BATCH).stack().shape == (4,)


def case_objects_between_ranks():
    start()
    kinds = lamina.RankType
    if RANK == 0:
        lamina.broadcast({"first": torch.ones(2)}, lamina.PP_GROUP)
        lamina.broadcast("second", lamina.PP_GROUP)
        lamina.send([1, None], 1, kinds.WORLD_RANK)
        assert lamina.recv_from(1, kinds.PP_RANK) == "answer"
    else:
        assert torch.equal(lamina.recv_from(0, kinds.PP_RANK)["first"], torch.ones(2))
        assert lamina.recv_from(0, kinds.PP_RANK) == "second"
        assert lamina.recv_from(0, kinds.MP_RANK) == [1, None]
        lamina.send("answer", 0, kinds.WORLD_RANK)
    lamina.broadcast("nobody", lamina.DP_GROUP)
    assert lamina.allgather((RANK, "x"), lamina.CommGroup.PP_GROUP) == [(0, "x"), (1, "x")]
    assert lamina.allgather(RANK, lamina.DP_GROUP) == [RANK]
    lamina.barrier()
    lamina.mp_barrier()
    lamina.dp_barrier()


def case_an_object_that_cannot_be_sent_is_named():
    start()
    with pytest.raises(lamina.UsageError, match="function cannot be sent"):
        lamina.allgather(lambda: None, lamina.WORLD)
    assert everywhere(True)


def case_objects_are_not_exchanged_inside_a_step():
    start()

    @lamina.step
    def step(x):
        lamina.barrier()

    with pytest.raises(lamina.UsageError, match="inside a step function"):
        step(BATCH)


def case_a_second_init():
    start()
    lamina.init()
    start()
    with pytest.raises(lamina.ConfigError, match="microbatches: 4 and 2"):
        start(microbatches=2)
    assert lamina.num_microbatches() == 4 and lamina.pp_size() == 2


def case_shutdown_then_init():
    for microbatches in (2, 4):
        start(microbatches=microbatches)
        original = nn.Module.__call__
        model = lamina.distribute(seeded())
        output = forward_step(model)(BATCH)
        assert len(output.outputs) == microbatches
        assert nn.Module.__call__ is not original
        lamina.shutdown()
        assert nn.Module.__call__ is original and not lamina.is_initialized()
        with pytest.raises(lamina.UsageError):
            model(BATCH)


def case_degrees_that_do_not_fit_the_launch_are_an_error():
    with pytest.raises(lamina.ConfigError, match="partitions"):
        start(partitions=3)
    assert not lamina.is_initialized()


# Batches.


def case_a_step_without_a_backward_may_have_fewer_microbatches():
    start()
    plain, model = seeded(), lamina.distribute(seeded())

    @lamina.step
    def evaluate(x):
        with torch.no_grad():
            return model(x)

    for rows, count in ((1, 1), (8, 4), (6, 4)):
        outputs = evaluate(BATCH[:rows] if RANK == 0 else BATCH[:5])
        assert len(outputs.outputs) == count
        assert torch.allclose(outputs.concat(), plain(BATCH[:rows]), atol=1e-6)


@dataclasses.dataclass
class Pieces:
    x: torch.Tensor
    y: torch.Tensor


class Encoding(collections.UserDict):
    pass


def case_batches_of_all_kinds_train_alike():
    start()
    model = lamina.distribute(seeded())

    @lamina.step
    def train(batch):
        x, y = (batch.x, batch.y) if hasattr(batch, "x") else (batch["x"], batch["y"])
        loss = F.mse_loss(model(torch.as_tensor(x)), torch.as_tensor(y))
        return len(x), loss

    named = {"x": BATCH, "y": BATCH[:, :1]}
    arrays = {name: value.numpy() for name, value in named.items()}
    losses = []
    for batch in (named, Encoding(named), Pieces(**named), types.SimpleNamespace(**named), Encoding(arrays)):
        lengths, loss = train(batch)
        assert lengths == [2] * 4
        losses.append(loss.stack())
    assert all(torch.equal(loss, losses[0]) for loss in losses)


# Random numbers of a job with a seed.


def case_a_job_with_a_seed_goes_on_with_the_random_numbers_of_the_one_before():
    def begin():
        by_hand(seed=7)
        model = lamina.distribute(two(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))))
        return model, lamina.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))

    def losses(model, steps):
        step = train_step(model)
        return [step(BATCH).stack() for _ in range(steps)]

    torch.manual_seed(0)
    model, optimizer = begin()
    losses(model, 3)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    partial = copy.deepcopy(optimizer.local_state_dict())
    expected = losses(model, 2)
    for state in (saved["optimizer"], partial):
        lamina.shutdown()
        model, optimizer = begin()
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(state)
        assert all(map(torch.equal, losses(model, 2), expected))
