// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lamina/shared_memory/exchange.h"
#include "lamina/transport/transport.h"

namespace lamina::collective {

// An all-gather between hosts, of tensors of the CPU: each member posts the places of the other members' parts and puts
// its own to them ([Note: puts]). What it begins is numbered, so operations that follow each other never mix, whether
// or not all of them ended well. One thread at a time.
class PostedGather {
 public:
  // `group`: of these members alone in the job, this rank among them. The transport outlives it.
  PostedGather(transport::Transport& transport, const std::string& group, std::vector<base::Rank> members);

  int size() const { return static_cast<int>(members_.size()); }

  // Part i becomes what member i gives as `mine`; all are dense, contiguous, and of one type and size. `check` is told
  // what is awaited at least every 50 ms, and ends the wait by what it throws. Throws besides it base::PeerError when a
  // member is lost, base::DesyncError, on both, where two of them give other sizes or types, and base::CancelledError
  // where a member has given it up.
  void run(std::span<const at::Tensor> parts, const at::Tensor& mine, const shared_memory::Check& check);

 private:
  transport::Transport& transport_;
  const std::vector<base::Rank> members_;
  const std::string name_;
  std::int64_t number_ = 0;
};

}  // namespace lamina::collective
