# SPDX-License-Identifier: Apache-2.0
"""Programs of one rank that train by Keras's own loop, by name: `lamina run -n 2 cases_fit.py NAME ...`."""

import functools
import os
import sys

import lamina.tensorflow as smp

# isort: split
import models
import numpy as np
import tensorflow as tf
from cases import raises
from tensorflow import keras

from lamina import errors
from lamina.tensorflow import older_keras, slices
from lamina.tensorflow.installed import OF_KERAS_2

older_keras.add()  # also where one process trains: its layers draw as those of ranks
keras.backend.set_floatx("float64")
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy


class Masked(models.Kind):
    """Words, each with a class; a mask goes with the results."""

    def __init__(self):
        super().__init__()
        self.words = keras.layers.Embedding(20, 8, mask_zero=True)
        self.first = keras.layers.LSTM(8, return_sequences=True)
        self.last = keras.layers.Dense(5, kernel_regularizer=keras.regularizers.L2(0.01))

    def call(self, x, training=None):
        return self.last(self.first(self.words(x)))

    def batch(self, draw, rows):
        return draw.integers(0, 4, (rows, 6)), draw.integers(0, 5, (rows, 6))


class Several(models.Kind):
    """Several inputs and results, losses that layers add, and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.left, self.right = keras.layers.Dense(6, activation="tanh"), keras.layers.Embedding(20, 6)
        self.frozen = keras.layers.Dense(6, trainable=False)
        self.one = keras.layers.Dense(5, kernel_regularizer=keras.regularizers.L2(0.1))
        self.other = keras.layers.Dense(2, activation="tanh")

    def call(self, x, training=None):
        h = self.frozen(self.left(x["left"]) + self.right(x["right"]))
        self.add_loss(0.1 * tf.reduce_mean(h**2))
        return {"one": self.one(h), "other": self.other(h)}

    def batch(self, draw, rows):
        x = {"left": draw.normal(size=(rows, 4)), "right": draw.integers(0, 20, rows)}
        return x, {"one": draw.integers(0, 5, rows), "other": draw.normal(size=(rows, 2))}


class Plain(models.Kind):
    def __init__(self):
        super().__init__()
        self.first, self.last = keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(5)

    def call(self, x):
        return self.last(self.first(x))


class MaskedTwice(Masked):
    """Several losses, each of what a mask leaves."""

    def call(self, x, training=None):
        h = self.first(self.words(x["words"]))
        return {"one": self.last(h), "other": self.last(self.first(self.words(x["others"])))}

    def batch(self, draw, rows):
        x = {"words": draw.integers(0, 4, (rows, 6)), "others": draw.integers(0, 3, (rows, 6))}
        return x, {"one": draw.integers(0, 5, (rows, 6)), "other": draw.integers(0, 5, (rows, 6))}


models.MODELS |= {"masked": Masked, "masked_twice": MaskedTwice, "several": Several, "plain": Plain}


def with_unique_rows(optimizer):
    """Has an optimizer of one process get slices as ranks do: Keras 3 takes the square of each row of a batch apart,
    and Keras 2 its norm."""
    plain, plain_of_pairs = getattr(optimizer, "apply", None), optimizer.apply_gradients

    def unique(gradient):
        return slices.added([gradient]) if isinstance(gradient, tf.IndexedSlices) else gradient

    def apply(grads, trainable_variables=None):
        return plain([unique(each) for each in grads], trainable_variables)

    def apply_gradients(grads_and_vars, **keywords):
        return plain_of_pairs([(unique(each), variable) for each, variable in grads_and_vars], **keywords)

    if OF_KERAS_2:
        optimizer.apply_gradients = apply_gradients
    else:
        optimizer.apply = apply


class Subject:
    """`model:microbatches:options`. Options: "copies2" trains two copies, "weights" gives weights of samples, "classes"
    of classes, "dataset" a tf.data.Dataset. "sum" is a loss that is a sum, "ema" and "clip" are such optimizers. "tiny"
    has a last batch of one sample, "stop" ends early, "ignore" leaves out a class. "steps2" has two batches go through
    one call of TensorFlow's function, "legacy" is an older optimizer of Keras 2."""

    def __init__(self, text):
        self.model, microbatches, *self.options = text.split(":")
        self.microbatches = int(microbatches)
        self.copies = next((int(each.removeprefix("copies")) for each in self.options if each[:6] == "copies"), 1)

    def optimizer(self):
        if "ema" in self.options:
            return keras.optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=2)
        if "clip" in self.options:
            return keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05)
        kinds = keras.optimizers.legacy if "legacy" in self.options else keras.optimizers
        return kinds.Adam(0.02, global_clipnorm=0.05 if "global" in self.options else None)

    def compile(self, model):
        loss = CROSS_ENTROPY(
            from_logits=True,
            reduction="sum" if "sum" in self.options else "sum_over_batch_size",
            ignore_class=2 if "ignore" in self.options else None,
        )
        if self.model == "several":
            metrics = {
                "one": ["accuracy", keras.metrics.SparseCategoricalCrossentropy(from_logits=True)],
                "other": "mae",
            }
            return model.compile(self.optimizer(), {"one": loss, "other": "mse"}, metrics=metrics)
        if self.model == "masked_twice":
            weights = {"one": 1.0, "other": 0.3}
            return model.compile(self.optimizer(), {"one": loss, "other": loss}, loss_weights=weights)
        weighted = [keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="weighted")]
        steps = 2 if "steps2" in self.options else 1
        return model.compile(
            self.optimizer(), loss, metrics=["accuracy"], weighted_metrics=weighted, steps_per_execution=steps
        )

    def data(self, rows, seed):
        x, y = models.MODELS[self.model].batch(None, np.random.default_rng(seed), rows)
        shape = y.shape if self.model == "masked" else rows
        weights = np.random.default_rng(seed).uniform(0.5, 2, shape) if "weights" in self.options else None
        return x, y, weights

    def train(self, model):
        """Results of Keras's loop."""
        self.compile(model)
        with_unique_rows(model.optimizer)
        rows = 17 if "tiny" in self.options else 22
        x, y, weights = self.data(rows, 1)
        given = {"x": x, "y": y, "sample_weight": weights, "batch_size": 8}
        if "dataset" in self.options:
            parts = (x, y) if weights is None else (x, y, weights)
            given = {"x": tf.data.Dataset.from_tensor_slices(parts).shuffle(22, seed=3).batch(8)}
        if "classes" in self.options:
            given["class_weight"] = {at: 0.5 + at for at in range(5)}
        callbacks = [keras.callbacks.ReduceLROnPlateau(patience=0, min_delta=0.5)]
        if "stop" in self.options:
            callbacks += [keras.callbacks.EarlyStopping(min_delta=0.5, restore_best_weights=True)]
        other = self.data(9, 2)
        validation = other if other[2] is not None else other[:2]
        keras.utils.set_random_seed(8)
        history = model.fit(
            **given,
            epochs=3,
            validation_data=validation,
            callbacks=callbacks,
            verbose=2,
        ).history
        evaluated = model.evaluate(
            other[0], other[1], sample_weight=other[2], batch_size=4, return_dict=True, verbose=0
        )
        return history, evaluated, model.predict(other[0], batch_size=4, verbose=0)


