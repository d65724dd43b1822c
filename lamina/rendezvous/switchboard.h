// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lamina/contact/handshake.h"
#include "lamina/rendezvous/socket.h"

namespace lamina::rendezvous {

// Makes the connections of a rank: those that it calls for, and those that others do, for as long as it lives.
// [Note: knocks] Of two ranks the higher one connects, so that there is never more than one connection between them. A
// lower one that wants it knocks: it connects and greets, is closed, and the higher one connects. Anybody can knock;
// all that it does is that two ranks of the job get connected. Not thread-safe. Strangers are closed and disturb
// nobody.
class Switchboard {
 public:
  struct Event {
    base::Rank peer;
    std::optional<contact::Connection> made;  // without one it could not be made, and is tried again until hang_up()
    bool refused = false;                     // nothing listens there
  };

  // `addresses`: of all ranks, as Address::text gives them.
  Switchboard(contact::Identity self, Fd listener, std::vector<std::string> addresses);
  ~Switchboard();
  Switchboard(const Switchboard&) = delete;
  Switchboard& operator=(const Switchboard&) = delete;

  // Readable when advance() has something to do. It is also to be called every kRetry while a call waits.
  int fd() const { return events_.get(); }

  // A connection with `peer` is wanted, if there is none yet.
  void call(base::Rank peer);
  // None is wanted any more.
  void hang_up(base::Rank peer);
  // The connection that was made has closed before it was used: there may be another one.
  void forget(base::Rank peer) { made_.erase(peer); }
  // Nobody will connect any more: the connections to all others are in use.
  void stop_listening();

  // Moves on with what the sockets allow now; does not block.
  std::vector<Event> advance();

  base::Rank rank() const { return self_.rank; }
  int size() const { return self_.size; }
  const std::string& last_failure() const { return last_failure_; }

 private:
  void call_again();
  void accept_all();
  void add(Fd socket, std::optional<base::Rank> peer);
  void remove(std::list<contact::Handshake>::iterator handshake);
  void failed(const contact::Handshake& handshake, std::vector<Event>& events);
  void knocked_by(base::Rank peer);
  bool is_calling(base::Rank peer) const;

  const contact::Identity self_;
  Fd listener_;
  const std::vector<std::string> addresses_;
  const Fd events_;
  std::list<contact::Handshake> running_;
  std::map<base::Rank, base::Clock::time_point> calls_;  // and when each is tried the next time
  std::set<base::Rank> made_;
  std::string last_failure_;
};

// Connections of a rank that has met the others.
struct Joined {
  std::vector<contact::Connection> connections;  // by rank; nothing for our own, and for those that it has not called
  std::unique_ptr<Switchboard> others;           // for these
};

// Connects this rank with `peers`, who are to do the same. `check_interrupt` is called every 200 ms and may throw.
// Throws base::TimeoutError that names the ranks missing at the deadline.
Joined connect_peers(std::unique_ptr<Switchboard> board, const std::vector<base::Rank>& peers, base::Deadline deadline,
                     const std::function<void()>& check_interrupt);

// The error of ranks with which there is no connection in time.
std::string no_connection(const std::vector<base::Rank>& ranks, const std::string& last_failure);

}  // namespace lamina::rendezvous
