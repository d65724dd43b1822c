// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace lamina::python {

void bind_batches(py::module_& module);

}  // namespace lamina::python
