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
#include "lamina/job_checkpoint/held_job.h"
#include "lamina/job_checkpoint/record_job.h"
#include "lamina/job_checkpoint/resume_job.h"
#include "lamina/job_checkpoint/resumption.h"
#include "lamina/job_checkpoint/save_job.h"
#include "lamina/job_checkpoint/together.h"
#include "lamina/session/peers.h"
#include "lamina/session/session.h"
#include "lamina/verification/run_recorder.h"
#include "python/bindings/bindings.h"
#include "python/bindings/carried_errors.h"
#include "python/bindings/checkpointed_job.h"
#include "python/bindings/convert.h"
#include "python/bindings/saves.h"

namespace lamina::python {
namespace {

using job_checkpoint::HeldJob;
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
  uncarried([&] { job_checkpoint::together(session::peers_of(session), [&] { carrying([&] { result = act(); }); }); });
  return result;
}

std::shared_ptr<HeldJob> hold_job(Session& session, py::object lent) {
  PythonCheckpointedJob job(session, std::move(lent));
  return uncarried([&] {
    job_checkpoint::require_changeable(job);
    return std::make_shared<HeldJob>(job_checkpoint::hold_job(job));
  });
}

std::shared_ptr<Resumption> held_resumption(const HeldJob& held, Session& session, py::object lent,
                                            bool keeps_options) {
  const auto job = std::make_shared<PythonCheckpointedJob>(session, std::move(lent));
  auto resumption = job_checkpoint::resumption_of(held, job);
  if (keeps_options) resumption->keep_options();
  return resumption;
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
  py::class_<JobRecording>(module, "Recording",
                           "Tells the recorder of a session what its hooks do not see: see "
                           "lamina/job_checkpoint/record_job.h. `job`: a CheckpointedJob.")
      .def(py::init([](Session& session) { return std::make_unique<JobRecording>(session.run_recorder()); }),
           py::arg("session"))
      .def("begin_step", hearing(&JobRecording::begin_step), py::arg("session"), py::arg("job"),
           "A step function is called. True: the program is to end.")
      .def("begin_call", hearing(&JobRecording::begin_call), py::arg("session"), py::arg("job"),
           "A module is called. True: the program is to end.")
      .def("note_cut", hearing(&JobRecording::note_cut), py::arg("session"), py::arg("job"),
           "The model is cut, and has its values.")
      .def("before_update", hearing(&JobRecording::before_update), py::arg("session"), py::arg("job"),
           "An optimizer that is not the job's is about to update.")
      .def("end", hearing(&JobRecording::end), py::arg("session"), py::arg("job"), "The job ends.")
      .def(
          "see_results",
          [](JobRecording& self, const std::vector<std::vector<at::Tensor>>& results) { self.see_results(results); },
          py::call_guard<Release>(), py::arg("results"),
          "Takes the tensors that a step function has returned for each microbatch.")
      .def("end_step", &JobRecording::end_step, py::call_guard<Release>(), "A step function has done its work.");
}

void bind_saves(py::module_& module) {
  py::class_<SharedSave, SaveHolder>(module, "Save", "A save of all ranks that is under way.")
      .def_property_readonly("is_over", [](const SharedSave& held) { return held.save->is_over(); })
      .def(
          "wait", [](SharedSave& held) { held.save->wait(); }, py::call_guard<Release>(),
          "Waits for its end, and raises what it ended with, alike on all ranks.");
  py::class_<Saves, std::unique_ptr<Saves, EndWithoutGil>>(module, "Saves", "The saves of a job: one at a time.")
      .def(py::init<>())
      .def_property_readonly("are_under_way", &Saves::are_under_way)
      .def("end", &Saves::end, py::call_guard<Release>(),
           "Waits for the one that is under way, and raises what it ended with, unless that was raised already.")
      .def("check_before_step", &Saves::check_before_step, py::call_guard<Release>(),
           "Raises, once, what it has failed with: on all ranks before the same step.")
      .def("drop", &Saves::drop, py::call_guard<Release>(), "Gives up the one that is under way, and its error.");
}

}  // namespace