def compare(*subjects):
    for text in subjects:
        compare_one(Subject(text))
        print(f"{text} is as in one process", flush=True)


def compare_one(subject):
    keras.backend.clear_session()
    alone = models.made(subject.model, keras.Model)
    right = subject.train(alone)
    every = older_keras.variables(alone) if OF_KERAS_2 else alone.variables
    variables = [variable.numpy() for variable in every]
    keras.backend.clear_session()
    smp.init(partitions=int(os.environ["WORLD_SIZE"]) // subject.copies, microbatches=subject.microbatches)
    model = models.made(subject.model, smp.DistributedModel)
    found = subject.train(model)
    for mine, expected in zip(found, right, strict=True):
        tf.nest.map_structure(near, mine, expected)
    own = {id(variable) for variable in model.variables}
    every = model._keras_variables()
    assert len(every) == len(variables)
    for variable, expected in zip(every, variables, strict=True):
        if id(variable) in own:
            near(variable.numpy(), expected)
    smp.shutdown()


def near(mine, expected):
    np.testing.assert_allclose(mine, expected, rtol=1e-9, atol=1e-9)


class Columns:
    """A small regression, without losses of its own."""

    def __init__(self, **options):
        super().__init__(**options)
        self.layers_ = [keras.layers.Dense(size, activation="tanh", **options) for size in (5, 5, 3)]

    def call(self, x):
        for layer in self.layers_:
            x = layer(x)
        return x


class TwoColumns(Columns):
    """Lists come in, and tuples go out."""

    def call(self, x):
        h = self.layers_[0](x[0] + x[1])
        return super().call(x[1]), self.layers_[2](h)


class OwnLoss(Columns):
    """With a loss and a metric of its own, as Keras's pages have them."""

    def __init__(self):
        super().__init__()
        self.tracker = keras.metrics.Mean(name="loss")

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        loss = tf.reduce_mean((y_pred - y) ** 2)
        self.tracker.update_state(loss)
        return loss

    def reset_metrics(self):
        self.tracker.reset_state()

    @property
    def metrics(self):
        return [self.tracker]


DRAW = np.random.default_rng(0)
X, Y = DRAW.normal(size=(20, 4)), DRAW.normal(size=(20, 3))


def of_kind(base, kind=Columns, **options):
    keras.utils.set_random_seed(4)
    return type("Model", (kind, base), {})(**options)


def lists(base):
    model = of_kind(base, TwoColumns)
    model.compile("adam", ["mse", "mae"], loss_weights=[1.0, 0.3])
    return model.fit([X, X * 2], [Y, Y * 3], batch_size=6, epochs=2, verbose=0).history


def own_loss(base):
    model = of_kind(base, OwnLoss)
    model.compile("adam")
    return model.fit(X, Y, batch_size=6, epochs=2, verbose=0).history


def accumulates(base):
    model = of_kind(base)
    model.compile(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2), "mse")
    return model.fit(X, Y, batch_size=4, epochs=3, verbose=0).history


