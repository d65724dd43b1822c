# SPDX-License-Identifier: Apache-2.0
"""Models of transformers under the Trainer."""

import importlib
import inspect
import json
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lamina.composer.model import ComposerModel
from lamina.errors import ConfigError, UsageError
from lamina.trainer import checks
from lamina.trainer.checkpoints import found_checkpoint


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
        if not getattr(self.config, "architectures", None):  # of which class a model is that is made of a checkpoint
            self.config.architectures = [type(model).__name__]
        self._texts: dict[str, str] | None = None
        parameters = inspect.signature(model.forward).parameters.values()
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self._names = None if takes_any else {parameter.name for parameter in parameters}

    def forward(self, batch: Any) -> Any:
        if not isinstance(batch, Mapping):
            raise UsageError(
                "HuggingFaceModel takes batches of tensors by the names of the model's inputs, not "
                f"{type(batch).__name__}: a collate_fn of the DataLoader makes {{'input_ids': ..., 'labels': ...}}"
            )
        names = batch.keys() if self._names is None else batch.keys() & self._names
        return self.model(**{name: batch[name] for name in batch if name in names})

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        if not isinstance(outputs, Mapping) or outputs.get("loss") is None:
            raise UsageError(
                f"{type(self.model).__name__} gave no loss for a batch of {', '.join(batch)}: models of transformers "
                "give one where the batch has 'labels'; or loss() of a subclass of HuggingFaceModel makes it"
            )
        return outputs["loss"]

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        outputs = self.forward(batch) if outputs is None else outputs
        if not self.use_logits or not self.val_metrics:
            return outputs
        logits = outputs["logits"]
        return logits.squeeze(1) if logits.shape[1] == 1 else logits

    def add_eval_metrics(self, evaluator: Any) -> None:
        """Adds the metrics of `lamina.composer.torch_metrics` that an evaluator names, each with its defaults.

        Errors:
            ConfigError: none is called so, or one needs arguments.
        """
        from lamina.composer import torch_metrics  # imports torchmetrics

        added = {}
        for name in evaluator.metric_names:
            kind = getattr(torch_metrics, name, None)
            try:
                added[name] = kind()
            except TypeError:
                raise ConfigError(
                    f"add_eval_metrics: {evaluator.label}: {name!r} is no metric that is made without arguments: "
                    "HuggingFaceModel(metrics=[...]) takes any"
                ) from None
        self.val_metrics = self.val_metrics | added

    def generate(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        """Words after these, by the model's own `generate`."""
        return self.model.generate(input_ids, **options)

    def get_metadata(self) -> dict[str, Any]:
        """The configuration and the tokenizer, as Composer's checkpoints have them."""
        kind = type(self.model)
        config = {
            "content": json.loads(self.config.to_json_string()),
            "class": f"{kind.__module__}.{kind.__qualname__}",
        }
        return {"model": {"config": config | {"file_extension": ".json"}}, "tokenizer": self._metadata_of_tokenizer()}

    def _metadata_of_tokenizer(self) -> dict[str, Any]:
        found = {}
        for name, text in self.texts_of_tokenizer().items():
            is_json = name.endswith(".json")
            content = json.loads(text) if is_json else text.split("\n")
            found[Path(name).stem] = {"file_extension": Path(name).suffix, "content": content}
        return found

    def texts_of_tokenizer(self) -> dict[str, str]:
        """The files of the tokenizer, for a checkpoint; but for those that are no texts."""
        if self._texts is None:
            self._texts = {}
            with tempfile.TemporaryDirectory() as folder:
                if self.tokenizer is not None:
                    self.tokenizer.save_pretrained(folder)
                for file in sorted(Path(folder).iterdir()):
                    if file.suffix in (".json", ".txt"):
                        self._texts[file.name] = file.read_text()
        return self._texts

    @staticmethod
    def hf_from_composer_checkpoint(
        checkpoint_path: str,
        model_instantiation_class: Any = None,
        model_config_kwargs: dict[str, Any] | None = None,
        local_checkpoint_save_location: Any = None,
        trust_remote_code: bool = False,
    ) -> tuple[Any, Any]:
        """Makes the model and the tokenizer of a checkpoint, with new values: a Trainer's `load_path` with
        `load_weights_only=True` loads the saved ones.

        Args:
            checkpoint_path: of a checkpoint of lamina's Trainer, or a file of Composer's, of which nothing is executed.
            model_instantiation_class: another class, or its name, "transformers.AutoModelForSequenceClassification".
            model_config_kwargs: what is different in the configuration.
            local_checkpoint_save_location: accepted; files are read where they are.
            trust_remote_code: whether code that comes with a model is executed.

        Errors:
            ConfigError: there is no such checkpoint, or it has no model of transformers.
        """
        import transformers

        place = found_checkpoint(checks.path("hf_from_composer_checkpoint: checkpoint_path", checkpoint_path))
        config, texts = _from_composers(place) if place.is_file() else _from_own(place)
        config = transformers.AutoConfig.for_model(**config | (model_config_kwargs or {}))
        kind = _class_named(model_instantiation_class or (config.architectures or ["AutoModel"])[0])
        options = {"trust_remote_code": trust_remote_code} if hasattr(kind, "_model_mapping") else {}
        model = kind.from_config(config, **options) if hasattr(kind, "_model_mapping") else kind(config)
        if not texts:
            return model, None
        with tempfile.TemporaryDirectory() as folder:
            for name, text in texts.items():
                Path(folder, Path(name).name).write_text(text)  # nowhere else, whatever the checkpoint says
            return model, transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)

    def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
        return self.train_metrics if is_train else self.val_metrics

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        labels = batch["labels"]
        if self.shift_labels:
            labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
        metric.update(outputs, labels)


