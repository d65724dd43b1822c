# SPDX-License-Identifier: Apache-2.0
"""Names of Composer's objects that have another way here. An attribute of such a name says which."""

from collections.abc import Mapping

from lamina.errors import ConfigError


class NotHereError(ConfigError, AttributeError):
    """An attribute of Composer's that is not there, so that `hasattr` says no, and others hear what to use."""


class Elsewhere:
    """An object that says of some names, which it has not, what is there in their place."""

    _elsewhere: Mapping[str, str] = {}

    def __getattr__(self, name: str) -> object:
        if name in self._elsewhere:
            raise NotHereError(f"{type(self).__name__}.{name} of Composer's is not there: {self._elsewhere[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


_WEIGHTS = "state.model.state_dict() has the weights, of all ranks together"
_CHECKPOINTS = "Trainer.save_checkpoint() saves a training, and load_path goes on with it"
OF_STATE = {
    "state_dict": f"{_WEIGHTS}; {_CHECKPOINTS}",
    "load_state_dict": f"state.model.load_state_dict() takes weights; {_CHECKPOINTS}",
    "load_model_state": "state.model.load_state_dict() takes weights",
    "load_optim_state": _CHECKPOINTS,
    "get_model_state_dict": _WEIGHTS,
    "deepspeed_model": "state.model is the model in each layout",
    "fsdp_state_dict_type": f"{_WEIGHTS}; checkpoints load in any layout",
    "fsdp_sharded_state_dict_enabled": "checkpoints load in any layout",
    "fsdp_elastic_sharded_enabled": "checkpoints load in any layout",
    "sharded_ckpt_prefix_dir": "checkpoints load in any layout",
    "load_fsdp_monolith_rank0_only": "checkpoints load in any layout",
}
OF_TRAINER = {
    "export_for_inference": (
        "after trainer.close() the model is a plain one, on every rank: torch.export.export(model, ...), "
        "torch.onnx.export(...) or torch.save(model.state_dict(), path) on one of them"
    ),
    "add_dataloader": "fit(train_dataloader=...) takes another one",
    "spin_dataloaders": "a training goes on with its next batch in any case",
}
OF_ENGINE = {
    "register_pass": "algorithms hear of an event in the order of the list",
    "algorithm_passes": "algorithms hear of an event in the order of the list",
    "run_marker_only_event": "run_event() tells of an event",
}
