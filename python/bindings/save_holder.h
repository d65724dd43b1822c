// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "lamina/checkpoint/save.h"

namespace lamina::python {

// Ends a save that Python lets go of: its thread may need the GIL, to write what Python makes, or to let go of it.
struct EndWithoutGil {
  void operator()(checkpoint::Save* save) const {
    const py::gil_scoped_release release;
    delete save;
  }
};
using SaveHolder = std::unique_ptr<checkpoint::Save, EndWithoutGil>;

}  // namespace lamina::python