def _no_model(place: Path, why: str) -> ConfigError:
    return ConfigError(
        f"hf_from_composer_checkpoint: checkpoint_path={str(place)!r}: {why}; it is a checkpoint that a Trainer "
        "has saved of a HuggingFaceModel"
    )


def _from_own(place: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The configuration and the tokenizer's files in a checkpoint of ours, or in the newest of a folder."""
    newest = place / "newest"
    folder = place / newest.read_text().strip() if newest.is_file() else place
    if not folder.is_dir():
        raise _no_model(place, "it is not there")
    texts = {each.name: each.read_text() for each in folder.iterdir() if each.suffix in (".json", ".txt")}
    if "config.json" not in texts:
        raise _no_model(place, "it has no configuration of transformers")
    config = json.loads(texts.pop("config.json"))
    is_there = any(name.startswith("tokenizer") or name.startswith("vocab") for name in texts)
    return config, texts if is_there else {}


def _from_composers(place: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The configuration and the tokenizer's files in a file of Composer's."""
    try:
        saved = torch.load(place, map_location="cpu", weights_only=True)["state"]["integrations"]["huggingface"]
    except (KeyError, TypeError):
        raise _no_model(place, "it has no model of transformers") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise _no_model(
            place,
            f"it cannot be read without executing what is in it ({reason}): save torch.load(path, weights_only=False), "
            "where you trust it, again with state.integrations alone",
        ) from None
    config = dict(saved["model"]["config"]["content"])
    config["architectures"] = [saved["model"]["config"]["class"]]
    texts = {}
    for stem, file in saved["tokenizer"].items():
        is_json = file["file_extension"] == ".json"
        text = json.dumps(file["content"]) if is_json else "\n".join(file["content"])
        texts[stem + file["file_extension"]] = text
    return config, texts


def _class_named(given: Any) -> Any:
    """A class of that name, of transformers where no module is named."""
    if not isinstance(given, str):
        return given
    module, _, name = given.rpartition(".")
    try:
        return getattr(importlib.import_module(module or "transformers"), name)
    except (ImportError, AttributeError):
        raise ConfigError(
            f"hf_from_composer_checkpoint: {given} cannot be imported: model_instantiation_class=... is a class"
        ) from None
