// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/current.h"

#include <ATen/Parallel.h>
#include <stdlib.h>  // on_exit
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "lamina/base/log.h"
#include "lamina/device/failure.h"
#include "lamina/faces/sayings.h"
#include "lamina/frontend/calls.h"
#include "lamina/frontend/device_errors.h"
#include "lamina/job_checkpoint/record_job.h"
#include "lamina/job_checkpoint/saves.h"
#include "lamina/rendezvous/job_store.h"
#include "lamina/runtime/rng_streams.h"
#include "lamina/session/change.h"
#include "lamina/session/device_end.h"
#include "lamina/session/step_check.h"
#include "lamina/verification/run_recorder.h"

namespace lamina::frontend {
namespace {

// How long others may take to come to collectives that this rank has begun, at its orderly end.
constexpr auto kLate = std::chrono::seconds(2);

Current* the_current = nullptr;

// Waits for a checkpoint that is being saved.
void end_saves() {
  if (the_current->saves == nullptr) return;
  try {
    the_current->saves->end();
  } catch (const std::exception& error) {
    base::log_warning(base::str("the last checkpoint was not saved: ", error.what()));
  }
}

// Notes what the last step has left.
void end_recording() {
  if (the_current->recording == nullptr) return;
  the_current->recording->end(*the_current->lend());
}

// Closes a job in order, and destroys it unless a thread still works in it: then it lives on.
void close_job(Current* ending) {
  const bool ended = ending->session->close(true);
  const auto late = base::Deadline::after(kLate);
  while (std::uncaught_exceptions() == 0 && ending->session->groups().stuck() && !late.expired()) continue;
  if (ended && !ending->session->groups().stuck()) delete ending;
}

// Ends the job with the process. The peers learn of the end of this process from the system, when it has ended. The
// session outlives all threads.
//
// A thread may still be at work in a step, even this one, in a module that calls std::exit. Then the exit handlers that
// are left would destroy what it works with, torch's statics first. So the process ends here, with its exit code.
void at_exit(int code, void*) {
  if (the_current == nullptr) return;
  auto& session = *the_current->session;
  if (devices::is_failed()) {  // what lies on it is not to be freed
    std::cout.flush();
    std::fflush(nullptr);
    ::_exit(code == 0 ? EXIT_FAILURE : code);
  }
  if (!session.job().in_step()) {
    end_saves();
    if (code == 0) end_recording();
    set_router(nullptr);
    session.tell_leaving(faces::said("end-of-program"));
    if (session.leave()) return;
  }
  std::cout.flush();
  std::fflush(nullptr);
  ::_exit(code);
}

}  // namespace

session::FaceHooks face_hooks() {
  return {{.thread_begins = [] { at::init_num_threads(); }}, explaining_failures(), nullptr};
}

Current::Current(std::shared_ptr<session::Session> its) : session(std::move(its)) {
  check = session::StepCheck::of_job(*session);
  if (const auto& recorder = session->run_recorder(); recorder != nullptr && recorder->writes()) {
    recording = std::make_unique<job_checkpoint::JobRecording>(recorder);
  }
  session->groups().make_by([this](topology::Group axis) { return make_group(axis); });
}
Current::~Current() = default;

c10::intrusive_ptr<c10d::ProcessGroup> Current::make_group(topology::Group axis) {
  if (!groups_) {
    const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(session->patience().timeout);
    const bool plain = session->config().ddp_dist_backend == config::DistBackend::kNccl;
    groups_ = std::make_unique<collective::C10dGroups>(session->world(), meeting_, timeout, nullptr,
                                                       plain ? &collective::make_gloo : &collective::make_backend);
  }
  const std::string name(topology::name(axis));
  const auto members = session->members(axis);
  return groups_->make(name, members, [&] { session->require_nobody_lost(members, "making the group " + name); });
}

Current& begin(config::Config config) {
  [[maybe_unused]] static const int registered = ::on_exit(at_exit, nullptr);
  the_current = new Current(std::make_shared<session::Session>(
      std::move(config), environment::read_world(environment::process_environment()), face_hooks()));
  return *the_current;
}

void end() {
  end_recording();
  set_router(nullptr);
  Current* const ending = std::exchange(the_current, nullptr);
  ending->session->tell_leaving("called lamina::shutdown()");
  close_job(ending);
}

Current& go_over(std::shared_ptr<session::Session> session) {
  auto changed = std::make_unique<Current>(std::move(session));
  changed->held = the_current->held;
  changed->loss_scale = the_current->loss_scale;
  changed->callbacks = the_current->callbacks;
  changed->clips_by_default = the_current->clips_by_default;
  changed->before_step = the_current->before_step;
  changed->open_after = the_current->open_after;
  session::await_device(*the_current->session);
  set_router(nullptr);
  close_job(std::exchange(the_current, changed.release()));
  session::take_over(*the_current->session);
  return *the_current;
}

base::Call call_at(const std::string& name, const std::source_location& site) {
  return {name, base::str(site.file_name(), ":", site.line()), name};
}

base::Patience patience(const session::Session& session, const std::string& name, const std::source_location& site) {
  auto patience = session.patience();
  patience.call = [=] { return call_at(name, site); };
  return patience;
}

void end_where_all_is_recorded(bool (job_checkpoint::JobRecording::*begin)(job_checkpoint::JobAccess&)) {
  if (the_current == nullptr || the_current->recording == nullptr) return;
  if (((*the_current->recording).*begin)(*the_current->lend())) std::exit(0);
}

bool has_current() { return the_current != nullptr; }
Current& current() {
  if (the_current == nullptr) {
    throw faces::refusal("not-initialised", "lamina::init()");
  }
  return *the_current;
}

void everywhere(const std::string& what) {
  if (has_current()) the_current->session->require_everywhere(what);
}

Current& outside_step(const std::string& what) {
  if (runtime::in_step()) {
    throw faces::refusal("inside-step", what);
  }
  return current();
}

}  // namespace lamina::frontend
