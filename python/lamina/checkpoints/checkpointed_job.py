# SPDX-License-Identifier: Apache-2.0
"""A job as its checkpoints see it: what lamina/job_checkpoint/job.h asks a face for."""

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lamina import _lamina
from lamina.checkpoints import pickled_content
from lamina.checkpoints.plain import from_plain, to_plain
from lamina.checkpoints.together import everywhere
from lamina.errors import FormatError, UsageError
from lamina.job import current
from lamina.optim.functional import class_name
from lamina.optim.optimizer_state import OptimizerState
from lamina.optim.state_rows import options as options_of
from lamina.script_state.generators import not_of_torch
from lamina.tensor_parallel import layers
from lamina.util.told import tell


class CheckpointedOptimizer:
    """An optimizer of the job.

    Attributes:
        engine, user: the engine's part of it, and how that sees the optimizer.
    """

    def __init__(self, state: OptimizerState):
        self._state = state
        self.engine, self.user = state.lent()

    def class_names(self) -> list[str]:
        """The names that its class may have in a checkpoint; it is saved under the first."""
        return [class_name(self._state.optimizer), type(self._state.optimizer).__name__]

    def options(self) -> list[dict[str, Any]]:
        """The options of its groups."""
        return [to_plain(group) for group in self._state.described()[0]]

    def rest(self) -> dict[str, Any]:
        """Gives what else its state dict has."""
        return to_plain(self._state.described()[1])

    def lacking(self, options: dict[str, Any]) -> list[str]:
        """The options that a step needs and a saved group has not. Flags, and what may be None, classes of other
        versions have not either, and set."""
        defaults = self._state.optimizer.defaults.items()
        needed = {key for key, value in defaults if not (value is None or isinstance(value, bool))}
        return sorted(needed - from_plain(options).keys())

    def load_options(self, groups: list[dict[str, Any]]) -> None:
        """Loads the options of its groups alone."""
        for group, options in zip(self._state.optimizer.param_groups, groups, strict=True):
            group.update(options_of(from_plain(options)))

    def load(self, states: dict[str, Any], groups: list[tuple[dict[str, Any], list[str]]], rest: Any) -> None:
        """Loads what stands in this rank's groups, by the names of parameters. Masters stay, and so do the objects that
        the groups are, which schedules have."""
        described = [from_plain(options) | {"params": names} for options, names in groups]
        kept = list(self._state.optimizer.param_groups)
        self._state.load_own(states, described, from_plain(rest) or {})
        for group, loaded in zip(kept, self._state.optimizer.param_groups, strict=True):
            group.update(loaded)
        self._state.optimizer.param_groups[:] = kept


