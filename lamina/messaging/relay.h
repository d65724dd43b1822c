// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "lamina/messaging/mailbox.h"
#include "lamina/transport/transport.h"

namespace lamina::messaging {

// [Note: relays] A rank is connected with those at distances 1, 2, 4, ... before and after it ([Note: news]). What it
// has to say to all ranks, or now and then to any one, goes along these connections, so that nobody opens another one
// for it.
//   - A word to all is told to these neighbours, and each rank that hears it for the first time does the same. So it
//     comes to all, as long as fewer ranks end meanwhile than one has neighbours; those that ranks get for others that
//     are lost are told what was said before.
//   - A word to one rank goes to the neighbour that is nearest to it, and so on: each is at most half as far away. What
//     a rank holds that ends meanwhile does not arrive. So whoever needs an answer asks again.
inline constexpr transport::Kind kFailedRank = "failed";  // a rank's part in the job is over
inline constexpr transport::Kind kRelayed = "relayed";    // a value for some rank's mailbox

// Says to all ranks, this one included, that this one is lost, and why, a clause: "its device failed". They take it as
// they take the end of its process, and do not wait for that. From any thread; waits for nobody.
void tell_failed(transport::Transport& transport, const std::string& why);

// Gives `to` a value without tensors, on a channel of its mailbox; nothing where that one is lost. Values of a channel
// may overtake each other. From any thread; waits for nobody.
void relay(Mailbox& mailbox, transport::Transport& transport, base::Rank to, const std::string& channel,
           value::Value value);
// Sends on what has come for another rank: true where it was for that.
bool send_on(Mailbox& mailbox, transport::Transport& transport, const transport::Message& message);
// The value that has come for this one.
transport::Message arrived(transport::Message&& message);

// Words for all that one rank has heard. Used by the transport's thread alone.
class Rumours {
 public:
  Rumours(Mailbox& mailbox, transport::Transport& transport) : mailbox_(mailbox), transport_(transport) {}

  // False where it was heard before.
  bool hear(const transport::Message& word);
  // Tells the neighbours that this rank has now what they have not heard from it.
  void pass_on();

 private:
  bool is_known_of(base::Rank rank) const;

  Mailbox& mailbox_;
  transport::Transport& transport_;
  std::vector<transport::Message> words_;
  std::map<base::Rank, std::size_t> told_;  // how many of them
};

}  // namespace lamina::messaging
