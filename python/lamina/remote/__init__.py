# SPDX-License-Identifier: Apache-2.0
"""Modules and parameters on other ranks: placed there, called from here, trained in contexts.

    if lamina.rank() == 0:
        lamina.remote.place(Net(), name="net")
        lamina.remote.serve()
    else:
        net = lamina.remote.find("net", owner=0)
        optimizer = lamina.optim.DistributedOptimizer(torch.optim.SGD, net.parameters(), lr=0.1)
        for x, y in batches:
            with lamina.remote.context() as context:
                loss = F.cross_entropy(net(x), y)
                lamina.remote.backward(context, loss)
                optimizer.step(context)

Each context has gradients of its own on the owners, so that trainers need not wait for each other.
"""

from lamina.remote.contexts import Context, backward, context, get_gradients
from lamina.remote.placed import RemoteModule, RemoteParameter, find, place, serve

__all__ = [
    "Context",
    "RemoteModule",
    "RemoteParameter",
    "backward",
    "context",
    "find",
    "get_gradients",
    "place",
    "serve",
]
