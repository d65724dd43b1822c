// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "lamina/value/value.h"

// Python objects as value trees, and back. The GIL is held. Of the containers only the very types list, tuple and dict
// are translated; their subclasses and all other objects go through the codec that the face registered (hooks.h).
namespace lamina::python {

value::Value to_value(py::handle object);
py::object to_object(const value::Value& tree);

}  // namespace lamina::python
