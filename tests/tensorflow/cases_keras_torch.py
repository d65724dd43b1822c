# SPDX-License-Identifier: Apache-2.0
"""A model of Keras 3 on torch, cut over ranks and in copies, beside one process that splits batches in the same way:
cases_keras_torch.py [KEY=VALUE]..., keys of lamina.init."""

import os
import sys

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch

import lamina

ROWS, STEPS, PARTS = 8, 5, 4  # of a batch: Keras computes some gradients in float32, whatever the type of the model


class Net(keras.Model):
    """Layers of Keras, one of them inside of another one, and one of torch's."""

    def __init__(self):
        super().__init__()
        self.first = keras.Sequential([keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(12)])
        self.norm = keras.layers.BatchNormalization()
        self.middle = torch.nn.Linear(12, 12)
        self.last = keras.layers.Dense(1)

    def call(self, x, training=None):
        return self.last(torch.tanh(self.middle(self.norm(self.first(x), training=training))))


def made() -> Net:
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(3)
    torch.set_default_dtype(torch.float64)
    model = Net()
    model(torch.zeros(2, 6))
    return model


def batch(number: int) -> torch.Tensor:
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(number))


def plain() -> list[float]:
    """Losses of one process."""
    model, losses = made(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for number in range(STEPS):
        optimizer.zero_grad()
        losses.append(0.0)
        for part in batch(number).chunk(PARTS):
            loss = model(part, training=True).square().mean() / PARTS
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
    return losses


def main() -> None:
    keys = {key: int(value) for key, _, value in (each.partition("=") for each in sys.argv[1:])}
    expected = plain()
    lamina.init(ddp=True, timeout_s=120, **keys)
    try:
        lamina.distribute(Net())
    except lamina.UsageError as error:
        assert "is not built" in str(error), error
    else:
        raise AssertionError("a model that is not built is taken")
    model = lamina.distribute(made())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    lamina.DistributedOptimizer(optimizer)

    @lamina.step
    def step(x):
        loss = model(x, training=True).square().mean()
        model.backward(loss)
        return loss

    for number, loss in enumerate(expected):
        optimizer.zero_grad()
        own = step(batch(number).chunk(lamina.dp_size())[lamina.dp_rank()]).reduce_mean().item()
        optimizer.step()
        every = lamina.allgather(own, lamina.WORLD)
        assert abs(sum(every) / len(every) - loss) < 1e-9, (number, every, loss)
    assert lamina.pp_size() == 1 or len(list(model.local_parameters())) < len(list(model.parameters()))
    lamina.shutdown()


if __name__ == "__main__":
    main()
