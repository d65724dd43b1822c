// SPDX-License-Identifier: Apache-2.0
#include "lamina/job_checkpoint/generators.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

#include "lamina/base/error.h"
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

SavedGenerators::SavedGenerators(JobAccess& job, const Reader& reader, const About& about)
    : are_there_(about.layout == JobLayout::of(job.ranks().topology)) {
  if (!are_there_) return;
  const auto rank = job.ranks().own;
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
