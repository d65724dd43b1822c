// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lamina/session/epoch_talk.h"
#include "lamina/session/session.h"

namespace lamina::session {

// [Note: ranks that are left] Ranks that have lost one are connected still, directly or by others. Over these
// connections they agree who goes on ([Note: epochs] in membership/member.h), and tell each other what they have. Then
// they open a session of their own beside the one that has lost a rank. A further loss meanwhile has them agree anew.

// Holds what those who go on know of each other. The first one leads: its state counts.
struct NextEpoch {
  std::int64_t number = 0;
  std::vector<base::Rank> members;  // by their ranks until now, in the order of their ranks from now on
  std::vector<value::Value> words;  // what each has told
  int rank = 0;                     // of this one among them
};

// The end of a session that has lost ranks, as one of the others makes it together with the rest.
class EpochEnd {
 public:
  // The session outlives it.
  explicit EpochEnd(Session& session);

  // Collective over the ranks that are left. Each tells `word` and how far it has come: who has come furthest leads, of
  // several the lowest rank. Throws base::PeerError where too few are left: they may not go on, for others might.
  NextEpoch next(const value::Value& word, std::int64_t progress);

  // Opens the next epoch's session. `microbatches`: of each copy of the model; without, the copies share out as many as
  // before. `world`: this rank's place there. Throws base::PeerError where one of them is lost meanwhile,
  // base::ConfigError where copies cannot share microbatches out alike.
  std::shared_ptr<Session> open(const NextEpoch& next, std::optional<int> microbatches, environment::World world,
                                FaceHooks hooks);
  // Does so in a layout of theirs.
  std::shared_ptr<Session> open_in(const NextEpoch& next, config::Config config, environment::World world,
                                   FaceHooks hooks);

 private:
  Session& before_;
  EpochTalk talk_;
};

}  // namespace lamina::session
