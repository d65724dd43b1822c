// SPDX-License-Identifier: Apache-2.0
#include "lamina/job_checkpoint/generators.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>
#include <optional>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/verification/run_recorder.h"

namespace lamina::job_checkpoint {
namespace {

std::string engine_name(base::Rank rank) { return base::str("generator/", rank); }
std::string face_name(base::Rank rank) { return base::str("generators/", rank); }

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
  list.add_content(engine_name(rank), at::detail::getDefaultCPUGenerator().get_state());
  const auto rest = job.generators();
  if (rest.get_if<value::None>() == nullptr) list.add_tree(face_name(rank), rest);
}

SavedGenerators::SavedGenerators(JobAccess& job, const Reader& reader, const About& about) {
  const auto saver = saver_of(job.ranks(), about);
  are_there_ = saver.has_value();
  if (!are_there_) return;
  const auto rank = *saver;
  engine_ = reader.content(engine_name(rank));
  try {
    if (engine_.defined()) at::detail::createCPUGenerator().set_state(engine_);
  } catch (const c10::Error&) {
    throw base::FormatError(base::str(reader.folder().string(), ": ", engine_name(rank), " is no state of one"));
  }
  const auto number = static_cast<std::size_t>(rank.value);
  const bool is_told = number < about.generators.size();
  job.take_generators(is_told ? about.generators[number] : reader.tree(face_name(rank)));
}

void SavedGenerators::set(JobAccess& job) const {
  if (!are_there_) return;
  if (engine_.defined()) {
    auto generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard guard(generator.mutex());
    generator.set_state(engine_);
  }
  job.set_generators();
}

}  // namespace lamina::job_checkpoint
