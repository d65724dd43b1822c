# SPDX-License-Identifier: Apache-2.0
"""Step functions with one partition, where they need no other process."""

import contextvars

import pytest
import torch

import lamina

BATCH = torch.arange(8.0).view(8, 1)


@lamina.step
def bare(x):
    return x.sum()


@lamina.step()
def called(x):
    return x.sum()


@pytest.mark.parametrize("function", [bare, called])
def test_decorated_before_init_with_and_without_parentheses(start, function):
    assert [output.item() for output in function(BATCH).outputs] == [1, 5, 9, 13]


def test_python_scalars_become_a_list_that_can_be_summed(start):
    step = lamina.step(lambda x: x.sum().item())
    assert sum(step(BATCH)) == 28


def test_it_keeps_name_and_documentation():
    assert bare.__name__ == "bare" and bare.__wrapped__ is not None


def test_on_methods_self_is_not_split(start):
    class Trainer(list):
        factor = 2

        @lamina.step
        def run(self, x, *, add):
            assert len(self) == 1
            return self.factor * x.sum() + add

        @staticmethod
        @lamina.step()
        def fixed(x):
            return x.sum()

    trainer = Trainer([torch.zeros(3)])
    assert trainer.run(BATCH, add=1).reduce_sum() == 60
    assert trainer.fixed(BATCH).reduce_sum() == 28
    assert trainer.run.__name__ == "run"


def test_non_split_inputs_go_to_all(start):
    @lamina.step(non_split_inputs=["whole", "extra"])
    def step(x, whole, **options):
        assert options["extra"] is whole
        return len(x), len(whole), len(options["split"])

    assert step(BATCH, BATCH, extra=BATCH, split=BATCH) == ([2] * 4, [8] * 4, [2] * 4)


def test_input_split_axes(start):
    @lamina.step(input_split_axes={"x": 1})
    def step(x, y):
        return x, y

    x, y = step(torch.zeros(3, 8), torch.zeros(8, 3))
    assert x.outputs[0].shape == (3, 2) and y.outputs[0].shape == (2, 3)


def test_positional_keyword_and_default_arguments(start):
    @lamina.step
    def step(x, *rest, y=BATCH, z=3):
        return len(x), [len(r) for r in rest], len(y), z

    assert step(BATCH, BATCH, BATCH, y=BATCH) == ([2] * 4, [[2] * 4, [2] * 4], [2] * 4, [3] * 4)
    assert step(BATCH)[2] == [8] * 4, "a default is no argument of the call: it is not split"


@pytest.mark.parametrize("options", [{"non_split_inputs": ["z"]}, {"input_split_axes": {"z": 1}}])
def test_unknown_names_are_an_error_at_decoration(options):
    with pytest.raises(lamina.UsageError, match=r"no argument 'z'; it has 'x', 'y'"):
        lamina.step(**options)(lambda x, y: x)


def test_misuse_of_the_decorator():
    with pytest.raises(lamina.UsageError, match="list of names"):
        lamina.step(non_split_inputs="x")(lambda x: x)
    with pytest.raises(lamina.UsageError, match="decorates a function, not list"):
        lamina.step(["x"])
    with pytest.raises(lamina.UsageError, match="detach_outputs is True or False, not 'no'"):
        lamina.step(detach_outputs="no")(lambda x: x)
    for axes in ("x", {"x": "1"}, {"x": True}):
        with pytest.raises(lamina.UsageError, match="input_split_axes is a dictionary of names and axes"):
            lamina.step(input_split_axes=axes)(lambda x: x)


def test_an_uneven_batch_is_an_error_before_anything_runs(start):
    ran = []
    with pytest.raises(lamina.UsageError, match=r"argument x .*size 6 .*multiple of 4"):
        lamina.step(lambda x: ran.append(x))(torch.zeros(6))
    assert ran == []


def test_wrong_arguments_are_a_type_error(start):
    with pytest.raises(TypeError, match="missing a required argument"):
        bare()


@pytest.mark.parametrize("detach, tracked", [(True, False), (False, True)])
def test_outputs_are_detached_unless_told(start, detach, tracked):
    weight = torch.ones(1, requires_grad=True)
    step = lamina.step(detach_outputs=detach)(lambda x: {"y": (x * weight).sum()})
    assert step(BATCH)["y"].reduce_sum().requires_grad is tracked


def test_the_callers_context_and_modes_hold_in_the_body(start):
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(7)

    @lamina.step
    def step(x):
        seen = variable.get()
        variable.set(8)
        return seen, torch.is_grad_enabled()

    with torch.no_grad():
        assert step(BATCH) == ([7] * 4, [False] * 4)
    assert variable.get() == 7


def test_a_step_inside_a_step_is_an_error(start):
    with pytest.raises(lamina.UsageError, match="inside a step function"):
        lamina.step(lambda x: bare(x))(BATCH)


@pytest.mark.parametrize(
    "call",
    [
        lamina.barrier,
        lamina.shutdown,
        lambda: lamina.allgather(1, lamina.WORLD),
        lambda: lamina.broadcast(1, lamina.WORLD),
        lambda: lamina.send(1, 0, lamina.RankType.WORLD_RANK),
        lambda: lamina.recv_from(0, lamina.RankType.WORLD_RANK),
    ],
)
def test_objects_are_not_exchanged_inside_a_step(start, call):
    with pytest.raises(lamina.UsageError, match="inside a step function"):
        lamina.step(lambda x: call())(BATCH)


def test_an_error_of_the_body_is_raised_as_it_is(start):
    def fail(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        lamina.step(fail)(BATCH)
    assert bare(BATCH).reduce_sum() == 28


def test_a_loss_backward_that_adds_microbatches_up_is_told_of_once(start, capfd):
    model = lamina.distribute(torch.nn.Linear(1, 1))

    @lamina.step
    def step(x):
        model(x).sum().backward()

    lamina.step(lambda x: model(x))(BATCH)
    assert "loss.backward()" not in capfd.readouterr().err
    step(BATCH)
    step(BATCH)
    assert capfd.readouterr().err.count("model.backward(loss) divides them by their number") == 1


@pytest.mark.parametrize("options", [{"average_grads_across_microbatches": False}, {}])
def test_it_is_no_matter_where_nothing_is_averaged_or_lamina_does_it(start, capfd, options):
    model = lamina.DistributedModel(torch.nn.Linear(1, 1), **options)

    @lamina.step
    def step(x):
        loss = model(x).sum()
        loss.backward() if options else model.backward(loss)

    step(BATCH)
    assert "loss.backward()" not in capfd.readouterr().err
