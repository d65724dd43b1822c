// SPDX-License-Identifier: Apache-2.0
#include <optional>

#include "lamina/device/generators.h"
#include "lamina/runtime/execution_context.h"
#include "lamina/runtime/rng_streams.h"
#include "python/bindings/bindings.h"

namespace lamina::python {
namespace {

// A C function without pybind11 around it: it is in the way of every call of a module that starts a stream, and hands
// the arguments on as they lie.
PyObject* call_in_stream(PyObject*, PyObject* const* arguments, Py_ssize_t count, PyObject* keywords) {
  if (count < 1) {
    PyErr_SetString(PyExc_TypeError, "call_in_stream() takes a function");
    return nullptr;
  }
  const auto call = [&] { return PyObject_Vectorcall(arguments[0], arguments + 1, count - 1, keywords); };
  const auto stream = runtime::rng_stream_here();
  return call();
}

// The cast goes through void(*)() because the signature depends on the flags.
PyMethodDef kCallInStream = {"call_in_stream",
                             reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_in_stream)),
                             METH_FASTCALL | METH_KEYWORDS, nullptr};

struct InBody {
  std::optional<runtime::AsInBody> here;
};

}  // namespace

void bind_random(py::module_& module) {
  py::class_<InBody>(module, "AsInBody",
                     "A context, in which modules have streams of random numbers as in the body of a step.")
      .def(py::init<>())
      .def("__enter__", [](InBody& self) { self.here.emplace(); })
      .def("__exit__", [](InBody& self, const py::args&) { self.here.reset(); });
  module.def(
      "rank_generator",
      [] {
        const auto generator = devices::rank_generator();
        return generator.defined() ? std::optional(generator) : std::nullopt;
      },
      "Torch's generator of the rank's device; None where that is the host.");
  module.def("in_step", &runtime::in_step, "True where this thread runs a step body, or a module for another rank.");
  module.def(
      "microbatch",
      [] {
        const auto* context = runtime::ExecutionContext::current();
        return context ? context->microbatch().value : -1;
      },
      "Which one this thread works on; -1 for none, and with one partition.");
  module.def(
      "leave_note",
      [](const std::string& note) {
        if (auto* context = runtime::ExecutionContext::current()) context->leave_note(note);
      },
      py::arg("note"),
      "In a module that runs for another rank: what that rank's `Session.take_notes` gives when the answer is there.");
  module.attr("call_in_stream") = py::reinterpret_steal<py::object>(PyCFunction_New(&kCallInStream, nullptr));
}

}  // namespace lamina::python
