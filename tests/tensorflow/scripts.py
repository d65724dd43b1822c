# SPDX-License-Identifier: Apache-2.0
"""Scripts as there are for the original, small: each runs in one process, and unchanged over ranks, to the same
numbers. `lamina run -n 2 scripts.py FOLDER DTYPE NAME ...`. There are as many partitions as PARTITIONS says, 2 else;
with more ranks each copy of the model reads its part of each batch, and one process reads all."""

import filecmp
import os
import sys
from pathlib import Path

import horovod.tensorflow

import smdistributed.modelparallel.tensorflow as over_ranks
import smdistributed.modelparallel.tensorflow.utils as utils

# isort: split
import numpy as np
import tensorflow as tf
from tensorflow.keras.layers import Conv2D, Dense, Flatten

from lamina.tensorflow import older_keras

SIZE = 8  # of images
PARTITIONS = int(os.environ.get("PARTITIONS", "2"))
COPIES = int(os.environ["WORLD_SIZE"]) // PARTITIONS


class Alone:
    """`smp` in one process: the names that the scripts use, without ranks."""

    def __init__(self):
        self.microbatches = 1

    class DistributedModel(tf.keras.Model):
        def profile(self, *_):
            pass

        def save_model(self, _):
            pass

    class CheckpointManager:
        def __init__(self, checkpoint, directory, **_):
            self.checkpoint = checkpoint
            self.manager = tf.train.CheckpointManager(checkpoint, os.path.join(directory, "alone"), None)

        def save(self):
            self.manager.save()

        def restore(self, restore_prefix=None):
            known = self.manager.checkpoints
            found = [each for each in known if restore_prefix is None or each.endswith("/" + restore_prefix)]
            if found:
                self.checkpoint.restore(found[-1])

    def init(self, config):
        self.microbatches = config["microbatches"] * COPIES

        def get_gradients(_, loss, variables):
            return tf.gradients(loss, [each.handle for each in variables])

        tf.keras.optimizers.Optimizer.get_gradients = get_gradients
        optimizer = tf.keras.mixed_precision.LossScaleOptimizer
        optimizer.get_gradients = get_gradients
        older_keras.add()

    def barrier(self):
        pass

    def allreduce(self, tensor):
        return tensor

    def broadcast_variables(self, variables, root_rank):
        pass

    def rank(self):
        return 0

    dp_rank = local_rank = rank

    def mp_rank(self):
        return 0

    def dp_size(self):
        return 1

    def step(self, body=None, non_split_inputs=(), **options):
        if body is None:
            return lambda body: self.step(body, non_split_inputs, **options)
        names = body.__code__.co_varnames

        def whole(*arguments):
            pieces = [
                [each] * self.microbatches if name in non_split_inputs else tf.split(each, self.microbatches)
                for name, each in zip(names, arguments, strict=False)
            ]
            returned = [body(*piece) for piece in zip(*pieces, strict=True)]
            if tf.is_tensor(returned[0]):
                return [returned]
            return [list(each) for each in zip(*returned, strict=True)]

        function = tf.function(whole, **options)

        @tf.autograph.experimental.do_not_convert
        def step(*arguments):
            first, *rest = function(*arguments)
            every = [first, *rest]
            made = [
                [over_ranks.StepOutput(each) for each in zip(*result, strict=True)]
                if isinstance(result[0], (list, tuple))
                else over_ranks.StepOutput(result)
                for result in every
            ]
            return made if len(made) > 1 else made[0]

        return step


def dense(units, seed, **keywords):
    return Dense(units, kernel_initializer=tf.keras.initializers.GlorotNormal(seed=seed), **keywords)


def conv(filters, seed):
    start = tf.keras.initializers.GlorotNormal(seed=seed)
    return Conv2D(filters, 3, activation="relu", kernel_initializer=start)


def images(rows, seed):
    """Numbers of float64, as division of bytes gives them, and classes of uint8."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 4, rows).astype(np.uint8)
    pixels = draw.integers(0, 256, (rows, SIZE, SIZE)) / 255.0 + labels[:, None, None] / 4
    return pixels[..., tf.newaxis], labels


def batches(smp, data, rows, seed):
    """Results of a copy, each a part of one process's."""
    whole = tf.data.Dataset.from_tensor_slices(data).shuffle(1000, seed=seed).batch(rows, drop_remainder=True)
    return whole.map(lambda *each: tuple(own_part(smp, part) for part in each))


def own_part(smp, batch):
    rows = batch.shape[0] // smp.dp_size()
    return batch[smp.dp_rank() * rows : (smp.dp_rank() + 1) * rows]


class Found(dict):
    """Numbers that a script found: lists, by name."""

    def add(self, name, number):
        self.setdefault(name, []).append(np.array(number))