class Adding(Columns):
    """Adds losses and metrics: numbers, and some of each sample."""

    def call(self, x):
        h = self.layers_[0](x)
        self.layers_[0].add_loss(0.1 * tf.reduce_mean(h**2))
        self.layers_[0].add_metric(tf.reduce_mean(h), name="mean")
        self.add_metric(tf.reduce_sum(h, 1), name="sum")
        return self.layers_[2](self.layers_[1](h))


def adds(base):
    found = []
    for reduction, optimizer, kind in [("none", "sgd", Columns), ("auto", keras.optimizers.legacy.Adam(0.01), Adding)]:
        model = of_kind(base, kind)
        model.compile(optimizer, keras.losses.MeanSquaredError(reduction=reduction))
        found.append(model.fit(X, Y, validation_data=(X[:7], Y[:7]), batch_size=6, epochs=2, verbose=0).history)
        if base is keras.Model:
            continue
        smp.shutdown()
        smp.init(partitions=int(os.environ["WORLD_SIZE"]), microbatches=3)
    assert {"mean", "val_sum"} <= set(found[1])
    return found


def toggled(base):
    model, found = of_kind(base), []
    for frozen in [(), (1,), (0, 2)]:
        for at, layer in enumerate(model.layers_):
            layer.trainable = at not in frozen
        model.compile(keras.optimizers.SGD(0.1), "mse")
        found.append(model.fit(X, Y, epochs=2, verbose=0).history)
    return found


def generator(base):
    def batches():
        draw = np.random.default_rng(3)
        while True:
            yield draw.normal(size=(5, 4)), draw.normal(size=(5, 3))

    model = of_kind(base)
    model.compile("adam", "mse", metrics=["mae"])
    found = model.fit(batches(), steps_per_epoch=3, epochs=2, verbose=0).history
    split = model.fit(X, Y, validation_split=0.3, verbose=0).history
    predicted = model.predict(tf.data.Dataset.from_tensor_slices(X).batch(7), verbose=0)
    return found, split, predicted, model.evaluate(X, Y, verbose=0)


def half(base, policy="mixed_float16"):
    model = of_kind(base, dtype=policy)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    found = model.fit(X.astype("float32"), Y.astype("float32"), batch_size=4, epochs=3, verbose=0).history
    scaling = keras.mixed_precision.LossScaleOptimizer if OF_KERAS_2 else keras.optimizers.LossScaleOptimizer
    assert isinstance(model.optimizer, scaling) == (policy == "mixed_float16")
    return found


def others(*_):
    """Other arguments that scripts give fit()."""
    bfloat16 = functools.partial(half, policy="mixed_bfloat16")
    cases = (lists, own_loss, adds if OF_KERAS_2 else accumulates, toggled, generator, half, bfloat16)
    for case in cases:
        # Halves of numbers round each microbatch's gradients.
        same = functools.partial(np.testing.assert_allclose, rtol=3e-2) if case in (half, bfloat16) else near
        keras.backend.clear_session()
        right = case(keras.Model)
        keras.backend.clear_session()
        smp.init(partitions=int(os.environ["WORLD_SIZE"]), microbatches=2)
        tf.nest.map_structure(same, case(smp.DistributedModel), right)
        smp.shutdown()


