# SPDX-License-Identifier: Apache-2.0
"""Programs of one rank, by name: `lamina run -n 2 cases.py NAME ...`."""

import contextlib
import os
import re
import signal
import sys
import threading
import time

import lamina.tensorflow as smp

# isort: split
import numpy as np
import tensorflow as tf
from models import batch, made
from tensorflow import keras

STEPS = 3


class Subject:
    """A model and how it is trained, as `model:schedule:gradients:microbatches:option`.

    Options: "copies2" trains two copies of it, "function" wraps the whole step in a tf.function, "clip" clips by the
    global norm as TensorFlow does, "clip_keras" as Keras does, "decay" is AdamW, "scale" scales the loss.
    """

    def __init__(self, text):
        self.model, self.schedule, self.gradients, microbatches, *self.options = text.split(":")
        self.microbatches = int(microbatches)
        self.copies = next((int(each.removeprefix("copies")) for each in self.options if each[:6] == "copies"), 1)
        self.rows = (8 if self.model == "mobilenet" else 2) * self.microbatches * self.copies

    def optimizer(self):
        keywords = {"global_clipnorm": 0.05} if "clip_keras" in self.options else {}
        if "sgd" in self.options:
            return keras.optimizers.SGD(0.01, **keywords)
        if "decay" in self.options:
            return keras.optimizers.AdamW(0.01, weight_decay=0.1, **keywords)
        return keras.optimizers.Adam(0.01, **keywords)

    def apply(self, optimizer, gradients, variables):
        if "clip" in self.options:
            gradients, _ = tf.clip_by_global_norm(gradients, 0.05)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def batch(self, step, copy):
        """The one that a copy reads."""
        return tuple(tf.split(part, self.copies)[copy] for part in batch(self.model, step, self.rows))

    def microbatches_of(self, step, copy):
        return zip(*(tf.split(part, self.microbatches) for part in self.batch(step, copy)), strict=True)


def mean_of(gradients):
    """Over microbatches, dense."""
    if any(gradient is None for gradient in gradients):
        return None
    return tf.add_n([tf.convert_to_tensor(gradient) for gradient in gradients]) / len(gradients)


class OfCopies:
    """Keeps what copies have of their own, in one process: the model's variables that are not trained. Floating ones
    are the first copy's once the copies are through; integers, as states of random numbers, stay."""

    def __init__(self, model, copies):
        self.model, self.values = model, [self.found(model)] * copies

    @staticmethod
    def found(model):
        return [variable.numpy() for variable in model.non_trainable_variables]

    @contextlib.contextmanager
    def one(self, copy):
        self.set(self.values[copy])
        yield
        self.values[copy] = self.found(self.model)

    def through(self):
        first = self.values[0]
        self.values = [
            [of_first if of_first.dtype.kind == "f" else own for own, of_first in zip(each, first, strict=True)]
            for each in self.values
        ]
        self.set(first)

    def set(self, values):
        for variable, value in zip(self.model.non_trainable_variables, values, strict=True):
            variable.assign(value)


def train_alone(subject):
    """Trains in one process: losses of each step, what an evaluation gives, and the variables."""
    model = made(subject.model, keras.Model)
    optimizer = subject.optimizer()

    @tf.function
    def microbatch_step(x, y):
        with tf.GradientTape() as tape:
            loss = model.judge(y, model(x, training=True))
        return loss, tape.gradient(loss, model.trainable_variables)

    losses = []
    microbatch_step.get_concrete_function(*next(subject.microbatches_of(0, 0)))  # makes its variables
    of_copies = OfCopies(model, subject.copies)
    for step in range(STEPS):
        found = []
        for copy in range(subject.copies):
            with of_copies.one(copy):
                found += [microbatch_step(*part) for part in subject.microbatches_of(step, copy)]
        of_copies.through()
        losses.append(np.mean([loss.numpy() for loss, _ in found]))
        means = [mean_of(gradients) for gradients in zip(*(each for _, each in found), strict=True)]
        subject.apply(optimizer, means, model.trainable_variables)
    evaluate = tf.function(lambda x: model(x, training=False))
    evaluated = [evaluate(x) for x, _ in subject.microbatches_of(99, 0)]
    joined = tf.nest.map_structure(lambda *parts: None if parts[0] is None else np.concatenate(parts), *evaluated)
    return losses, joined, [variable.numpy() for variable in model.variables]