def metrics():
    keras = tf.keras.metrics
    return [
        keras.Mean(name="train_loss"),
        keras.SparseCategoricalAccuracy(name="train_accuracy"),
        keras.Mean(name="test_loss"),
        keras.SparseCategoricalAccuracy(name="test_accuracy"),
    ]


def convolutional(smp, reuse):
    """A model with a layer that is never called, and one that is called twice with `reuse`."""

    class Model(smp.DistributedModel):
        def __init__(self):
            super().__init__()
            self.conv = conv(4, 12)
            self.never_called = conv(4, 12)
            self.flatten = Flatten()
            self.d1 = dense(8, 192, activation="relu")
            self.d2 = dense(4, 126)
            self.last = dense(4, 129)

        def first(self, x):
            with tf.name_scope("first"):
                return self.flatten(self.conv(x))

        def second(self, x):
            with tf.name_scope("second"):
                x = self.d2(self.d1(x))
                return self.last(self.last(x)) if reuse else x

        def call(self, x, training=None):
            return self.second(self.first(x))

    return Model()


def serve(smp, folder, model, found):
    """Saves the model, and has what was saved compute."""
    path = os.path.join(folder, "saved")
    model.save_model(path)
    smp.barrier()
    pixels = tf.constant(images(6, 3)[0])
    if smp is over_ranks:
        infer = tf.keras.models.load_model(path).signatures["serving_default"]
        found.add("served", infer(pixels)["output_0"])
        for rank in range(PARTITIONS):
            assert os.path.exists(os.path.join(folder, f"mp_rank_{rank}", "checkpoint"))
    else:
        found.add("served", model(pixels, training=False))


def epochs(smp, hvd, folder, config, reuse=True, copies=False):
    """Training and evaluation by epochs with metrics, checkpoints and a saved model; with `copies` Horovod's names."""
    smp.init(config)
    train = batches(smp, images(24, 1), 8, 123)
    test = batches(smp, images(16, 2), 8, 7)
    found = Found()

    model = convolutional(smp, reuse)
    for pixels, _ in train.take(2):
        model.profile(pixels)
    judge = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.Adam()
    train_loss, train_accuracy, test_loss, test_accuracy = metrics()

    @smp.step
    def get_grads(pixels, labels):
        predictions = model(pixels, training=True)
        loss = judge(labels, predictions)
        return optimizer.get_gradients(loss, model.trainable_variables), loss, predictions

    @tf.function
    def train_step(pixels, labels, first_batch):
        gradients, loss, predictions = get_grads(pixels, labels)
        gradients = [hvd.allreduce(g.accumulate()) if copies else g.accumulate() for g in gradients]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if first_batch:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables(), root_rank=0)
        train_loss(loss.reduce_mean())
        train_accuracy(labels, predictions.merge())
        return loss.reduce_mean()

    @smp.step(
        input_signature=[
            tf.TensorSpec(shape=[None, SIZE, SIZE, 1], dtype=tf.float64),
            tf.TensorSpec(shape=[None], dtype=tf.uint8),
        ]
    )
    def test_step(pixels, labels):
        predictions = model(pixels, training=False)
        t_loss = judge(labels, predictions)
        test_loss(t_loss)
        test_accuracy(labels, predictions)
        return t_loss

    manager = smp.CheckpointManager(tf.train.Checkpoint(optimizer=optimizer, model=model), folder)
    for epoch in range(2):
        for metric in (train_loss, train_accuracy, test_loss, test_accuracy):
            metric.reset_states()
        for step, (pixels, labels) in enumerate(train):
            if step == 1 and epoch == 0:
                manager.restore()
            found.add("loss", train_step(pixels, labels, tf.constant(step == 0)))
        manager.save()
        for pixels, labels in test:
            found.add("test", test_step(pixels, labels).reduce_mean())
        for metric in (train_loss, train_accuracy, test_loss, test_accuracy):
            found.add(metric.name, metric.result())
    serve(smp, folder, model, found)
    return found


def evaluation(smp, hvd, folder):
    return epochs(smp, hvd, folder, {"microbatches": 2, "partitions": PARTITIONS}, reuse=False)


def convolutions(smp, hvd, folder):
    config = {"microbatches": 2, "partitions": PARTITIONS, "placement_strategy": "spread", "pipeline": "interleaved"}
    return epochs(smp, hvd, folder, config | {"optimize": "memory"})


def compiled(smp, hvd, folder):
    """With XLA."""
    tf.config.optimizer.set_jit(True)
    try:
        return epochs(smp, hvd, folder, {"microbatches": 2, "partitions": PARTITIONS, "xla": True, "contiguous": False})
    finally:
        tf.config.optimizer.set_jit(False)