void bind_checkpoint(py::module_& module) {
  bind_saves(module);
  bind_recording(module);
  py::class_<Resumption, std::shared_ptr<Resumption>>(module, "Resumption",
                                                      "A checkpoint that waits for the cut of a model.")
      .def_property_readonly("partition", &Resumption::partition,
                             "The partition of each module, where the job has as many as the saved one; else {}.")
      .def_property_readonly("has_optimizers", &Resumption::has_optimizers, "False for the model alone.")
      .def(
          "load", [](Resumption& resumption) { uncarried([&] { resumption.load(); }); },
          "Loads it into a model that is cut; collective over the world.")
      .def(
          "for_job",
          [](const Resumption& resumption, Session& session, py::object lent) {
            return resumption.for_job(std::make_shared<PythonCheckpointedJob>(session, std::move(lent)));
          },
          py::arg("session"), py::arg("job"), "The same of a job that goes on in the place of that one.")
      .def("go_on", &Resumption::go_on, py::call_guard<Release>(),
           "Has random numbers and the loss scale go on where they were.");
  py::class_<HeldJob, std::shared_ptr<HeldJob>>(module, "HeldJob",
                                                "A job in the memory of its ranks, while it changes its layout: see "
                                                "lamina/job_checkpoint/held_job.h.")
      .def(py::init(&hold_job), py::arg("session"), py::arg("job"),
           "Lists what the ranks hold; collective over the world. Raises UsageError, on all of them, where something "
           "cannot be held, or waits.")
      .def("resumption", &held_resumption, py::arg("session"), py::arg("job"), py::arg("keeps_options") = true,
           py::keep_alive<0, 2>(),
           "The Resumption of it in the session of another layout. `keeps_options`: those of the optimizers are the "
           "very ones that were saved.")
      .def_property_readonly(
          "received_bytes", [](const HeldJob& self) { return self.pieces->received_bytes(); },
          "So much has come from other ranks.");
  module.def("save_job", &save_job, py::arg("session"), py::arg("job"), py::arg("saves"), py::kw_only(),
             py::arg("folder"), py::arg("tag"), py::arg("partial"), py::arg("keep"), py::arg("asynchronous"),
             py::arg("allow_objects"), py::keep_alive<0, 1>(), py::keep_alive<3, 1>(),
             "Begins to save a job: lamina/job_checkpoint/save_job.h. Collective over the world.");
  module.def("resume_job", &resume_job, py::arg("session"), py::arg("job"), py::arg("saves"), py::kw_only(),
             py::arg("folder"), py::arg("tag"), py::arg("partial"), py::arg("strict"), py::arg("load_optimizer"),
             py::arg("load_sharded_optimizer_state"), py::arg("verify"), py::arg("allow_objects"), py::arg("translate"),
             py::arg("missing_ok"),
             "Loads a checkpoint into a job: lamina/job_checkpoint/resume_job.h. Collective over the world.");
  module.def(
      "require_ready",
      [](Session& session, py::object lent) {
        const PythonCheckpointedJob job(session, std::move(lent));
        uncarried([&] {
          job_checkpoint::together(job.peers(), [&] { job_checkpoint::require_ready(job); });
          job_checkpoint::require_same_copies(job);
        });
      },
      py::arg("session"), py::arg("job"),
      "UsageError, on all ranks, where there is nothing yet, or not now, to be saved. Collective over the world. "
      "`job`: here and below a CheckpointedJob.");
  module.def("require_model", &job_checkpoint::require_model, py::arg("has_model"), py::arg("call"),
             "UsageError where there is no model.");
  module.def("together", &together, py::arg("session"), py::arg("act"),
             "Acts on this rank, as all ranks do; then raises what failed on one of them, the first, on all. "
             "Collective over the world.");
}

}  // namespace lamina::python
