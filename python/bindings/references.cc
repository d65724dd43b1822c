// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/utils/pybind.h>

#include "lamina/remote/issued.h"
#include "lamina/value/away.h"
#include "lamina/value/guarded.h"
#include "lamina/value/guarded_calls.h"
#include "lamina/value/reference_tensor.h"
#include "lamina/value/released.h"
#include "python/bindings/bindings.h"

namespace lamina::python {
namespace {

// Fetches what this thread's calls of other ranks have returned and somebody may still read: nothing that it does with
// that waits for them afterwards.
void settle() {
  auto* const context = runtime::ExecutionContext::current();
  if (context == nullptr) return;
  std::vector<std::shared_ptr<remote::RemoteValue>> sources;
  for (const auto& reference : remote::issued(*context).references) {
    if (auto source = reference.lock()) sources.push_back(std::move(source));
  }
  for (const auto& source : sources) source->take();
}

// A context of Python's.
template <class Kind>
struct OwnContext {
  std::optional<Kind> open;
};

template <class Kind>
void bind_context(py::module_& module, const char* name) {
  py::class_<OwnContext<Kind>>(module, name)
      .def(py::init<>())
      .def("__enter__", [](OwnContext<Kind>& self) { self.open.emplace(); })
      .def("__exit__", [](OwnContext<Kind>& self, const py::args&) { self.open.reset(); });
}

}  // namespace

void bind_references(py::module_& module) {
  module.def("is_pending", &value::is_pending, py::arg("tensor"));
  module.def("where_released", &value::where_released, py::arg("tensor"));
  module.def("is_away", &value::is_away, py::arg("tensor"));
  module.def("materialise", &value::materialise, py::arg("tensor"), py::call_guard<py::gil_scoped_release>());
  module.def("why_guarded", &value::why_guarded, py::arg("tensor"));
  module.def("name_guarded", &value::name_guarded, py::arg("tensor"));
  module.def("require_whole", &value::require_whole, py::arg("tensor"), py::arg("operation"));
  module.def("guard_again", &value::guard_again, py::arg("slice"));
  module.def("guard_gradient", &value::guard_gradient, py::arg("gradient"), py::arg("parameter"));
  module.def("set_updating", &value::set_updating, py::arg("updates"));
  bind_context<value::Unguarded>(module, "Unguarded");
  bind_context<value::Judged>(module, "Judged");
  module.def("settle", &settle, py::call_guard<py::gil_scoped_release>());
  module.def(
      "release",
      [](at::Tensor tensor, const std::string& why, const at::Tensor& like) { value::release(tensor, why, like); },
      py::arg("tensor"), py::arg("why"), py::arg("like"));
  module.def("is_released", &value::is_released, py::arg("tensor"));
  module.def("restore", &value::restore, py::arg("tensor"), py::arg("value"));
}

}  // namespace lamina::python
