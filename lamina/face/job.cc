// SPDX-License-Identifier: Apache-2.0
#include "lamina/face/job.h"

#include <ATen/Parallel.h>

#include <cstdlib>
#include <sstream>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lamina/base/log.h"
#include "lamina/face/calls.h"
#include "lamina/face/current.h"
#include "lamina/face/model.h"
#include "lamina/pipeline/activity.h"
#include "lamina/pipeline/streams.h"

namespace lamina {
namespace face {
namespace {

Current* the_current = nullptr;
int jobs = 0;

pipeline::FaceHooks hooks() {
  return {{.thread_begins = [] { at::init_num_threads(); }}, nullptr, nullptr};
}

// The peers learn of the end of this process from the system, when it has ended. The session outlives all threads.
void at_exit() {
  if (the_current == nullptr) return;
  set_router(nullptr);
  the_current->session->job().leave();
}

}  // namespace

Current::Current(base::Config config)
    : session(std::make_unique<pipeline::Session>(std::move(config), base::read_world(base::process_environment()),
                                                  hooks())) {
  ++jobs;
}
Current::~Current() = default;

const c10::intrusive_ptr<c10d::ProcessGroup>& Current::group(Group group) {
  auto& made = made_[group];
  if (!made) {
    if (!groups_) {
      const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(session->patience().timeout);
      groups_ =
          std::make_unique<collective::C10dGroups>(session->world(), base::str("lamina/c++/", jobs), timeout, nullptr);
    }
    made = groups_->make(std::string(topology::name(group)), session->members(group));
  }
  return made;
}

bool has_current() { return the_current != nullptr; }
Current& current() {
  if (the_current == nullptr) {
    throw base::UsageError("lamina is not initialised in this process: call lamina::init() first");
  }
  return *the_current;
}

bool in_step() { return pipeline::in_streams(); }

Current& outside_step(const std::string& what) {
  if (in_step()) {
    throw base::UsageError(base::str(what,
                                     " was called inside a step function, which runs once per microbatch and on one "
                                     "rank of the pipeline only: call it before or after the step"));
  }
  return current();
}

}  // namespace face

namespace {

std::string quoted(const std::string& text) {
  std::ostringstream out;
  out << '"';
  for (const char letter : text) {
    if (letter == '"' || letter == '\\') out << '\\';
    out << letter;
  }
  out << '"';
  return out.str();
}

void require_same(const base::Config& now, const base::Config& asked) {
  const auto differences = base::differences(now, asked);
  if (differences.empty()) return;
  throw base::ConfigError(
      base::str("init() was called before with another configuration; call shutdown() first to change it. Then and "
                "now: ",
                differences));
}

}  // namespace

std::string Setting::json_of(bool value) { return value ? "true" : "false"; }
std::string Setting::json_of(std::int64_t value) { return std::to_string(value); }
std::string Setting::json_of(double value) {
  std::ostringstream out;
  out.precision(17);
  out << value;
  return out.str();
}
std::string Setting::json_of(const std::string& value) { return quoted(value); }

void init(Settings settings) {
  std::string json;
  for (const auto& [key, setting] : settings) json += (json.empty() ? "" : ", ") + quoted(key) + ": " + setting.json();
  init("{" + json + "}");
}

void init(const std::string& json) {
  const bool again = face::has_current();
  if (again && json == "{}") return;
  const auto environment = base::process_environment();
  const auto launched = base::read_world(environment).launched;
  auto parsed = base::parse_config({json, environment("SM_HP_MP_PARAMETERS"), launched});
  if (again) return require_same(face::current().session->config(), base::with_defaults(parsed.config));
  for (const auto& warning : parsed.warnings) base::log_warning(warning);
  [[maybe_unused]] static const int registered = std::atexit(face::at_exit);
  face::the_current = new face::Current(std::move(parsed.config));
  auto& session = *face::the_current->session;
  if (const int replicas = dp_size(); replicas > 1 && rank() == 0 && !session.config().ddp) {
    base::log_warning(
        base::str(replicas, " replicas of the model train apart: their gradients are not averaged without ddp: true"));
  }
}

bool is_initialized() { return face::has_current(); }

void shutdown() {
  if (!face::has_current()) return;
  auto& ending = face::outside_step("shutdown()");
  face::set_router(nullptr);
  face::the_current = nullptr;
  const bool ended = ending.session->job().close(true);
  if (ended) delete &ending;  // a session that a thread still works in lives as long as the process
}

int rank() { return static_cast<int>(face::current().session->world().rank.value); }
int size() { return face::current().session->world().size; }
int local_rank() { return face::current().session->world().local_rank; }
int rank_in(Group group) {
  const auto& session = *face::current().session;
  return session.topology().index(group, session.world().rank);
}
int size_of(Group group) { return face::current().session->topology().size(group); }
int num_microbatches() { return face::current().session->config().microbatches; }

void barrier(Group group) {
  auto& session = *face::outside_step("barrier()").session;
  session.job().mailbox().barrier(session.members(group), session.patience());
}

std::vector<Value> all_gather(Group group, const Value& value) {
  auto& session = *face::outside_step("all_gather()").session;
  return session.job().mailbox().all_gather(session.members(group), value, session.patience());
}

c10::intrusive_ptr<c10d::ProcessGroup> process_group(Group group) {
  return face::outside_step("the first use of process_group()").group(group);
}

}  // namespace lamina