class CheckpointedJob:
    """The current job.

    Args:
        model, optimizer: those that are meant, which are to be the job's; None for all of them.
        user_content: what is to be saved.
        translate: makes the state of a whole model that of this one.
        strict: whether the names in it have to be the model's.
        pickles: whether they are compared with their checksums, and whether they may make objects of any class.

    Attributes:
        content: what was loaded.
    """

    def __init__(
        self,
        job: current.Job,
        model: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
        user_content: Any = None,
        translate: Callable[[Any], Any] | None = None,
        strict: bool = True,
        pickles: tuple[bool, bool] = (True, False),
    ):
        self.content: Any = None
        self._job = job
        self._meant = (model, optimizer)
        self._user_content = user_content
        self._translate = translate
        self._strict = strict
        self._pickles = pickles
        self._optimizers: dict[OptimizerState, CheckpointedOptimizer] = {}
        self._extra_states: list[tuple[str, torch.nn.Module, Any]] = []
        self._generators: dict[str, Any] = {}
        self._slicings: dict[int, layers.Slicing] | None = None

    def has_model(self) -> bool:
        return self._job.has_model

    def is_cut(self) -> bool:
        return self._job.model.partitioned

    def accumulates(self) -> bool:
        return self._job.replicas.gradients_wait

    def model_state(self) -> list[tuple[list[str], torch.Tensor]]:
        """Each tensor of the model's state, with its names. Before the model is cut wholes without memory stand for
        slices, of which nothing else tells then."""
        self._require_meant()
        slicings = {} if self.is_cut() else layers.slicings(self._job.model.module)
        by_tensor: dict[int, tuple[list[str], torch.Tensor]] = {}
        for name, tensor in self.tensors():
            by_tensor.setdefault(id(tensor), ([], tensor))[0].append(name)
        return [(names, _whole(tensor, slicings)) for names, tensor in by_tensor.values()]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors of the model's state, each under all its names."""
        return _persistent(self._job.model.module)

    def whole_shape(self, tensor: torch.Tensor) -> list[int]:
        """The shape of the whole of which a tensor of the model's state is all, or a slice."""
        if self._slicings is None:
            self._slicings = layers.slicings(self._job.model.module)
        slicing = self._slicings.get(id(tensor))
        return list(tensor.shape) if slicing is None else layers.unsliced(tensor.shape, slicing)

    def table(self) -> _lamina.ParameterTable:
        """Tells who holds what; UsageError where modules have come or gone since the model was cut."""
        self._job.partitioned_model.tensors()
        return self._job.partitioned_model.table

    def sharding(self) -> _lamina.Sharding | None:
        return self._job.partitioned_model.sharding

    def partition(self) -> dict[str, int]:
        return self._job.partitioned_model.report.get("partition", {})

    def optimizers(self) -> list[CheckpointedOptimizer]:
        """The optimizers that are meant; UsageError for one that is not the job's."""
        return [self._optimizers.setdefault(each, CheckpointedOptimizer(each)) for each in self.states()]

    def states(self) -> list[OptimizerState]:
        """Lists them as the job has them."""
        self._require_meant()
        meant = self._meant[1]
        known = [known for known in self._job.optimizers if meant is None or known.optimizer is meant]
        if meant is not None and not known:
            raise UsageError(
                "the optimizer is not this job's: make it lamina.DistributedOptimizer(optimizer), which knows where "
                "its states are",
                code="checkpoint-no-optimizer",
            )
        return known

    def loss_scale(self) -> _lamina.LossScale | None:
        return self._job.loss_scale

    def settle(self) -> None:
        """Makes what was put into the groups of optimizers since the model was cut this rank's part."""
        for optimizer in self._job.optimizers:
            optimizer.settle(self._job.partitioned_model)

    def begin_load(self) -> None:
        """Ends a time in which each rank has the whole model, too."""
        self._job.life.make_again()
        self.settle()

    # To be saved.

    def user_content(self) -> Any:
        """As plain values."""
        try:
            return to_plain(self._user_content)
        except RecursionError:
            raise UsageError(
                "user_content is nested too deeply, or holds itself: save what can be written down",
                code="checkpoint-cannot-save",
            ) from None

    def texts(self) -> dict[str, str]:
        """Files of Hugging Face's that tell how to make the model."""
        config = getattr(self._job.model.module, "config", None)
        to_json = getattr(config, "to_json_string", None)
        others = getattr(self._job.model.module, "texts_of_tokenizer", dict)
        return others() | ({"config.json": to_json()} if callable(to_json) else {})

    def extra_states(self) -> dict[str, Any]:
        """The extra states of modules here, by name."""
        return to_plain(
            {
                name: module.get_extra_state()
                for name, module in self._job.model.module.named_modules()
                if type(module).get_extra_state is not torch.nn.Module.get_extra_state
                and self._job.partitioned_model.owns(name)
            }
        )

    def generators(self) -> dict[str, Any]:
        """The states of Python's random generator, and of NumPy's where that is in use."""
        return to_plain({each.name: each.get() for each in not_of_torch()})

    # Saved ones.

    def take_content(self, content: Any) -> None:
        self.content = from_plain(content)

    def take_pickle(self, file: str) -> None:
        self.content = pickled_content.read(file, *self._pickles)

    def take_extra_states(self, states: Any) -> None:
        modules = dict(self._job.model.module.named_modules(remove_duplicate=False))
        self._extra_states, unexpected = [], []
        for name, value in _dictionary(states).items():
            module = modules.get(name)
            if module is None or type(module).set_extra_state is torch.nn.Module.set_extra_state:
                unexpected.append(name)
            else:
                self._extra_states.append((name, module, value))
        if unexpected and self._strict:
            raise UsageError(
                f"the checkpoint has extra states of modules that take none here: {unexpected}; strict=False leaves "
                "them out",
                code="checkpoint-names",
            )
        if unexpected and self._job.session.rank == 0:
            tell(f"resume_from_checkpoint(strict=False) left out: extra states of {unexpected}")

    def take_generators(self, states: Any) -> None:
        """Tries them first: setting them is to succeed."""
        self._generators = _dictionary(states)
        try:
            if "python" in self._generators:
                random.Random().setstate(self._generators["python"])
            if "numpy" in self._generators and (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.RandomState().set_state(self._generators["numpy"])
        except (TypeError, ValueError, OverflowError, LookupError, AttributeError) as error:
            raise FormatError(f"the checkpoint has states of random generators that are none: {error}") from error

    def load_extra_states(self) -> None:
        for name, module, value in self._extra_states:
            if self._job.partitioned_model.owns(name):
                module.set_extra_state(value)

    def set_generators(self) -> None:
        """Has them go on from the saved states; what is not there stays."""
        for each in not_of_torch():
            if each.name in self._generators:  # a program in C++ has none
                each.put(self._generators[each.name])

    def wait_for_cut(self, resumption: _lamina.Resumption | None) -> None:
        self._job.life.resumption = resumption

    def load_translated(self, state: dict[str, torch.Tensor]) -> None:
        translated = everywhere(self._job, lambda: self._translate(state))
        self._job.model.load_state_dict(translated, self._strict)

    def _require_meant(self) -> None:
        if self._meant[0] is not None and self._meant[0] is not self._job.model:
            raise UsageError(
                "save_checkpoint(): `model` is not this job's DistributedModel", code="checkpoint-no-model"
            )


def _dictionary(states: Any) -> dict[str, Any]:
    """Returns what a checkpoint has by name; FormatError for something else."""
    found = from_plain(states)
    if found is None:
        return {}
    if isinstance(found, dict) and all(isinstance(name, str) for name in found):
        return found
    raise FormatError("a checkpoint has something else where states go by names")


def _whole(tensor: torch.Tensor, slicings: dict[int, layers.Slicing]) -> torch.Tensor:
    """A stand-in for the whole of which a tensor is a slice; the tensor itself where it is none."""
    slicing = slicings.get(id(tensor))
    if slicing is None:
        return tensor
    return torch.empty(layers.unsliced(tensor.shape, slicing), dtype=tensor.dtype, device="meta")


def _persistent(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all that a module's state dict has, under all names."""
    yield from module.named_parameters(remove_duplicate=False)
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
