// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lamina/session/door.h"
#include "lamina/session/epoch_talk.h"
#include "lamina/session/session.h"

namespace lamina::session {

// [Note: ranks that are left] Ranks that have lost one are connected still, directly or by others. Over these
// connections they agree who goes on ([Note: epochs] in membership/member.h), and tell each other what they have. Then
// they open a session of their own beside the one that has lost a rank. A further loss meanwhile has them agree anew.
// Where none is lost, all have agreed already that newcomers come in, or some leave ([Note: newcomers] in door.h). When
// all have opened it, they decide that it begins: so of two groups that lack each other one goes on, in the old session
// or in the new one.

// Holds what those who go on know of each other. The first one leads: its state counts.
struct NextEpoch {
  std::int64_t number = 0;
  std::vector<base::Rank> members;  // by their ranks until now, in the order of their ranks from now on
  std::vector<value::Value> words;  // what each has told
  int rank = -1;                    // of this one among them; -1: it leaves
  std::vector<base::Rank> leaving;  // by their ranks until now
  std::vector<int> newcomers;       // who come after them: the machine of each
  base::Rank door{0};               // of the member that lets them in, if any

  int size() const { return static_cast<int>(members.size() + newcomers.size()); }
};

// The machine of each of them, and of the newcomers.
std::vector<int> nodes_of(const Session& before, const NextEpoch& next);

// The end of a session that has lost ranks, or that newcomers join, as one of its ranks makes it together with the
// rest.
class EpochEnd {
 public:
  // The session outlives it, and so does the door, where this rank has it.
  explicit EpochEnd(Session& session, Door* door = nullptr);

  // Collective over the ranks that are left. Each tells `word` and how far it has come: who has come furthest leads, of
  // several the lowest rank. Who `leaves` is no member; it opens nothing, and calls may_leave(). Throws base::PeerError
  // where too few are left: they may not go on, for others might.
  NextEpoch next(const value::Value& word, std::int64_t progress, bool leaves = false);
  // Waits until the session that the others open begins, for they may need this rank's voice. False: all agree anew.
  bool may_leave(const NextEpoch& next);

  // Opens the next epoch's session, of copies of the model, which share out as many microbatches as before. `world`:
  // this rank's place there; `epoch`: its LAMINA_EPOCH. Throws base::PeerError where one of them is lost meanwhile,
  // also a newcomer.
  std::shared_ptr<Session> open(const NextEpoch& next, environment::World world, std::int64_t epoch, FaceHooks hooks);
  // Does so in a layout of theirs.
  std::shared_ptr<Session> open_in(const NextEpoch& next, config::Config config, environment::World world,
                                   std::int64_t epoch, FaceHooks hooks);

 private:
  std::shared_ptr<Session> meet(const NextEpoch& next, config::Config config, environment::World world,
                                std::int64_t epoch, FaceHooks hooks);
  void tell_places(const NextEpoch& next, const environment::World& world, std::int64_t epoch,
                   const config::Config& config);
  void check_newcomers(const NextEpoch& next);
  void tell_lost(const NextEpoch& next, Session& session) const;

  Session& before_;
  Door* const door_;
  EpochTalk& talk_;
  std::vector<base::Rank> members_;  // who are left
  std::int64_t number_ = 0;
};

}  // namespace lamina::session
