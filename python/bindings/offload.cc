// SPDX-License-Identifier: Apache-2.0
#include "lamina/runtime/offload.h"

#include <torch/csrc/utils/pybind.h>

#include "python/bindings/bindings.h"

namespace lamina::python {

void bind_offload(py::module_& module) {
  using runtime::Offload;
  const py::call_guard<py::gil_scoped_release> release;
  py::class_<Offload::Kept, std::shared_ptr<Offload::Kept>>(module, "KeptActivation")
      .def("take", &Offload::Kept::take, release, "The tensor on its device.");
  py::class_<Offload, std::shared_ptr<Offload>>(module, "Offload")
      .def(py::init([](int horizon) { return std::make_shared<Offload>(horizon, runtime::make_device_mover()); }),
           py::arg("horizon"))
      .def("keep", &Offload::keep, py::arg("tensor"), release, "Sends it to the host; None where it lies there.");
}

}  // namespace lamina::python