def copies(smp, hvd, folder):
    config = {"microbatches": 2, "horovod": True, "partitions": PARTITIONS, "xla": False, "optimize": "speed"}
    return epochs(smp, hvd, folder, config, copies=True)


def signature(smp, hvd, folder):
    """Signatures of whole batches, an argument that is not split, a call without `training`, a norm of all ranks."""
    config = {"microbatches": 2, "horovod": True, "partitions": PARTITIONS, "pipeline": "interleaved"}
    smp.init(config | {"optimize": "speed"})
    train = batches(smp, images(24, 1), 8, 123)
    found = Found()
    train_loss, train_accuracy, *_ = metrics()

    class Model(smp.DistributedModel):
        def __init__(self):
            super().__init__()
            self.conv = conv(4, 12)
            self.flatten = Flatten()
            self.d1 = dense(8, 192, activation="relu")
            self.d2 = dense(4, 126)

        def call(self, x):
            return self.d2(self.d1(self.flatten(self.conv(x))))

    model = Model()
    judge = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.Adam(global_clipnorm=0.05)

    rows = 8 // smp.dp_size()
    specs = [tf.TensorSpec([rows, SIZE, SIZE, 1], tf.float64), tf.TensorSpec([rows], tf.uint8)]

    @smp.step(input_signature=[*specs, tf.TensorSpec([], tf.bool)], non_split_inputs=["first_batch"])
    def get_grads(pixels, labels, first_batch):
        predictions = model(pixels, training=True)
        loss = judge(labels, predictions)
        return optimizer.get_gradients(loss, model.trainable_variables), predictions, loss

    @tf.function
    def train_step(pixels, labels, first_batch):
        gradients, predictions, loss = get_grads(pixels, labels, first_batch)
        gradients = [hvd.allreduce(g.reduce_mean()) for g in gradients]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if first_batch:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables(), root_rank=0)
        train_loss(loss.reduce_mean())
        train_accuracy(labels, predictions.merge())
        return loss.reduce_mean()

    for _ in range(2):
        for metric in (train_loss, train_accuracy):
            metric.reset_states()
        for batch, (pixels, labels) in enumerate(train):
            found.add("loss", train_step(pixels, labels, tf.constant(batch == 0)))
        for metric in (train_loss, train_accuracy):
            found.add(metric.name, metric.result())
    path = os.path.join(folder, "saved")
    model.save_model(path)
    if smp is not over_ranks:
        found.add("served", model(images(6, 3)[0]))
    elif smp.dp_rank() == 0 and smp.mp_rank() == 0:
        infer = tf.keras.models.load_model(path).signatures["serving_default"]
        found.add("served", infer(tf.constant(images(6, 3)[0]))["output_0"])
    smp.barrier()
    return found


def checkpoints(smp, hvd, folder):
    """A checkpoint that is not there, and is later, of numpy's data."""
    config = {"microbatches": 2, "placement_strategy": "spread", "partitions": PARTITIONS}
    smp.init(config | {"contiguous": False, "xla": False})
    xs, ys = own_part(smp, np.arange(8.0)[:, None]), own_part(smp, np.ones((8, 1)) * 2)
    found = Found()

    class Model(smp.DistributedModel):
        def __init__(self):
            super().__init__()
            self.d1 = dense(4, 192, activation="relu")
            self.d2 = dense(1, 126)

        def call(self, x, training=None):
            return self.d2(self.d1(x))

    model = Model()
    judge = tf.keras.losses.MSE
    rate = tf.keras.optimizers.schedules.ExponentialDecay(0.085, decay_steps=5, decay_rate=0.96, staircase=False)
    optimizer = tf.keras.optimizers.Adam(learning_rate=rate)

    @smp.step
    def get_grads(x, y):
        predictions = model(x, training=True)
        loss = tf.reduce_mean(judge(y, predictions))
        grads = optimizer.get_gradients(loss, model.trainable_variables)
        return grads, loss, predictions

    @tf.function
    def train_step(x, y):
        gradients, loss, _ = get_grads(x, y)
        gradients = [g.accumulate() for g in gradients]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss.reduce_mean()

    spec = tf.TensorSpec(shape=xs.shape, dtype=tf.float32)

    @smp.step(input_signature=[spec, spec])
    def test_step(x, y):
        predictions = model(x, training=False)
        return tf.reduce_mean(judge(y, predictions))

    counter = tf.Variable(0.0)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model, test_var=counter)
    manager = smp.CheckpointManager(checkpoint, folder)
    for step in range(5):
        if step == 1:
            manager.restore(restore_prefix="ckpt-2")
        found.add("loss", train_step(xs, ys))
        counter.assign_add(1.0)
        manager.save()
    manager.restore(restore_prefix="ckpt-2")
    assert manager.checkpoint.test_var.numpy() == 2.0
    restored = test_step(xs, ys).reduce_mean()
    np.testing.assert_allclose(restored, found["loss"][2], rtol=1e-6)
    found.add("restored", restored)
    found.add("again", train_step(xs, ys))
    found.add("and again", train_step(xs, ys))
    np.testing.assert_allclose(found["and again"][0], found["loss"][3], rtol=1e-12)
    smp.barrier()
    return found


