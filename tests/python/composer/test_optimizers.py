# SPDX-License-Identifier: Apache-2.0
import math
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lamina.trainer import ComposerClassifier, Trainer, loggers, monitors
from lamina.trainer.optimizers import DecoupledAdamW, DecoupledSGDW


def parameters_of(seed=0):
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(5, 3).double()), torch.nn.Parameter(torch.randn(7).double())]


def gradient(parameter):
    return parameter.detach().sin() + 0.3


def sgdw(parameters, rates, momentum, dampening, decay, nesterov):
    momenta = [None] * len(parameters)
    for lr in rates:
        for number, parameter in enumerate(parameters):
            step = gradient(parameter)
            if momentum:
                last = momenta[number]
                momenta[number] = step.clone() if last is None else momentum * last + (1 - dampening) * step
                step = step + momentum * momenta[number] if nesterov else momenta[number]
            parameter.data = parameter.data * (1 - lr / rates[0] * decay) - lr * step


def adamw(parameters, rates, betas, eps, decay, amsgrad):
    first = [torch.zeros_like(parameter) for parameter in parameters]
    second, most = [each.clone() for each in first], [each.clone() for each in first]
    for count, lr in enumerate(rates, 1):
        for number, parameter in enumerate(parameters):
            step = gradient(parameter)
            first[number] = betas[0] * first[number] + (1 - betas[0]) * step
            second[number] = betas[1] * second[number] + (1 - betas[1]) * step**2
            most[number] = torch.maximum(most[number], second[number])
            under = (most if amsgrad else second)[number].sqrt() / math.sqrt(1 - betas[1] ** count) + eps
            decayed = parameter.data * (1 - lr / rates[0] * decay)
            parameter.data = decayed - lr / (1 - betas[0] ** count) * first[number] / under


RATES = [0.1, 0.1, 0.05, 0.02, 0.0, 0.1]


@pytest.mark.parametrize(
    ("kind", "formula", "options"),
    [
        (DecoupledSGDW, (sgdw, 0, 0, 1e-4, False), {"weight_decay": 1e-4}),
        (DecoupledSGDW, (sgdw, 0.9, 0.1, 5e-4, False), {"momentum": 0.9, "dampening": 0.1, "weight_decay": 5e-4}),
        (DecoupledSGDW, (sgdw, 0.9, 0, 0, True), {"momentum": 0.9, "nesterov": True}),
        (DecoupledAdamW, (adamw, (0.9, 0.95), 1e-8, 1e-5, False), {}),
        (DecoupledAdamW, (adamw, (0.8, 0.9), 1e-6, 5e-4, True), {"betas": (0.8, 0.9), "eps": 1e-6, "amsgrad": True}),
    ],
)
def test_a_step_takes_the_same_part_of_weights_whatever_the_first_rate_is(kind, formula, options):
    if kind is DecoupledAdamW and options:
        options = options | {"weight_decay": 5e-4}
    ours, theirs = parameters_of(), parameters_of()
    optimizer = kind(ours, lr=RATES[0], **options)
    for lr in RATES:
        for group in optimizer.param_groups:
            group["lr"] = lr
        for parameter in ours:
            parameter.grad = gradient(parameter)
        optimizer.step()
    formula[0](theirs, RATES, *formula[1:])
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


def test_parameters_without_a_gradient_stay_and_a_closure_is_called_before_the_decay():
    (first, second), seen = parameters_of(), []
    before, other = first.detach().clone(), second.detach().clone()
    optimizer = DecoupledSGDW([first, second], lr=0.5, weight_decay=5e-4)

    def closure():
        seen.append(torch.equal(first, before))
        first.grad = torch.ones_like(first)
        return 3.0

    assert optimizer.step(closure) == 3.0 and seen == [True]
    torch.testing.assert_close(first.detach(), before * (1 - 5e-4) - 0.5)
    assert torch.equal(second, other)


def test_groups_have_rates_and_decays_of_their_own_also_when_they_come_later():
    first, second = parameters_of()
    before = first.detach().clone(), second.detach().clone()
    optimizer = DecoupledAdamW([{"params": [first], "weight_decay": 0.0}], lr=0.0, weight_decay=5e-4)
    optimizer.add_param_group({"params": [second], "lr": 0.2})
    optimizer.param_groups[1]["lr"] = 0.0
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.0, 0.2]
    for parameter in (first, second):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.equal(first, before[0]) and torch.equal(second, before[1])
    optimizer.param_groups[1]["initial_lr"] = 0.0  # then the decay has no schedule
    optimizer.step()
    torch.testing.assert_close(second.detach(), before[1] * (1 - 5e-4))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 5e-4]


def test_a_decay_as_torchs_are_is_warned_of():
    with pytest.warns(UserWarning, match="weight_decay=0.01 multiplies weights by 0.99 in each step"):
        DecoupledAdamW(parameters_of(), weight_decay=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DecoupledSGDW(parameters_of(), 0.1)


def test_states_are_those_of_torchs_own():
    ours = parameters_of()
    optimizer = DecoupledAdamW(ours)
    for parameter in ours:
        parameter.grad = gradient(parameter)
    optimizer.step()
    plain = torch.optim.AdamW(parameters_of())
    plain.load_state_dict(optimizer.state_dict())
    other = DecoupledAdamW(parameters_of())
    other.load_state_dict(plain.state_dict())
    for own, loaded in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert own.keys() == loaded.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(own[name], loaded[name]) for name in own)


def test_what_a_deepspeed_config_clips_is_measured_as_the_optimizer_gets_it():
    x, memory = torch.randn(6, 4), loggers.InMemoryLogger()
    model = ComposerClassifier(torch.nn.Linear(4, 4), num_classes=4)
    before = model.module.weight.detach().clone()
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(TensorDataset(x, x.argmax(1)), 3),
        max_duration=1,
        optimizers=torch.optim.SGD(model.parameters(), 1.0),
        deepspeed_config={"gradient_clipping": 1e-3},
        callbacks=monitors.OptimizerMonitor(),
        loggers=memory,
    )
    trainer.fit()
    trainer.close()
    assert memory.get_timeseries("l2_norm/grad/global")["l2_norm/grad/global"] == pytest.approx([1e-3] * 2, rel=1e-3)
    assert 0 < (model.module.weight - before).norm() < 2.01e-3


def test_composers_paths_have_lamina_s_own():
    import composer.algorithms
    import composer.callbacks
    import composer.loggers
    import composer.optim
    from lamina import trainer
    from lamina.trainer import gradient_clipping, loggers, monitors, optimizers, schedulers

    for module, sources in (
        (composer.optim, (optimizers, schedulers)),
        (composer.callbacks, (monitors,)),
        (composer.loggers, (loggers, trainer)),
        (composer.algorithms, (gradient_clipping,)),
    ):
        for name in module.__all__:
            assert any(getattr(module, name) is getattr(source, name, None) for source in sources), name
