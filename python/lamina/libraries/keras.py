# SPDX-License-Identifier: Apache-2.0
"""Support for models of Keras 3 on its backend of torch."""

import sys
from typing import Any

from torch import nn

from lamina.errors import UsageError

_LAYERS = "keras.src.backend.torch.layer"  # that nobody has imported where no layer of Keras is on torch


def register_own_parameters(module: nn.Module) -> None:
    """Has each layer of Keras below be a module of the layer that it is in, with its own parameters alone. Keras
    registers all parameters in the outermost one, and no layers that lie in lists: there was nothing to share out.

    Errors:
        UsageError: a layer without parameters yet, which its first call would make.
    """
    if _LAYERS not in sys.modules:
        return
    kind = sys.modules[_LAYERS].TorchLayer
    known = {id(parameter): parameter for parameter in module.parameters()}
    layers = [layer for layer in module.modules() if isinstance(layer, kind)]
    for layer in layers:  # which grows
        _require_built(layer)
        here = set(layer._modules.values())
        for inner in layer._layers:
            if inner not in here:
                layer._modules[inner.name] = inner
            if inner not in layers:
                layers.append(inner)
    for layer in layers:
        own = [*layer._trainable_variables, *layer._non_trainable_variables]
        own += [generator.state for generator in layer._seed_generators]
        layer._torch_params = nn.ParameterDict({variable.path: variable.value for variable in own})
    for parameter in module.parameters():
        known.pop(id(parameter), None)
    for number, parameter in enumerate(known.values()):  # of what is neither a layer's nor a module's
        module.register_parameter(f"of_keras_{number}", parameter)


def _require_built(layer: Any) -> None:
    if not layer.built:
        raise UsageError(
            f"{layer.name}, a {type(layer).__name__} of Keras, is not built: call the model once, or build() it, "
            "before lamina gets it",
            code="model-not-built",
        )
