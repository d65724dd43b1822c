// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "lamina/plan/report.h"

namespace lamina::python {

// A row of the tree as Session.plan takes it: the keys of a node in a plan's file, with "parameter_ids", "callable",
// "placed_at" and "together". Only "parent" and "name" have to be there; an unknown key is an error.
plan::Node to_node(const py::dict& row);

py::dict to_dict(const plan::ModuleTree& tree, const plan::Report& report);

}  // namespace lamina::python
