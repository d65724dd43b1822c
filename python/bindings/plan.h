// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "lamina/model/plan.h"

namespace lamina::python {

// Adds the tree of a model, and the plan that is made from it.
void bind_plan(py::module_& module);

// The rows of a plan. Keys: those of a node in a plan's file, with the position as "id", and its place by hand.
py::list tree_rows(const plan::ModuleTree& tree);

// Measures that a trace took of each node (`tracing/record.py`); None where there was none.
model::Costs to_costs(const py::object& measures);

}  // namespace lamina::python
