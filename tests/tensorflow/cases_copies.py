# SPDX-License-Identifier: Apache-2.0
"""Programs of one rank of several copies of a model, by name: `lamina run -n 4 cases_copies.py NAME [FOLDER]`."""

import os
import signal
import sys
import threading
import time

import horovod.tensorflow as hvd

import lamina.tensorflow as smp

# isort: split
import keras
import numpy as np
import tensorflow as tf
from cases import Two, raises

from lamina import errors

keras.backend.set_floatx("float64")


def begin(microbatches=2, **keys):
    """Two partitions each; every copy has other values of its own."""
    smp.init(partitions=2, microbatches=microbatches, auto_partition=False, default_partition=0, **keys)
    keras.utils.set_random_seed(100 + smp.rank())


def mean_square(model, x, behind=tf.identity):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(behind(model(x)) ** 2)
    return loss, tape.gradient(loss, model.trainable_variables)


def whole_batch():
    return np.random.default_rng(7).normal(size=(8, 4))


def own_batch():
    return tf.constant(np.split(whole_batch(), smp.dp_size())[smp.dp_rank()])


def of_copies(each):
    return smp.allgather(each, smp.CommGroup.RDP_GROUP)


def require_alike(each):
    first, *others = of_copies(each)
    for other in others:
        tf.nest.map_structure(np.testing.assert_array_equal, other, first)


def values(model):
    return [variable.numpy() for variable in model.variables]


def interface(folder):
    """Uses what scripts do, over copies."""
    begin(horovod=True)
    outside = tf.Variable([1.0 + smp.dp_rank(), 2.0], dtype=tf.float64)
    table = tf.Variable(np.ones([6, 4]), dtype=tf.float64)
    model = Two()

    @smp.step
    def train_step(x, rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2) + tf.reduce_sum(outside**2) + tf.reduce_mean(tf.gather(table, rows))
        return loss, tape.gradient(loss, [*model.trainable_variables, outside, table])

    rows = tf.constant([[1, 1, 5, 2], [2, 3, 3, 1]][smp.dp_rank()])
    loss, gradients = train_step(own_batch(), rows)
    require_alike(values(model))  # those of the first copy, as they began
    means = [gradient.accumulate() for gradient in gradients]
    *of_model, of_outside, of_table = means
    require_alike([each.numpy() for each in of_model])
    np.testing.assert_allclose(of_outside, [3.0, 4.0])
    assert isinstance(of_table, tf.IndexedSlices)
    assert sorted(of_table.indices.numpy()) == [1, 2, 3, 5]
    counts = np.array([0, 3, 2, 2, 0, 1])[:, None] * np.ones([6, 4])
    np.testing.assert_allclose(tf.convert_to_tensor(of_table), counts / 32)
    np.testing.assert_allclose(gradients[0].reduce_sum(), 2 * of_model[0])
    of_one_copy = {float(each) for each in of_copies(float(loss.reduce_mean()))}
    assert len(of_one_copy) == 2, of_one_copy
    np.testing.assert_allclose(hvd.allreduce(loss.reduce_mean()), np.mean(list(of_one_copy)))
    for each in ("outputs", "stack", "concat", "merge"):
        raises("those of one copy", lambda each=each: use(gradients[0], each), errors.Error)
    of_horovod(means, of_table)
    optimizer = keras.optimizers.Adam(0.1, global_clipnorm=0.01)
    optimizer.apply_gradients(zip(of_model, model.trainable_variables, strict=True))
    require_alike(values(model))
    norm = float(tf.linalg.global_norm(of_model))
    assert len(set(smp.allgather(norm, smp.WORLD))) == 1
    keeps(model, optimizer, train_step, rows, folder)
    smp.shutdown()


