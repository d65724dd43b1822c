// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "lamina/checkpoint/save.h"

namespace lamina::python {

// Lets go of what has saves without the GIL, which their threads may need: to write what Python makes, or to let go of
// it.
struct EndWithoutGil {
  template <class T>
  void operator()(T* held) const {
    const py::gil_scoped_release release;
    delete held;
  }
};

// A save that Python has, too.
struct SharedSave {
  std::shared_ptr<checkpoint::Save> save;
};
using SaveHolder = std::unique_ptr<SharedSave, EndWithoutGil>;

}  // namespace lamina::python
