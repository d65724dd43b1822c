# SPDX-License-Identifier: Apache-2.0
"""Names that scripts for the original reach, and errors: `lamina run -n 2 cases_scripts.py NAME FOLDER`."""

import os
import sys

import smdistributed.modelparallel.tensorflow as smp

# isort: split
import cases
import keras
import numpy as np
import tensorflow as tf

from lamina import errors

keras.backend.set_floatx("float64")


class Model(smp.DistributedModel):
    """A layer on each rank, the other way round with `swapped`."""

    def __init__(self, swapped=False):
        super().__init__()
        self.swapped = swapped
        self.layers_ = [keras.layers.Dense(4, name=f"dense_{at}") for at in range(2)]

    def call(self, x):
        for at, layer in enumerate(self.layers_):
            with smp.partition(1 - at if self.swapped else at):
                x = layer(x)
        return {"last": x, "nothing": None, "x": x + 1}


def by_hand(microbatches=2, **keys):
    smp.init({"partitions": 2, "microbatches": microbatches, "auto_partition": False, "default_partition": 0, **keys})


def raises(words, call, kind=errors.Error):
    cases.raises(words, call, kind)


def serves(model, x, path):
    """The whole model is one that is called by name and in any number of samples, without training."""
    model.save_model(path)
    served = tf.keras.models.load_model(path).signatures["serving_default"]
    right = smp.step(lambda x: model(x))(x)
    for rows_of in (1, 3, 4):
        found = served(x=tf.constant(x[:rows_of]))
        assert set(found) == {"last", "x"}, set(found)
        np.testing.assert_allclose(found["last"], right["last"].concat()[:rows_of], rtol=1e-12)


def leaves_as_slices(gradient, nothing):
    """Gradients of an embedding are slices, and leave with unique indices."""
    assert nothing.accumulate() is None and nothing.reduce_mean() is None
    slices = gradient.accumulate()
    assert isinstance(slices, tf.IndexedSlices)
    assert sorted(slices.indices.numpy()) == [1, 2, 5]
    gathered = tf.Variable(tf.zeros([6, 4], tf.float64), trainable=False)
    gradient.accumulate("add_n", gathered)
    whole = np.mean([tf.convert_to_tensor(part).numpy() for part in gradient.outputs], axis=0)
    np.testing.assert_allclose(gathered.numpy(), whole, rtol=1e-12)
    np.testing.assert_allclose(tf.convert_to_tensor(slices).numpy(), whole, rtol=1e-12)


def interface(folder):
    by_hand(contiguous=False, horovod=True, xla=True, fork=True)
    by_hand(contiguous=False, horovod=True, xla=True, fork=True)  # again: nothing
    assert tf.config.threading.get_intra_op_parallelism_threads() == int(os.environ["OMP_NUM_THREADS"])
    ran = []

    @smp.register_post_partition_hook
    def hook():
        ran.append([variable.path for variable in model.variables])
        assert tf.executing_eagerly()

    model = Model()
    assert model.profile(np.ones([4, 4])) is None
    assert not ran
    table = keras.layers.Embedding(6, 4)
    table.build()

    unused = tf.Variable(0.0)

    @smp.step
    def train_step(x, rows):
        with tf.GradientTape() as tape:
            found = model(x, training=True)["last"]
            loss = tf.reduce_mean(found * table(rows))
        return loss, tape.gradient(loss, [*model.trainable_variables, unused, table.embeddings.value])

    # A step in a loop of a tf.function, over numpy's data.
    total = tf.Variable(0.0, dtype=tf.float64, trainable=False)

    @tf.function
    def loop(batches, rows):
        for batch in batches:
            total.assign_add(train_step(batch, rows)[0].reduce_mean())

    rows = np.array([1, 1, 5, 2])
    data = np.random.default_rng(1).normal(size=(3, 4, 4))
    each = [float(train_step(batch, rows)[0].reduce_mean()) for batch in data]
    assert ran == [[variable.path for variable in model.variables]], ran
    loop(tf.data.Dataset.from_tensor_slices(data), tf.constant(rows))
    np.testing.assert_allclose(total.numpy(), sum(each), rtol=1e-12)

    # Steps and norms of one function run one after the other, though no value goes between them.
    @tf.function
    def several(x):
        norms = [tf.linalg.global_norm(model.trainable_variables) for _ in range(2)]
        return [train_step(x, rows)[0].reduce_mean() for _ in range(3)], norms

    losses, norms = several(data[0])
    assert len({float(loss) for loss in losses}) == len({float(norm) for norm in norms}) == 1

    _, gradients = train_step(data[0], rows)
    leaves_as_slices(gradients[-1], gradients[-2])
    serves(model, data[1], os.path.join(folder, "whole"))
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.apply_gradients([(gradients[0].accumulate(), model.trainable_variables[0])])
    assert optimizer.variables() == optimizer.variables
    smp.core.barrier()
    smp.shutdown()


