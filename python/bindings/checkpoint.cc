// SPDX-License-Identifier: Apache-2.0
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lamina/checkpoint/tree_json.h"
#include "lamina/job_checkpoint/copies.h"
#include "lamina/job_checkpoint/record_job.h"
#include "lamina/job_checkpoint/resume_job.h"
#include "lamina/job_checkpoint/resumption.h"
#include "lamina/job_checkpoint/save_job.h"
#include "lamina/job_checkpoint/together.h"
#include "lamina/session/session.h"
#include "lamina/verification/run_recorder.h"
#include "python/bindings/bindings.h"
#include "python/bindings/carried_errors.h"
#include "python/bindings/checkpointed_job.h"
#include "python/bindings/convert.h"
#include "python/bindings/saves.h"

namespace lamina::python {
namespace {

using job_checkpoint::JobRecording;
using job_checkpoint::Resumption;
using job_checkpoint::Saves;
using session::Session;

SaveHolder save_job(Session& session, py::object lent, Saves& saves, const std::filesystem::path& folder,
                    const std::string& tag, bool partial, std::size_t keep, bool asynchronous, bool allow_objects) {
  PythonCheckpointedJob job(session, std::move(lent));
  const job_checkpoint::SaveOptions options{folder, tag, partial, keep, asynchronous, allow_objects};
  return SaveHolder(new SharedSave{uncarried([&] { return job_checkpoint::save_job(job, saves, options); })});
}

void resume_job(Session& session, py::object lent, Saves& saves, const std::filesystem::path& folder,
                std::optional<std::string> tag, bool partial, bool strict, bool load_optimizer,
                bool load_sharded_optimizer_state, bool verify, bool allow_objects, bool translate, bool missing_ok) {
  const auto job = std::make_shared<PythonCheckpointedJob>(session, std::move(lent));
  const job_checkpoint::ResumeOptions options{
      folder, std::move(tag), partial,   strict,    load_optimizer, load_sharded_optimizer_state,
      verify, allow_objects,  translate, missing_ok};
  uncarried([&] { job_checkpoint::resume_job(job, saves, options); });
}

py::object together(Session& session, const py::function& act) {
  py::object result;
  uncarried([&] { job_checkpoint::together(peers_of(session), [&] { carrying([&] { result = act(); }); }); });
  return result;
}

// Makes a method that hears of a call of the face in `lent`, a CheckpointedJob.
template <class Result>
auto hearing(Result (JobRecording::*method)(job_checkpoint::JobAccess&)) {
  return [method](JobRecording& self, Session& session, py::object lent) {
    PythonCheckpointedJob job(session, std::move(lent));
    return uncarried([&] { return (self.*method)(job); });
  };
}

void bind_recording(py::module_& module) {
  py::class_<JobRecording>(module, "Recording")
      .def(py::init([](Session& session) { return std::make_unique<JobRecording>(session.run_recorder()); }))
      .def("begin_step", hearing(&JobRecording::begin_step))
      .def("begin_call", hearing(&JobRecording::begin_call))
      .def("note_cut", hearing(&JobRecording::note_cut))
      .def("before_update", hearing(&JobRecording::before_update))
      .def("end", hearing(&JobRecording::end))
      .def(
          "see_results",
          [](JobRecording& self, const std::vector<std::vector<at::Tensor>>& results) { self.see_results(results); },
          py::call_guard<Release>())
      .def("end_step", &JobRecording::end_step, py::call_guard<Release>());
}

void bind_saves(py::module_& module) {
  py::class_<SharedSave, SaveHolder>(module, "Save")
      .def_property_readonly("is_over", [](const SharedSave& held) { return held.save->is_over(); })
      .def("wait", [](SharedSave& held) { held.save->wait(); }, py::call_guard<Release>());
  py::class_<Saves, std::unique_ptr<Saves, EndWithoutGil>>(module, "Saves")
      .def(py::init<>())
      .def("end", &Saves::end, py::call_guard<Release>())
      .def("check_before_step", &Saves::check_before_step, py::call_guard<Release>())
      .def("drop", &Saves::drop, py::call_guard<Release>());
}

}  // namespace

void bind_checkpoint(py::module_& module) {
  bind_saves(module);
  bind_recording(module);
  py::class_<Resumption, std::shared_ptr<Resumption>>(module, "Resumption")
      .def_property_readonly("partition", &Resumption::partition)
      .def_property_readonly("has_optimizers", &Resumption::has_optimizers)
      .def("load", [](Resumption& resumption) { uncarried([&] { resumption.load(); }); });
  module.def("save_job", &save_job, py::arg("session"), py::arg("job"), py::arg("saves"), py::kw_only(),
             py::arg("folder"), py::arg("tag"), py::arg("partial"), py::arg("keep"), py::arg("asynchronous"),
             py::arg("allow_objects"), py::keep_alive<0, 1>(), py::keep_alive<3, 1>());
  module.def("resume_job", &resume_job, py::arg("session"), py::arg("job"), py::arg("saves"), py::kw_only(),
             py::arg("folder"), py::arg("tag"), py::arg("partial"), py::arg("strict"), py::arg("load_optimizer"),
             py::arg("load_sharded_optimizer_state"), py::arg("verify"), py::arg("allow_objects"), py::arg("translate"),
             py::arg("missing_ok"));
  module.def(
      "require_ready",
      [](Session& session, py::object lent) {
        const PythonCheckpointedJob job(session, std::move(lent));
        uncarried([&] {
          job_checkpoint::together(job.peers(), [&] { job_checkpoint::require_ready(job); });
          job_checkpoint::require_same_copies(job);
        });
      },
      py::arg("session"), py::arg("job"));
  module.def("require_model", &job_checkpoint::require_model, py::arg("has_model"), py::arg("call"));
  module.def("together", &together, py::arg("session"), py::arg("act"));
}

}  // namespace lamina::python
