# SPDX-License-Identifier: Apache-2.0
"""Keras's own loop over a model that is cut: `compile`, `fit`, `evaluate` and `predict`.

A batch is cut into as many parts as copies of the model have microbatches, as even as they can be. A part's gradients
count by its share of what the loss is a mean of: its samples, or what a mask leaves of them. So their sum is the
gradient of the batch's loss, also where parts differ. Losses that are shown, and metrics, are taken of the whole
batch's results, which all ranks have.
"""

import contextlib
import inspect
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from tensorflow.python.eager import context

from lamina.errors import UsageError
from lamina.job import current
from lamina.tensorflow import copies, exchange, older_keras, running, slices
from lamina.tensorflow.installed import keras, tf
from lamina.tensorflow.loops import LOOP
from lamina.tensorflow.model import CutModel
from lamina.tensorflow.step import StepFunction, StepOutput
from lamina.util.told import tell

_MASK = "_keras_mask"  # where Keras keeps that of a tensor
_INTEGERS = {1: tf.uint8, 2: tf.int16, 4: tf.int32, 8: tf.int64}  # by their bytes
_WRITERS = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)


class _Batches(StepFunction):
    """A step function of whole batches, of which each copy of the model takes its part."""

    def returns(self, *arguments: Any) -> Any:
        """Gives what its body returns for such arguments, which is traced, and not run."""
        return self._function.get_concrete_function(*arguments).structured_outputs[0][0]

    def _pieces(self, name: str, leaf: Any, count: int, token: tf.Tensor | None = None) -> list[Any]:
        if not tf.is_tensor(leaf):
            return [leaf] * count
        parts, first = _parts(), copies.of_job().own * count
        own = range(first, first + count)
        rows = _rows(leaf)
        if isinstance(rows, int) and rows % parts == 0:
            each = rows // parts
            return [leaf[part * each : (part + 1) * each] for part in own]
        starts, sizes = _spread(rows, parts)
        last = tf.maximum(rows, parts) - 1
        kept = tf.cond(rows < parts, lambda: tf.gather(leaf, tf.minimum(tf.range(last + 1), rows - 1)), lambda: leaf)
        pieces = [kept[starts[part] : starts[part] + sizes[part]] for part in own]
        for piece in pieces:
            piece.set_shape([None, *leaf.shape[1:]] if leaf.shape.rank else None)
        return pieces


def _parts() -> int:
    """Parts of a batch: the microbatches of all copies of the model."""
    return copies.of_job().count * current.job().session.config.microbatches


def _rows(leaf: tf.Tensor) -> Any:
    """The samples of a batch; a tensor where their number is not known, or does not divide into parts."""
    known = leaf.shape[0] if leaf.shape.rank is not None else None
    if known is not None and known % _parts() == 0:
        return known
    # TensorFlow is not to conclude the sizes of single parts: the model is traced for all of them.
    return tf.compat.v1.placeholder_with_default(tf.shape(leaf)[0] if known is None else known, [])


