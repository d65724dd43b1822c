# SPDX-License-Identifier: Apache-2.0
"""Classes of transformers, and what they become."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lamina import _lamina
from lamina.errors import UsageError
from lamina.tensor_parallel.correspondence import Correspondence, Row, is_like
from lamina.tensor_parallel.registry import Arguments, DistributedModule, Registration, UnfitError, signature_of

_HARMLESS = ("use_cache", "return_dict", "cache_position")  # arguments without an effect on numbers


@dataclass(frozen=True)
class Known:
    """A class of transformers.

    Attributes:
        kind: the class of lamina's.
        rows: the correspondence of parameters.
        options: the arguments of that class, of a module; UnfitError where it has none for what the module does.
        dropouts: the names of Dropouts in the module, in which "*" stands for a number, for each argument that they
            give.
        inputs: the argument of its `forward`, of those of the original's, by name.
        result: what the original's `forward` returns, of what it returns.
    """

    kind: type[DistributedModule]
    rows: Correspondence
    options: Callable[[nn.Module], dict[str, Any]]
    dropouts: Mapping[str, tuple[str, ...]]
    inputs: Callable[["Call"], Any]
    result: Callable[[Any], Any]

    def registration(self, original: type[nn.Module]) -> Registration:
        return Registration(
            self.kind,
            forward_hook=lambda *args, **kwargs: ((self.inputs(Call(original, args, kwargs)),), {}),
            return_hook=self.result,
            correspondence=self.rows,
            arguments_of=self._arguments_of,
        )

    def _arguments_of(self, module: nn.Module) -> Arguments:
        for name, part in module.named_modules():
            if not type(part).__module__.startswith(("transformers.", "torch.")) or "forward" in vars(part):
                raise UnfitError(f"its {name or 'forward'} is not transformers' own")
            if vars(part).get("gradient_checkpointing") is True:
                raise UnfitError(
                    "it checkpoints activations: ask for that by set_activation_checkpointing after the wrap"
                )
        options = self.options(module)
        for option, names in self.dropouts.items():
            found = {part.p for name, part in module.named_modules() if any(is_like(each, name) for each in names)}
            if len(found) > 1:
                raise UnfitError(f"its layers have several {option}: {', '.join(map(str, sorted(found)))}")
            options |= dict.fromkeys([option], *found) if found else {}
        return (), options


class Call:
    """The arguments of a call, by name."""

    def __init__(self, kind: type[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]):
        signature = inspect.signature(kind.forward)
        self._kind = kind
        self._given = dict(signature.bind(None, *args, **kwargs).arguments)
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                self._given |= self._given.pop(name, {})
        del self._given[next(iter(signature.parameters))]

    def taken(self, *names: str, but: Iterable[str] = ()) -> list[Any]:
        """The values of these; None for what was not given.

        Args:
            but: others that may be given, and have no effect.

        Errors:
            UsageError: another one was given.
        """
        known = {*names, *but, *_HARMLESS}
        for name, value in self._given.items():
            if name not in known and not _has_no_effect(value):
                raise UsageError(
                    f"{name} is not available for a {self._kind.__name__} that has become a class of lamina.nn: leave "
                    "it out, or mark the model with replace=False",
                    code="tp-layer",
                )
        return [self._given.get(name) for name in names]


def _has_no_effect(value: Any) -> bool:
    """True for what says nothing, and for a cache that is only written to: nobody reads one in training."""
    if hasattr(value, "get_seq_length"):
        return torch.is_grad_enabled() and value.get_seq_length() == 0
    return value is None or (isinstance(value, bool | int) and not value)


def like(function: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that says that it takes what a method takes."""
    function.__signature__ = signature_of(method)
    return function


def activation(name: Any) -> str:
    """The name of a function that the layers have. Errors: UnfitError: another one."""
    name = {"gelu_pytorch_tanh": "gelu_new"}.get(name, name)
    if name not in _lamina.activations():
        raise UnfitError(f"its layers have the activation {name!r}")
    return name


def rows_of(
    original: str, ours: str, transposed: bool = False, kinds: Iterable[str] = ("weight", "bias")
) -> Correspondence:
    """The rows of a layer's weight and bias."""
    return tuple(Row(f"{original}.{kind}", f"{ours}.{kind}", transposed and kind == "weight") for kind in kinds)


def hidden_of(mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask [N, S], 1 where a position is seen, as one that is 1 where it is not.

    Errors:
        UsageError: a mask of another shape.
    """
    if mask is not None and mask.dim() != 2:
        raise UsageError(
            f"attention_mask has {mask.dim()} dimensions, and a model that has become a class of lamina.nn takes 2",
            code="tp-layer",
        )
    return None if mask is None else (mask == 0).long()


def added_of(mask: torch.Tensor | None, states: torch.Tensor) -> torch.Tensor | None:
    """A mask that is True where a position is seen, as one that is added to scores; one of numbers as it is."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=states.dtype).masked_fill(~mask, torch.finfo(states.dtype).min)


def inputs_of_layers(call: Call) -> Any:
    """The argument of a layer, or a stack of layers, of states and masks of those."""
    states, mask, others, mask_of_others = call.taken(
        "hidden_states", "attention_mask", "encoder_hidden_states", "encoder_attention_mask", but=("position_ids",)
    )
    if others is None:
        return states, added_of(mask, states)
    return states, others, added_of(mask, states), added_of(mask_of_others, states)
