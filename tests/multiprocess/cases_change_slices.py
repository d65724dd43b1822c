# SPDX-License-Identifier: Apache-2.0
"""Cases for four ranks that change over how many ranks the layers of a model are sliced."""

import os

import pytest
import torch
from multiprocess.cases_change import STEPS, agree, refused, run, states_agree
from multiprocess.cases_sliced import HEADS, PLAN, WIDTH, WORDS, Attention, Words
from soak import some
from torch import nn

import lamina

RANK = int(os.environ.get("RANK", 0))
ROWS, MICROBATCHES = 16, 8  # of a batch of all copies
ROUNDING = 1e-10  # biases of keys have gradients that are nothing else, and AdamW divides these by their size


def layout(tp=1, partitions=1, shards=1, **keys):
    degrees = {
        "tensor_parallel_degree": tp,
        "partitions": partitions,
        "sharded_data_parallel_degree": shards,
        "shard_optimizer_state": False,
    }
    return degrees | keys


WAYS = {
    "copies to slices and back": (layout(), {2: layout(2), 5: layout()}),
    "slices to copies and back": (layout(2), {2: layout(), 5: layout(2)}),
    "two slices to four and back": (layout(2), {1: layout(4), 4: layout(2)}),
    "slices of partitions": (layout(2), {2: layout(2, 2), 4: layout(1, 4), 6: layout(4)}),
    "partitions to slices of partitions": (layout(1, 2), {2: layout(2, 2), 5: layout(1, 2)}),
    "slices of shards": (layout(2), {2: layout(2, 1, 2), 4: layout(1, 1, 4), 6: layout(2, 1, 2)}),
    "slices whose states copies divide": (
        layout(2, shard_optimizer_state=True),
        {2: layout(shard_optimizer_state=True), 5: layout(2, shard_optimizer_state=True)},
    ),
    "before the first step": (layout(1, 2), {0: layout(2, 2), 3: layout(4)}),
}


