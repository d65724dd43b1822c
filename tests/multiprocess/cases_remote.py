# SPDX-License-Identifier: Apache-2.0
"""Modules and parameters of rank 0 that ranks 1 and 2 train. Each case begins without a job; every rank runs it."""

import os
import time

import pytest
import torch
from launch.launcher_harness import built
from multiprocess.remote_parts import QHM, FunctionalQHM, PlainFunctionalQHM, PlainQHM, Scale, Trust
from torch import nn
from torch.nn import functional as F

import lamina
from lamina import remote
from lamina.optim import DistributedOptimizer

RANK = int(os.environ.get("RANK", 0))
TRAINERS = (1, 2)


def start(timeout_s=30):
    lamina.init(timeout_s=timeout_s)


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 6, generator=generator, dtype=torch.double), torch.randint(4, (5,), generator=generator)


def iteration(net, optimizer, x, y):
    with remote.context() as context:
        loss = F.cross_entropy(net(x), y)
        remote.backward(context, loss)
        optimizer.step(context)
    return loss.item()


def plain_losses(model, optimizer, batches):
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def case_a_module_is_placed_found_called_and_trained_as_the_plain_loop_would():
    start()
    kinds = [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (lamina.optim.AdamW, {"lr": 0.01})]
    models = [net(), net()]
    if RANK == 0:
        for kind, (model, _) in enumerate(zip(models, kinds, strict=True)):
            remote.place(model, name=f"net {kind}")
    lamina.barrier()
    if RANK == 1:
        for kind, (Class, arguments) in enumerate(kinds):
            there = remote.find(f"net {kind}", owner=0)
            optimizer = DistributedOptimizer(Class, there.parameters(), **arguments)
            batches = [batch(seed) for seed in range(5)]
            losses = [iteration(there, optimizer, *each) for each in batches]
            plain = models[kind]
            assert losses == pytest.approx(plain_losses(plain, Class(plain.parameters(), **arguments), batches), 1e-9)
            for (name, parameter), mine in zip(there.named_parameters(), plain.named_parameters(), strict=True):
                assert name == mine[0]
                assert parameter.shape == mine[1].shape
                torch.testing.assert_close(parameter.to_here(), mine[1].detach(), rtol=1e-9, atol=1e-12)
    lamina.barrier()
    if RANK == 0:
        assert all(parameter.grad is None for model in models for parameter in model.parameters())


def case_another_rank_has_the_owner_make_a_module_or_sends_it_one():
    start()
    if RANK == 1:
        made = remote.place(Scale, owner=0, args=(3,), kwargs={"value": 2.0})
        sent = remote.place(Scale(3, 5.0), owner=0, name="sent")
        alone = remote.place(torch.ones(3, dtype=torch.double, requires_grad=True), owner=2)
        lamina.send((made, alone), 2, lamina.RankType.WORLD_RANK)
        x = torch.ones(3, dtype=torch.double)
        optimizer = DistributedOptimizer(torch.optim.SGD, [*made.parameters(), *sent.parameters(), alone], lr=1.0)
        with remote.context() as context:
            remote.backward(context, (sent(made(x)) * alone.to_here()).sum())
            optimizer.step(context)
        assert made.parameters()[0].to_here().tolist() == [-3.0] * 3
        assert sent.parameters()[0].to_here().tolist() == [3.0] * 3
        assert alone.to_here().tolist() == [-9.0] * 3
    lamina.barrier()
    if RANK == 2:
        made, alone = lamina.recv_from(1, lamina.RankType.WORLD_RANK)
        assert (made.owner, alone.owner, alone.shape) == (0, 2, (3,))
        assert made(torch.ones(3)).tolist() == [-3.0] * 3
        assert remote.find("sent", owner=0).run("state_dict")["weight"].tolist() == [3.0] * 3
        made.run("eval")
    lamina.barrier()


