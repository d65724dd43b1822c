// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <chrono>

namespace lamina::python {

using Acquire = py::gil_scoped_acquire;
using Release = py::gil_scoped_release;

// Throws what a signal's handler throws. Takes the GIL.
void check_signals();
std::chrono::milliseconds milliseconds(double seconds);

void bind_checkpoint(py::module_& module);
void bind_checkpoint_files(py::module_& module);
void bind_collective(py::module_& module);
void bind_config(py::module_& module);
void bind_batch_record(py::module_& module);
void bind_data_parallel(py::module_& module);
void bind_device_errors(py::module_& module);
void bind_dist(py::module_& module);
void bind_graph(py::module_& module);
void bind_layers(py::module_& module);
void bind_loss_scale(py::module_& module);
void bind_offload(py::module_& module);
void bind_optim(py::module_& module);
void bind_optimizer(py::module_& module);
void bind_parameter_server(py::module_& module);
void bind_parameters(py::module_& module);
void bind_observe(py::module_& module);
void bind_random(py::module_& module);
void bind_references(py::module_& module);
void bind_session(py::module_& module);
void bind_sharding(py::module_& module);
void bind_step_check(py::module_& module);
void bind_tensor_parallel(py::module_& module);
void bind_training(py::module_& module);

}  // namespace lamina::python
