// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <vector>

#include "lamina/collective/c10d_groups.h"
#include "lamina/frontend/on_partition.h"
#include "lamina/optim/loss_scale.h"
#include "lamina/rendezvous/job_store.h"
#include "lamina/session/session.h"

namespace lamina::job_checkpoint {
class JobAccess;
class JobRecording;
class Resumption;
class Saves;
}  // namespace lamina::job_checkpoint

namespace lamina::session {
class StepCheck;
}

namespace lamina::frontend {

class Model;
struct HeldModel;
struct JobOptimizer;

// The job that one init() started, in one layout.
struct Current {
  explicit Current(std::shared_ptr<session::Session> its);
  ~Current();

  bool pipelined() const { return session->topology().size(topology::kPartitions) > 1; }
  // Lends it to checkpoints, recordings and changes of the layout.
  std::unique_ptr<job_checkpoint::JobAccess> lend();

  std::shared_ptr<session::Session> session;
  std::shared_ptr<Model> model;
  std::shared_ptr<HeldModel> held;                        // the model, as the program's DistributedModel has it
  std::vector<std::string> relies;                        // clauses that say what relies on its layout
  std::weak_ptr<optim::LossScale> loss_scale;             // what the optimizers of the job share
  std::list<std::weak_ptr<PartitionCallback>> callbacks;  // what optimizers have called when the model is cut
  std::vector<std::weak_ptr<JobOptimizer>> optimizers;    // in the order in which they were made
  std::shared_ptr<job_checkpoint::Saves> saves;
  std::shared_ptr<job_checkpoint::Resumption> waiting;      // a checkpoint that waits for the cut of the model
  std::unique_ptr<job_checkpoint::JobRecording> recording;  // with `lamina verify`
  std::unique_ptr<session::StepCheck> check;                // while steps are compared
  // Called before each step, and each call of the model outside of one; may throw.
  std::function<void()> before_step = [] {};
  // Opens the session of another layout, in the place of session::open_after(); empty: nothing does.
  std::function<std::shared_ptr<session::Session>(config::Config)> open_after;
  bool clips_by_default = false;  // gradients of shards, to a norm that nobody has set

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> make_group(topology::Group axis);

  const std::string meeting_ = rendezvous::next_meeting(rendezvous::kGroups);  // of the groups of this job
  std::unique_ptr<collective::C10dGroups> groups_;
};

Current& begin(config::Config config);  // where there is none
void end();                             // of the current one
// Ends the current one, and begins one of the same ranks whose session was opened beside its own. Model and optimizers
// are still to go over. Collective over the world.
Current& go_over(std::shared_ptr<session::Session> session);

// The hooks that C++ lends to a session.
session::FaceHooks face_hooks();

// Where the job is recorded: tells of a step, or a call, that begins. Once all that is wanted is recorded the process
// ends here, with exit code 0, as by std::exit(); so does every rank.
void end_where_all_is_recorded(bool (job_checkpoint::JobRecording::*begin)(job_checkpoint::JobAccess&));

// Throws base::UsageError before begin().
Current& current();
bool has_current();

// For waits of a call of `name`, which the user's code makes at `site`.
base::Call call_at(const std::string& name, const std::source_location& site);
base::Patience patience(const session::Session& session, const std::string& name, const std::source_location& site);

// The current job; throws base::UsageError inside a step, where `what` is not allowed.
Current& outside_step(const std::string& what);

}  // namespace lamina::frontend