def case_every_trainer_updates_exactly_once_for_each_of_its_steps():
    start()
    steps = 20
    if RANK == 0:
        weight = Scale(50, 0.0)
        remote.place(weight, name="net")
    else:
        there = remote.find("net", owner=0)
        optimizer = DistributedOptimizer(torch.optim.SGD, there.parameters(), lr=1.0)
        for _ in range(steps):
            with remote.context() as context:
                remote.backward(context, there(torch.ones(50, dtype=torch.double)).sum())
                optimizer.step(context)
    lamina.barrier()
    if RANK == 0:
        assert weight.weight.eq(-steps * len(TRAINERS)).all()
        assert lamina.job.current.session().parameter_server.contexts == 0


def case_an_exception_reaches_its_trainer_only_with_its_type_and_the_owners_traceback():
    start()
    if RANK == 0:
        remote.place(Scale(2), name="net")
    else:
        there = remote.find("net", owner=0)
        optimizer = DistributedOptimizer(torch.optim.SGD, there.parameters(), lr=1.0)
        x = torch.ones(2, dtype=torch.double)
        for _ in range(5):
            if RANK == 1:
                with remote.context(), pytest.raises(KeyError, match="no such thing here") as caught:
                    there(x, fails=True)
                assert isinstance(caught.value, lamina.RemoteError)
                assert "remote_parts.py" in str(caught.value) or "remote_parts.py" in "".join(caught.value.__notes__)
            with remote.context() as context:
                remote.backward(context, there(x).sum())
                optimizer.step(context)
    lamina.barrier()


def case_a_context_used_wrongly_is_an_error_that_says_what_to_do():
    start()
    if RANK == 0:
        remote.place(Scale(2), name="net")
    if RANK == 1:
        there = remote.find("net", owner=0)
        optimizer = DistributedOptimizer(torch.optim.SGD, there.parameters(), lr=1.0)
        x = torch.ones(2, dtype=torch.double)
        with remote.context() as context:
            loss = there(x).sum()
            with pytest.raises(lamina.UsageError, match=r"\[remote-no-backward\]"):
                optimizer.step(context)
            with pytest.raises(lamina.UsageError, match=r"\[remote-backward\]"):
                loss.backward()
            remote.backward(context, loss)
            assert remote.get_gradients(context) == {}
            optimizer.step(context)
            with pytest.raises(lamina.UsageError, match=r"\[remote-context-stepped\]"):
                optimizer.step(context)
            with pytest.raises(lamina.UsageError, match=r"\[remote-context-nested\]"), remote.context():
                pass
        with pytest.raises(lamina.UsageError, match=r"\[remote-context-ended\]"):
            optimizer.step(context)
        with pytest.raises(lamina.UsageError, match=r"\[remote-context-ended\]"), context:
            pass
        with pytest.raises(lamina.UsageError, match="takes a context of lamina"):
            optimizer.step(7)
        with pytest.raises(ValueError, match="Invalid learning rate: -1"):
            DistributedOptimizer(torch.optim.SGD, there.parameters(), lr=-1)
        with pytest.raises(lamina.UsageError, match="LBFGS"):
            DistributedOptimizer(torch.optim.LBFGS, there.parameters())
        with pytest.raises(lamina.UsageError, match="takes an optimizer's class, not <class 'int'>"):
            DistributedOptimizer(int, there.parameters())
        with pytest.raises(lamina.UsageError, match="there is no rank 3; the job has 3"):
            remote.find("net", owner=3)
        assert there.parameters()[0].to_here().tolist() == [0.0, 0.0]
    lamina.barrier()
    lamina.shutdown()
    start()
    if RANK == 1:
        with pytest.raises(lamina.UsageError, match=r"\[remote-other-job\]"):
            optimizer.step(context)
        with pytest.raises(lamina.UsageError, match=r"\[remote-other-job\]"):
            there(x)
    lamina.barrier()


def case_local_leaves_have_their_gradients_in_the_context_too():
    start()
    if RANK == 0:
        remote.place(Scale(2, 3.0), name="net")
    if RANK == 1:
        head = Scale(2, 2.0)
        there, mine = remote.find("net", owner=0), remote.place(head)
        optimizer = DistributedOptimizer(torch.optim.SGD, [*there.parameters(), *mine.parameters()], lr=1.0)
        with remote.context() as context:
            remote.backward(context, head(there(torch.ones(2, dtype=torch.double))).sum())
            (gradient,) = remote.get_gradients(context).values()
            assert gradient.tolist() == [3.0, 3.0]
            optimizer.step(context)
        assert head.weight.tolist() == [-1.0, -1.0]
        assert head.weight.grad is None
        assert there.parameters()[0].to_here().tolist() == [1.0, 1.0]
    lamina.barrier()