def compare(*subjects):
    for text in subjects:
        compare_one(Subject(text))
        print(f"{text} is as in one process", flush=True)


def compare_one(subject):
    """Trains over the ranks as one process does."""
    ranks = int(os.environ["WORLD_SIZE"])
    right = train_alone(subject) if os.environ["RANK"] == "0" else None
    keras.utils.clear_session()  # names count on from the same on all ranks
    smp.init(
        partitions=ranks // subject.copies,
        microbatches=subject.microbatches,
        schedule=subject.schedule,
        auto_partition=True,
    )
    expected, evaluated, variables = smp.allgather(right, smp.WORLD)[0]
    model = made(subject.model, smp.DistributedModel)
    optimizer = subject.optimizer()

    @smp.step
    def train_step(x, y):
        if subject.gradients == "tape":
            with tf.GradientTape() as watched:
                loss = model.judge(y, model(x, training=True))
            return loss, watched.gradient(loss, model.trainable_variables)
        loss = model.judge(y, model(x, training=True))
        return loss, optimizer.get_gradients(loss, model.trainable_variables)

    @smp.step
    def evaluate(x):
        return model(x, training=False)

    def whole_step(x, y):
        loss, gradients = train_step(x, y)
        means = [gradient.accumulate() for gradient in gradients]
        subject.apply(optimizer, means, model.trainable_variables)
        return loss.reduce_mean()

    if "function" in subject.options:
        whole_step = tf.function(whole_step)
    losses = [float(whole_step(*subject.batch(step, smp.dp_rank()))) for step in range(STEPS)]
    losses = np.mean(smp.allgather(losses, smp.CommGroup.DP_GROUP), 0)
    np.testing.assert_allclose(losses, expected, rtol=1e-9)
    found = tf.nest.map_structure(
        lambda output: output.concat().numpy() if output.outputs[0] is not None else None,
        evaluate(subject.batch(99, 0)[0]),
    )
    tf.nest.map_structure(
        lambda mine, right: (
            np.testing.assert_allclose(mine, right, rtol=1e-9, atol=1e-9) if right is not None else None
        ),
        found,
        evaluated,
    )
    every = model._keras_variables()
    own = {id(variable) for variable in model.variables}
    for variable, right in zip(every, variables, strict=True):
        if id(variable) in own:
            np.testing.assert_allclose(variable.numpy(), right, rtol=1e-9, atol=1e-9, err_msg=variable.path)
    counts = smp.allgather(len(own), smp.MP_GROUP)
    assert sum(counts) == len(every), counts
    smp.shutdown()


class TwoLayers:
    def __init__(self):
        super().__init__()
        self.layers_ = [keras.layers.Dense(4), keras.layers.Dense(4)]

    def call(self, x, training=None):
        with smp.partition(0):
            x = self.layers_[0](x)
        with smp.partition(1):
            return self.layers_[1](self.between(x))

    def between(self, x):
        return x


def by_hand(*_):
    """Each layer is where the script places it."""
    smp.init(partitions=2, microbatches=2, auto_partition=False, default_partition=0)
    model = type("Model", (TwoLayers, smp.DistributedModel), {})()

    @smp.step
    def evaluate(x):
        return model(x)

    evaluate(tf.ones([4, 3], tf.float64))
    assert [variable.path.split("/")[-2] for variable in model.variables] == [
        f"dense{'_1' if smp.rank() else ''}"
    ] * 2, [variable.path for variable in model.variables]
    smp.shutdown()


def placed(*subjects):
    """Trains where ranks have nothing, or nothing to train, and where microbatches come back to a partition. A subject
    is `d0.s1.d0:gradients`: a dense layer on partition 0, a sine on 1, another layer on 0."""
    for text in subjects:
        places, take = text.split(":")
        placed_as(places.split("."), take)
        print(f"{text} is as in one process", flush=True)


