// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "lamina/base/ids.h"
#include "lamina/base/wait.h"
#include "lamina/messaging/mailbox.h"
#include "lamina/messaging/presence.h"

namespace c10d {
class ProcessGroup;
}

namespace lamina::collective {

// Ranks that compute on tensors together. Every member makes the same calls in the same order, with dense contiguous
// tensors of the same size and type; a call returns when the tensor holds the result. All throw base::PeerError when a
// member is gone, base::TimeoutError, and what an interrupt throws; the tensor is then lost, and so is the group.
class ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;

  virtual int size() const = 0;
  virtual void sum(at::Tensor& tensor) = 0;
  virtual void max(at::Tensor& tensor) = 0;
  // The tensor of member `root`, an index into the group.
  virtual void broadcast(at::Tensor& tensor, int root = 0) = 0;
};

// Facts of the job that a wait for torch's collectives needs.
struct GroupOptions {
  std::string purpose;              // what an error begins with, such as "averaging gradients"
  std::vector<base::Rank> members;  // world ranks
  base::Patience patience;
};

// torch's group, which has to outlive this one. `mailbox` knows who is lost, `presence` who has come.
std::unique_ptr<ProcessGroup> wrap(c10d::ProcessGroup& group, messaging::Mailbox& mailbox,
                                   messaging::Presence& presence, GroupOptions options);

}  // namespace lamina::collective
