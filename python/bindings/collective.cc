// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/backend.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "python/bindings/bindings.h"

namespace lamina::python {

void bind_collective(py::module_& module) {
  module.def(
      "make_backend",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, const std::vector<int>& members, double timeout_s) {
        collective::BackendOptions options{
            .store = store, .rank = rank, .timeout = milliseconds(timeout_s), .check_interrupt = &check_signals};
        for (const int member : members) options.members.emplace_back(member);
        return collective::make_backend(options);
      },
      py::arg("store"), py::arg("rank"), py::arg("members"), py::arg("timeout_s"),
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace lamina::python
