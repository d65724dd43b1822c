# SPDX-License-Identifier: Apache-2.0
"""Everything that replaces something of torch's, in this table and nowhere else.

While a model is cut over several ranks, until `shutdown`:

| torch's | by | so that |
|---|---|---|
| torch.nn.Module.__call__ | module_call | a call of a module on another rank goes there |
| torch.nn.Sequential.forward | sequential | modules of one other rank are one call |
| torch.nn.Module.__setattr__ | module_attributes | each microbatch sees the attributes that it set |
| torch.nn.Module.register_forward_pre_hook | foreign | no hook is hung in a step where it is not called |
| torch.nn.Module.register_forward_hook | foreign | likewise |
| torch.nn.Module.register_full_backward_pre_hook | foreign | likewise |
| torch.nn.Module.register_full_backward_hook | foreign | likewise |
| torch.nn.Module.register_backward_hook | foreign | likewise |
| torch.nn.Parameter.register_hook | foreign | likewise |
| torch.nn.Parameter.register_post_accumulate_grad_hook | foreign | likewise |
| torch.nn.Module._apply | foreign | no part of another rank is converted in a step |
| torch.nn.Module.zero_grad | foreign | the gradients of no such part are zeroed in a step |
| torch.nn.Module.load_state_dict | foreign | no state is loaded into such a part in a step |
| torch.optim.Optimizer.zero_grad | foreign | one rank alone does not zero the model's gradients |
| torch.autograd._engine_run_backward | foreign | no gradient is asked for that is on another rank |
| torch.autograd._engine_run_backward | backwards | the check of first steps hears of backwards |
| torch.nn.Parameter.grad | foreign | who reads a gradient that is on another rank is told |
| torch.nn.Parameter.data | foreign | nobody sets values that are on another rank |
| torch.nn.utils.get_total_norm | clipping | the norm of the model's gradients is that of all ranks |
| torch.nn.utils.clip_grad_norm_ | clipping | likewise |
| torch.nn.utils.clip_grads_with_norm_ | clipping | gradients of shards are clipped, too |
| torch.nn.utils.clip_grad_value_ | clipping | likewise |
| torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype | clipping | a rank may have no gradients to clip |
| torch.nn.utils.stateless._reparametrize_module | swapping | functional_call() swaps nothing for other microbatches |
| torch.optim.swa_utils.AveragedModel.update_parameters | averages | an average is one of this rank's part |
| torch._dynamo.eval_frame._callback_from_stance | compiled | compiled code gets values, where it is imported |
| torch._dynamo.convert_frame.CatchErrorsWrapper.__call__ | compiled | nobody waits in the compiler's lock |
| torch.amp.GradScaler._check_scale_growth_tracker | grad_scaler | torch's own is refused over partitions |
| torch._tensor_str._str | printing | a tensor without a value says where that is, a slice what it is; for good |

Classes of the user's modules get descriptors for attributes that are set in a step, and for `training` where it changes
in one: by lamina.shared_state, which hears of both from `module_attributes`. By torch's public functions `foreign` also
registers hooks that are called before any optimizer's step, and when a module gets a parameter, buffer or submodule.
`module_call` gives torch's compiler back what that has taken for torch's own call of a module, where it was imported
while ours was in its place.

While parameters are sharded, or something else stands for them in optimizers, until `shutdown`, also with one
partition:

| torch's | by | so that |
|---|---|---|
| torch.nn.Module.zero_grad | zero_grad | a module's shards have no gradients either |
| torch.nn.Parameter.grad | zero_grad | a sharded parameter has the gradient of its shard, a stand-in its part |
| torch._subclasses.meta_utils.safe_grad | compiled | the compiler takes no gradient of a shard for its parameter's |
| torch._dynamo.variables.builder.safe_grad | compiled | likewise |
| torch.amp.GradScaler._unscale_grads_ | grad_scaler | gradients are found, and infinities in shards, by all ranks |
| torch.optim.swa_utils.AveragedModel.update_parameters | averages | an average has the values of shards, too |

While ranks of a `lamina.Run` train:

| torch's | by | so that |
|---|---|---|
| torch.amp.GradScaler._maybe_opt_step | grad_scaler | a step that is left out counts as one of the training |

While layers of a model are slices, until `shutdown`:

| torch's | by | so that |
|---|---|---|
| torch.utils.checkpoint.CheckpointFunction.forward | checkpoints | dropout of parts is computed again as it was |
| torch.utils.checkpoint._checkpoint_without_reentrant_generator | checkpoints | likewise |
| torch.nn.Parameter.data | foreign | a parameter that gets another value is a guarded slice where it was one |
| torch.nn.Parameter.grad | foreign | the gradient of a slice that a script reads is guarded |
| torch.nn.Parameter.register_hook | slice_gradients | the gradient that a hook gets is guarded |
| torch.nn.Parameter.register_post_accumulate_grad_hook | slice_gradients | what such a hook does is judged |
| torch.autograd._engine_run_backward | slice_gradients | gradients of slices that are asked for are guarded |
| torch.Tensor.numpy | slice_values | who reads a slice as an array is told |
| torch.Tensor.tolist | slice_values | likewise, as a list |
| torch.Tensor.__reduce_ex__ | slice_values | likewise, as a pickle |
| torch.Tensor.__dlpack__ | slice_values | likewise, in another library |
| torch.Tensor.data_ptr | slice_values | likewise, in a file of safetensors |
| torch.Tensor.new | slice_values | a guarded slice makes a plain tensor |
| torch.Tensor.new_tensor | slice_values | likewise |
| torch.Tensor.__getitem__ | slice_values | a range that ends where the slice does is seen |
| torch.Tensor.__setitem__ | slice_values | likewise |
| torch.compile | compiled_slices | the next one is there when the compiler is |
| torch._dynamo.output_graph.OutputGraph.call_user_compiler | compiled_slices | compiled code has slices of its layers |

Since one of torch's helpers of state dicts has met a model, until `shutdown`:

| torch's | by | so that |
|---|---|---|
| torch.distributed.checkpoint.state_dict._init_optim_state | state_helpers | an optimizer of parts is refused |

For the time of a context:

| torch's | by | so that |
|---|---|---|
| torch.nn.Module.__call__ | scoped.calls | a trace knows which module runs |
| torch.nn.Module.__setattr__ | scoped.attributes | a trace knows who sets what |
| torch.nn.Module.__getattribute__ | scoped.attributes | a trace knows who reads what |
| torch.autograd.Function.apply | scoped.functions | a trace knows which modules a backward may use |
| torch.nn.Module.__init__ | scoped.creations | modules know the `partition` that they were made in |
"""
