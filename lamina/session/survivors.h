// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lamina/base/deadline.h"
#include "lamina/session/doorway.h"
#include "lamina/session/next_epoch.h"
#include "lamina/session/session.h"
#include "lamina/value/value.h"

namespace lamina::session {

// Words of a rank to those who go on with it: how far it has come, and what its face tells. -1: it joins them.
struct Told {
  std::int64_t progress = -1;
  value::Value word;
};
value::Value to_value(const std::vector<Told>& told);
std::vector<Told> to_told(const value::Value& value);

// A training that outlives ranks, as whoever runs its loop knows it.
class TrainingFace {
 public:
  virtual ~TrainingFace() = default;

  // How far it is. It grows with each update, and states are those of the last one.
  virtual std::int64_t progress() const = 0;
  // The session of the current job; nullptr where there is none.
  virtual std::shared_ptr<Session> session() const = 0;
  // Waits for a checkpoint that is being saved, or gives it up where a rank is lost.
  virtual void end_saves(bool is_lost) = 0;
  // Gives what this rank tells the others.
  virtual value::Value word() const = 0;
  // Nobody goes on, in order: all are connected still.
  virtual void all_leave() {}
};

struct SurvivorOptions {
  std::function<FaceHooks()> hooks;                       // of the next epoch's session
  std::function<void()> note_place = [] {};               // the environment says another place of this rank from now on
  std::function<Facts()> facts = [] { return Facts(); };  // that newcomers are to have in common, of the face
};

// The loop in which ranks meet after a loss and go on, for trainings of any kind: see [Note: ranks that are left] in
// next_epoch.h. One thread calls it.
class Survivors {
 public:
  virtual ~Survivors() = default;

  // True where the ranks that are left go on from an error that a loss has made. Where a rank is lost, and they do not,
  // the first of them says why.
  bool may_go_on();
  // Goes on with them, whoever else is lost meanwhile, and with newcomers. Collective over these. `is_lost`: by a loss;
  // else newcomers wait, or some leave. Returns what each has told, by their ranks from now on: the first one is that
  // which has come furthest. Throws base::PeerError where too few are left, or what a lost rank had is lost with it;
  // ProcessEnds in a rank that leaves.
  std::vector<Told> go_on(bool is_lost);
  // True where the epoch is to end before the next step, on all ranks after one and the same update.
  virtual bool is_called() const;
  // lamina.change(): opens the session of that layout, to which the face goes over then. Collective over the world.
  // Throws what session::open_after() does; all go on in the layout that there was, then.
  virtual std::shared_ptr<Session> open_after(config::Config config);
  // Says once, on the first rank, who was lost in that step, or joined before it, and what all do.
  void tell_going_on(std::int64_t step, bool is_again);

  // Newcomers find it closed.
  void close_door() { doorway_.end(*session_); }
  Doorway& doorway() { return doorway_; }

 protected:
  // The next epoch's session, none where this one goes on, and what all have told.
  struct Next {
    std::shared_ptr<Session> session;
    std::vector<Told> told;
  };
  Survivors(TrainingFace& face, SurvivorOptions options);

  virtual std::string why_not(const Session& session) const = 0;
  // True where all can go on from a change of the layout that has gone over to another session.
  virtual bool outlives_changes() const { return false; }
  virtual Next meet(bool is_lost) = 0;
  // Returns what all have told, in a session with whoever joins, too.
  virtual std::vector<Told> go_over(Next next) = 0;
  void begin_epoch();
  // This process becomes a rank of the job whose door it comes to; returns what all have told.
  std::vector<Told> join();
  // Why the job cannot go on in that session with so many ranks; "" where it can.
  virtual std::function<std::string(int)> why_not_so_many() = 0;
  // The fact that says how its ranks go on, which newcomers are to have in common with them.
  virtual std::string way() const = 0;

  // The environment says from now on that this rank has that place.
  void take_place(const environment::World& place, std::int64_t epoch);
  void note(const NextEpoch& next);
  // This rank is none of those who go on, if any do: throws ProcessEnds.
  [[noreturn]] void leave(const NextEpoch& next);
  // Has the face go over to that session, in which the training is as soon as the face's job is there.
  void switch_to(const std::shared_ptr<Session>& session, const std::function<void()>& go_over);

  const SurvivorOptions options_;
  Doorway doorway_;
  std::shared_ptr<Session> session_;  // in which the training was last

 private:
  TrainingFace& face_;
  std::vector<base::Rank> lost_, left_;  // since the last tell_going_on(), by their numbers when they were
  int joined_ = 0;
  std::optional<base::Clock::time_point> since_;  // the first of them was heard of
};

// A training of copies of a model.
class CopiesFace : public TrainingFace {
 public:
  // The buffers of the model, by name.
  virtual std::vector<std::pair<std::string, at::Tensor>> buffers() const = 0;
  // Goes on in the place of the current job with that session: gradients are forgotten, and all copies have the model
  // of the first one. Collective over the world.
  virtual void go_over(std::shared_ptr<Session> session) = 0;
  // Gives progress and states, of optimizer and loop, to copies that have not come so far.
  virtual value::Value states() const = 0;
  // Goes on with these; nullptr: with its own.
  virtual void take(const value::Value* states) = 0;
};

// The copies that go on where others are lost, with what the one has that has come furthest, and those who join or
// leave.
class CopySurvivors : public Survivors {
 public:
  // The face outlives it.
  CopySurvivors(CopiesFace& face, SurvivorOptions options);

  // Notes what a batch changes besides the parameters, where it has been changed: after each update, of this job or
  // of one in another layout.
  void keep();
  // The training begins: newcomers may come. A process that is one joins those who train, and returns what go_on()
  // does. Throws ProcessEnds in a newcomer where the job is over, base::ConfigError in one that differs from the job.
  std::optional<std::vector<Told>> begin();
  bool is_called() const override { return doorway_.is_called(*session_); }

 private:
  // A buffer as it was in that version.
  struct Kept {
    at::Tensor buffer, value;
    std::int64_t version;
  };
  std::string why_not(const Session& session) const override;
  Next meet(bool is_lost) override;
  std::vector<Told> go_over(Next next) override;
  std::function<std::string(int)> why_not_so_many() override;
  std::string way() const override { return "copies of the model"; }
  NextEpoch agree(EpochEnd& end, bool leaves);

  CopiesFace& face_;
  bool is_whole_ = true;  // what is here is of one update
  std::map<std::string, Kept> kept_;
  std::optional<std::uint64_t> seeded_;  // steps that have drawn random numbers, with `seed`
};

// True of an error that a rank's loss may have made, here or on another rank that says so.
bool is_of_loss(const std::exception_ptr& error);

// The key that gives ranks parts which no other one has; "" where each has a copy of all.
std::string key_of_parts(const config::Config& config);

// Why a job cannot go on without a rank; "" where it can. `keeps_parts`: what a rank alone has is kept with another
// one.
std::string why_no_survivors(const Session& session, bool keeps_parts = false);
inline constexpr auto kChangesLayout = "the job was about to take another layout";  // another reason

// Tells why nobody goes on, where this rank is the first that is left.
void tell_no_survivors(Session& session, const std::string& why);

}  // namespace lamina::session
