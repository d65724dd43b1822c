// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lamina/base/deadline.h"
#include "lamina/session/session.h"
#include "lamina/value/value.h"

namespace lamina::session {

class EpochEnd;
struct NextEpoch;

// A training of copies of a model, as whoever runs its loop knows it.
class CopiesFace {
 public:
  virtual ~CopiesFace() = default;

  // How far it is. It grows with each update, and states are those of the last one.
  virtual std::int64_t progress() const = 0;
  // The session of the current job.
  virtual std::shared_ptr<Session> session() const = 0;
  // The buffers of the model.
  virtual std::vector<at::Tensor> buffers() const = 0;
  // The hooks of the next epoch's session.
  virtual FaceHooks hooks() const = 0;

  // Goes on in the place of the current job with that session: gradients are forgotten, and all copies have the model
  // of the first one. Collective over the world.
  virtual void go_over(std::shared_ptr<Session> session) = 0;
  // Gives progress and states, of optimizer and loop, to copies that have not come so far.
  virtual value::Value states() const = 0;
  // Goes on with these; nullptr: with its own.
  virtual void take(const value::Value* states) = 0;
};

// The copies that go on where others are lost, with what the one has that has come furthest: see
// [Note: ranks that are left] in next_epoch.h. One thread calls it.
class Survivors {
 public:
  // The face outlives it.
  explicit Survivors(CopiesFace& face);
  ~Survivors();

  // Notes what a batch changes besides the parameters, where it has been changed: after each update, of this job or
  // of one in another layout.
  void keep();

  // True where the copies that are left go on from an error. Where a lost rank is behind it, and they do not, the first
  // of them says why.
  bool may_go_on(const std::exception_ptr& error);
  // Goes on with them, whoever else is lost meanwhile. Collective over those who are left. Returns how far each was,
  // by their ranks from now on: the furthest is the first. Throws base::PeerError where too few are left, or what a
  // lost rank had is lost with it.
  std::vector<std::int64_t> go_on();
  // Says once, on the first rank, who was lost in that step, and what the others do.
  void tell_going_on(std::int64_t step, bool is_again);

 private:
  // A buffer as it was in that version.
  struct Kept {
    at::Tensor buffer, value;
    std::int64_t version;
  };
  std::pair<std::shared_ptr<Session>, std::vector<std::int64_t>> meet();
  void note_lost(const NextEpoch& next);
  void go_over(std::shared_ptr<Session> session, const std::vector<std::int64_t>& progress);

  CopiesFace& face_;
  std::shared_ptr<Session> session_;
  bool is_whole_ = true;  // what is here is of one update
  std::vector<Kept> kept_;
  std::optional<std::uint64_t> seeded_;           // steps that have drawn random numbers, with `seed`
  std::vector<base::Rank> lost_;                  // since the last tell_going_on(), by their numbers when they were
  std::optional<base::Clock::time_point> since_;  // the first of them was heard of
};

// True of an error that a rank's loss has made, here or on another rank that says so.
bool is_of_loss(const std::exception_ptr& error);

// Why a job cannot go on without a rank; "" where it can. `keeps_parts`: what a rank alone has is kept with another
// one.
std::string why_no_survivors(const Session& session, bool keeps_parts = false);
inline constexpr auto kChangesLayout = "the job was about to take another layout";  // another reason

// Tells why nobody goes on, where this rank is the first that is left.
void tell_no_survivors(Session& session, const std::string& why);
// Tells, where this rank is the first one, who was lost in that step, by their numbers then. The others make it again,
// or it is done. `took`: seconds since then.
void tell_survivors(Session& session, std::vector<base::Rank> lost, std::int64_t step, bool is_again, double took);

}  // namespace lamina::session