def files(smp, hvd, folder):
    """Files of a checkpoint that go from one rank to another."""
    smp.init({"microbatches": 1, "partitions": PARTITIONS, "fork": False})
    if smp is not over_ranks:
        return Found()
    source, target = os.path.join(folder, "source"), os.path.join(folder, "target")
    sent_folder = f"mp_rank_{smp.core.allgather(smp.mp_rank(), over_ranks.WORLD)[1]}"
    if smp.rank() == 1:
        own = Path(source, f"mp_rank_{smp.rank()}", "below")
        own.mkdir(parents=True)
        (own / "data.bin").write_bytes(np.random.default_rng(0).bytes(40_000_000))
        (own / "empty").touch()
        utils.send_checkpoint_files(source, 0)
    elif smp.rank() == 0:
        utils.receive_checkpoint_files(target, 1)
    smp.core.barrier()
    if smp.rank() == 0:
        for name in ("data.bin", "empty"):
            sent, came = (os.path.join(root, sent_folder, "below", name) for root in (source, target))
            assert filecmp.cmp(sent, came, shallow=False)
    return Found()


def drops(smp, hvd, folder):
    """Layers that draw, and in Keras 2 a scaled loss, which overflows in one step."""
    smp.init({"microbatches": 2, "partitions": PARTITIONS})
    found = Found()

    class Model(smp.DistributedModel):
        def __init__(self):
            super().__init__()
            self.d1 = dense(8, 192, activation="relu")
            self.drops = [tf.keras.layers.Dropout(0.5, seed=3), tf.keras.layers.GaussianNoise(0.1, seed=4)]
            self.d2, self.d3 = dense(8, 126, activation="relu"), dense(1, 127)

        def call(self, x, training=None):
            x = self.drops[0](self.d1(x), training=training)
            return self.d3(self.drops[1](self.d2(x), training=training))

    model = Model()
    optimizer = tf.keras.optimizers.Adam(0.05, global_clipnorm=0.05)
    scales = hasattr(tf.keras.mixed_precision.LossScaleOptimizer, "get_scaled_loss")
    if scales:
        optimizer = tf.keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=2**10, dynamic_growth_steps=2)

    @smp.step
    def get_grads(x):
        loss = tf.reduce_mean(model(x, training=True) ** 2)
        scaled = optimizer.get_scaled_loss(loss) if scales else loss
        return optimizer.get_gradients(scaled, model.trainable_variables), loss

    @tf.function
    def train_step(x):
        gradients, loss = get_grads(x)
        gradients = [g.accumulate() for g in gradients]
        if scales:
            gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss.reduce_mean()

    for step in range(6):
        x = np.random.default_rng(step).normal(size=(8, 4)) * (1e200 if scales and step == 3 else 1)
        loss = train_step(x)
        if np.isfinite(loss):
            found.add("loss", loss)
        if scales:
            found.add("scale", optimizer.loss_scale)
    assert len(found["loss"]) == (5 if scales else 6), found
    return found


SCRIPTS = (drops, evaluation, convolutions, compiled, copies, signature, checkpoints, files)


def run(script, folder, dtype):
    tf.keras.backend.set_floatx(dtype)
    tf.random.set_seed(1234)
    tf.keras.utils.set_random_seed(1234)
    one = Alone()
    alone = script(one, one, os.path.join(folder, "of_one", os.environ["RANK"]))
    tf.keras.utils.set_random_seed(1234)
    found = script(over_ranks, horovod.tensorflow, folder)
    assert set(alone) - set(found) <= {"served"}, (set(alone), set(found))
    of_copies = over_ranks.allgather(dict(found), over_ranks.CommGroup.DP_GROUP)
    for name in found:
        numbers = np.mean([each[name] for each in of_copies if name in each], 0)
        exact = 1e-9 if dtype == "float64" else 1e-5
        np.testing.assert_allclose(numbers, alone[name], rtol=exact, atol=exact, err_msg=name)
    over_ranks.shutdown()


def main():
    folder, dtype, *names = sys.argv[1:]
    for script in SCRIPTS:
        if script.__name__ in names:
            run(script, os.path.join(folder, script.__name__), dtype)
            print(f"{script.__name__} is as in one process", flush=True)


if __name__ == "__main__":
    main()