def told(folder):
    """Errors that come on both ranks."""
    for key in ({"ddp": True}, {"bf16": True}, {"tensor_parallel_degree": 2, "ddp": True}, {"seed": 3}):
        raises("is of models of torch", lambda key=key: smp.init({"partitions": 2, **key}))
    by_hand()
    model = Model()
    checkpoint = tf.train.Checkpoint(model=model)
    manager = smp.CheckpointManager(checkpoint, folder)
    assert manager.restore() is None
    raises("before the first step", manager.save)
    raises("before the first step", lambda: model.save_model(folder))
    raises("set_jit", lambda: smp.step(lambda x: model(x), jit_compile=True))
    x = tf.ones([4, 4], tf.float64)

    @smp.step(input_signature=[tf.TensorSpec([None, 4], tf.float64)])
    def evaluate(x):
        return model(x)["last"]

    raises(
        "x has a number of samples along axis 0 that 2 microbatches do not divide", lambda: evaluate(x[:3]), Exception
    )
    assert evaluate(x).merge().shape == (4, 4)

    @smp.step
    def noisy(x):
        return model(x)["x"] + tf.random.normal([2, 4], dtype=tf.float64)

    raises("draws random numbers from a state", lambda: noisy(x))
    raises("once the model is cut", lambda: smp.register_post_partition_hook(print))
    raises("takes variable, add_n", lambda: evaluate(x).accumulate("mean"))
    if smp.rank() == 0:
        manager.directory = os.path.join("/proc", "no such folder")
    raises("rank 0 could not save its part" if smp.rank() else "", manager.save, Exception)
    smp.shutdown()


def layouts(folder):
    """A checkpoint of another layout, and one that a rank lacks, are refused on both ranks."""
    by_hand()
    model = Model()
    evaluate = smp.step(lambda x: model(x)["last"])
    x = tf.ones([4, 4], tf.float64)
    right = evaluate(x).merge().numpy()
    manager = smp.CheckpointManager(tf.train.Checkpoint(model=model), folder, max_to_keep=2, checkpoint_name="mine")
    paths = [manager.save() for _ in range(3)]
    assert paths[2].endswith(f"mp_rank_{smp.rank()}/mine-3"), paths
    assert [os.path.basename(path) for path in manager.checkpoints] == ["mine-2", "mine-3"]
    for variable in model.variables:
        variable.assign(tf.zeros_like(variable))
    assert manager.restore(restore_prefix="mine-1") is None  # it is not there any more
    assert not evaluate(x).merge().numpy().any()
    assert manager.restore() == paths[2]
    np.testing.assert_array_equal(evaluate(x).merge().numpy(), right)
    smp.barrier()
    if smp.rank() == 1:
        os.remove(paths[2] + ".index")
    smp.barrier()
    raises("rank 0 has the checkpoint mine-3 to restore, and rank 1 has none", lambda: manager.restore("mine-3"))
    assert manager.restore() == paths[1]  # the latest that both have
    smp.shutdown()
    by_hand()
    model = Model(swapped=True)
    smp.step(lambda x: model(x)["last"])(x)
    other = smp.CheckpointManager(tf.train.Checkpoint(model=model), folder, checkpoint_name="mine")
    raises("the model was cut in another way", other.restore)
    smp.shutdown()


CASES = {"interface": interface, "errors": told, "layouts": layouts}

if __name__ == "__main__":
    name, folder = sys.argv[1:]
    CASES[name](folder)
