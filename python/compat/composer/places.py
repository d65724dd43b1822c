# SPDX-License-Identifier: Apache-2.0
"""Ways to do what names of Composer's do that are not there."""

_SAVES = "save_folder, save_interval and save_num_checkpoints_to_keep of the Trainer save, and load_path goes on"
_FILES = "folders are paths of a file system that all ranks see, and fsspec copies what was saved"
_TIMELINE = "lamina.timeline shows what each rank does"
_PLAIN = "after trainer.close() the model is a plain one: torch.export.export(model, ...) or torch.save of its values"
_WRAPS = "fsdp_config and lamina_config of the Trainer say how the model lies on the ranks"
_LAYOUT = "state.model is the model in each layout; State has fsdp_enabled and deepspeed_enabled"
_TORCHVISION = "ComposerClassifier(model, num_classes) takes a model of torchvision or timm"
_TRANSFORMERS = "HuggingFaceModel(model, tokenizer) takes a model of transformers"

PLACES = {
    **dict.fromkeys(("CheckpointSaver", "save_checkpoint", "load_checkpoint"), _SAVES),
    "safe_torch_load": "torch.load(path, weights_only=True)",
    **dict.fromkeys(
        ("ObjectStore", "S3ObjectStore", "GCSObjectStore", "OCIObjectStore", "LibcloudObjectStore"), _FILES
    ),
    **dict.fromkeys(("RemoteUploaderDownloader", "get_file", "parse_uri"), _FILES),
    "maybe_create_object_store_from_uri": _FILES,
    **dict.fromkeys(("Profiler", "JSONTraceHandler", "TorchProfiler", "SystemProfiler", "TraceHandler"), _TIMELINE),
    **dict.fromkeys(("Trace", "Marker", "cyclic_schedule", "ProfilerAction"), _TIMELINE),
    **dict.fromkeys(("export_for_inference", "export_with_logger", "ExportForInferenceCallback"), _PLAIN),
    **dict.fromkeys(("DDPSyncStrategy", "ddp_sync_context", "prepare_ddp_module", "prepare_fsdp_module"), _WRAPS),
    **dict.fromkeys(("is_model_fsdp", "is_model_deepspeed"), _LAYOUT),
    **dict.fromkeys(("composer_resnet", "composer_resnet_cifar", "composer_timm", "create_vit"), _TORCHVISION),
    **dict.fromkeys(("create_bert_mlm", "create_bert_classification", "create_gpt2"), _TRANSFORMERS),
    "AlgorithmPass": "algorithms hear of an event in the order of the list",
    "ensure_evaluator": "the Trainer takes loaders as they are, and Evaluators",
    "SystemMetricsMonitor": "MemoryMonitor logs memory, and any Callback what it likes",
    "NaNMonitor": "a Callback with after_loss(state, logger) looks at state.loss",
    "RuntimeEstimator": "ProgressBarLogger shows how far a training is, SpeedMonitor its speed",
    "CometMLLogger": "a LoggerDestination of the script's own takes metrics",
    "MLFlowLogger": "a LoggerDestination of the script's own takes metrics",
    "NeptuneLogger": "a LoggerDestination of the script's own takes metrics",
    "LabelSmoothing": "torch.nn.CrossEntropyLoss(label_smoothing=...) in the model's loss",
    "EMA": "torch.optim.swa_utils.AveragedModel in a Callback",
    "SWA": "torch.optim.swa_utils.AveragedModel in a Callback",
    "ChannelsLast": "model.to(memory_format=torch.channels_last) before the Trainer is made",
    "LayerFreezing": "parameter.requires_grad_(False) before the Trainer is made",
    "apply_gradient_clipping": "GradientClipping of composer.algorithms",
    "seed_context": "get_rng_state() and load_rng_state() put generators back",
}