def case_a_users_optimizer_is_the_plain_one_scripted_or_of_python_or_eager():
    start()
    arguments = {"lr": 0.1, "momentum": 0.9, "nu": 0.7}
    if RANK == 0:
        for number in range(3):
            remote.place(net(), name=f"net {number}")
    for number, form in enumerate((FunctionalQHM, PlainFunctionalQHM, None)):
        DistributedOptimizer.functional_optim_map.pop(QHM, None)
        if form is not None:
            lamina.optim.register_functional_optimizer(QHM, form)
        lamina.barrier()
        if RANK == 1:
            there, plain = remote.find(f"net {number}", owner=0), net()
            optimizer = DistributedOptimizer(QHM, there.parameters(), **arguments)
            batches = [batch(seed) for seed in range(4)]
            losses = [iteration(there, optimizer, *each) for each in batches]
            assert losses == pytest.approx(plain_losses(plain, QHM(plain.parameters(), **arguments), batches), 1e-9)
        lamina.barrier()


def case_a_shared_librarys_form_and_apexs_adam_are_updated_without_python():
    library = built("*/libtrust_plugin.so")
    lamina.optim.register_functional_optimizer(Trust, str(library))

    def made(*_, **__):
        raise AssertionError("an update in Python")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lamina.optim.engine_optimizer.EngineOptimizer.__init__", made)
        _train_without_python()


def _train_without_python():
    start()
    models = {kind: net() for kind in (Trust, lamina.optimizers.FusedAdam)}
    if RANK == 0:
        for kind, model in models.items():
            remote.place(model, name=kind.__name__)
    lamina.barrier()
    if RANK == 1:
        for kind, model in models.items():
            there = remote.find(kind.__name__, owner=0)
            optimizer = DistributedOptimizer(kind, there.parameters(), lr=0.1)
            losses = [iteration(there, optimizer, *batch(1)) for _ in range(3)]
            if kind is Trust:
                x, y = batch(1)
                plain = []
                for _ in range(3):
                    loss = F.cross_entropy(model(x), y)
                    gradients = torch.autograd.grad(loss, list(model.parameters()))
                    with torch.no_grad():
                        for own, gradient in zip(model.parameters(), gradients, strict=True):
                            own -= 0.1 * own.norm() / gradient.norm() * gradient
                    plain.append(loss.item())
            else:
                adamw = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
                plain = plain_losses(model, adamw, [batch(1)] * 3)
            assert losses == pytest.approx(plain, 1e-9)
    lamina.barrier()


def case_an_optimizer_that_is_sent_to_another_trainer_shares_its_states():
    start()
    if RANK == 0:
        remote.place(Scale(1, 0.0), name="net")
    there = remote.find("net", owner=0)
    mine = DistributedOptimizer(torch.optim.SGD, there.parameters(), lr=1.0, momentum=1.0) if RANK == 1 else None
    optimizer = lamina.allgather(mine, lamina.CommGroup.WORLD)[1]
    for rank in TRAINERS:
        if rank == RANK:
            with remote.context() as context:
                remote.backward(context, there(torch.ones(1, dtype=torch.double)).sum())
                optimizer.step(context)
        lamina.barrier()
    assert there.parameters()[0].to_here().item() == -3.0, "the second step has the momentum of the first"
    lamina.barrier()


