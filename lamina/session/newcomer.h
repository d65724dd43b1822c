// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/environment/elastic_terms.h"
#include "lamina/environment/job_door.h"
#include "lamina/session/door_words.h"
#include "lamina/session/session.h"

namespace lamina::session {

// A rank among those of its machine.
struct LocalPlace {
  int rank = 0, size = 1;  // LOCAL_RANK, LOCAL_WORLD_SIZE
};
// `nodes`: the machine of each rank.
LocalPlace local_place(const std::vector<int>& nodes, int rank);

// The place of a newcomer in the next epoch.
struct NewPlace {
  int rank = 0, size = 0;
  LocalPlace local;  // on its machine
  std::string host;  // where the ranks meet
  int port = 0;
  std::int64_t epoch = 0;  // its LAMINA_EPOCH
  // Configurations as JSON: of the job's next session, and the one that its program has asked for.
  std::string config, asked;
  std::int64_t microbatches = 0;  // that the copies of the model share out; 0: as the configuration says
  bool clips_as_shards = false;
  // The names of the job where its ranks meet, which its launcher has given them.
  std::string run, restart;

  // Takes them from the environment.
  void take_names();
  std::string text() const;
  // Throws base::FormatError.
  static NewPlace read(const std::string& text);
};

// Facts that every rank tells of itself, and those that the face adds: its configuration, but for the layout, which is
// the job's. A text that is too long is cut, with its hash.
Facts facts_of(const Session& session, const Facts& of_face);

// A process that joins a job which trains: see [Note: newcomers] in door.h.
class Newcomer {
 public:
  // Throws base::ConfigError in a process to which no launcher has said where.
  Newcomer(const Session& own, const Facts& of_face);

  // Waits at the job's door for a place; none where the job is over. Throws base::ConfigError where the job refuses it,
  // base::TimeoutError where nobody has answered for the session's timeout, or no launcher is left that could. It
  // throws ProcessEnds where there was no place for as long as its launcher lets it wait.
  std::optional<NewPlace> wait();

  // Opens the job's session at that place; `world` says the same. Throws base::PeerError where others go on without
  // this one meanwhile: then it comes to the door again.
  std::shared_ptr<Session> open(Session& own, const NewPlace& place, environment::World world, FaceHooks hooks);

 private:
  using Time = base::Clock::time_point;

  bool look_for_door();
  bool ask(const std::string& launcher, environment::JobDoor& known);
  std::optional<DoorLine> come(const std::string& address);
  void hear_why(const std::string& why);
  void check_answers(Time now) const;
  void check_line();
  bool is_let_in(Session& session);

  const environment::DoorPlate plate_;
  const base::Patience patience_;
  const std::string own_launcher_;
  const environment::NewcomerTerms terms_;
  const Facts facts_;
  const int node_;
  contact::Identity self_;
  std::optional<DoorLine> line_;
  bool is_in_ = false, is_sent_away_ = false;
  std::string told_;              // why it waits
  std::optional<Time> no_place_;  // since when there is none for it
  Time heard_{}, answered_{};     // a word of the door; a launcher, or that
  bool has_launchers_ = false;    // others than its own, that it knows of
};

}  // namespace lamina::session
