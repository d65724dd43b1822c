# SPDX-License-Identifier: Apache-2.0
"""The ranks that tensorflow_graphs.py starts: a model of TensorFlow over them, one stage on each. Rank 0 prints what it
measures.

    lamina run -n P -c python benchmarks/tensorflow_ranks.py KIND SCHEDULE MICROBATCHES STEPS

    sleeping    stages that sleep: the seconds of a forward and of a backward alone, then of each step but the first two
    empty       stages that multiply by one number: the seconds of each step but the first two
    first       a Transformer of four layers: the seconds of the first step, and of the steps after it
"""

import os
import statistics
import sys
import time

import lamina.tensorflow as smp

# isort: split
import keras
import numpy as np
import tensorflow as tf

FORWARD_S, BACKWARD_S = 0.010, 0.020
WIDTH, WORDS, LENGTH, ROWS = 64, 100, 16, 16


def forward_sleeps(x):
    time.sleep(FORWARD_S)
    return x


def backward_sleeps(gradient):
    time.sleep(BACKWARD_S)
    return gradient


@tf.custom_gradient
def sleeping(x):
    def slept(function, value):
        result = tf.numpy_function(function, [value], value.dtype)
        result.set_shape(value.shape)
        return result

    return slept(forward_sleeps, x), lambda gradient: slept(backward_sleeps, gradient)


class Stage(keras.layers.Layer):
    """x -> x, by what it is given. Has one variable, as a stage that learns has."""

    def __init__(self, computes):
        super().__init__()
        self.computes = computes

    def build(self, _):
        self.weight = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return self.computes(x * self.weight)


class Row(smp.DistributedModel):
    """A stage on each rank. The result comes back to rank 0, as in the schedule that is simulated."""

    def __init__(self, computes):
        super().__init__()
        self.stages = [Stage(computes) for _ in range(smp.size())]

    def call(self, x):
        for at, stage in enumerate(self.stages):
            with smp.partition(at):
                x = stage(x)
        with smp.partition(0):
            return tf.identity(x)


class Transformer(smp.DistributedModel):
    """Four layers of attention and two dense ones, which a plan cuts."""

    def __init__(self):
        super().__init__()
        self.words, self.last = keras.layers.Embedding(WORDS, WIDTH), keras.layers.Dense(WORDS)
        self.blocks = [
            (
                keras.layers.LayerNormalization(),
                keras.layers.MultiHeadAttention(2, WIDTH // 2),
                keras.layers.LayerNormalization(),
                keras.layers.Dense(2 * WIDTH, activation="gelu"),
                keras.layers.Dense(WIDTH),
            )
            for _ in range(4)
        ]

    def call(self, x):
        h = self.words(x)
        for before, attention, after, up, down in self.blocks:
            n = before(h)
            h = h + attention(n, n)
            h = h + down(up(after(h)))
        return self.last(h)


def seconds_of(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def alone():
    """The seconds of a stage's forward, and of its backward, with nothing around them."""
    x = tf.ones([1, 1024])

    @tf.function
    def forward(x):
        return sleeping(x)

    @tf.function
    def both(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = sleeping(x)
        return tape.gradient(y, x)

    medians = []
    for function in (forward, both):
        function(x)
        medians.append(statistics.median(seconds_of(lambda f=function: f(x).numpy()) for _ in range(10)))
    return medians[0], medians[1] - medians[0]


def steps_of(model, loss_of, data, count):
    """The seconds of each step, from a barrier until rank 0 has its loss and its gradients."""

    @smp.step
    def train_step(*data):
        with tf.GradientTape() as tape:
            loss = loss_of(model, *data)
        return loss, tape.gradient(loss, model.trainable_variables)

    seconds = []
    for _ in range(count):
        smp.barrier()
        seconds.append(seconds_of(lambda: train_step(*data)[0].outputs[-1].numpy()))
    return seconds


def main():
    kind, schedule, microbatches, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    by_hand = {} if kind == "first" else {"auto_partition": False, "default_partition": 0}
    smp.init(partitions=int(os.environ["WORLD_SIZE"]), microbatches=microbatches, schedule=schedule, **by_hand)
    if kind == "first":
        x = tf.constant(np.random.default_rng(0).integers(0, WORDS, (ROWS, LENGTH)))

        def loss_of(model, x):
            return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=x, logits=model(x)))

        found = steps_of(Transformer(), loss_of, [x], 1 + steps)
    else:
        found = [*alone()] if kind == "sleeping" else []
        model = Row(sleeping if kind == "sleeping" else tf.identity)
        data = [tf.ones([microbatches, 1024])]
        found += steps_of(model, lambda model, x: tf.reduce_mean(model(x)), data, 2 + steps)[2:]
    if smp.rank() == 0:
        print(*found, flush=True)
    smp.shutdown()


if __name__ == "__main__":
    main()
