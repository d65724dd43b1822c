// SPDX-License-Identifier: Apache-2.0
#include "lamina/job_checkpoint/held_job.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/base/hash.h"
#include "lamina/base/str.h"
#include "lamina/job_checkpoint/contents.h"
#include "lamina/job_checkpoint/together.h"
#include "lamina/messaging/agreement.h"

namespace lamina::job_checkpoint {

using value::List;
using value::Value;

void require_changeable(const JobAccess& job) {
  const auto refuse = [](const std::string& why) {
    throw base::UsageError("lamina.change(): " + why, base::Code{"change-refused"});
  };
  together(job.peers(), [&] {
    if (job.accumulates()) {
      refuse(
          "gradients wait for the next pass (backward_passes_per_step, no_sync()): call it after the pass in which "
          "they are averaged");
    }
    for (const auto* row : job.table().here()) {
      if (held_here(job, row->tensor).grad().defined()) {
        refuse(base::str(row->layout.name,
                         " has a gradient, which would be lost: call it after optimizer.step() and "
                         "optimizer.zero_grad()"));
      }
      if (const auto* other = job.table().sharer(row->tensor)) {
        refuse(base::str(row->layout.name, " and ", other->layout.name,
                         " lie in one memory, and would not in another layout: make one of them a tensor of its own"));
      }
    }
  });
}

HeldJob hold_job(JobAccess& job) {
  const auto peers = job.peers();
  job.settle();
  std::optional<Contents> contents;
  together(peers, [&] { contents.emplace(job, Contents::Of::kAll, SaveList::Has::kAll).collect(); });
  std::string names;
  for (const auto& optimizer : contents->names()) {
    for (const auto& group : optimizer) {
      for (const auto& name : group) names += name + '\n';
      names += '\t';
    }
  }
  const auto hash = static_cast<std::int64_t>(base::hash64(std::string_view(names)));
  if (!messaging::are_alike(peers.mailbox, peers.world, hash, peers.patience)) {
    throw base::UsageError(
        "lamina.change(): groups of an optimizer have other parameters on some ranks, in another order, or groups that "
        "others have not, so that nobody knows the whole groups: make the optimizer of model.parameters() on every "
        "rank, and change its groups alike on all of them",
        base::Code{"change-groups"});
  }
  contents->hand_in();
  const auto told = from_first(peers, [&]() -> Value {
    std::vector<at::Tensor> tensors;
    const auto about = write_about(contents->describe(), tensors, /*allow_objects=*/true);
    return value::Tuple{{about.dump(), List{std::vector<Value>(tensors.begin(), tensors.end())}}};
  });
  About about;
  together(peers, [&] {
    const auto& items = told.as<value::Tuple>().items;
    const auto tensor = [&](std::size_t at) { return items.at(1).as<List>().items.at(at).as<at::Tensor>(); };
    about = read_about(nlohmann::json::parse(items.at(0).as<std::string>()), tensor, {.allow_objects = true});
  });
  return {std::move(about),
          std::make_shared<checkpoint::HeldPieces>(peers, contents->list().take(), contents->list().take_others())};
}

std::shared_ptr<Resumption> resumption_of(const HeldJob& held, std::shared_ptr<JobAccess> job) {
  held.pieces->read_with(job->peers());
  auto reader = std::make_shared<Reader>(held.pieces->manifest(), held.pieces);
  return std::make_shared<Resumption>(std::move(job), std::move(reader), held.about, /*strict=*/true,
                                      OfOptimizers::kAll);
}

}  // namespace lamina::job_checkpoint
