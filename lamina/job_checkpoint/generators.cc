// SPDX-License-Identifier: Apache-2.0
#include "lamina/job_checkpoint/generators.h"

#include <c10/core/DeviceType.h>

#include <optional>
#include <string>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"
#include "lamina/device/generators.h"
#include "lamina/verification/run_recorder.h"

namespace lamina::job_checkpoint {
namespace {

std::string face_name(base::Rank rank) { return base::str("generators/", rank); }

// Torch's generators here, by the names that their states have in a checkpoint of that rank. A device's is that of its
// type, for states of other types are nothing to it.
std::vector<std::pair<std::string, at::Generator>> torchs(base::Rank rank) {
  const auto host = base::str("generator/", rank);
  std::vector<std::pair<std::string, at::Generator>> found{{host, devices::generator(devices::kHost)}};
  if (const auto device = devices::rank_generator(); device.defined()) {
    const auto type = c10::DeviceTypeName(device.device().type(), /*lower_case=*/true);
    found.emplace_back(base::str(host, "/", type), device);
  }
  return found;
}

// Finds the rank whose generators this one goes on with. In another layout that is nobody, but in a run that is
// compared with one in theirs: there it is the rank that led this copy of the model, placed as by default.
std::optional<base::Rank> saver_of(const collective::Ranks& ranks, const About& about) {
  if (about.layout == JobLayout::of(ranks.topology)) return ranks.own;
  if (!about.layout || !verification::read_terms(environment::process_environment())) return {};
  const auto& [pp, rdp, shard, tp, world] = *about.layout;
  const topology::Topology saved(static_cast<int>(world), static_cast<int>(pp), static_cast<int>(tp));
  if (saved.size(topology::kReplicas) != ranks.topology.size(topology::kReplicas)) return {};
  return saved.translate(topology::kReplicas, ranks.topology.index(topology::kReplicas, ranks.own), base::Rank(0));
}

}  // namespace

void add_generators(JobAccess& job, SaveList& list) {
  const auto rank = job.ranks().own;
  for (const auto& [name, generator] : torchs(rank)) list.add_content(name, devices::state_of(generator));
  const auto rest = job.generators();
  if (rest.get_if<value::None>() == nullptr) list.add_tree(face_name(rank), rest);
}

SavedGenerators::SavedGenerators(JobAccess& job, const Reader& reader, const About& about) {
  const auto saver = saver_of(job.ranks(), about);
  are_there_ = saver.has_value();
  if (!are_there_) return;
  const auto rank = *saver;
  for (const auto& [name, generator] : torchs(rank)) {
    const auto state = reader.content(name);
    if (!state.defined()) continue;
    if (!devices::takes_state(generator, state)) {
      throw base::FormatError(base::str(reader.folder().string(), ": ", name, " is no state of one"));
    }
    states_.emplace_back(generator, state);
  }
  const auto number = static_cast<std::size_t>(rank.value);
  const bool is_told = number < about.generators.size();
  job.take_generators(is_told ? about.generators[number] : reader.tree(face_name(rank)));
}

void SavedGenerators::set(JobAccess& job) const {
  if (!are_there_) return;
  for (const auto& [generator, state] : states_) devices::set_state(generator, state);
  job.set_generators();
}

}  // namespace lamina::job_checkpoint
