// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <memory>

#include "lamina/model/modules.h"
#include "lamina/session/session.h"

// Functions that the engine calls back in Python.
namespace lamina::python {

// As the docstring of set_hooks() describes them. Set once; read with the GIL held.
struct Hooks {
  py::object run_module, capture_state, hear, describe_exception, rebuild_exception, pack, unpack, name_call,
      make_remote, errors;
};
const Hooks& hooks();
void bind_hooks(py::module_& module);

// Sets the Python error that stands for `error`. The GIL is held.
void set_python_error(std::exception_ptr error);

// An exception of Python as C++ passes it on. The GIL is held.
std::exception_ptr as_thrown(const py::object& exception);

// The model of the Python face, its modules called by the hooks: see model::Modules.
std::shared_ptr<model::Modules> python_modules(std::vector<std::string> names, std::vector<bool> own_stream,
                                               std::vector<int> streams, std::vector<bool> dynamic);

// Threads with a Python state of their own, exceptions as Python describes them, signals noticed.
session::FaceHooks face_hooks();

}  // namespace lamina::python