def within(*_):
    """Gradients that functions, conditionals and loops of a step function take are averaged, and what is beside them
    stays the copy's own."""
    begin()
    copy = smp.dp_rank()
    outside = tf.Variable([1.0 + copy, 2.0], dtype=tf.float64)
    table = tf.Variable(np.ones([6, 4]), dtype=tf.float64)
    model = Two()

    def square():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(outside**2)
        return loss, tape.gradient(loss, outside)

    called = tf.function(square)
    called()  # traced before the step function is

    @tf.function
    def nested(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, rows)) * (1.0 + copy)
        return called(), {"rows": tape.gradient(loss, table), "loss": loss}

    def looped():
        body = lambda at, loss, total: (at + 1, loss + square()[0], total + square()[1])  # noqa: E731
        zeros = (tf.constant(0), tf.constant(0.0, tf.float64), tf.zeros([2], tf.float64))
        return tf.while_loop(lambda at, *_: at < 3, body, zeros)

    @smp.step
    def train_step(x, rows):
        results = model(x)
        loss, gradient = tf.cond(tf.reduce_sum(results**2) >= 0, square, lambda: (tf.reduce_sum(results), outside * 0))
        return (loss, gradient), nested(rows), looped()

    of_cond, (of_call, of_table), (count, of_loop, summed) = train_step(
        own_batch(), tf.constant([[1, 1], [2, 3]][copy])
    )
    own = (1.0 + copy) ** 2 + 4
    for loss, gradient, times in [(*of_cond, 1), (*of_call, 1), (of_loop, summed, 3)]:
        np.testing.assert_allclose(gradient.accumulate(), [3.0 * times, 4.0 * times])
        raises("those of one copy", lambda gradient=gradient: gradient.stack(), errors.Error)
        np.testing.assert_allclose(loss.stack(), [own * times] * 2)
    assert list(count.stack()) == [3, 3]
    rows = of_table["rows"].accumulate()
    assert sorted(rows.indices.numpy()) == [1, 2, 3]
    np.testing.assert_allclose(tf.convert_to_tensor(rows)[:, 0], [0, 0.5, 0.5, 0.5, 0, 0])
    np.testing.assert_allclose(of_table["loss"].stack(), [4.0 * (1 + copy)] * 2)

    @tf.function
    def changes():
        outside.assign_sub(square()[1])

    @smp.step
    def updates(x):
        changes()
        return model(x)

    raises("changes a variable by gradients", lambda: updates(own_batch()))
    smp.shutdown()


def use(output, name):
    found = getattr(output, name)
    return found() if callable(found) else found


def of_horovod(means, of_table):
    """Its names are over copies, in functions and outside."""
    copy = smp.dp_rank()
    assert hvd.allreduce(means[0]) is means[0]  # it is of all copies already
    assert hvd.allreduce(None) is None
    own = tf.constant([1.0, 5.0]) * (copy + 1)
    np.testing.assert_allclose(hvd.allreduce(own), [1.5, 7.5])
    np.testing.assert_allclose(hvd.allreduce(own, op=hvd.Sum), [3.0, 15.0])
    np.testing.assert_allclose(hvd.allreduce(own, average=False), [3.0, 15.0])
    np.testing.assert_allclose(
        tf.function(lambda each: hvd.allreduce(each) + hvd.allreduce(2 * each))(own), [4.5, 22.5]
    )
    np.testing.assert_allclose(hvd.allreduce(np.float64(copy)), 0.5)
    rows = tf.IndexedSlices(tf.constant([[1.0], [2.0]]) + copy, tf.constant([copy, 1]), tf.constant([3, 1]))
    np.testing.assert_allclose(tf.convert_to_tensor(hvd.allreduce(rows)), [[0.5], [3.5], [0.0]])
    np.testing.assert_allclose(hvd.allreduce(of_table, op=hvd.Sum).values, 2 * of_table.values)
    raises("takes no process_set", lambda: hvd.allreduce(own, process_set=0), errors.Error)
    raises("Average and Sum", lambda: hvd.allreduce(own, op="Max"), errors.Error)
    raises("cast it to a floating type", lambda: hvd.allreduce(tf.constant(1)), errors.Error)
    numbers = [tf.Variable([copy]), tf.Variable(1.0 + copy, dtype=tf.float64)]
    hvd.broadcast_variables(numbers, root_rank=1)
    assert [each.numpy().item() for each in numbers] == [1, 2.0]
    numbers[0].assign([copy])

    @tf.function
    def sometimes(now):
        if now:
            hvd.broadcast_variables(numbers, root_rank=0)

    sometimes(tf.constant(False))
    assert numbers[0].numpy().item() == copy
    sometimes(tf.constant(True))
    assert numbers[0].numpy().item() == 0
    raises("there is no copy 2 of the model, only 0 to 1", lambda: hvd.broadcast_variables([], 2), errors.Error)


