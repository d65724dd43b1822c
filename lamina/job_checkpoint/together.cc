// SPDX-License-Identifier: Apache-2.0
#include "lamina/job_checkpoint/together.h"

#include "lamina/messaging/agreement.h"

namespace lamina::job_checkpoint {

void together(const checkpoint::Peers& peers, const std::function<void()>& act) {
  messaging::act_together(peers.mailbox, peers.world, act, peers.patience);
}

value::Value from_first(const checkpoint::Peers& peers, const std::function<value::Value()>& make) {
  return messaging::made_by_first(peers.mailbox, peers.world, make, peers.patience);
}

}  // namespace lamina::job_checkpoint
