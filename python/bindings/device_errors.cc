// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/device_errors.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "lamina/device/failure.h"
#include "python/bindings/bindings.h"

namespace lamina::python {
namespace {

std::string told_of_full_memory(session::Session& session, const model::ParameterTable* table,
                                sharding::Sharding* sharding, std::vector<at::Tensor> uncut,
                                std::vector<at::Tensor> states, const std::string& module) {
  auto held = table == nullptr ? session::TensorsHeld() : session::tensors_of(*table, sharding);
  for (const auto& parameter : uncut) held.gradients.push_back(parameter.grad());
  held.parameters.insert(held.parameters.end(), uncut.begin(), uncut.end());
  held.optimizer_states = std::move(states);
  return session::told_of_full_memory(session, held, module);
}

}  // namespace

void bind_device_errors(py::module_& module) {
  module.def(
      "told_of_full_memory", &told_of_full_memory, py::arg("session"), py::arg("table"), py::arg("sharding"),
      py::arg("uncut"), py::arg("states"), py::arg("module"),
      "The line on a device's memory that is full: see [Note: errors of devices]. Of a model that is cut it takes the "
      "table and, where it is sharded, that; of another one its parameters.");
  module.def("told_of_failed_kernel", &session::told_of_failed_kernel, py::call_guard<Release>(), py::arg("session"),
             "The line on a kernel that has failed, \"\" where none has.");
  module.def(
      "device_has_failed", [] { return devices::failure() != nullptr; }, py::call_guard<Release>(),
      "True where this process has lost its device: see [Note: failed kernels].");
}

}  // namespace lamina::python