def keeps(model, optimizer, train_step, rows, folder):
    """The first copy writes checkpoints and the whole model; all copies read."""
    manager = smp.CheckpointManager(tf.train.Checkpoint(model=model, optimizer=optimizer), folder, max_to_keep=2)
    right = values(model)
    paths = [manager.save() for _ in range(3)]
    assert [os.path.basename(path) for path in paths] == ["ckpt-1", "ckpt-2", "ckpt-3"]
    assert [os.path.basename(path) for path in manager.checkpoints] == ["ckpt-2", "ckpt-3"], manager.checkpoints
    for variable in model.variables:
        variable.assign(tf.zeros_like(variable) + smp.rank())
    assert manager.restore() == paths[2]
    tf.nest.map_structure(np.testing.assert_array_equal, values(model), right)
    assert manager.save().endswith("ckpt-4")
    path = os.path.join(folder, "whole")
    model.save_model(path)
    served = tf.keras.models.load_model(path).signatures["serving_default"]
    x = tf.constant(whole_batch())
    np.testing.assert_allclose(served(x)["output_0"], smp.step(lambda x: model(x))(x).concat(), rtol=1e-12)
    if smp.rank() == 0:
        os.remove(paths[2] + ".index")
    smp.barrier()
    raises("and rank", lambda: manager.restore("ckpt-3"), errors.Error)


def scales(*_):
    """A loss scale falls on all ranks where gradients of one overflow, and nothing is updated."""
    begin()
    model = Two()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
    smp.step(lambda x: model(x))(own_batch())
    optimizer.build(model.trainable_variables)
    train_step = smp.step(lambda x, by: scaled(model, optimizer, x, by))
    found = []
    for by in (1.0, np.inf if smp.dp_rank() == 1 else 1.0, 1.0):
        gradients = [each.accumulate() for each in train_step(own_batch(), tf.constant(by, tf.float64))]
        before = values(model)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        changed = [np.any(now != then) for now, then in zip(values(model), before, strict=True)]
        found.append((float(optimizer.dynamic_scale), any(changed)))
        require_alike(values(model))
    assert found == [(8.0, True), (4.0, False), (4.0, True)], found
    smp.shutdown()


def scaled(model, optimizer, x, by):
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(tf.reduce_mean(model(x) ** 2)) * by
    return tape.gradient(loss, model.trainable_variables)


class Small(smp.DistributedModel):
    """A rank that trains nothing and has statistics, and one with a single number and a gradient of rows."""

    def __init__(self):
        super().__init__()
        self.norm = keras.layers.BatchNormalization(center=False, scale=False)
        self.one = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", dtype="float32")
        self.table = keras.layers.Embedding(3, 1, embeddings_initializer="ones")

    def call(self, x, rows):
        with smp.partition(0):
            x = self.norm(x, training=True)
        with smp.partition(1):
            return tf.cast(self.one(tf.cast(x, tf.float32)), tf.float64) * self.table(rows)


def small(*_):
    """Parts with less numbers than there are copies, none, or several types of them."""
    begin(microbatches=1, placement_strategy="spread")
    model = Small()
    copy = smp.dp_rank()
    x = tf.constant([[1.0], [3.0 + copy]], tf.float64)

    @smp.step
    def train_step(x, rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, rows) * tf.constant([[1.0], [2.0 + copy]], tf.float64))
        return loss, {"of": [tape.gradient(loss, model.trainable_variables)]}

    _, gradients = train_step(x, tf.constant([copy, 2]))
    means = [each.accumulate() for each in gradients["of"][0]]
    require_alike(values(model))
    if smp.mp_rank() == 1:
        of_one, of_rows = means
        assert of_one.dtype == tf.float32 and of_one.shape == (1, 1)
        # A batch of two numbers is normalized to -1 and 1, but for epsilon.
        np.testing.assert_allclose(of_one, [[np.mean([1.0, 2.0])]], rtol=2e-3)
        np.testing.assert_allclose(tf.convert_to_tensor(of_rows), [[-0.5], [-0.5], [2.5]], rtol=2e-3)
    else:
        assert not means
        mean, variance = (variable.numpy() for variable in model.non_trainable_variables)
        np.testing.assert_allclose(mean, [0.01 * 2])  # of the first copy
        np.testing.assert_allclose(variance, [0.99 + 0.01 * 1])
    smp.shutdown()


