// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <concepts>
#include <initializer_list>
#include <optional>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

#include "lamina/config/scalar.h"
#include "lamina/frontend/serializer.h"
#include "lamina/topology/topology.h"

namespace c10d {
class ProcessGroup;
}

// The job that this process is in, from init to shutdown.
namespace lamina {

using topology::Group;

// The value of a key of the configuration.
class Setting {
 public:
  template <class T>
    requires(std::integral<T> || std::floating_point<T> || std::convertible_to<T, std::string>)
  Setting(const T& value) : value_(scalar(value)) {}
  Setting(std::vector<std::string> names) : value_(std::move(names)) {}
  Setting(std::nullopt_t) {}  // null
  std::string json() const { return config::show(value_); }

 private:
  template <class T>
  static config::Scalar scalar(const T& value) {
    if constexpr (std::same_as<T, bool>) {
      return value;
    } else if constexpr (std::integral<T>) {
      return static_cast<std::int64_t>(value);
    } else if constexpr (std::floating_point<T>) {
      return static_cast<double>(value);
    } else {
      return std::string(value);
    }
  }
  config::Scalar value_;
};

using Settings = std::initializer_list<std::pair<const char*, Setting>>;

namespace frontend {
std::string to_json(Settings settings);  // an object
}

// Starts lamina in this process; every process of the job calls it. The keys are those of docs/configuration.md:
// init({{"partitions", 2}, {"microbatches", 4}}). The environment variables LAMINA_CONFIG and SM_HP_MP_PARAMETERS, when
// they say anything, count instead, with a warning where that is something else. A second call without configuration,
// or with the same, does nothing. In a job of one process degrees above 1 become 1, with a warning. Throws ConfigError,
// with all that is wrong; PeerError and TimeoutError when the ranks do not find each other.
void init(Settings settings = {});
void init(const std::string& json);  // the same as a JSON object
bool is_initialized();

// Ends what init started; every rank calls it, outside of steps. Waits for a checkpoint that is being saved, and throws
// what that failed with when all else has ended. Afterwards init may be called again. A process that ends without it
// ends well: its peers learn of it when it has.
void shutdown();

// This process among those of the job; without a job what the launcher says, as lamina/dist/dist.h.
int rank();
int size();
int local_rank();
// The device that this rank computes on: the host before init, then what the key `device` has chosen.
at::Device device();
// All further ones throw UsageError before init.
int rank_in(Group group);
int size_of(Group group);
inline int pp_rank() { return rank_in(Group::kPp); }
inline int pp_size() { return size_of(Group::kPp); }
inline int tp_rank() { return rank_in(Group::kTp); }
inline int tp_size() { return size_of(Group::kTp); }
inline int rdp_rank() { return rank_in(Group::kRdp); }
inline int rdp_size() { return size_of(Group::kRdp); }
inline int dp_rank() { return rank_in(Group::kDp); }
inline int dp_size() { return size_of(Group::kDp); }
int num_microbatches();

// Into how many microbatches a step splits its batch from now on, in the place of `microbatches` of init. Every rank
// calls it alike, outside of steps. Throws UsageError inside of one, and for a number below 1.
void set_num_microbatches(int microbatches);

// In a job with the key `seed`: how many steps have drawn random numbers, which say what the next one draws. A training
// that goes on keeps it with its checkpoint and gives it back on every rank, before its first step. Both throw
// UsageError without `seed`, where the state of torch's generator says.
std::uint64_t rng_step();
void set_rng_step(std::uint64_t steps);

// Seeds the random numbers of every microbatch from the next step on, as the key `seed` does from the first. For a seed
// that is only known in the job, as one that a rank draws. Every rank calls it alike, outside of steps.
void set_rng_seed(std::uint64_t seed);

// Where the user's code calls a function, for messages.
using CallSite = std::source_location;

// Collective over the ranks of a group, outside of steps. Throw DesyncError where ranks wait in other calls for each
// other.
void barrier(Group group = Group::kWorld, CallSite site = CallSite::current());
std::vector<Value> all_gather(Group group, const Value& value, CallSite site = CallSite::current());
template <Serializable T>
std::vector<T> all_gather(Group group, const T& value, CallSite site = CallSite::current()) {
  std::vector<T> values;
  for (const Value& one : all_gather(group, to_value(value), site)) values.push_back(from_value<T>(one));
  return values;
}

// torch's process group of those ranks, the job's own, for collectives on tensors of the CPU (Gloo). Made when it is
// first used, which is collective over it; throws DesyncError where ranks first use groups in different orders. Needs
// no `ddp`.
c10::intrusive_ptr<c10d::ProcessGroup> process_group(Group group, CallSite site = CallSite::current());

}  // namespace lamina
