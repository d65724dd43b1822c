// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "lamina/session/session.h"

namespace lamina::python {

// Adds what a session does with the model when it is cut, and with its values after that.
void bind_model(py::module_& module, py::class_<session::Session, std::shared_ptr<session::Session>>& kind);

// "world", "mp", "dp", "pp", "tp" or "rdp"; throws base::UsageError for another text.
topology::Group group_of(const std::string& kind);
std::string kind_of(topology::Group group);

}  // namespace lamina::python