def began(subject, microbatches=2, copies=1, **options):
    smp.init(partitions=int(os.environ["WORLD_SIZE"]) // copies, microbatches=microbatches)
    model = models.made(subject, smp.DistributedModel)
    if options.pop("compiles", True):
        model.compile("sgd", options.pop("loss", CROSS_ENTROPY(from_logits=True)), **options)
    return model


def told(*_):
    """Says what is not there, alike on both ranks, and goes on."""
    model = began("plain")
    rank = smp.rank()
    x, y, _ = Subject("plain:2").data(8, 1)
    for words, options in [
        ("jit_compile", {"jit_compile": True}),
        ("run_eagerly", {"run_eagerly": True}),
        ("steps_per_execution by time", {"steps_per_execution": "auto"}),
    ]:
        raises(words, lambda options=options: model.compile("sgd", "mse", **options), errors.Error)
    raises("ModelCheckpoint", lambda: model.fit(x, y, callbacks=[keras.callbacks.ModelCheckpoint("a.keras")]))
    raises("argument x differs between rank 0 and rank 1", lambda: model.fit(x + rank, y, verbose=0))
    ragged = tf.data.Dataset.from_tensors((tf.ragged.constant([[1.0], [1.0, 2.0]]), y[:2]))
    raises("has a RaggedTensor", lambda: model.fit(ragged, verbose=0))
    uneven = tf.data.Dataset.from_tensors((x, y[:6]))
    raises("different numbers of samples", lambda: model.fit(uneven, verbose=0))
    fewer = tf.data.Dataset.from_tensor_slices((x, y)).take(8 - 4 * rank).batch(2)
    raises("other numbers of batches: 4, 2 in an epoch", lambda: model.fit(fewer, verbose=0))
    unknown = fewer.filter(lambda *_: True)
    raises("all ranks call the same", lambda: model.fit(unknown, verbose=0))
    assert len(model.fit(x, y, verbose=0).history["loss"]) == 1
    if OF_KERAS_2:
        model.run_eagerly = True
        raises("fit(): run_eagerly", lambda: model.fit(x, y, verbose=0))
    else:
        model.compile("sgd", CROSS_ENTROPY(from_logits=True, reduction="mean_with_sample_weight"))
        raises("mean_with_sample_weight", lambda: model.fit(x, y, sample_weight=np.ones(8), verbose=0))
    model.compile("sgd", CROSS_ENTROPY(from_logits=True))
    history = model.fit(x, y, epochs=4, verbose=0, callbacks=[OfOneRank()]).history
    assert len(history["loss"]) == 2, history  # one rank has stopped it
    assert len(set(smp.allgather(float(model.optimizer.learning_rate), smp.WORLD))) == 1
    for name in ("save", "save_weights", "load_weights", "export"):
        raises("lies on several ranks", lambda name=name: getattr(model, name)("a"), errors.Error)
    trained = model.train_on_batch(x, y, return_dict=True)["loss"]
    assert model.test_on_batch(x, y, return_dict=True)["loss"] < trained < history["loss"][0]
    assert model.predict_on_batch(x).shape == (8, 5)
    smp.shutdown()
    if OF_KERAS_2:  # which takes one loss for each result
        return
    two = began("masked", loss=[CROSS_ENTROPY(from_logits=True)] * 2)
    x, y, _ = Subject("masked:2").data(8, 1)
    raises("one of them with a mask", lambda: two.fit(x, y, verbose=0))
    smp.shutdown()


class OfOneRank(keras.callbacks.Callback):
    """Stops the training on rank 1, and decides by a loss that only looks alike on ranks."""

    def on_epoch_end(self, epoch, logs=None):
        if smp.rank() == 1 and epoch == 1:
            self.model.stop_training = True
        self.model.optimizer.learning_rate = 0.01 + (0.01 if logs["of_rank"] else 0)

    def set_model(self, model):
        super().set_model(model)
        plain = model.get_metrics_result
        model.__dict__["get_metrics_result"] = lambda: {**plain(), "of_rank": smp.rank()}


def copies_told(*_):
    """Copies that are given other batches are told."""
    model = began("plain", copies=2)
    x, y, _ = Subject("plain:2").data(8, 1)
    raises("copies of the model have got other batches", lambda: model.fit(x + smp.dp_rank(), y, verbose=0))
    raises("copies of the model have got other batches", lambda: model.predict(x[::-1] if smp.dp_rank() else x))
    assert model.predict(x, verbose=0).shape == (8, 5)
    smp.shutdown()


CASES = (compare, others, told, copies_told)

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    {each.__name__: each for each in CASES}[name](*arguments)
