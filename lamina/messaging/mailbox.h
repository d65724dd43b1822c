// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/base/wait.h"
#include "lamina/messaging/exchange.h"
#include "lamina/messaging/handlers.h"
#include "lamina/messaging/mutual_waits.h"
#include "lamina/transport/transport.h"

namespace lamina::messaging {

inline constexpr transport::Kind kObject = "object";  // a value on the channel that its fields name

// The name of a group's own channel: what its members exchange there arrives in order between each two of them. Short
// also for a large group.
std::string group_channel(const char* what, std::span<const base::Rank> members);

// Names a wait in which these ranks are still to be heard.
using WaitNamer = std::function<std::string(std::span<const base::Rank> awaited)>;

// How an exchange goes.
struct Course {
  WaitNamer named = nullptr;  // names the wait; empty: by its channel
  bool is_loose = false;      // members may be in different calls, and tell the others themselves of what they throw
  // Numbers the exchange, from 1 and ever higher, where members may leave some out; else they are counted.
  std::optional<std::int64_t> number = {};
};

// Values between ranks outside the pipeline: objects of the user, plans, parameters. Each pair of ranks has any number
// of channels, told apart by name; within one, values arrive in the order sent. All waits here, and others of the job,
// end as [Note: mutual waits] says.
class Mailbox {
 public:
  Mailbox(transport::Transport& transport, Handlers& handlers);

  base::Rank rank() const { return transport_.rank(); }
  MutualWaits& waits() { return waits_; }

  void send(base::Rank to, const std::string& channel, value::Value value);
  // Sends a value without tensors, and waits for nobody; see Transport::tell.
  void tell(base::Rank to, const std::string& channel, value::Value value);

  // The next value of `channel` from `from`. Throws base::PeerError when that rank is lost and has sent no more,
  // base::TimeoutError, and what the patience's interrupt throws.
  value::Value receive(base::Rank from, const std::string& channel, const base::Patience& patience);

  // Hears every rank of `from`: `take` gets what comes, under this mailbox's lock, and says when that rank has said
  // enough; what it throws ends the wait. `what` names the wait. Throws what
  // receive() throws.
  using Take = std::function<bool(base::Rank from, value::Value value)>;
  void hear(std::vector<base::Rank> from, const std::string& channel, const base::Patience& patience, const Take& take,
            const WaitNamer& what);

  // Takes the value where it has come already.
  std::optional<value::Value> poll(base::Rank from, const std::string& channel);

  // Every member calls with the same `members`, its own rank among them, for the same purpose, which begins the name of
  // a channel: makes one value of theirs; see [Note: meetings]. Throws base::DesyncError, on all, where members give
  // different parts of their calls (see base::Call), and what keeps any member from it. base::UsageError comes in a
  // thread beside one that exchanges with the same members: the two would have no order.
  value::Value exchange(std::span<const base::Rank> members, const char* purpose, value::Value value,
                        const Merge& merge, const base::Patience& patience, const Course& course = {});
  // The members' values, in that order: an exchange that gives each of them to all.
  std::vector<value::Value> all_gather(std::span<const base::Rank> members, value::Value value,
                                       const base::Patience& patience);
  // Returns when every member has called.
  void barrier(std::span<const base::Rank> members, const base::Patience& patience, const char* purpose = "barrier");

  // Waits until one of `members` is lost, at most `within`; none when none is.
  std::optional<base::Loss> loss(std::span<const base::Rank> members, std::chrono::milliseconds within);
  // Throws as above for the first rank that was lost, whichever it is: others may have left because of it.
  std::optional<base::Loss> first_loss();

  void lose(const base::Loss& loss);  // from the transport's thread

 private:
  using Key = std::pair<base::Rank, std::string>;
  struct Item {
    std::int64_t number;  // among those of its channel; of an exchange among those of the group
    value::Value value;
  };
  using Boxes = std::map<Key, std::deque<Item>>;

  void deliver(transport::Message&& message);  // kObject, from the transport's thread
  std::int64_t next_number(base::Rank to, const std::string& channel);
  transport::Message message(const std::string& channel, std::int64_t number, value::Value value) const;
  value::Value take(Boxes::iterator box);
  bool heard_enough(base::Rank from, const std::string& channel, const Take& take);
  // A value that a thread waits for: that of this number, or the next one (0).
  struct Lacked {
    base::Rank from;
    const std::string& channel;
    std::int64_t number;
    const base::Call& call;
    const MutualWaits::Scope& scope;
    const WaitNamer& named;  // empty: by the channel
    bool is_loose = false;
  };
  value::Value await(const Lacked& lacked, const base::Patience& patience);
  // These are called under the lock. The second drops what came before.
  std::string name(const Lacked& lacked);
  bool is_here(base::Rank from, const std::string& channel, std::int64_t number);
  [[noreturn]] void throw_lost(const base::Loss& loss, const Lacked& lacked);
  void meet(std::span<const base::Rank> members, const std::string& channel, std::int64_t number, Given& given,
            const Merge& merge, const base::Patience& patience, const base::Call& call, const Course& course);
  void give(base::Rank to, const transport::Message& word);
  void require_members(std::span<const base::Rank> members, const Lacked& lacked);
  void forget(const Key& box, std::int64_t until);  // values of exchanges; under the lock
  MutualWaits::Keeper values_kept();
  MutualWaits::Keeper exchanges_kept();

  transport::Transport& transport_;
  MutualWaits waits_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  Boxes boxes_;                                    // none is empty
  std::map<Key, std::int64_t> sent_, taken_;       // how many values of each channel
  std::map<std::string, std::int64_t> exchanges_;  // how many of each group
  std::set<std::string> exchanging_;               // channels of groups in which a thread waits
  struct Lost {
    base::Loss loss;
    base::Clock::time_point at;
  };
  std::map<base::Rank, Lost> lost_;
  std::optional<base::Loss> first_loss_;
};

}  // namespace lamina::messaging
