# SPDX-License-Identifier: Apache-2.0
"""Step functions with one partition, where they need no other process."""

import contextvars
import copy
import sys
import warnings

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


@pytest.mark.parametrize("size, lengths", [(1, [1]), (3, [1] * 3), (5, [2, 1, 1, 1]), (6, [2, 2, 1, 1])])
def test_an_uneven_batch_has_microbatches_that_differ_by_one_or_fewer(start, capfd, size, lengths):
    step = lamina.step(lambda x, y: len(x))
    for _ in range(2):
        assert step(torch.zeros(size), torch.zeros(2 * size)) == lengths
    fewer = f"a batch has {len(lengths)} microbatches instead of 4"
    assert capfd.readouterr().err.count(fewer) == (1 if size < 4 else 0)
    assert step(torch.zeros(8), torch.zeros(8)) == [2] * 4


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("averages", [True, False])
def test_an_uneven_batch_trains_as_one_of_the_plain_model(start, size, averages):
    plain = torch.nn.Linear(3, 2, dtype=torch.double)
    model = lamina.DistributedModel(copy.deepcopy(plain), average_grads_across_microbatches=averages)
    x = torch.randn(size, 3, dtype=torch.double)

    @lamina.step
    def step(x):
        output = model(x).square()
        loss = output.mean() if averages else output.sum()
        model.backward(loss)
        return loss

    expected = plain(x).square().mean() if averages else plain(x).square().sum()
    expected.backward()
    loss = step(x)
    torch.testing.assert_close(loss.reduce_mean() if averages else loss.reduce_sum(), expected.detach())
    torch.testing.assert_close(model.module.weight.grad, plain.weight.grad)


def test_a_name_may_be_that_of_an_argument_and_of_a_keyword(start):
    step = lamina.step(lambda x, /, **more: (len(x), len(more["x"])))
    assert step(torch.zeros(8), x=torch.zeros(4)) == ([2] * 4, [1] * 4)


def test_the_first_call_says_what_is_split_and_what_is_not(start, capfd):
    @lamina.step(non_split_inputs=["whole"])
    def step(x, mask, labels, whole, rate, **more):
        return None

    for _ in range(2):
        step(torch.zeros(8, 3), mask=torch.zeros(4, 4), labels=list("abcdefgh"), whole=BATCH, rate=0.1, more=BATCH)
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("lamina: ")]
    assert len(told) == 1 and told[0].endswith(
        "step: split into 4 microbatches: x (8, 3) along axis 0, mask (4, 4) along axis 0, labels (8 samples) by "
        'elements, more (8, 1) along axis 0. To keep an argument whole: non_split_inputs=["name"]; another axis: '
        'input_split_axes={"name": 1}'
    )


def test_one_step_function_of_a_job_is_told_how_its_batch_is_cut(start, capfd):
    for function in (lambda x: None, lambda y: None):
        lamina.step(function)(torch.zeros(8, 3))
    assert capfd.readouterr().err.count("split into 4 microbatches") == 1


def test_a_step_function_that_returns_nothing_is_named_where_its_result_is_missed(start, capfd):
    @lamina.step
    def forgets(x):
        x.sum()

    for missed, told in ((lambda: forgets(BATCH).reduce_mean(), 1), (lambda: {}.reduce_mean(), 0)):
        try:
            missed()
        except AttributeError as error:
            sys.excepthook(type(error), error, error.__traceback__)
        says = "forgets returned nothing, so a call of it gave None: with `return loss` in it, "
        assert capfd.readouterr().err.count(says) == told


def test_a_backward_of_a_result_outside_of_its_step_is_followed_by_the_remedy(start, capfd):
    model = lamina.distribute(torch.nn.Linear(1, 1))
    loss = lamina.step(lambda x: model(x).sum())(BATCH).reduce_mean()
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    sys.excepthook(caught.type, caught.value, caught.tb)
    assert "results of step functions have no graph: call model.backward(loss) inside" in capfd.readouterr().err


@pytest.mark.parametrize("loss", [1.0, None, "loss", {"loss": BATCH}])
def test_a_backward_of_no_tensor_says_what_it_takes(start, loss):
    model = lamina.distribute(torch.nn.Linear(1, 1))
    kind = type(loss).__name__
    with pytest.raises(lamina.UsageError, match=f"takes the loss as a tensor, as the model computed it, not {kind}"):
        lamina.step(lambda x: model.backward(loss))(BATCH)


