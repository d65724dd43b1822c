// SPDX-License-Identifier: Apache-2.0
#include "lamina/job_checkpoint/together.h"

#include "lamina/messaging/agreement.h"

namespace lamina::job_checkpoint {

void together(const checkpoint::Peers& peers, const std::function<void()>& act) {
  messaging::act_together(peers.mailbox, peers.world, act, peers.patience);
}

value::Value from_first(const checkpoint::Peers& peers, const std::function<value::Value()>& make) {
  std::optional<value::Value> made;
  together(peers, [&] {
    if (peers.is_first()) made = make();
  });
  return messaging::first_given(peers.mailbox, peers.world, std::move(made), peers.patience)->value;
}

}  // namespace lamina::job_checkpoint