def told(*_):
    """Errors come on all ranks, and they go on."""
    begin()
    model = Two()
    copy, rank, x = smp.dp_rank(), smp.rank(), own_batch()
    train_step = smp.step(lambda x: mean_square(model, x))
    evaluate = smp.step(lambda x: model(x))
    right = evaluate(x).concat().numpy()
    unused = tf.Variable(1.0, dtype=tf.float64)

    @smp.step
    def sometimes(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
            if copy == 1:
                loss += unused**2
        return loss, tape.gradient(loss, [*model.trainable_variables, unused])

    raises("of the step function sometimes is", lambda: sometimes(x), errors.DesyncError)
    raises(
        "is no gradient and float64 ()" if copy == 0 else "is float64 () and no gradient",
        lambda: sometimes(x),
        errors.DesyncError,
    )
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    @smp.step
    def updates(x):
        loss, gradients = mean_square(model, x)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    raises("changes a variable by gradients", lambda: updates(x))
    raises("in a step function", lambda: smp.step(lambda x: hvd.allreduce(model(x)))(x))
    if copy == 1:
        raises("of this copy alone", lambda: smp.step(lambda x: fails())(x))
    else:
        raises("of this copy alone", lambda: train_step(x))
    if copy == 0:  # as often as it likes
        for _ in range(3):
            np.testing.assert_array_equal(evaluate(x).concat(), right)
    train_step(x if copy == 0 else x[:2])  # copies may read batches of other sizes
    gradients = train_step(x)[1]
    require_alike([each.accumulate().numpy() for each in gradients])
    if copy == 0:
        raises("all ranks call the same", lambda: hvd.allreduce(tf.constant(1.0)))
    else:
        raises("all ranks call the same", lambda: train_step(x))
    train_step(x)
    # An operation that fails on one rank of one copy ends the step of all.
    broken = smp.step(lambda x: mean_square(model, x, finite))
    broken(x)
    end = "broken" if copy == 1 else "an operation has failed"
    raises(end, lambda: broken(x * (np.nan if copy == 1 else 1)))
    np.testing.assert_array_equal(evaluate(x).concat(), right)
    require_alike([each.accumulate().numpy() for each in broken(x)[1]])
    assert rank == smp.rank()
    smp.shutdown()


def finite(y):
    return tf.debugging.check_numerics(y, "broken")


def fails():
    raise ValueError("of this copy alone")


def lost(*_):
    """A rank of a copy is killed within a step: all ranks of all copies say which."""
    begin()
    model = Two()
    x = own_batch()
    train_step = smp.step(lambda x: mean_square(model, x))
    train_step(x)
    if smp.rank() == 3:
        os.kill(os.getpid(), 9)
    since = time.monotonic()
    raises("rank 3 is lost", lambda: train_step(x))
    assert time.monotonic() - since < 20
    print("it was told", flush=True)


def interrupted(*_):
    """Ctrl-C on rank 0, which waits for the other copy."""
    begin()
    model = Two()
    x = own_batch()
    train_step = smp.step(lambda x: mean_square(model, x))
    right = train_step(x)[1][0].accumulate().numpy()
    if smp.rank() == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            train_step(x)
        except (KeyboardInterrupt, tf.errors.OpError):
            pass
        else:
            raise AssertionError("it was not interrupted")
    elif smp.rank() == 1:
        raises("rank 0 was interrupted (Ctrl-C)", lambda: train_step(x))
    smp.barrier()
    if smp.dp_rank() == 1:
        raises("rank 0 was interrupted (Ctrl-C)", lambda: train_step(x))
    np.testing.assert_array_equal(train_step(x)[1][0].accumulate().numpy(), right)
    smp.shutdown()


CASES = (interface, within, scales, small, told, lost, interrupted)

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    {each.__name__: each for each in CASES}[name](*arguments)
