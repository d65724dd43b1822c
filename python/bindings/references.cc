// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/utils/pybind.h>

#include "lamina/value/reference_tensor.h"
#include "lamina/value/released.h"
#include "python/bindings/bindings.h"

namespace lamina::python {
namespace {

// The value that a Python callable returns. Destroyed with or without the GIL, and asked with or without it.
class PythonSource : public value::Source {
 public:
  explicit PythonSource(py::function take) : take_(std::move(take)) {}
  ~PythonSource() override {
    const py::gil_scoped_acquire gil;
    take_.release().dec_ref();
  }

  at::Tensor take() override {
    const py::gil_scoped_acquire gil;
    if (value_.defined()) return value_;
    const auto taken = take_().cast<at::Tensor>();  // may let go of the GIL: another reader may be first
    if (!value_.defined()) value_ = taken;
    return value_;
  }

 private:
  py::function take_;
  at::Tensor value_;  // under the GIL
};

at::Tensor pending_reference(const at::Tensor& like, py::function take, bool gradient) {
  return value::make_reference(value::spec_of(like), std::make_shared<PythonSource>(std::move(take)),
                               gradient ? value::Strides::kAsTheyArrive : value::Strides::kAsSpecified);
}

}  // namespace

void bind_references(py::module_& module) {
  module.def("pending_reference", &pending_reference, py::arg("like"), py::arg("take"), py::arg("gradient") = false);
  module.def("is_pending", &value::is_pending, py::arg("tensor"));
  module.def("where_released", &value::where_released, py::arg("tensor"));
  module.def("materialise", &value::materialise, py::arg("tensor"), py::call_guard<py::gil_scoped_release>());
  module.def(
      "release",
      [](at::Tensor tensor, const std::string& why, const at::Tensor& like) { value::release(tensor, why, like); },
      py::arg("tensor"), py::arg("why"), py::arg("like"));
  module.def("is_released", &value::is_released, py::arg("tensor"));
  module.def("restore", &value::restore, py::arg("tensor"), py::arg("value"));
}

}  // namespace lamina::python
