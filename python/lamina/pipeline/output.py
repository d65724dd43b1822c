# SPDX-License-Identifier: Apache-2.0
"""Results of a step function."""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch

from lamina import _lamina
from lamina.util import pytree

_HINT = (
    "it holds one of each microbatch: take reduce_mean() (of losses), reduce_sum(), concat() or stack() of it, or its "
    "list `outputs`"
)


Item = TypeVar("Item", bound=torch.Tensor)


class StepOutput(Generic[Item]):
    """A tensor that a step function returned, once per microbatch.

    Attributes:
        outputs: the tensors, in the order of the microbatches.
        samples: the number of samples that each microbatch had; [] where it is not known.
    """

    # Containers of other libraries take what can be iterated over for something else.
    __iter__ = None

    def __init__(self, outputs: Sequence[Item], samples: Sequence[int] = ()):
        self.outputs = list(outputs)
        self.samples = list(samples)

    def reduce_mean(self) -> torch.Tensor:
        """The mean over the samples of means over those of each microbatch, a new tensor of the shape of each; of
        integers, in the default dtype."""
        return _lamina.mean_of_outputs(self.outputs, self.samples)

    def reduce_sum(self) -> torch.Tensor:
        """The sum over microbatches, a new tensor of the shape of each; of integers and bool, in int64."""
        return self.stack().sum(0)

    def concat(self) -> torch.Tensor:
        """The tensors one after the other along axis 0: the whole batch again. 0-dimensional ones are stacked."""
        return _lamina.concat_outputs(self.outputs)

    def stack(self) -> torch.Tensor:
        """The tensors along a new axis 0, a new tensor of shape (microbatches, ...).

        Errors:
            UsageError: their shapes differ, as those of microbatches with other numbers of samples; also in
                `reduce_mean` and `reduce_sum`.
        """
        return _lamina.stack_outputs(self.outputs)

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs!r})"

    # It is no tensor: how its parts become one number is for the caller to say.

    def __getattr__(self, name: str) -> Any:
        hint = f"; {_HINT}" if hasattr(torch.Tensor, name) and not name.startswith("__") else ""
        raise AttributeError(f"StepOutput has no {name}{hint}", name=name, obj=self)

    def __format__(self, form: str) -> str:
        return self._refuse() if form else repr(self)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"a StepOutput is no tensor; {_HINT}")

    __float__ = __int__ = __index__ = __getitem__ = __array__ = __neg__ = __abs__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __torch_function__ = classmethod(_refuse)


def merge(outputs: Sequence[Any], samples: Sequence[int] = ()) -> Any:
    """The outputs of the microbatches as one tree: a StepOutput in the place of each tensor, a list of one value per
    microbatch in the place of anything else, None where all are None. Containers keep their class; where microbatches
    differ in structure, the list holds what each returned."""
    first = outputs[0]
    if all(output is None for output in outputs):
        return None
    if all(isinstance(output, torch.Tensor) for output in outputs):
        return StepOutput(outputs, samples)
    if isinstance(first, (set, frozenset)) or pytree.children(first) is None:
        return list(outputs)
    trees = [list(pytree.children(output) or ()) for output in outputs]
    labels = [label for label, _ in trees[0]]
    for output, tree in zip(outputs, trees, strict=True):
        if type(output) is not type(first) or [label for label, _ in tree] != labels:
            return list(outputs)
    return pytree.rebuild(first, [merge([tree[at][1] for tree in trees], samples) for at in range(len(labels))])
