// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/posted_gather.h"

#include <memory>

#include "lamina/base/rank_list.h"
#include "lamina/base/str.h"

namespace lamina::collective {
namespace {

using Transfers = std::vector<std::unique_ptr<transport::Transfer>>;

// The first error of any of them ends the wait: a member that has met another one's loss comes no more.
void await_all(const Transfers& transfers, const std::string& what, const shared_memory::Check& check) {
  base::Patience patience;
  patience.timeout = std::chrono::hours(24 * 365);  // `check` ends it
  patience.tell = nullptr;
  patience.check_interrupt = [&] {
    check(what);
    for (const auto& transfer : transfers) {
      if (transfer->done()) transfer->wait({});
    }
  };
  for (const auto& transfer : transfers) transfer->wait(patience);
}

}  // namespace

PostedGather::PostedGather(transport::Transport& transport, const std::string& group, std::vector<base::Rank> members)
    : transport_(transport),
      members_(std::move(members)),
      name_(base::str("all_gather of ", group, " over ", base::name_ranks(members_), ", number ")) {}

void PostedGather::run(std::span<const at::Tensor> parts, const at::Tensor& mine, const shared_memory::Check& check) {
  const auto name = base::str(name_, ++number_);
  const auto meaning = base::str(mine.scalar_type());
  Transfers posts, puts;
  // Puts first: a post may answer an announcement and so set bytes free, behind which what is announced later waits.
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (members_[i] != transport_.rank()) puts.push_back(transport_.put(members_[i], {name, meaning, mine}));
  }
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (members_[i] != transport_.rank()) {
      posts.push_back(transport_.post(members_[i], {name, meaning, parts[i]}));
    } else if (parts[i].const_data_ptr() != mine.const_data_ptr()) {
      parts[i].copy_(mine);
    }
  }
  const auto what = base::str("the parts of ", base::name_ranks(members_));
  await_all(posts, what, check);
  await_all(puts, what, check);
}

}  // namespace lamina::collective
