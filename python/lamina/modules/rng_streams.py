# SPDX-License-Identifier: Apache-2.0
"""Which modules run in a random stream of their own inside steps.

Modules that may draw random numbers, and those above them. The rule looks at classes and at what was hung on a module,
never at what it does with them (a Dropout with p=0 counts), so that it is the same in every layout.
"""

from torch import nn

from lamina import _lamina

_OWN = "torch.nn.modules."

# Torch's own that draw, or hold one that does and reach into it.
_DRAW = (
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RReLU,
    nn.Transformer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.modules.dropout._DropoutNd,
)


def agree(mine: list[bool], session: _lamina.Session) -> list[bool]:
    """For each node, whether its calls run in a stream of their own, as the rank of partition 0 says: hooks may have
    been hung on some ranks only. Collective over the pipeline."""
    return session.all_gather("one_copy", mine)[0] if session.group_size("one_copy") > 1 else mine


def may_draw(module: nn.Module) -> bool:
    """True where `module` itself may draw random numbers. Only of torch's own classes is it known which do not."""
    return not type(module).__module__.startswith(_OWN) or isinstance(module, _DRAW) or is_altered(module)


def is_altered(module: nn.Module) -> bool:
    """True where other code than its class's runs in its calls."""
    return bool("forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks)
