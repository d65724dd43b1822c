# SPDX-License-Identifier: Apache-2.0
"""Gradients that are rows of a tensor: `tf.IndexedSlices`."""

from collections.abc import Sequence

from lamina.tensorflow.installed import tf


def times(gradient: tf.Tensor | tf.IndexedSlices, factor: tf.Tensor) -> tf.Tensor | tf.IndexedSlices:
    """A tensor or slices, multiplied."""
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values
        return tf.IndexedSlices(values * tf.cast(factor, values.dtype), gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def divided(slices: tf.IndexedSlices, by: float) -> tf.IndexedSlices:
    """Slices whose values are divided."""
    return tf.IndexedSlices(slices.values / by, slices.indices, slices.dense_shape)


def added(every: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    """Their sum, with unique indices."""
    values = tf.concat([each.values for each in every], 0)
    unique, places = tf.unique(tf.concat([each.indices for each in every], 0))
    return tf.IndexedSlices(tf.math.unsorted_segment_sum(values, places, tf.size(unique)), unique, every[0].dense_shape)
