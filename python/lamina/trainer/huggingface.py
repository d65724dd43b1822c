# SPDX-License-Identifier: Apache-2.0
"""Models of transformers under the Trainer."""

import inspect
from typing import Any

import torch

from lamina.trainer import checks
from lamina.trainer.model import ComposerModel


class HuggingFaceModel(ComposerModel):
    """A model of transformers, called with a batch's items by their names, whose loss is its own.

    A loss that is a mean over tokens counts by tokens, where microbatches have different numbers of them:
    `Trainer(accumulate_train_batch_on_tokens=True)` and a DataSpec with `get_num_tokens_in_batch`.

    Args:
        model: with `labels` in its batches, for it to have a loss.
        tokenizer: kept as an attribute.
        use_logits: whether metrics get the logits; else all outputs.
        metrics: of torchmetrics.
        shift_labels: whether the label of a position is the next one's, for metrics; else where the model is one for
            causal language modeling.

    Errors:
        ConfigError: `model` is none of transformers.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        use_logits: bool = False,
        metrics: list[Any] | None = None,
        shift_labels: bool | None = None,
    ):
        super().__init__()
        if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
            raise checks.wrong("HuggingFaceModel: model", model, "a model of transformers, which has a config")
        self.model, self.config, self.tokenizer, self.use_logits = model, model.config, tokenizer, use_logits
        if tokenizer is not None and len(tokenizer) != self.config.vocab_size:
            model.resize_token_embeddings(len(tokenizer))
        self.train_metrics = self.val_metrics = {type(metric).__name__: metric for metric in metrics or ()}
        is_causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        self.shift_labels = is_causal if shift_labels is None else shift_labels
        parameters = inspect.signature(model.forward).parameters.values()
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self._names = None if takes_any else {parameter.name for parameter in parameters}

    def forward(self, batch: Any) -> Any:
        names = batch.keys() if self._names is None else batch.keys() & self._names
        return self.model(**{name: batch[name] for name in batch if name in names})

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        return outputs["loss"]

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        outputs = self.forward(batch) if outputs is None else outputs
        if not self.use_logits or not self.val_metrics:
            return outputs
        logits = outputs["logits"]
        return logits.squeeze(1) if logits.shape[1] == 1 else logits

    def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
        return self.train_metrics if is_train else self.val_metrics

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        labels = batch["labels"]
        if self.shift_labels:
            labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
        metric.update(outputs, labels)
