// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>
#include <vector>

#include "lamina/layout/parameter_layout.h"
#include "lamina/model/call_hooks.h"
#include "lamina/session/session.h"

namespace lamina::python {

// Adds what a session does with the model when it is cut, and with its values after that.
void bind_model(py::module_& module, py::class_<session::Session, std::shared_ptr<session::Session>>& kind);

// "world", "mp", "dp", "pp", "tp" or "rdp"; throws base::UsageError for another text.
topology::Group group_of(const std::string& kind);
std::string kind_of(topology::Group group);

// The dimension along which a tensor is sliced, and the extent and unit of each of its sections.
using PythonSlicing = std::pair<int, std::vector<std::pair<std::int64_t, std::int64_t>>>;
layout::Slicing to_slicing(const session::Session& session, const PythonSlicing& given);

// Ends, and begins, without the GIL: hooks may wait for other ranks.
struct BegunCall {
  std::unique_ptr<model::HookedCall> call;
  void end(const std::vector<at::Tensor>& outputs) { call->end(outputs); }
  void fail() { call.reset(); }
};

}  // namespace lamina::python
