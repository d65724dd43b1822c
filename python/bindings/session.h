// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "lamina/session/session.h"

namespace lamina::python {

// A session that was opened, in which other ranks may have this one make what Python makes.
std::shared_ptr<session::Session> with_maker(std::shared_ptr<session::Session> session);

// Adds the backwards of a job's model; see data_parallel.cc.
void bind_backwards(py::module_& module);

// Adds who goes on where ranks are lost, or join.
void bind_survivors(py::module_& module, py::class_<session::Session, std::shared_ptr<session::Session>>& kind);

// Adds how a session gives way to one of another layout, or of those who are left.
void bind_changes(py::module_& module, py::class_<session::Session, std::shared_ptr<session::Session>>& kind);

}  // namespace lamina::python
