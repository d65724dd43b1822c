// SPDX-License-Identifier: Apache-2.0
#include "lamina/job_checkpoint/copies.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/messaging/agreement.h"
#include "lamina/verification/digest_of.h"

namespace lamina::job_checkpoint {
namespace {

// The parameters of which others of a TP_GROUP have all that this rank has.
std::vector<const model::Parameter*> copies_here(const JobAccess& job) {
  auto rows = job.table().here();
  std::erase_if(rows, [](const auto* row) {
    const bool has_digest = verification::digest_can_be_made(row->tensor.scalar_type());
    return row->layout.buffer || row->layout.slicing || !has_digest;
  });
  return rows;
}

// Says which of them differs, given the digests of all members; nothing where none does.
std::optional<value::Value> difference(const std::vector<value::Value>& everyone,
                                       const std::vector<const model::Parameter*>& rows,
                                       const std::vector<base::Rank>& members) {
  const auto& first = everyone.front().as<value::List>().items;
  for (std::size_t member = 1; member < everyone.size(); ++member) {
    const auto& others = everyone[member].as<value::List>().items;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (first.at(i).as<std::int64_t>() == others.at(i).as<std::int64_t>()) continue;
      return value::Value(base::str(
          rows[i]->layout.name, " has other values on rank ", members[member], " than on rank ", members.front(),
          ", and the ranks of a TP_GROUP have copies of it that are alike: what is written to parameters "
          "has to be the same on all of them; load a checkpoint from before"));
    }
  }
  return std::nullopt;
}

}  // namespace

void require_same_copies(const JobAccess& job) {
  const auto ranks = job.ranks();
  const auto members = ranks.topology.members(topology::Group::kTp, ranks.own);
  if (members.size() == 1 || !job.has_model() || !job.is_cut()) return;
  const auto rows = copies_here(job);
  value::List own;
  for (const auto* row : rows) {
    const auto digest = verification::digest_of(held_here(job, row->tensor).detach(), /*bits=*/true);
    own.items.emplace_back(static_cast<std::int64_t>(digest.bits));
  }
  const auto everyone = ranks.mailbox.all_gather(members, own, ranks.patience());
  // The ranks of other groups hear of it, too.
  const auto first =
      messaging::first_given(ranks.mailbox, ranks.everyone(), difference(everyone, rows, members), ranks.patience());
  if (first) throw base::DesyncError(first->value.as<std::string>(), base::Code{"tp-copies"});
}

}  // namespace lamina::job_checkpoint
