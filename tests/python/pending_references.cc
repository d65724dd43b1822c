// SPDX-License-Identifier: Apache-2.0
// Gives tests of the Python face references that become what a function of Python returns.
#include <torch/csrc/utils/pybind.h>

#include "lamina/value/reference_tensor.h"

namespace py = pybind11;

namespace lamina {
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
}  // namespace lamina

PYBIND11_MODULE(pending_references, module) {
  module.def("pending_reference", &lamina::pending_reference, py::arg("like"), py::arg("take"),
             py::arg("gradient") = false);
}