def test_a_call_that_splits_nothing_warns_once(start):
    step = lamina.step(lambda batch: None)
    with pytest.warns(UserWarning, match="nothing in its arguments can be split: each of 4 microbatches") as caught:
        step(object())
        step(object())
    assert len(caught) == 1


def test_nothing_is_said_where_nothing_was_to_be_split(start, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lamina.step(lambda: None)()
        lamina.step(non_split_inputs=["x"])(lambda x: None)(BATCH)
    assert capfd.readouterr().err == ""


# Random numbers of a job with a seed.


def dropped(steps):
    step = lamina.step(lambda x: torch.nn.functional.dropout(x))
    return [step(torch.ones(8, 16)).stack() for _ in range(steps)]


def optimizer_of(model):
    return lamina.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def test_the_state_of_an_optimizer_knows_where_the_random_numbers_are():
    lamina.init(microbatches=4, seed=3)
    model = lamina.distribute(torch.nn.Linear(1, 1))
    optimizer = optimizer_of(model)
    dropped(3)
    saved, weights = optimizer.state_dict(), model.state_dict()
    expected = dropped(2)
    lamina.shutdown()
    lamina.init(microbatches=4, seed=3)
    model = lamina.distribute(torch.nn.Linear(1, 1))
    optimizer = optimizer_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        assert all(map(torch.equal, dropped(2), expected))
    plain = torch.nn.Linear(1, 1)
    plain.load_state_dict(weights)
    torch.optim.SGD(plain.parameters(), lr=0.2).load_state_dict(saved)


def test_rng_step_may_be_kept_by_hand():
    lamina.init(microbatches=4, seed=3)
    dropped(3)
    steps = lamina.rng_step()
    expected = dropped(1)
    lamina.set_rng_step(steps)
    assert torch.equal(dropped(1)[0], expected[0]) and lamina.rng_step() == steps + 1 == 4
    with pytest.raises(lamina.UsageError, match="takes a number of steps, not -1"):
        lamina.set_rng_step(-1)


def test_a_seed_may_come_later():
    lamina.init(microbatches=4, seed=3)
    expected = dropped(2)
    lamina.shutdown()
    for key in (None, 8):
        lamina.init(microbatches=4, seed=key)
        dropped(1)
        lamina.set_rng_seed(3)
        lamina.set_rng_step(0)
        assert all(map(torch.equal, dropped(2), expected)) and lamina.rng_step() == 2
        for wrong in (-1, 2**63, 1.0, True, "2", None):
            with pytest.raises(lamina.UsageError, match=r"set_rng_seed\(\) takes a whole number"):
                lamina.set_rng_seed(wrong)
        lamina.shutdown()


def test_the_number_of_microbatches_changes_between_steps():
    lamina.init(microbatches=4)
    assert dropped(1)[0].shape == (4, 2, 16)
    lamina.set_num_microbatches(2)
    assert lamina.num_microbatches() == 2 and dropped(1)[0].shape == (2, 4, 16)
    for wrong in (0, 1.0, True, "2"):
        with pytest.raises(lamina.UsageError, match=r"set_num_microbatches\(\) is an integer, at least 1"):
            lamina.set_num_microbatches(wrong)


def test_without_a_seed_torchs_generator_says(start):
    for call in (lamina.rng_step, lambda: lamina.set_rng_step(1)):
        with pytest.raises(lamina.UsageError, match="needs the key `seed`"):
            call()
    model = lamina.distribute(torch.nn.Linear(1, 1))
    assert optimizer_of(model).state_dict().keys() == {"state", "param_groups"}


def test_a_model_that_goes_on_with_the_random_numbers_of_a_first_step_warns_once():
    lamina.init(microbatches=4, seed=3)
    model = lamina.distribute(torch.nn.Linear(1, 1))
    model.load_state_dict(torch.nn.Linear(1, 1).state_dict())
    with pytest.warns(UserWarning, match=r"draw the random numbers of a first step.*set_rng_step") as caught:
        dropped(2)
    assert len(caught) == 1
    lamina.set_rng_step(0)
    with pytest.warns(UserWarning, match="saved without `seed`"):
        optimizer_of(model).load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())


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
