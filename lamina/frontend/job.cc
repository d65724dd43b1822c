// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/job.h"

#include <algorithm>
#include <exception>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lamina/base/log.h"
#include "lamina/device/rank_device.h"
#include "lamina/dist/dist.h"
#include "lamina/faces/sayings.h"
#include "lamina/frontend/current.h"
#include "lamina/job_checkpoint/saves.h"
#include "lamina/session/device_end.h"
#include "lamina/verification/configuration.h"

namespace lamina {
namespace {

void require_same(const config::Config& now, const config::Config& asked) {
  const auto differences = config::differences(now, asked);
  if (differences.empty()) return;
  throw faces::refusal<base::ConfigError>("other-configuration", differences);
}

const environment::World& world() { return frontend::current().session->world(); }

}  // namespace

std::string frontend::to_json(Settings settings) {
  std::string json;
  for (const auto& [key, setting] : settings) {
    json += base::str(json.empty() ? "" : ", ", config::show(std::string(key)), ": ", setting.json());
  }
  return "{" + json + "}";
}

void init(Settings settings) { init(frontend::to_json(settings)); }

void init(const std::string& json) {
  const bool again = frontend::has_current();
  if (again && json == "{}") return;
  const auto environment = environment::process_environment();
  auto parsed = verification::read_configuration(json, environment);
  if (again) return require_same(frontend::current().session->asked(), config::with_defaults(parsed.config));
  if (parsed.config.tensor_parallel_degree > 1 && !parsed.config.prescaled_batch) {
    throw base::ConfigError(
        "prescaled_batch: with tensor_parallel_degree above 1 it is to be true in C++ programs, whose ranks of a "
        "TP_GROUP "
        "read one batch");
  }
  for (const auto& warning : parsed.warnings) base::log_warning(warning);
  const bool clips = std::ranges::find(parsed.given, "sdp_gradient_clipping") != parsed.given.end();
  frontend::begin(std::move(parsed.config)).clips_by_default = !clips;
}

bool is_initialized() { return frontend::has_current(); }

void shutdown() {
  if (!frontend::has_current()) return;
  const auto& job = frontend::outside_step("shutdown()");
  const auto saves = job.saves;
  std::exception_ptr error;
  try {
    if (saves != nullptr) saves->end();
    session::await_device(*job.session);
  } catch (...) {
    error = std::current_exception();
  }
  frontend::end();
  if (error) std::rethrow_exception(error);
}

int rank() { return frontend::has_current() ? static_cast<int>(world().rank.value) : dist::get_global_rank(); }
int size() { return frontend::has_current() ? world().size : dist::get_world_size(); }
at::Device device() { return devices::rank_device(); }

int local_rank() { return frontend::has_current() ? world().local_rank : dist::get_local_rank(); }
int rank_in(Group group) {
  const auto& session = *frontend::current().session;
  return session.topology().index(group, session.world().rank);
}
int size_of(Group group) { return frontend::current().session->topology().size(group); }
int num_microbatches() { return frontend::current().session->job().microbatches(); }

void set_num_microbatches(int microbatches) {
  auto& session = *frontend::outside_step("set_num_microbatches()").session;
  if (microbatches < 1) throw faces::refusal("not-a-count", "set_num_microbatches()", microbatches);
  session.job().set_microbatches(microbatches);
}

std::uint64_t rng_step() {
  const auto steps = frontend::outside_step("rng_step()").session->job().seeds().steps();
  if (!steps) throw faces::refusal("no-seed", "rng_step()");
  return *steps;
}

void set_rng_step(std::uint64_t steps) {
  auto& seeds = frontend::outside_step("set_rng_step()").session->job().seeds();
  if (!seeds.steps()) throw faces::refusal("no-seed", "set_rng_step()");
  seeds.go_on_after(steps);
}

void set_rng_seed(std::uint64_t seed) { frontend::outside_step("set_rng_seed()").session->job().seeds().reseed(seed); }

void barrier(Group group, CallSite site) {
  auto& session = *frontend::outside_step("barrier()").session;
  session.mailbox().barrier(session.members(group), frontend::patience(session, "lamina::barrier()", site));
}

std::vector<Value> all_gather(Group group, const Value& value, CallSite site) {
  auto& session = *frontend::outside_step("all_gather()").session;
  return session.mailbox().all_gather(session.members(group), value,
                                      frontend::patience(session, "lamina::all_gather()", site));
}

c10::intrusive_ptr<c10d::ProcessGroup> process_group(Group group, CallSite site) {
  auto& session = *frontend::outside_step("the first use of process_group()").session;
  return session.groups().torchs(group, frontend::patience(session, "lamina::process_group()", site));
}

}  // namespace lamina