def case_options_travel_with_the_steps_of_whoever_sets_them():
    """A schedule of a trainer's, over optimizers of the engine, in TorchScript, in Python, and eager."""
    DistributedOptimizer.functional_optim_map[QHM] = FunctionalQHM
    DistributedOptimizer.functional_optim_map[PlainQHM] = PlainFunctionalQHM
    kinds = [
        (torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.9)}, {"betas": (0.5, 0.9), "weight_decay": 0.3}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"momentum": 0.5}),
        (QHM, {"lr": 0.1, "momentum": 0.9, "nu": 0.7}, {"nu": 0.2}),
        (PlainQHM, {"lr": 0.1, "momentum": 0.9, "nu": 0.7}, {"nu": 0.2}),
        (torch.optim.ASGD, {"lr": 0.1}, {"alpha": 0.5}),
    ]
    start()
    models = [net() for _ in kinds]
    if RANK == 0:
        for number, model in enumerate(models):
            remote.place(model, name=f"net {number}")
    lamina.barrier()
    if RANK == 1:
        for number, (model, (kind, options, others)) in enumerate(zip(models, kinds, strict=True)):
            there = remote.find(f"net {number}", owner=0)
            ours = DistributedOptimizer(kind, there.parameters(), **options)
            theirs = kind(model.parameters(), **options)
            schedule = torch.optim.lr_scheduler.ExponentialLR(theirs, 0.5)
            for turn in range(4):
                x, y = batch(turn)
                expected = plain_losses(model, theirs, [(x, y)])
                assert iteration(there, ours, x, y) == pytest.approx(expected[0], rel=1e-9), (kind, turn)
                schedule.step()
                ours.set_options(lr=schedule.get_last_lr()[0])
                if turn == 1:
                    theirs.param_groups[0].update(others)
                    ours.set_options(**others)
        with pytest.raises(lamina.UsageError, match=r"set_options\(rate\): ASGD has the options alpha, .*lr"):
            ours.set_options(rate=1.0)
        adamw = DistributedOptimizer(torch.optim.AdamW, there.parameters())
        with pytest.raises(ValueError, match="Invalid learning rate: -1"):
            adamw.set_options(lr=-1.0)
    lamina.barrier()


def case_a_gradient_that_cannot_be_applied_leaves_all_parameters_of_its_owner():
    start()
    elements = 1 << 17  # so many are updated apart from others
    if RANK == 0:
        for number in range(4):
            remote.place(Scale(elements), name=f"dense {number}")
            if number == 1:
                remote.place(nn.EmbeddingBag(4, 2, sparse=True), name="sparse")
    if RANK == 1:
        dense = [remote.find(f"dense {number}", owner=0) for number in range(4)]
        sparse = remote.find("sparse", owner=0)
        parameters = [parameter for module in (*dense, sparse) for parameter in module.parameters()]
        optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=1.0)
        with remote.context() as context:
            x = torch.ones(elements, dtype=torch.double)
            loss = sum(module(x).sum() for module in dense) + sparse(torch.tensor([[1, 2]])).sum()
            remote.backward(context, loss)
            with pytest.raises(lamina.UsageError, match="does not support sparse gradients"):
                optimizer.step(context)
        assert all(module.parameters()[0].to_here().eq(1).all() for module in dense)
    lamina.barrier()


def case_what_a_trainer_alone_could_name_goes_when_it_leaves():
    start()
    if RANK == 0:
        remote.place(net(), name="net")
    lamina.barrier()
    there = remote.find("net", owner=0)
    if RANK != 0:
        mine = remote.place(Scale, 0, args=(3,))
        optimizer = DistributedOptimizer(torch.optim.SGD, mine.parameters(), lr=0.1)
        eager = DistributedOptimizer(torch.optim.ASGD, there.parameters())
    sent = lamina.allgather((mine, optimizer) if RANK == 1 else None, lamina.WORLD)[1]
    server = lamina.job.current.session().parameter_server
    assert RANK != 0 or (server.optimizers, server.modules) == (4, 4), "net, two of trainers, and what makes them"
    lamina.barrier()
    if RANK == 1:
        lamina.shutdown()
    elif RANK == 0:
        deadline = time.monotonic() + 20
        while (server.optimizers, server.modules) != (3, 4) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (server.optimizers, server.modules) == (3, 4), "what rank 1 has sent stays"
        remote.place(torch.zeros(1), name="rank 1 has left")
        remote.serve()
        while (server.optimizers, server.modules) != (1, 4) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (server.optimizers, server.modules) == (1, 4)
    else:
        remote.find("rank 1 has left", owner=0)
        module, shared = sent
        with remote.context() as context:
            remote.backward(context, module(torch.ones(3, dtype=torch.double)).sum())
            shared.step(context)
        assert module.parameters()[0].to_here().eq(0.9).all()
        del eager
