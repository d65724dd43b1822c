# SPDX-License-Identifier: Apache-2.0
"""The parts of a job: those that do something have the form of those that do nothing, which a job has without them."""

import inspect

import pytest

from lamina.data_parallel.replicas import Replicas
from lamina.job import parts
from lamina.pipeline.distributed_model import DistributedModel
from lamina.pipeline.gradients import Gradients
from lamina.pipeline.life import Life
from lamina.pipeline.routing import Routing
from lamina.tensor_parallel.calls_elsewhere import DropoutContext
from lamina.verification.recording import Recording
from lamina.verification.step_check import StepCheck

PARTS = {
    parts.Model: DistributedModel,
    parts.CallContext: DropoutContext,
    parts.Life: Life,
    parts.Routing: Routing,
    parts.Gradients: Gradients,
    parts.Replicas: Replicas,
    parts.Recording: Recording,
    parts.StepCheck: StepCheck,
}


def form(member: object) -> object:
    """The names and kinds of the parameters of a method; of anything else nothing."""
    if not inspect.isfunction(member):
        return None
    return [(each.name, each.kind) for each in inspect.signature(member).parameters.values()]


@pytest.mark.parametrize("kind", PARTS, ids=lambda kind: kind.__name__)
def test_a_part_that_does_something_has_the_form_of_the_one_that_does_nothing(kind):
    derived = PARTS[kind]
    assert issubclass(derived, kind)
    names = {name for name in vars(kind) if not name.startswith("_")}
    methods = {name: given for name in names if (given := form(getattr(kind, name))) is not None}
    assert methods == {name: (form(getattr(derived, name)) or [])[: len(given)] for name, given in methods.items()}
    own = {name for each in derived.__mro__[: derived.__mro__.index(kind)] for name in vars(each)}
    assert methods.keys() <= own, "all of them do something"


def test_parts_that_do_nothing_raise_nothing():
    replicas, check, recording, context = parts.Replicas(), parts.StepCheck(), parts.Recording(), parts.CallContext()
    with replicas.no_sync(), context.calling([]), context.served(context.told(lambda _: 0), []):
        replicas.note_forward(replicas.note_call(), None)
    life = parts.Life()
    with life.unrouted():
        assert life.enter_step() is None
    assert life.whole_everywhere and not life.whole
    assert not (replicas.averages or replicas.accumulates or replicas.are_joining or replicas.gradients_wait)
    assert not (check.is_due or check.leads or check.sees_calls or recording.sees_calls)
