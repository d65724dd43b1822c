// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "lamina/base/deadline.h"
#include "lamina/base/fd.h"
#include "lamina/contact/reception.h"
#include "lamina/environment/job_door.h"
#include "lamina/session/door_words.h"

namespace lamina::session {

// [Note: newcomers] A process may join the ranks of a training. It runs its script up to the training in a world
// of its own. Then it comes to the door, at which the first rank listens as long as it is that, and proves that it has
// the job's secret. What it is to have in common with the job is compared: where anything differs it is refused by
// name, and nobody else is disturbed. It waits there, and says that it is alive. The first rank's passes tell all
// copies that somebody waits (data_parallel/newcomers.h), ranks with parts hear it when a step begins: so all of them
// end their epoch after one and the same update. They agree as after a loss ([Note: ranks that are left]), open the
// next session with the newcomers as its last ranks, and give them what a copy has that is behind, or their parts. A
// newcomer that dies or hangs on its way in is left out, and the others open it anew. When the first rank is lost,
// those who wait come to the next one's door.
//
// The address of the door stands on the plate of its machine (environment/job_door.h). Where nobody answers there, it
// asks the launchers that stand beside it. Each epoch has every machine's plate say where the door is, and who these
// launchers are. Newcomers by hand (`lamina run --join`) have one of them there at first. So the door is found as
// long as a launcher runs that was heard of. When newcomers enter: see Admission. One without a place waits for a
// while, and takes that of a lost rank.
//
// The door has a thread, so that neither strangers nor newcomers wait for a step, or have one wait.

class Session;

// How many newcomers may come in.
struct DoorTerms {
  int ranks = 1;  // there are
  int most = 1;   // there may be
  // Why the job cannot have so many, a clause; "" where it can.
  std::function<std::string(int)> why_not = [](int) { return ""; };
  base::Clock::duration every{};  // how often those who are started by hand enter
  std::function<Facts()> facts;   // as they are by now, asked before anybody enters; empty: as at the beginning

  // How many of so many that wait.
  int fitting(int waiting) const;
};

class Door {
 public:
  // Opens it, and says on the plate where it is. Throws base::Error where this machine has no such address.
  Door(const environment::DoorPlate& plate, const std::string& host, contact::Secret secret, Facts facts);
  ~Door();  // closed; who waits looks for the next one
  Door(const Door&) = delete;

  // The place where it listens.
  const std::string& address() const { return address_; }

  // Sets those of the epoch that has begun.
  void set_terms(const DoorTerms& terms);
  bool has_waiting() const { return has_waiting_; }  // somebody who may come in

  // Takes those who may come in to so many ranks: the machine of each. Who was taken before, and has no place, counts
  // anew. Who differs by now is refused.
  std::vector<int> take(int ranks);
  // Tells those who were taken their places. From now on they have to come in.
  void tell(const std::vector<std::string>& places);
  // One of them has gone, or has not come in for long.
  bool has_lost();
  // They are in.
  void let_in();
  // They have no place any more, and come to the door again.
  void send_away();
  // Nobody is let in any more: the job's training is over.
  void end();

 private:
  struct Guest {
    DoorLine line;
    Facts facts;
    Entrant entrant;
    base::Clock::time_point heard;
    bool is_gone = false;
  };

  void run();
  void receive(contact::Connection connection);
  void hear(std::list<Guest>& guests);
  void tell_waiting();
  // These are called under the lock.
  void compare();
  void count();
  std::vector<Entrant> present() const;
  void wake() const;

  const environment::DoorPlate plate_;
  base::Fd wake_;
  contact::Reception reception_;  // of the thread, from its start on
  const std::string address_;

  std::mutex mutex_;
  Facts facts_;
  DoorTerms terms_;
  Admission admission_;
  std::list<Guest> waiting_, taken_;
  std::optional<base::Deadline> in_by_;
  base::Clock::time_point said_{};
  bool ends_ = false;
  std::atomic<bool> has_waiting_ = false;
  std::thread thread_;
};

// Newcomers, and launchers, read where the door is from the plate of their machine. So the rank with the door writes it
// there, and tells a rank on each other machine, once in an epoch...
void tell_door(Session& session, const Door& door);
// ...which writes it there when it has come.
void hear_of_door(Session& session);
// A training is over on this rank: newcomers of its machine are told.
void end_door(const Session& session);

}  // namespace lamina::session
