// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/utils/pybind.h>

#include "tests/emulated/backend.h"
#include "tests/emulated/emulated.h"
#include "tests/emulated/generator.h"
#include "tests/emulated/settings.h"

namespace py = pybind11;

namespace emulated {
namespace {

py::dict counts_in_python() {
  const auto all = counts();
  py::dict made;
  made["enqueued"] = all.enqueued;
  made["drained"] = all.drained;
  made["waits"] = all.waits;
  made["bytes"] = all.bytes;
  made["peak_bytes"] = all.peak_bytes;
  made["contexts"] = all.contexts;
  made["drains"] = all.drains;
  return made;
}

}  // namespace
}  // namespace emulated

PYBIND11_MODULE(_emulated, module) {
  module.attr("DEVICES") = emulated::settings().devices;  // bad settings are told by the import
  module.def("counts", emulated::counts_in_python);
  module.def("reset_counts", emulated::reset_counts);
  module.def("default_generator", emulated::default_generator);
  module.def("make_backend", emulated::make_backend);
}
