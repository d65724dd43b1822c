// SPDX-License-Identifier: Apache-2.0
// Gives tests of the Python face hooks around calls of modules, which are C++.
#include "tests/model/recorded_calls.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "lamina/session/session.h"

namespace py = pybind11;
using lamina::model::RecordedCalls;

PYBIND11_MODULE(call_recorder, module) {
  py::class_<RecordedCalls, std::shared_ptr<RecordedCalls>>(module, "RecordedCalls").def("take", &RecordedCalls::take);
  module.def("record", [](lamina::session::Session& session, const std::vector<std::string>& names) {
    auto recorded = std::make_shared<RecordedCalls>();
    session.job().call_hooks().add(recorded, names);
    return recorded;
  });
}
