// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/change.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lamina/session/next_layout.h"
#include "python/bindings/bindings.h"
#include "python/bindings/convert.h"
#include "python/bindings/hooks.h"
#include "python/bindings/session.h"

namespace lamina::python {
namespace {

using session::ChangingJob;
using session::ChangingOptimizer;
using session::Session;

std::shared_ptr<Session> open_after(Session& before, const config::Config& config) {
  const Release release;
  return with_maker(session::open_after(before, config, face_hooks()));
}

void bind_changing(py::module_& module) {
  py::class_<ChangingOptimizer>(module, "ChangingOptimizer",
                                "An optimizer of a job that is to change its layout: see lamina/session/change.h.")
      .def(py::init([](std::string name, std::string beside, std::string why_not_parts, bool measures_all,
                       bool takes_sparse, bool waits) {
             return ChangingOptimizer{std::move(name), std::move(beside), std::move(why_not_parts),
                                      measures_all,    takes_sparse,      waits};
           }),
           py::kw_only(), py::arg("name"), py::arg("beside"), py::arg("why_not_parts"), py::arg("measures_all"),
           py::arg("takes_sparse"), py::arg("waits"));
  py::class_<ChangingJob>(module, "ChangingJob",
                          "A job that is to change its layout, as far as Python knows it: see "
                          "lamina/session/change.h.")
      .def(py::init([](bool saves, std::vector<std::string> relies, bool waits) {
             return ChangingJob{.saves = saves, .relies = std::move(relies), .waits = waits};
           }),
           py::kw_only(), py::arg("saves"), py::arg("relies"), py::arg("waits"))
      .def_readwrite("has_model", &ChangingJob::has_model)
      .def_readwrite("is_cut", &ChangingJob::is_cut)
      .def_readwrite("has_hook", &ChangingJob::has_hook)
      .def_readwrite("joins", &ChangingJob::joins)
      .def_readwrite("odd_buffers", &ChangingJob::odd_buffers)
      .def_readwrite("optimizers", &ChangingJob::optimizers)
      .def_readwrite("why_not_slices", &ChangingJob::why_not_slices);
}

void bind_layouts(py::class_<Session, std::shared_ptr<Session>>& kind) {
  kind.def("take_over", &session::take_over, py::call_guard<Release>(),
           "The session before is closed: what a process has once is this one's from now on.");
  kind.def("changed_config", &session::changed_config, py::call_guard<Release>(), py::arg("keys_json"),
           "The configuration in the layout that keys of init() ask for: see lamina/session/change.h. Raises "
           "ConfigError and UsageError, alike on all ranks; collective over the world.")
      .def("require_changeable", &session::require_changeable, py::call_guard<Release>(), py::arg("config"),
           py::arg("job"),
           "Raises UsageError, on all ranks, where the job cannot go over to that layout, or not now; collective over "
           "the world.")
      .def("waits_for_trace", &session::waits_for_trace, py::call_guard<Release>(), py::arg("config"),
           py::arg("is_traced"), py::arg("is_whole"),
           "Whether the model stays whole until the next step, which traces and cuts it; collective over the world.")
      .def("require_layouts", &session::require_layouts, py::call_guard<Release>(), py::arg("layouts"),
           py::arg("of_copies"),
           "Raises UsageError or ConfigError, on all ranks, for what is no layout; collective over the world.")
      .def("open_after", &open_after, py::arg("config"),
           "Opens the session of another layout, which is to take this one's place; collective over the world.");
  kind.def(
      "put_aside",
      [](Session&, const model::ParameterTable& table, const std::shared_ptr<sharding::Sharding>& sharding) {
        session::put_aside(table, sharding.get());
      },
      py::arg("table"), py::arg("sharding").none(true),
      "Leaves the memory of values and shards to whoever else keeps it for a while.");
}

}  // namespace

void bind_changes(py::module_& module, py::class_<Session, std::shared_ptr<Session>>& kind) {
  bind_changing(module);
  bind_layouts(kind);
  bind_survivors(module, kind);
}

}  // namespace lamina::python
