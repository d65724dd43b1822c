// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lamina/job_checkpoint/kept_job.h"
#include "lamina/session/change.h"
#include "lamina/session/keep_pace.h"
#include "lamina/session/survivors.h"

namespace lamina::session {

// A training of ranks with parts that nobody else has.
class PartsFace : public TrainingFace {
 public:
  // The job, of which each tensor goes over.
  virtual std::unique_ptr<job_checkpoint::JobAccess> lend() = 0;
  // Tells what it has that may keep it from another layout.
  virtual ChangingJob told() const = 0;
  // Gives what the loop goes on with besides; takes it back.
  virtual value::Value state() const = 0;
  virtual void take(const value::Value& state) = 0;
  // Gives what ranks that come to the job need besides; takes it.
  virtual value::Value given() const { return {}; }
  virtual void take_given(const value::Value& /*given*/) {}
  // Goes on in the place of the current job with that session, in whose layout values, states and options are what
  // `hold` gives then. Without it the model is whole, and each rank goes on with its own. Collective over the world.
  virtual void go_over(std::shared_ptr<Session> session, const std::function<job_checkpoint::HeldJob()>& hold) = 0;
};

// The ranks that go on where others are lost, with what all had some updates before, in another layout: see
// [Note: kept states] in membership/keepers.h. Where others come, or leave, all keep what they have just then, so that
// nothing is done again. Until a step has cut the model each has all of it, and goes on with that.
class PartSurvivors : public Survivors {
 public:
  // The face outlives it. `every`: updates that lie between two versions, see KeepPace. `layouts`: see next_layout().
  PartSurvivors(PartsFace& face, SurvivorOptions options, std::optional<std::int64_t> every,
                std::vector<std::string> layouts);
  ~PartSurvivors() override;

  // From now on all go on where one is lost, and newcomers may come. A process that is one joins, and returns what
  // go_on() does; see CopySurvivors::begin().
  std::optional<std::vector<Told>> begin();
  // Waits for the others, who may lose one still: all go on together then. Nobody comes any more.
  void end();
  // Goes on in the place of another one, once a job of copies takes a layout with parts.
  void succeed(Survivors& before);
  // An update is made: the next step keeps what it has made, when all that follows on it is done.
  void note_update();
  // True where the step that begins is to keep a version. Listens, once after each update.
  bool is_due();
  // Hears whether newcomers wait at the first rank's door, or some want to leave: as is_called() says then. Collective
  // over the world, under `lamina run --elastic`.
  bool listen();
  // True where the epoch is to end before the step that begins, once what is due is kept.
  bool is_called() const override { return is_called_; }
  // Keeps it; collective over the world.
  void keep();
  // Keeps what there is, and waits until it is with whoever is to have it. Collective over the world.
  void keep_everywhere();
  // Keeps what there is, with whoever is to have it, before the layout is given up: then all go back to that, wherever
  // in the other one a rank is lost.
  std::shared_ptr<Session> open_after(config::Config config) override;

  std::uint64_t sent_bytes() const { return states_.sent_bytes(); }  // to keepers

 private:
  std::string why_not(const Session& session) const override { return why_no_survivors(session, /*keeps_parts=*/true); }
  bool outlives_changes() const override { return true; }
  Next meet(bool is_lost) override;
  std::vector<Told> go_over(Next next) override;
  std::function<std::string(int)> why_not_so_many() override;
  // True where this rank has all of the model still, and nobody has kept anything.
  bool is_whole() const;
  void require_first_values(const NextEpoch& next) const;
  std::string way() const override;
  std::string why_not_so_many(int ranks) const;
  bool leaves_in_order();
  void give_newcomers(std::vector<Told>& told, Session& session);

  PartsFace& face_;
  KeepPace pace_;
  const std::vector<std::string> layouts_;
  job_checkpoint::KeptJob states_;
  bool is_on_ = false;
  bool has_succeeded_ = false;  // another one, and has not told yet where the door is
  bool is_called_ = false;
  bool goes_whole_ = false;               // all go on with a model that each has all of...
  bool is_alike_ = false;                 // which had the same values everywhere, when that was asked
  std::optional<std::uint64_t> seeded_;   // steps that have drawn random numbers, with `seed`
  std::int64_t listened_ = -1;            // after so many updates
  std::int64_t began_ = 0, changes_ = 0;  // the job's epoch, and how often its ranks have changed their layout in it
  std::weak_ptr<Session> kept_;           // in which it was
  // One talk about the end of a session, of which others may still be in the middle.
  struct Talk {
    Talk(std::shared_ptr<Session> its, Door* door);
    std::shared_ptr<Session> session;
    EpochEnd end;
    std::int64_t epochs;
  };
  std::optional<Talk> talk_;
};

}  // namespace lamina::session