def row_of_layers(base, places, place):
    """A model of dense layers and sines, each in what `place` enters for its partition."""

    class Model(base):
        def __init__(self):
            super().__init__()
            self.parts = [keras.layers.Dense(4, activation="tanh") for _ in places]

        def call(self, x):
            for part, (kind, at) in zip(self.parts, places, strict=True):
                with place(int(at)):
                    x = part(x) if kind == "d" else tf.sin(x)
            return x

    keras.utils.set_random_seed(5)
    return Model()


def placed_as(places, take):
    def losses(model, step, apply):
        found = []
        for number in range(STEPS):
            x = tf.constant(np.random.default_rng(number).normal(size=(6, 4)))
            loss, gradients = step(model, x)
            apply(gradients, model.trainable_variables)
            found.append(loss)
        return found

    def body(model, x, optimizer):
        if take == "get_gradients":
            loss = tf.reduce_mean(model(x) ** 2)
            return loss, optimizer.get_gradients(loss, model.trainable_variables)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        return loss, tape.gradient(loss, model.trainable_variables)

    def alone(model, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        return float(loss), tape.gradient(loss, model.trainable_variables)

    def train(model, step):
        optimizer = keras.optimizers.Adam(0.05, global_clipnorm=0.1)
        pairs = lambda gradients, variables: [  # noqa: E731
            pair for pair in zip(gradients, variables, strict=True) if pair[0] is not None
        ]
        return losses(model, step(optimizer), lambda *each: optimizer.apply_gradients(pairs(*each)))

    plain = row_of_layers(keras.Model, places, lambda _: contextlib.nullcontext())
    expected = train(plain, lambda _: alone)
    ranks = int(os.environ["WORLD_SIZE"])
    smp.init(partitions=ranks, microbatches=3, auto_partition=False, default_partition=0)
    model = row_of_layers(smp.DistributedModel, places, smp.partition)

    def over_ranks(optimizer):
        train_step = smp.step(lambda x: body(model, x, optimizer))

        def step(_, x):
            loss, gradients = train_step(x)
            return float(loss.reduce_mean()), [each.accumulate() for each in gradients]

        return step

    np.testing.assert_allclose(train(model, over_ranks), expected, rtol=1e-9)
    x = tf.ones([6, 4], tf.float64)
    np.testing.assert_allclose(smp.step(lambda x: model(x))(x).concat(), plain(x), rtol=1e-9)
    smp.shutdown()


def failing(where):
    """An operation that fails on rank 1 in the second step ends that one on both; the third works."""
    smp.init(partitions=2, microbatches=2, auto_partition=False, default_partition=0)

    class Model(TwoLayers, smp.DistributedModel):
        def between(self, x):
            if where == "forward":
                return tf.debugging.check_numerics(x, "broken")
            return fails_back(x) if where == "backward" else x

    @tf.custom_gradient
    def fails_back(x):
        return tf.identity(x), lambda upstream: tf.debugging.check_numerics(upstream, "broken")

    model = Model()
    right = tf.Variable(1.0, dtype=tf.float64, trainable=False)

    @smp.step
    def train_step(x):
        with tf.GradientTape() as tape:
            y = model(x)
            if where == "loss" and smp.rank() == 1:
                y = tf.debugging.check_numerics(y, "broken")
            loss = tf.reduce_mean(y * y)
        return loss, tape.gradient(loss, model.trainable_variables)

    x = tf.ones([4, 3], tf.float64)
    before = float(train_step(x)[0].reduce_mean())
    try:
        train_step(x * np.nan)
    except tf.errors.OpError as error:
        words = str(error)
    else:
        raise AssertionError("nothing was raised")
    if smp.rank() == 1:
        assert "broken" in words, words
    else:
        assert re.search(r"rank 1: step \d of a graph: an operation has failed", words), words
        assert "its rank shows the error" in words, words
        assert where == "loss" or f"in {where} of level" in words, words
    right.assign(1.0)
    assert float(train_step(x)[0].reduce_mean()) == before
    smp.shutdown()


def lost(*_):
    """Rank 1 is killed within a step; rank 0 says so."""
    smp.init(partitions=2, microbatches=2, auto_partition=False, default_partition=0)

    class Model(TwoLayers, smp.DistributedModel):
        def between(self, x):
            return x

    model = Model()

    @smp.step
    def evaluate(x):
        return model(x)

    evaluate(tf.ones([4, 3], tf.float64))
    if smp.rank() == 1:
        os.kill(os.getpid(), 9)
    begin = time.monotonic()
    try:
        evaluate(tf.ones([4, 3], tf.float64))
    except tf.errors.OpError as error:
        assert "rank 1 is lost" in str(error), error
        assert time.monotonic() - begin < 5
        print("rank 0 was told", flush=True)


class Two(smp.DistributedModel):
    """A layer on each rank, and what a case puts between them."""

    def __init__(self, units=4, between=lambda x: x):
        super().__init__()
        self.parts, self.between = [keras.layers.Dense(units), keras.layers.Dense(units)], between

    def call(self, x, gradient=None):
        with smp.partition(0):
            x = self.parts[0](x)
        with smp.partition(1):
            return self.parts[1](self.between(x))


def by_hand_on_two(microbatches=2):
    smp.init(partitions=2, microbatches=microbatches, auto_partition=False, default_partition=0)


def raises(words, call, kind=Exception):
    try:
        call()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nothing was raised where {words} was due")


def refused(*_):
    """Says what is not there, alike on both ranks, and goes on."""
    by_hand_on_two(4)
    model = Two()
    x = tf.ones([8, 4], tf.float64)

    def refuses(words, body, **options):
        raises(words, lambda: smp.step(body, **options)(x), smp_errors.Error)

    def train(x, take):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        return take(tape, loss)

    def twice(tape, loss):
        return [tape.gradient(loss, model.trainable_variables) for _ in range(2)]

    def second_derivative(x):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_sum(model(x) ** 2)
            gradient = inner.gradient(loss, model.trainable_variables)
            norm = tf.add_n([tf.reduce_sum(each**2) for each in gradient])
        return outer.gradient(norm, model.trainable_variables)

    raises("outside a step", lambda: model(x), smp_errors.Error)
    raises("outside a step", lambda: model.losses, smp_errors.Error)
    refuses("model.losses before", lambda x: model.losses)
    raises("which 4 microbatches do not divide", lambda: smp.step(lambda x: model(x))(x[:6]), smp_errors.Error)
    refuses("calls its model once", lambda x: model(model(x)))
    refuses("in a loop, a conditional", lambda x: tf.cond(x[0, 0] > 0, lambda: model(x), lambda: x))
    refuses("takes gradients of its model 2 times", lambda x: train(x, twice))
    refuses("second derivatives", second_derivative)
    refuses("gradients of a part", lambda x: train(x, lambda tape, loss: tf.gradients(loss, last_weight(model))))
    refuses("a global norm in a step function", lambda x: tf.linalg.global_norm([model(x)]))
    raises("jit_compile", lambda: smp.step(lambda x: model(x), jit_compile=True), smp_errors.Error)
    whole = tf.function(smp.step(lambda x: model(x)), jit_compile=True)
    raises("jit_compile", lambda: whole(x))
    with tf.distribute.OneDeviceStrategy("cpu").scope():
        refuses("tf.distribute", lambda x: model(x))
    raises("there is a DistributedModel already", Two, smp_errors.Error)
    assert smp.step(lambda x: model(x))(x).concat().shape == (8, 4)
    smp.shutdown()


def last_weight(model):
    """One that the last segment of each rank uses."""
    return [model.trainable_variables[-1].value.handle]


def foreign_variables(*_):
    """A variable of another rank is an error that names it and its rank, and has no memory."""
    by_hand_on_two()
    model = Two(units=4000)
    for part in model.parts:
        part.build((None, 4000))
    old = [part.kernel.value.handle for part in model.parts]
    held = tensors_that_fill_what_is_free()
    before = resident_bytes()
    evaluate = smp.step(lambda x: model(x))
    evaluate(tf.ones([4, 4000], tf.float64))
    held += [tf.ones([4000, 4000], tf.float64) for _ in range(2)]  # one of them where the other rank's variable was
    assert resident_bytes() < before + 1.5 * KERNEL_BYTES, (before, resident_bytes())
    del held
    own, other = model.parts[smp.rank()].kernel, model.parts[1 - smp.rank()].kernel
    assert own.numpy().shape == (4000, 4000)
    words = f"variable {other.path} is on rank {1 - smp.rank()}"
    raises(words, lambda: other.numpy(), smp_errors.Error)
    raises(words, lambda: other + 1, smp_errors.Error)
    raises(words, lambda: other.assign(own.numpy()), smp_errors.Error)
    raises(words, tf.function(lambda: tf.reduce_sum(other)), smp_errors.Error)
    raises(words, lambda: model.get_weights() and [each.numpy() for each in model.parts[1 - smp.rank()].weights])
    of_old = tf.raw_ops.ReadVariableOp(resource=old[1 - smp.rank()], dtype=tf.float64)
    assert of_old.shape == (0,), of_old.shape
    evaluate(tf.ones([2, 4000], tf.float64))  # another signature, which traces again
    smp.shutdown()


KERNEL_BYTES = 4000 * 4000 * 8


def tensors_that_fill_what_is_free():
    """Tensors of a kernel's size. TensorFlow keeps memory that was freed, for its next tensors."""
    tensors = []
    while True:
        before = resident_bytes()
        tensors.append(tf.ones([4000, 4000], tf.float64))
        if resident_bytes() > before + 0.9 * KERNEL_BYTES:
            return tensors


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def different(*_):
    """Ranks that do not do the same are told, both of them, and go on."""
    by_hand_on_two()
    seen = []
    model = Two()
    x, rank = tf.ones([4, 4], tf.float64), smp.rank()

    @smp.step
    def evaluate(x, scale=1.0, extra=None):
        seen.append("traced")
        return model(x) * scale

    @smp.step
    def train(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    raises("argument x differs between rank 0 and rank 1", lambda: evaluate(x + rank))
    raises("argument scale differs between rank 0 and rank 1", lambda: evaluate(x, scale=2.0 + rank))
    evaluate(x)
    seen.clear()
    evaluate(tf.ones([8, 4], tf.float64))
    assert len(seen) == 1, seen  # once for all microbatches
    raises("takes gradients in it, and rank", lambda: (train, evaluate)[rank](x))
    raises("all ranks call the same step functions", lambda: evaluate(x if rank else x[:2]))
    model.between = lambda x: x + 1 if rank else tf.sin(x)
    raises("the model's call differs: rank 1 traced", lambda: smp.step(lambda x: model(x))(tf.ones([6, 4], tf.float64)))

    def fails(x):
        raise ValueError("of this rank alone")

    model.between = fails if rank else lambda x: x
    other = tf.ones([12, 4], tf.float64)
    raises("of this rank alone", lambda: smp.step(lambda x: model(x))(other))
    model.between = lambda x: x
    raises("of this rank alone", lambda: smp.step(fails if rank else lambda x: model(x))(other))
    assert evaluate(other).concat().shape == (12, 4)
    smp.shutdown()


def interrupted(*_):
    """Ctrl-C on rank 0, which waits for rank 1."""
    by_hand_on_two()
    model = Two()
    x = tf.ones([4, 4], tf.float64)
    evaluate = smp.step(lambda x: model(x))
    right = evaluate(x).concat().numpy()
    if smp.rank() == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        try:
            evaluate(x)
        except (KeyboardInterrupt, tf.errors.OpError):
            assert time.monotonic() - begin < 5
        else:
            raise AssertionError("it was not interrupted")
        smp.send("rank 0 was interrupted", 1, smp.RankType.WORLD_RANK)
    else:
        smp.recv_from(0, smp.RankType.WORLD_RANK)
        raises("rank 0 was interrupted (Ctrl-C)", lambda: evaluate(x))
    np.testing.assert_array_equal(evaluate(x).concat().numpy(), right)
    smp.shutdown()


CASES = (compare, by_hand, placed, failing, lost, refused, foreign_variables, different, interrupted)


def main():
    name, *arguments = sys.argv[1:]
    {each.__name__: each for each in CASES}[name](*arguments)


if __name__ == "__main__":
    from lamina import errors as smp_errors

    main()
