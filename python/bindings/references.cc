// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <utility>

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
  module.def("is_pending", &value::is_pending, py::arg("tensor"),
             "True for a reference that has not become its value.");
  module.def("where_released", &value::where_released, py::arg("tensor"),
             "The place of the value of a tensor of other ranks: \"0.weight lives in partition 1 on rank 1\". \"\" for "
             "any other.");
  module.def("is_away", &value::is_away, py::arg("tensor"),
             "True for one that is sharded, or other such memory, whose value is gone for now.");
  module.def("materialise", &value::materialise, py::arg("tensor"), py::call_guard<py::gil_scoped_release>(),
             "Makes a pending reference become its value; does nothing to other tensors.");
  module.def("why_guarded", &value::why_guarded, py::arg("tensor"),
             "Says of what a guarded slice is one: \"up.weight is sliced, and this rank has [8, 4] of its [16, 4]\". "
             "\"\" for any other tensor. See lamina/value/guarded.h.");
  module.def("name_guarded", &value::name_guarded, py::arg("tensor"),
             "The name of the parameter of which that is a guarded slice, or comes of one; \"\" for any other tensor.");
  module.def(
      "where_cut",
      [](const at::Tensor& tensor) -> std::optional<std::pair<int, std::int64_t>> {
        if (!value::is_guarded(tensor)) return std::nullopt;
        const auto cut = value::where_cut(tensor);
        return std::pair(cut.dim, cut.extent);
      },
      py::arg("tensor"),
      "Gives the dimension in which a guarded slice is cut, and how many places that has in the whole: -1, and all "
      "elements, where the slice has other dimensions; -2 for what slices were joined into. None for other tensors.");
  module.def("require_whole", &value::require_whole, py::arg("tensor"), py::arg("operation"),
             "UsageError for a guarded slice that `operation` is about to take for the whole, but in an update.");
  module.def("guard_again", &value::guard_again, py::arg("slice"),
             "Guards a parameter that was, and had another value since.");
  module.def("guard_gradient", &value::guard_gradient, py::arg("gradient"), py::arg("parameter"),
             "Guards the gradient of a slice, as that is; does nothing for others, and inside `Unguarded`.");
  module.def(
      "set_updating", &value::set_updating, py::arg("updates"),
      "From now on, what this thread computes of slices is not guarded, as states of optimizers are; or is again.");
  bind_context<value::Unguarded>(module, "Unguarded");
  bind_context<value::Judged>(module, "Judged");
  module.def("settle", &settle, py::call_guard<py::gil_scoped_release>(),
             "Fetches what calls of other ranks have returned to this thread and somebody may still read.");
  module.def(
      "release",
      [](at::Tensor tensor, const std::string& why, const at::Tensor& like) { value::release(tensor, why, like); },
      py::arg("tensor"), py::arg("why"), py::arg("like"),
      "Frees the value of a tensor, which becomes one of the dtype, device and strides of `like`; the Python object "
      "stays, and any use of the value is an error with the text `why`: lamina/value/released.h.");
  module.def("is_released", &value::is_released, py::arg("tensor"), "True where the value of `tensor` was freed.");
  module.def("restore", &value::restore, py::arg("tensor"), py::arg("value"),
             "Gives a tensor that has no value a value again, of the same shape and dtype, in the memory of that one.");
}

}  // namespace lamina::python
