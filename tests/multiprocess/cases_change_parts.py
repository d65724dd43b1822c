# SPDX-License-Identifier: Apache-2.0
"""Cases for two or four ranks that change how parameters and states are divided among copies of the model."""

import os

import torch
from multiprocess.cases_change import (
    STEPS,
    Training,
    adamw,
    agree,
    batch,
    momentum,
    plain,
    refused,
    run,
    start,
    states_agree,
)
from soak import some

import lamina

RANKS = int(os.environ.get("WORLD_SIZE", 1))
SHARDS = {"sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": None}  # small parameters have shards, too


def sharded(degree, partitions=1, **keys):
    return {"sharded_data_parallel_degree": degree, "partitions": partitions, "shard_optimizer_state": False} | keys


def divided(partitions=1, **keys):
    return sharded(1, partitions, shard_optimizer_state=True, **keys)


def whole(partitions=1, **keys):
    return sharded(1, partitions, **keys)


# How a job begins, and the layouts that follow, by the step before which they do.
WAYS = {
    "copies to shards and back": (whole(), {2: sharded(RANKS), 5: whole()}),
    "shards to partitions and back": (sharded(RANKS), {2: whole(RANKS), 5: sharded(RANKS)}),
    "partitions to divided states": (whole(RANKS), {3: divided()}),
    "divided states to shards and back": (divided(), {2: sharded(RANKS), 5: divided()}),
    "divided states to copies to partitions": (divided(), {2: whole(), 5: whole(2)}),
    "some parameters alone": (
        sharded(RANKS, sdp_param_persistence_threshold=30),
        {2: sharded(RANKS, sdp_persistent_parameters=["0"]), 5: sharded(RANKS, sdp_param_persistence_threshold=0)},
    ),
}
if RANKS == 4:
    WAYS |= {
        "shards in pairs": (sharded(2), {2: sharded(2, 2), 4: sharded(4), 6: sharded(2)}),
        "partitions of shards": (sharded(2, 2), {2: whole(2), 4: divided(2), 6: sharded(2, 2)}),
        "each to each": (whole(4), {1: sharded(4), 3: divided(2), 4: sharded(2, 2), 6: divided()}),
    }


def begun(first, make, **options):
    keys = SHARDS | first
    start(RANKS // keys["partitions"], microbatches=8 * keys["partitions"] // RANKS, **keys)
    return Training(make, **options)


def objects(training):
    optimizer = training.optimizer
    return list(map(id, [training.model, *training.model.parameters(), optimizer, *optimizer.param_groups]))


def case_losses_and_states_are_those_of_one_process_whatever_is_divided():
    ways = some([(make, way) for make in (adamw, momentum) for way in WAYS], 8, seed=11)
    for make in (adamw, momentum):
        expected, one = plain(make)
        for way in [way for other, way in ways if other is make]:
            first, changes = WAYS[way]
            training = begun(first, make)
            before = objects(training)
            losses = run(training, changes)
            agree(losses, expected)
            states_agree(training, one)
            assert objects(training) == before
            lamina.shutdown()


def case_a_rank_has_its_shards_alone_afterwards():
    training = begun(whole(), adamw)
    training.step()
    total = sum(parameter.numel() for parameter in training.model.parameters())
    lamina.change(**sharded(RANKS))
    own = sum(parameter.ds_tensor.numel() for parameter in training.model.parameters())
    assert total <= lamina.size() * own < total + RANKS * len(list(training.model.parameters()))
    assert {id(each) for group in training.optimizer.param_groups for each in group["params"]} == {
        id(parameter.ds_tensor) for parameter in training.model.parameters()
    }
    shards = [parameter.ds_tensor for parameter in training.model.parameters()]
    states = training.optimizer.state
    assert all(states[shard]["exp_avg"].numel() == shard.numel() for shard in shards)
    lamina.change(**whole())
    assert not any(hasattr(parameter, "ds_tensor") for parameter in training.model.parameters())
    states = training.optimizer.state
    assert all(states[parameter]["exp_avg"].shape == parameter.shape for parameter in training.model.parameters())
    with torch.no_grad():  # the former shards say where their values went
        refused_use(shards[0])


def refused_use(tensor):
    try:
        tensor.sum().item()
    except lamina.UsageError as error:
        assert "on its way to another layout" in str(error)
    else:
        raise AssertionError("a former shard was read")


def case_a_change_keeps_masters_and_the_loss_scale_bit_by_bit():
    for first, changes in (
        (whole(), [sharded(RANKS), whole(2), divided(), whole()]),
        (divided(), [sharded(RANKS), divided(), whole(RANKS), sharded(RANKS)]),
    ):
        keys = SHARDS | first
        start(RANKS // keys["partitions"], microbatches=8 * keys["partitions"] // RANKS, bf16=True, **keys)
        scaling = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 64.0, "scale_window": 2}}
        training = Training(adamw, torch.bfloat16, **scaling)
        fresh = training.optimizer.state_dict()["loss_scale"]
        for _ in range(3):
            training.step()
        before = kept(training)
        assert before["loss_scale"] != fresh
        for keys in changes:
            lamina.change(**keys)
            after = kept(training)
            assert before.keys() == after.keys()
            assert before["loss_scale"] == after["loss_scale"]
            for name in before.keys() - {"loss_scale"}:
                torch.testing.assert_close(after[name], before[name], rtol=0, atol=0, msg=name)
        training.step()
        lamina.shutdown()


def kept(training):
    """Everything that a job goes on with, by name; collective."""
    state = training.optimizer.state_dict()
    found = dict(training.model.state_dict()) | {"loss_scale": state["loss_scale"]}
    for number, values in state["state"].items():
        found |= {f"{number} {key}": value for key, value in values.items()}
    return found | {f"{number} master": value for number, value in state["masters"].items()}


def case_gradients_are_clipped_as_before_the_change():
    expected, _ = plain(adamw)
    training = begun(whole(sdp_gradient_clipping=0.01), adamw)  # which is of shards alone
    agree(run(training, {2: sharded(RANKS), 5: whole()}), expected)
    lamina.shutdown()
    expected, _ = plain(adamw, clip=0.05)
    training = begun(sharded(RANKS, sdp_gradient_clipping=0.05), adamw)
    agree(run(training, {2: whole(RANKS), 4: whole(), 6: sharded(RANKS)}), expected, 1e-5)


def case_what_is_divided_changes_with_gradients_used_alone():
    expected, _ = plain(adamw)
    training = begun(sharded(RANKS), adamw)
    losses = run(training, {}, 2)
    x = batch(2).chunk(lamina.dp_size())[lamina.dp_rank()]
    training.step_function(x)
    refused("has a gradient", **whole())
    training.optimizer.zero_grad()
    refused("sharded_data_parallel_degree: 3", lamina.ConfigError, **sharded(3))
    for _ in range(2, STEPS):
        losses.append(training.step())
    agree(losses, expected)


class Unknown(torch.optim.SGD):
    """Has not said what it needs of a parameter."""


def case_optimizers_that_cannot_have_parts_are_refused():
    training = begun(whole(), lambda parameters: Unknown(parameters, lr=0.1))
    refused("Unknown would have a part of each parameter", **sharded(RANKS))
    refused("Unknown would have a part of each parameter", **divided())
    training.step()
    lamina.change(**whole(RANKS))
    training.step()
