# SPDX-License-Identifier: Apache-2.0
"""Models in float64, as plain Keras models and as ones that are cut; batches and losses for them."""

import numpy as np
import tensorflow as tf
from tensorflow import keras  # of the version that the environment names

keras.backend.set_floatx("float64")


class Kind:
    """How a model is fed and judged, where it does not say it itself."""

    def batch(self, draw, rows):
        return draw.normal(size=(rows, 6)), draw.integers(0, 5, rows)

    def judge(self, y, logits):
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))


class Convolutions(Kind):
    """With BatchNorm, whose statistics change in forwards, and dropout."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Conv2D(4, 3, padding="same")
        self.norms = [keras.layers.BatchNormalization(), keras.layers.BatchNormalization()]
        self.second = keras.layers.Conv2D(8, 3, strides=2)
        self.drop = keras.layers.Dropout(0.25, seed=7)
        self.hidden = keras.layers.Dense(16)
        self.last = keras.layers.Dense(5)

    def call(self, x, training=None):
        x = tf.nn.relu(self.norms[0](self.first(x), training=training))
        x = tf.nn.relu(self.norms[1](self.second(x), training=training))
        x = tf.reshape(x, [x.shape[0], -1])
        return self.last(self.drop(tf.nn.relu(self.hidden(x)), training=training))

    def batch(self, draw, rows):
        return draw.normal(size=(rows, 8, 8, 3)), draw.integers(0, 5, rows)


class Transformer(Kind):
    """Masked, with positions that every block's attention is told."""

    def __init__(self, blocks=3, width=16):
        super().__init__()
        self.words = keras.layers.Embedding(20, width)
        self.places = keras.layers.Embedding(6, width)
        self.blocks = [
            (
                keras.layers.LayerNormalization(),
                keras.layers.MultiHeadAttention(2, width // 2),
                keras.layers.LayerNormalization(),
                keras.layers.Dense(2 * width, activation="gelu"),
                keras.layers.Dense(width),
            )
            for _ in range(blocks)
        ]
        self.norm = keras.layers.LayerNormalization()
        self.last = keras.layers.Dense(5)

    def call(self, x, training=None):
        kept = x > 2
        mask = tf.logical_and(kept[:, None, :], tf.linalg.band_part(tf.ones([6, 6], tf.bool), -1, 0)[None])
        h = self.words(x) + self.places(tf.range(6)[None])
        for before, attention, after, up, down in self.blocks:
            n = before(h)
            h = h + attention(n, n, attention_mask=mask, training=training)
            h = h + down(up(after(h)))
        weights = tf.cast(kept, h.dtype)[..., None]
        return self.last(tf.reduce_sum(self.norm(h) * weights, 1) / (tf.reduce_sum(weights, 1) + 1))

    def batch(self, draw, rows):
        return draw.integers(0, 20, (rows, 6)), draw.integers(0, 5, rows)


class Recurrent(Kind):
    """Layers of Keras that loop, with a mask that it takes along."""

    batch = Transformer.batch

    def __init__(self):
        super().__init__()
        self.words = keras.layers.Embedding(20, 8, mask_zero=True)
        self.first = keras.layers.LSTM(8, return_sequences=True)
        self.second = keras.layers.GRU(6)
        self.last = keras.layers.Dense(5)

    def call(self, x, training=None):
        return self.last(self.second(self.first(self.words(x))))


class Loops(Kind):
    """A loop, a conditional and a function of TensorFlow's, and one layer that is called in several places."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(6, activation="tanh")
        self.looped = keras.layers.Dense(6, activation="tanh")
        self.looped.build((None, 6))
        self.chosen = keras.layers.Dense(6)
        self.chosen.build((None, 6))
        self.last = keras.layers.Dense(5)

    @tf.function
    def between(self, h):
        return self.chosen(h) if tf.reduce_sum(h) > 0 else h * h

    def call(self, x, training=None):
        h = self.first(x)
        h, _ = tf.while_loop(lambda _, i: i < 3, lambda h, i: (self.looped(h) + x, i + 1), (h, tf.constant(0)))
        h = tf.cond(tf.reduce_mean(h) > 0, lambda: h + 1, lambda: h * 2)
        return self.last(self.first(self.between(h)) + h)


class Heads(Kind):
    """Results of which the loss uses one, another one is an integer; nothing is to move what the other needs."""

    def __init__(self):
        super().__init__()
        self.body = keras.layers.Dense(8, activation="tanh")
        self.used, self.unused, self.deep = keras.layers.Dense(5), keras.layers.Dense(3), keras.layers.Dense(4)

    def call(self, x, training=None):
        h = self.body(x)
        used = self.used(h)
        return {"unused": self.unused(self.deep(h)), "used": used, "best": tf.argmax(used, -1), "nothing": None, "x": x}

    def judge(self, y, outputs):
        return super().judge(y, outputs["used"])


class OwnGradients(Kind):
    """Operations whose gradients are functions of Python, and a gradient that the model itself takes."""

    def __init__(self):
        super().__init__()
        self.layers_ = [keras.layers.Dense(6, activation="silu") for _ in range(3)]
        self.again = keras.layers.Dense(6, activation="tanh")
        self.again.build((None, 6))
        self.looped, self.chosen = (keras.layers.Dense(6, activation="silu") for _ in range(2))
        self.looped.build((None, 6))
        self.chosen.build((None, 6))
        self.last = keras.layers.Dense(5)

    def in_functions(self, x):
        """In a loop, in a conditional, and in a loop of one: what TensorFlow itself can do."""
        again = tf.recompute_grad(lambda h: tf.sin(h) * tf.cos(h))

        def looped(h, times):
            body = lambda h, at: (tf.nn.silu(self.looped(again(clipped_back(h)))) + x, at + 1)  # noqa: E731
            return tf.while_loop(lambda _, at: at < times, body, (h, tf.constant(0)))[0]

        h = tf.cond(tf.reduce_sum(x) > 1e3, lambda: clipped_back(x), lambda: tf.nn.silu(self.chosen(x) * x, beta=0.5))
        return tf.cond(tf.reduce_sum(h) > -1e3, lambda: looped(h, 2), lambda: h) + looped(x, 3)

    def call(self, x, training=None):
        for layer in self.layers_:
            x = tf.nn.silu(layer(x), beta=1.5)
        x = self.in_functions(x)
        x = tf.recompute_grad(lambda h: tf.sin(self.again(h)))(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            energy = tf.reduce_sum(tf.sin(x) ** 2)
        x = x + tape.gradient(energy, x)
        return self.last(clipped_back(x))


@tf.custom_gradient
def clipped_back(x):
    """The identity, whose gradient depends on what it was given."""
    return tf.identity(x), lambda upstream: tf.clip_by_value(upstream, -0.01, 0.01) * tf.cos(x)


class Losses(Kind):
    """Losses that layers add, and those of their weights."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(6, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.1))
        self.small = keras.layers.ActivityRegularization(l1=0.01)
        self.last = keras.layers.Dense(5, bias_regularizer=keras.regularizers.L1(0.1))

    def call(self, x, training=None):
        return self.last(self.small(self.first(x)))

    def judge(self, y, logits):
        return super().judge(y, logits) + tf.add_n(self.losses)


class MobileNet(Kind):
    """A model of keras.applications, as it is."""

    def __init__(self):
        super().__init__()
        self.net = keras.applications.MobileNetV2((32, 32, 3), alpha=0.35, weights=None, classes=5)

    def call(self, x, training=None):
        return tf.math.log(self.net(x, training=training) + 1e-6)

    def batch(self, draw, rows):
        return draw.normal(size=(rows, 32, 32, 3)), draw.integers(0, 5, rows)


MODELS = {
    "convolutions": Convolutions,
    "transformer": Transformer,
    "recurrent": Recurrent,
    "loops": Loops,
    "heads": Heads,
    "own_gradients": OwnGradients,
    "losses": Losses,
    "mobilenet": MobileNet,
}


def made(name, base):
    """A model of that name as a subclass of `base`, with weights that do not depend on it."""
    keras.utils.set_random_seed(3)
    return type(name, (MODELS[name], base), {})()


def batch(name, step, rows=8):
    return MODELS[name].batch(None, np.random.default_rng(step), rows)