def _spread(rows: tf.Tensor, parts: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Where parts begin, and their sizes. Of fewer samples than parts the last one is repeated."""
    numbers = tf.range(parts)
    filled = tf.maximum(rows, parts)
    each, more = filled // parts, filled % parts
    return numbers * each + tf.minimum(numbers, more), each + tf.cast(numbers < more, tf.int32)


def _shares(rows: Any, parts: int) -> tf.Tensor:
    """The samples of each part, as a share of the even one; repeated ones are none."""
    if isinstance(rows, int):
        return tf.ones([parts], keras.backend.floatx())
    starts, sizes = _spread(rows, parts)
    own = tf.cast(tf.clip_by_value(rows - starts, 0, sizes), keras.backend.floatx())
    return own * parts / tf.cast(rows, own.dtype)


class _Reductions:
    """The numbers of which a body's losses are means, of one part of a batch."""

    def __init__(self, share: tf.Tensor, left: tf.Tensor | None = None):
        """Begins without a loss.

        Args:
            share: the part's share of the samples.
            left: where there are several losses, what masks leave of the batch, for each loss that has one; else None.
        """
        self._share, self._left = share, left
        self.kinds: list[str] = []
        self.kept: list[tf.Tensor] = []

    def noted(self) -> contextlib.AbstractContextManager:
        """Notes those of the losses that are computed."""
        return LOOP.noting(self._note)

    def _note(self, values: Any, mask: Any, reduction: str) -> tf.Tensor | None:
        if values.shape.rank == 0:
            reduction = "mean"
            if current.job().session.rank == 0:
                tell("fit(): a loss that is one number is taken of each microbatch, and averaged")
        self.kinds.append(reduction)
        masked = mask is not None and reduction == "mean"
        if masked:
            self.kept.append(self._share * tf.reduce_mean(tf.cast(mask, keras.backend.floatx())))
        if self._left is None:
            return None
        return tf.math.divide_no_nan(self.kept[-1], self._left[len(self.kept) - 1]) if masked else self._share

    def of_several(self) -> list[tf.Tensor]:
        """Gives what masks leave of the part, for each loss that has one; nothing where there is one loss."""
        return self.kept if len(self.kinds) > 1 else []

    def weighted(self, loss: tf.Tensor, added: list[tf.Tensor]) -> tuple[tf.Tensor, Any]:
        """The part's loss, so that the mean over parts is the batch's. Where a mask leaves less of the only one, it is
        that but for the mean of what it leaves, which is returned, too; else None is.

        Args:
            loss: the part's.
            added: what the layers have added, which is in the loss.
        """
        kinds, loss = set(self.kinds) or {"mean"}, tf.reduce_sum(loss)
        share = tf.cast(self._share, loss.dtype)
        extra = tf.add_n([tf.cast(tf.reduce_sum(each), loss.dtype) for each in added]) if added else 0.0
        if kinds == {"sum"}:  # a repeated sample's share is none
            return (loss - extra) * _parts() * tf.cast(share > 0, loss.dtype) + extra * share, None
        if kinds != {"mean"}:
            raise UsageError(
                f"fit(): losses with the reductions {', '.join(sorted(map(str, self.kinds)))}: microbatches make the "
                "loss of a batch where all of them are means of samples, or all are sums"
            )
        if self._left is not None:
            return loss - extra + extra * share, None
        if self.of_several():
            raise UsageError(
                "fit(): several losses of one target, one of them with a mask: a microbatch would count differently in "
                "each; give a target for each loss"
            )
        [kept] = self.kept or [self._share]
        return loss * tf.cast(kept, loss.dtype), kept if self.kept else None


def _of_all(said: Any) -> list[Any]:
    """Words of all ranks, beginning with rank 0. Collective; a rank that is in a step instead is told at once."""
    own_copy = [each["said"] for each in exchange.of_job().words({"said": said})]
    return [said for each in copies.of_job().words({"said": own_copy}) for said in each["said"]]


class _Alike(keras.callbacks.Callback):
    """Has all ranks decide by the numbers that rank 0 has: theirs may differ in the last bits."""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        steps = _of_all(self.params.get("steps"))
        if len(set(steps)) > 1:
            raise UsageError(f"fit(): ranks have other numbers of batches: {', '.join(map(str, steps))} in an epoch")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs.update(_of_all({name: each for name, each in logs.items() if isinstance(each, (int, float))})[0])


class _Together(keras.callbacks.Callback):
    """Has all ranks stop where one does."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.model.stop_training = any(_of_all(bool(self.model.stop_training)))


class DistributedModel(CutModel):
    """A Keras model whose `call` is cut over the ranks of the job, at its first call in a step function.

    Attributes:
        variables, trainable_variables, weights: those of this rank, from its first call on.
        losses: in a step function, behind the model's call: those that its layers have added.
    """

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self.__dict__["_lamina_steps"] = {}
        self.jit_compile = False

    @property
    def weights(self) -> list[Any]:
        return self._own(super().weights)

    def compile(self, *arguments: Any, **keywords: Any) -> None:
        """As Keras's, but for `jit_compile`, `run_eagerly` and `steps_per_execution`.

        Errors:
            UsageError: one of these.
        """
        bound = inspect.signature(super().compile).bind(*arguments, **keywords)
        given = bound.arguments
        others = given.get("kwargs", {})  # of Keras 2
        steps = given.get("steps_per_execution") or others.get("experimental_steps_per_execution")
        _refuse_modes("compile()", given.get("jit_compile"), given.get("run_eagerly"), steps)
        given["jit_compile"] = False
        self._lamina_steps.clear()
        super().compile(*bound.args, **bound.kwargs)

    def fit(self, *arguments: Any, **keywords: Any) -> Any:
        """As Keras's. All ranks give the same data; each copy of the model takes its part of each batch. Callbacks run
        on every rank, and decide by the numbers of rank 0.

        Errors:
            UsageError: a callback that saves the model as Keras does.
        """
        bound = self._of_rank(super().fit, arguments, keywords)
        given = bound.arguments.get("callbacks") or []
        given = given.callbacks if isinstance(given, keras.callbacks.CallbackList) else tf.nest.flatten(given)
        for each in given:
            if isinstance(each, _WRITERS):
                raise UsageError(
                    f"fit(): {type(each).__name__} saves what one rank has: use smp.CheckpointManager or save_model()"
                )
        bound.arguments["callbacks"] = [_Alike(), *given, _Together()]
        _seed_alike()
        return self._run(super().fit, bound)

    def evaluate(self, *arguments: Any, **keywords: Any) -> Any:
        """As Keras's; collective, as `fit`."""
        bound = self._of_rank(super().evaluate, arguments, keywords)
        return self._run(super().evaluate, bound)

    def predict(self, *arguments: Any, **keywords: Any) -> Any:
        """As Keras's; collective, as `fit`. All ranks get all results."""
        bound = self._of_rank(super().predict, arguments, keywords)
        return self._run(super().predict, bound)

    def save(self, *arguments: Any, **keywords: Any) -> Any:
        """As Keras's, of a model that lies on one rank.

        Errors:
            UsageError: it lies on several.
        """
        return self._refuse_files("save()") or super().save(*arguments, **keywords)

    def save_weights(self, *arguments: Any, **keywords: Any) -> Any:
        """As `save`."""
        return self._refuse_files("save_weights()") or super().save_weights(*arguments, **keywords)

    def load_weights(self, *arguments: Any, **keywords: Any) -> Any:
        """As `save`; before the first step on every rank, where the model's layers are built."""
        return self._refuse_files("load_weights()") or super().load_weights(*arguments, **keywords)

    def export(self, *arguments: Any, **keywords: Any) -> Any:
        """As `save`."""
        return self._refuse_files("export()") or super().export(*arguments, **keywords)

    def _refuse_files(self, what: str) -> None:
        if self._lamina.owners and len(current.job().session.group_members("partitions")) > 1:
            raise UsageError(
                f"{what} of a model that lies on several ranks: use smp.CheckpointManager, or save_model(), which "
                "writes the whole model"
            )

    def _of_rank(self, plain: Callable[..., Any], arguments: tuple, keywords: dict[str, Any]) -> inspect.BoundArguments:
        tuned = getattr(self, "autotune_steps_per_execution", False)  # by Keras 2
        _refuse_modes(f"{plain.__name__}()", self.jit_compile, self.run_eagerly, "auto" if tuned else None)
        bound = inspect.signature(plain).bind(*arguments, **keywords)
        if current.job().session.rank != 0:
            bound.arguments["verbose"] = 0
        return bound

    def _run(self, plain: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
        self.__dict__["_lamina_runs"] = True
        try:
            return plain(*bound.args, **bound.kwargs)
        finally:
            self.__dict__["_lamina_runs"] = False

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if self.__dict__.get("_lamina_runs") and tf.executing_eagerly() and not self.built:
            # Keras 2 builds a model so, by the first batch of a generator.
            return tf.function(self.predict_step, autograph=False)(arguments[:1])
        return super().__call__(*arguments, **keywords)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        gradients, batch = self._computed("train_step", x, y, sample_weight)
        means = [each.accumulate() for each in gradients]
        if batch.kept is not None:
            factor = tf.math.divide_no_nan(tf.ones_like(batch.kept), batch.kept)
            means = [None if each is None else slices.times(each, factor) for each in means]
        LOOP.apply(self.optimizer, means, self.trainable_variables)
        return self._measured(batch, x, y, sample_weight, training=True)

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        _, batch = self._computed("test_step", x, y, sample_weight)
        return self._measured(batch, x, y, sample_weight, training=False)

    def predict_step(self, data: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self._computed("predict_step", x, None, None)[1].results

    def _computed(self, name: str, x: Any, y: Any, sample_weight: Any) -> "tuple[list[StepOutput], _Batch]":
        x, y, sample_weight = _checked((x, y, sample_weight))
        leaves = [each for each in tf.nest.flatten((x, y, sample_weight)) if each is not None]
        rows = _rows(leaves[0])
        shares = _shares(rows, _parts())
        self._lamina.joins_metrics = True
        try:
            left = self._left_by_masks(x, y, sample_weight, shares) if name == "train_step" else None
            gradients, *returned = self._step(name)(x, y, sample_weight, shares, left)
        finally:
            self._lamina.joins_metrics = False
        return gradients, _Batch(returned, leaves, rows, shares)

    def _step(self, name: str) -> _Batches:
        if name not in self._lamina_steps:
            self._lamina_steps[name] = _Batches((_masks if name == "masks" else _body)(self, name), (), {}, {})
        return self._lamina_steps[name]

    def _left_by_masks(self, *data: Any) -> tf.Tensor | None:
        """Gives what masks leave of a batch, for each loss that has one, as each part of the batch gets it; None where
        there is one target, or no mask. Parts go forward once more for it: a part's gradients are added before others
        are there."""
        step = self._step("masks")
        if len(tf.nest.flatten(data[1])) < 2 or not step.returns(*data):
            return None
        joined = copies.of_job().joined([each.stack() for each in step(*data)])
        return tf.tile(tf.stack([tf.reduce_mean(each) for each in joined])[None], [_parts(), 1])

    def _measured(self, batch: "_Batch", x: Any, y: Any, sample_weight: Any, training: bool) -> dict[str, Any]:
        """The metrics, which are updated by a batch."""
        older_keras.count(self, batch.metrics)
        with self._lamina.giving_losses(batch.added):
            LOOP.count_loss(self, x, y, batch.results, sample_weight, rows=batch.rows, training=training)
        return self.compute_metrics(x, y, batch.results, sample_weight=sample_weight)


def _refuse_modes(what: str, jit_compile: Any, run_eagerly: Any, steps_per_execution: Any) -> None:
    if jit_compile not in ("auto", False, None):
        raise UsageError(f"{what}: jit_compile of a DistributedModel: use tf.config.optimizer.set_jit(True)")
    if run_eagerly:
        raise UsageError(f"{what}: run_eagerly of a DistributedModel, whose call is a graph that is cut")
    if steps_per_execution == "auto":
        raise UsageError(f"{what}: steps_per_execution by time, which would be others on each rank: give a number")


def _loss_of(model: DistributedModel, reductions: _Reductions, *data: Any) -> tf.Tensor:
    with reductions.noted(), LOOP.without_metrics():  # they are of the batch
        return LOOP.loss(model, *data, training=True)


def _masks(model: DistributedModel, name: str) -> Callable[..., Any]:
    def masks(x: Any, y: Any, sample_weight: Any, shares: tf.Tensor) -> list[tf.Tensor]:
        reductions = _Reductions(shares[0])
        _loss_of(model, reductions, x, y, LOOP.called(model, x, False), sample_weight)
        return reductions.of_several()

    return masks


def _body(model: DistributedModel, name: str) -> Callable[..., Any]:
    training = name == "train_step"

    def body(x: Any, y: Any, sample_weight: Any, shares: tf.Tensor, left: tf.Tensor | None) -> Any:
        gradients, kept = [], None
        if training:
            with tf.GradientTape() as tape:
                results = LOOP.called(model, x, training)
                reductions = _Reductions(shares[0], None if left is None else left[0])
                loss = _loss_of(model, reductions, x, y, results, sample_weight)
                loss, kept = reductions.weighted(loss, model.losses)
                loss = LOOP.scaled(model.optimizer, loss)
            gradients = tape.gradient(loss, model.trainable_variables)
        else:
            results = LOOP.called(model, x, training)
        masks = [getattr(each, _MASK, None) for each in tf.nest.flatten(results)]
        losses = [tf.reduce_sum(each) for each in model.losses]
        return gradients, results, masks, kept, losses, running.current("metrics").metrics

    body.__name__ = name
    return body


class _Batch:
    """Results of the model for a batch, on all ranks.

    Attributes:
        results: those of the model, with masks of Keras's.
        kept: the mean of what masks leave of parts; None without masks.
        added: losses that layers add, the means over parts.
        metrics: values that layers of Keras 2 add for metrics; numbers are means over parts.
        rows: samples.
    """

    def __init__(self, returned: Sequence[Any], data: list[tf.Tensor], rows: Any, shares: tf.Tensor):
        """Joins what a step function returns of the microbatches of all copies.

        Args:
            returned: the model's results, their masks, `kept`, `added` and `metrics`.
            data: what the batch has.
            rows: its samples.
            shares: of its parts.
        """
        results, masks, kept, added, metrics = returned
        groups = [tf.nest.flatten(results), masks, [kept], added, list(metrics.values())]
        tensors = [each.concat() for group in groups for each in group if each.outputs[0] is not None]
        joined = iter(_joined(tensors, data))
        flat, masks, [kept], added, values = (
            [None if each.outputs[0] is None else next(joined) for each in group] for group in groups
        )
        numbers = [each.outputs[0].shape.rank == 0 for each in metrics.values()]
        values = [_mean(each, shares) if one else each for each, one in zip(values, numbers, strict=True)]
        if not isinstance(rows, int):
            flat, masks, values = ([_without_repeated(each, rows) for each in group] for group in (flat, masks, values))
        for each, mask in zip(flat, masks, strict=True):
            if mask is not None:
                setattr(each, _MASK, mask)
        weights = shares if kept is None else kept
        self.results, self.rows = tf.nest.pack_sequence_as(results, flat), rows
        self.kept = None if kept is None else tf.reduce_mean(kept)
        self.added = [_mean(each, weights) for each in added]
        self.metrics = dict(zip(metrics, values, strict=True))


def _mean(values: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """The mean of numbers, of which each counts by its weight."""
    shares = tf.math.divide_no_nan(weights, tf.reduce_sum(weights))
    return tf.reduce_sum(values * tf.cast(shares, values.dtype))


def _without_repeated(tensor: tf.Tensor | None, rows: tf.Tensor) -> tf.Tensor | None:
    """Results without those of the sample that was repeated."""
    if tensor is None or tensor.shape.rank == 0:
        return tensor
    return tensor[: tf.shape(tensor)[0] * rows // tf.maximum(rows, _parts())]


def _joined(tensors: list[tf.Tensor], data: list[tf.Tensor]) -> list[tf.Tensor]:
    """Tensors of all copies, whose batches were the same."""
    if copies.of_job().count == 1:
        return tensors
    sums = [_sum_of_bits(each) for each in data if each.dtype != tf.string]
    *joined, sums = copies.of_job().joined([*tensors, tf.stack(sums)[None]])
    tf.debugging.assert_equal(
        tf.reduce_min(sums, 0),
        tf.reduce_max(sums, 0),
        "copies of the model have got other batches: fit() and its like take the same data on all ranks, in one order",
    )
    return joined


def _sum_of_bits(tensor: tf.Tensor) -> tf.Tensor:
    """A number that differs where tensors do, in samples or in their order."""
    if tensor.dtype.size in _INTEGERS and tensor.dtype != tf.bool:
        tensor = tf.bitcast(tensor, _INTEGERS[tensor.dtype.size])
    samples = tf.reduce_sum(tf.cast(tf.reshape(tensor, [tf.shape(tensor)[0], -1]), tf.int64), 1)
    return tf.reduce_sum(samples * tf.range(1, tf.size(samples, tf.int64) + 1))


def _checked(batch: Any) -> Any:
    """A batch, all of whose tensors have as many samples: else that is an error, before the step begins."""
    leaves = [each for each in tf.nest.flatten(batch) if each is not None]
    for each in leaves:
        if not isinstance(each, tf.Tensor):
            raise UsageError(f"fit(): a batch has a {type(each).__name__}, which cannot be cut into microbatches yet")
        if each.shape.rank == 0:
            raise UsageError("fit(): a batch has a tensor without an axis of samples")
    words = "fit(): tensors of a batch have different numbers of samples"
    known = [each.shape[0] if each.shape.rank is not None else None for each in leaves]
    if None not in known:
        if len(set(known)) > 1:
            raise UsageError(f"{words}: {', '.join(map(str, known))}")
        return batch
    rows = tf.stack([tf.shape(each)[0] for each in leaves])
    with tf.control_dependencies([tf.debugging.assert_equal(rows, rows[0], words)]):
        return tf.nest.map_structure(lambda each: None if each is None else tf.identity(each), batch)


def _seed_alike() -> None:
    """Has all ranks shuffle alike, where the script has set no seed."""
    seed = _of_all((context.global_seed(), secrets.randbits(31)))[0]
    if context.global_seed() is None:
        tf.random.set_seed(seed[0] if seed[0] is not None else seed[1])
