// SPDX-License-Identifier: Apache-2.0
#include "lamina/job_checkpoint/generators.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

#include "lamina/base/str.h"

namespace lamina::job_checkpoint {
namespace {

std::string engine_name(base::Rank rank) { return base::str("generator/", rank); }
std::string face_name(base::Rank rank) { return base::str("generators/", rank); }

}  // namespace

void add_generators(JobAccess& job, SaveList& list) {
  const auto rank = job.ranks().own;
  list.add_content(engine_name(rank), at::detail::getDefaultCPUGenerator().get_state());
  const auto rest = job.generators();
  if (rest.get_if<value::None>() == nullptr) list.add_tree(face_name(rank), rest);
}

std::optional<Generators> read_generators(const JobAccess& job, const Reader& reader, const About& about) {
  if (about.layout != JobLayout::of(job.ranks().topology)) return std::nullopt;
  const auto rank = job.ranks().own;
  const auto number = static_cast<std::size_t>(rank.value);
  const bool is_told = number < about.generators.size();
  return Generators{reader.content(engine_name(rank)),
                    is_told ? about.generators[number] : reader.tree(face_name(rank))};
}

void set_generators(JobAccess& job, const Generators& states) {
  if (states.engine.defined()) {
    auto generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard guard(generator.mutex());
    generator.set_state(states.engine);
  }
  job.set_generators(states.face);
}

}  // namespace lamina::job_checkpoint
