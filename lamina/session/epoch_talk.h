// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/membership/member.h"
#include "lamina/messaging/mailbox.h"
#include "lamina/transport/transport.h"

namespace lamina::session {

class WitnessLine;

// The epoch with which a session begins, the same on all of its ranks but for the line.
struct FirstEpoch {
  // Takes it from the first of these ranks, for newcomers know nothing of it; connects those with the witness who are
  // not yet. Collective where the job has a witness. `before`: as the session before says; nullptr: the job begins.
  // `machines`: of each rank, where they are several; `silence`: after which a witness that does not answer is lost.
  // Throws what WitnessLine does.
  static FirstEpoch learn(const FirstEpoch* before, messaging::Mailbox& mailbox, const std::vector<base::Rank>& ranks,
                          std::vector<int> machines, base::Clock::duration silence, const base::Patience& patience);

  std::int64_t number = 0;
  bool has_witness = false;
  std::int64_t session = 0;           // a number that the witness knows the session by
  std::shared_ptr<WitnessLine> line;  // of this process, from then on; nullptr: none
  std::vector<int> machines;          // of each rank; empty: not known
};

// Talk of the ranks of a job when some are lost, each as the member with its rank's number. Words go from
// neighbour to neighbour ([Note: relays]), and losses are those of which the mailbox hears. It is there as long as the
// session, for ranks may lose the witness before they lose each other.
class EpochTalk {
 public:
  // `least`: ranks without which nobody goes on.
  EpochTalk(messaging::Mailbox& mailbox, transport::Transport& transport, std::size_t least, base::Patience patience,
            FirstEpoch first);

  // Waits for the epoch that follows the one whose members were given last, or the first one: its members. Throws
  // base::PeerError where this rank goes on no more.
  std::vector<base::Rank> next();
  // Decides, once for all members of the epoch, whether the session that they have opened beside this one begins. Each
  // says whether it has opened it, which all must have. False: all stay in this session, perhaps in another epoch.
  // True: this session is over, and who has heard of a loss goes over with it. Throws as next().
  bool begins(bool is_open);
  // The members of the epoch.
  std::vector<base::Rank> members() const;
  // As Mailbox::all_gather, among these members. Some may not have heard of their epoch: they are answered meanwhile.
  // Others may wait in what they do without a lost rank, for one that is here already: both learn of it as of any
  // mutual wait, and who is here goes on waiting.
  std::vector<value::Value> all_gather(std::span<const base::Rank> members, value::Value value);

  // Between steps: finds out whether the witness is there still. Where it is not, the first rank says so once.
  void look_after_witness();
  // The epoch with which a session of these members begins, where this one is over.
  FirstEpoch follows() const;

 private:
  void await(const std::function<bool()>& is_decided);
  void attend();
  void exchange(bool tells_losses);
  void hear_witness();
  void tell_witness_lost();

  messaging::Mailbox& mailbox_;
  transport::Transport& transport_;
  const base::Patience patience_;
  const FirstEpoch first_;
  membership::Member member_;
  std::int64_t ended_;
  bool has_told_ = false;  // that the witness is lost
  base::Clock::time_point looked_{};
};

}  // namespace lamina::session
