// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "lamina/runtime/execution_context.h"
#include "lamina/session/session.h"
#include "lamina/session/timeline.h"
#include "python/bindings/bindings.h"

namespace lamina::python {
namespace {

using session::Session;

py::dict take_totals(Session& session) {
  session.recorder().start_counting();
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
  module.def("start_timeline", &session::start_timeline, py::call_guard<py::gil_scoped_release>());
  module.def("stop_timeline", [](Session& session) { session.recorder().stop(); });
  module.def("write_timeline", &session::write_timeline, py::call_guard<py::gil_scoped_release>());
  module.def("take_totals", &take_totals);
  module.def("records_events", [](Session& session) { return session.recorder().keeps_events(); });
  module.def("name_turn", &name_turn);
}

}  // namespace lamina::python
