# SPDX-License-Identifier: Apache-2.0
"""Random numbers whose state is in the kernel of an operation. Copies of such an operation, one for each microbatch,
draw the same, each from a state of its own. In one process one operation goes on."""

from tensorflow.core.framework import graph_pb2

from lamina.errors import UsageError

_DRAWS = frozenset(
    (
        "Multinomial",
        "ParameterizedTruncatedNormal",
        "RandomGamma",
        "RandomPoisson",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "TruncatedNormal",
    )
)


def refuse(definition: graph_pb2.GraphDef, where: str) -> None:
    """Raises UsageError where an operation of it, or of a function that it has, draws so."""
    for nodes in (definition.node, *(function.node_def for function in definition.library.function)):
        for node in nodes:
            if node.op in _DRAWS:
                raise UsageError(
                    f"operation {node.name} of {where} draws random numbers from a state of its own ({node.op}), which "
                    "copies for microbatches do not share: use keras.random with a keras.random.SeedGenerator, a layer "
                    "of Keras 2 that is made after smp.init(), or tf.random.stateless_uniform and the like"
                )