def start(first, one_batch=True, **keys):
    copies = 4 // (first["partitions"] * (first["tensor_parallel_degree"] if one_batch else 1))
    shards = {"sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": None}
    more = {"ddp": True, "microbatches": MICROBATCHES // copies, "timeout_s": 60, "prescaled_batch": one_batch}
    lamina.init(**more | shards | first | keys)


def made(dtype=torch.float64):
    torch.manual_seed(2)
    return Words().to(dtype)


def batch(number):
    return torch.randint(0, WORDS, (ROWS, 7), generator=torch.Generator().manual_seed(number))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class Training:
    """A training of a model in a job, or in no job."""

    def __init__(self, make, module=None, dropout=False, distributed=True, one_batch=True, plan=PLAN, **scaling):
        module = module or made()
        module.train(dropout)
        if plan and distributed:
            lamina.set_tensor_parallelism(module, plan=plan)
        self.model = lamina.distribute(module) if distributed else module
        self.optimizer = make(self.model.parameters())
        if distributed:
            self.optimizer = lamina.DistributedOptimizer(self.optimizer, **scaling)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.distributed, self.one_batch, self.number = distributed, one_batch, 0

        @lamina.step
        def step(x):
            loss = self.model(x)
            self.model.backward(loss)
            return loss

        self.step_function = step

    def share(self):
        x = batch(self.number)
        if self.one_batch:
            return x.chunk(lamina.rdp_size())[lamina.rdp_rank()]
        return x.chunk(lamina.dp_size())[lamina.dp_rank()]

    def step(self):
        """Returns the loss of the next batch."""
        self.optimizer.zero_grad()
        if self.distributed:
            loss = self.step_function(self.share()).reduce_mean()
            losses = lamina.allgather(loss.item(), lamina.RDP_GROUP if self.one_batch else lamina.DP_GROUP)
            loss = sum(losses) / len(losses)
        else:
            loss = self.model(batch(self.number))
            loss.backward()
            loss = loss.item()
        self.number += 1
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss

    def objects(self):
        modules, parameters = self.model.modules(), self.model.parameters()
        return list(map(id, [self.model, *modules, *parameters, self.optimizer, *self.optimizer.param_groups]))


def plain(make, module=None):
    """The losses and the state of one process that trains on whole batches."""
    training = Training(make, module, distributed=False)
    return [training.step() for _ in range(STEPS)], training


def case_losses_and_states_are_those_of_one_process_whatever_is_sliced():
    ways = some([(make, way) for make in (adamw, momentum) for way in WAYS], 6, seed=5)
    for make in (adamw, momentum):
        expected, one = plain(make)
        for way in [way for other, way in ways if other is make]:
            first, changes = WAYS[way]
            start(first)
            training = Training(make)
            before = training.objects()
            agree(run(training, changes), expected)
            states_agree(training, one, ROUNDING)
            assert training.objects() == before
            lamina.shutdown()


def case_batches_of_each_rank_s_own_take_turns_in_the_slices_that_there_are():
    expected, one = plain(adamw)
    for first, changes in (
        (layout(), {2: layout(2), 5: layout()}),
        (layout(2), {2: layout(4), 4: layout(), 6: layout(2)}),
    ):
        start(first, one_batch=False)
        training = Training(adamw, one_batch=False)
        agree(run(training, changes), expected)
        states_agree(training, one, ROUNDING)
        lamina.shutdown()


def case_random_numbers_go_on():
    runs = []
    for first, changes in (
        (layout(), {}),
        (layout(), {2: layout(2), 4: layout(4), 6: layout()}),
        (layout(2), {3: layout(2, 2), 5: layout()}),
    ):
        start(first, seed=5)
        training = Training(adamw, dropout=True)
        runs.append(run(training, changes))
        lamina.shutdown()
    agree(runs[1], runs[0])
    agree(runs[2], runs[0])


def case_layers_are_what_they_were_and_hooks_stay():
    start(layout())
    training = Training(adamw)
    attention, heard = training.model.module.blocks[0].attention, []
    attention.register_forward_hook(lambda module, args, output: heard.append(module.num_heads))
    attention.query.register_forward_pre_hook(lambda module, args: heard.append(tuple(module.weight.shape)))
    handle = training.model.module.head.weight.register_hook(lambda gradient: heard.append("tied"))
    weight = attention.query.weight
    for tp in (1, 2, 4, 1):
        lamina.change(tensor_parallel_degree=tp)
        assert attention.query.weight is weight
        assert weight.shape == (WIDTH // tp, WIDTH)
        assert attention.num_heads == HEADS // tp
        training.step()  # which proves calls, with whole layers, too
        heard.clear()
        training.step()
        assert {HEADS // tp, (WIDTH // tp, WIDTH), "tied"} == set(heard)
        with torch.no_grad():
            whole = lamina.get_full_parameter(weight)
        assert whole.shape == (WIDTH, WIDTH)
    handle.remove()
    assert type(attention) is Attention
    assert type(attention.query) is nn.Linear
    assert not [name for name in vars(attention.query) if name.startswith("_lamina_") and "tensor_parallel" not in name]
    weight.detach().norm()  # which is no slice any more


def case_a_rank_has_its_slices_alone():
    start(layout())
    training = Training(adamw)
    training.step()
    weight = training.model.module.blocks[0].up.weight
    lamina.change(tensor_parallel_degree=4)
    assert weight.untyped_storage().nbytes() == 8 * 3 * WIDTH * WIDTH // 4
    assert training.optimizer.state[weight]["exp_avg"].shape == weight.shape == (3 * WIDTH // 4, WIDTH)
    with pytest.raises(lamina.UsageError, match=r"blocks.0.up.weight is sliced"):
        weight.norm()
    training.step()
    with pytest.raises(lamina.UsageError, match=r"blocks.0.up.weight is sliced"):
        weight.detach().sum()


def case_masters_and_the_loss_scale_are_kept_bit_by_bit():
    start(layout(), bf16=True)
    scaling = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 64.0, "scale_window": 2}}
    training = Training(adamw, made(torch.float32), **scaling)
    run(training, {}, 3)
    before = kept(training)
    for keys in (layout(2), layout(2, 2), layout(4), layout(1, 2), layout(2, shard_optimizer_state=True), layout()):
        lamina.change(**keys)
        after = kept(training)
        assert before.keys() == after.keys()
        for name, value in before.items():
            torch.testing.assert_close(after[name], value, rtol=0, atol=0, msg=name)
    training.step()


def kept(training):
    """Everything that a job goes on with, by name; collective."""
    state = training.optimizer.state_dict()
    found = dict(training.model.state_dict()) | {"loss_scale": torch.tensor(state["loss_scale"]["scale"])}
    for number, values in state["state"].items():
        found |= {f"{number} {key}": value for key, value in values.items()}
    return found | {f"{number} master": value for number, value in state["masters"].items()}


def case_models_of_transformers_change():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=WORDS, n_positions=8, n_embd=16, n_head=4, n_layer=2, attn_implementation="eager")

    class Scored(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.inner = GPT2LMHeadModel(config).double()

        def forward(self, words):
            return nn.functional.cross_entropy(self.inner(input_ids=words).logits.flatten(0, 1), words.flatten())

    expected, one = plain(adamw, Scored())
    start(layout())
    with lamina.tensor_parallelism():
        module = Scored()
    training = Training(adamw, module, plan=None)
    agree(run(training, {1: layout(2), 3: layout(4), 5: layout(1, 2), 6: layout(2, 2)}), expected)
    states_agree(training, one, ROUNDING)
    assert module.inner.transformer.h[0].attn.num_heads == 2


def case_layers_of_lamina_change_with_positions_in_parts():
    class Scored(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.inner = lamina.nn.DistributedTransformerLMHead(
                2, 4, 4, 16, 24, WORDS, 7, 0.0, 0.0, "relu", 1e-6, 0, 7, False, True, 0.1, True, True, False
            ).double()

        def forward(self, words):
            return self.inner((words, None, None, None, words))[0].mean()

    expected, one = plain(adamw, Scored())
    start(layout())
    training = Training(adamw, Scored(), plan=None)
    agree(run(training, {1: layout(2), 3: layout(2, optimize="speed"), 4: layout(4), 6: layout()}), expected)
    states_agree(training, one, ROUNDING)


class Unknown(torch.optim.SGD):
    """Has not said what it needs of a parameter."""


def case_what_cannot_be_sliced_is_refused_and_nothing_is_lost():
    expected, _ = plain(adamw)
    start(layout())
    training = Training(adamw)
    attention = training.model.module.blocks[1].attention
    losses = run(training, {}, 2)
    refused("tensor_parallel_degree", lamina.ConfigError, tensor_parallel_degree=3)
    attention.num_heads = 2
    refused("2 heads", tensor_parallel_degree=4)
    attention.num_heads = HEADS
    lamina.change(tensor_parallel_degree=2)
    losses.append(training.step())
    kind = type(attention)
    attention.__class__ = type("Other", (kind,), {})
    refused("blocks.1.attention has got another class", tensor_parallel_degree=1)
    attention.__class__ = kind
    training.step_function(training.share())
    refused("has a gradient", tensor_parallel_degree=1)
    training.optimizer.zero_grad()
    losses += run(training, {0: layout(4)}, STEPS - 3)
    agree(losses, expected)


def case_optimizers_that_cannot_have_slices_are_refused():
    start(layout())
    training = Training(lambda parameters: Unknown(parameters, lr=0.1))
    refused("Unknown would have a part of each parameter", **layout(2))
    training.step()
    lamina.shutdown()
    start(layout(2, 2))
    Training(adamw)
    refused("no step has cut yet", **layout(1, 2))
    lamina.shutdown()


def case_modules_that_became_others_are_refused():
    start(layout())
    lamina.tp_register_with_module(Plain, Other)
    model = nn.Sequential(Plain(), nn.Linear(4, 4))
    lamina.set_tensor_parallelism(model)
    lamina.distribute(model)
    refused("names of modules that have become others", **layout(2))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x):
        return self.up(x)


class Other(lamina.nn.DistributedModule):
    slicing_plan = {"up": "colwise_gather_output"}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x):
        return self.up(x)
