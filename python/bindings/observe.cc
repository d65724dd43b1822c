// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "lamina/runtime/execution_context.h"
#include "lamina/runtime/turn_times.h"
#include "lamina/session/session.h"
#include "lamina/session/timeline.h"
#include "python/bindings/bindings.h"

namespace lamina::python {
namespace {

using session::Session;

py::dict take_totals(Session& session) {
  session.recorder().start_counting();
  runtime::record_passed();
  const auto totals = session.recorder().take_totals();
  py::dict values;
  values["step_s"] = static_cast<double>(totals.step_ns) / 1e9;
  values["compute_s"] = static_cast<double>(totals.compute_ns) / 1e9;
  values["messages"] = totals.messages;
  values["sent_bytes"] = totals.bytes;
  values["memory_bytes"] = totals.peak_bytes;
  return values;
}

// "" outside of steps: nothing is recorded there.
std::string name_turn(std::string name) {
  auto* context = runtime::ExecutionContext::current();
  return context == nullptr ? "" : context->go_on_as(std::move(name));
}

}  // namespace

void bind_observe(py::module_& module) {
  module.def(
      "start_timeline", &session::start_timeline, py::call_guard<py::gil_scoped_release>(), py::arg("session"),
      py::arg("path"),
      "Records this rank from now on, for a file that world rank 0 is to write; collective over the world. Raises "
      "UsageError where it is recorded already, and FileError on every rank where the file could not be written.");
  module.def(
      "stop_timeline", [](Session& session) { session.recorder().stop(); }, py::arg("session"),
      "Ends it and drops what was recorded.");
  module.def("write_timeline", &session::write_timeline, py::call_guard<py::gil_scoped_release>(), py::arg("session"),
             py::arg("path"),
             "Ends it; collective over the world. World rank 0 writes what all have recorded to the file and gets a "
             "summary; the others get \"\".");
  module.def(
      "take_totals", &take_totals, py::arg("session"),
      "Sums of this rank's steps since the last call: \"step_s\", \"compute_s\", \"messages\" and \"sent_bytes\", and "
      "the most memory that its process had, or its tensors on an accelerator, \"memory_bytes\". The first call begins "
      "to count.");
  module.def(
      "records_events", [](Session& session) { return session.recorder().keeps_events(); }, py::arg("session"),
      "True while a timeline is recorded.");
  module.def("name_turn", &name_turn, py::arg("name"),
             "In a step: what this thread does from now on is recorded under that name. -> the name before.");
}

}  // namespace lamina::python
