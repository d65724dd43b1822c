// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lamina/collective/groups.h"
#include "lamina/collective/ranks.h"
#include "lamina/collective/same_order.h"
#include "lamina/config/config.h"
#include "lamina/environment/world.h"
#include "lamina/messaging/messenger.h"
#include "lamina/observe/recorder.h"
#include "lamina/parameter_server/service.h"
#include "lamina/pipeline/job.h"
#include "lamina/topology/topology.h"
#include "lamina/value/failure.h"

namespace lamina::verification {
class RunRecorder;
}

namespace lamina::tensor_parallel {
class Team;
}

namespace lamina::graph {
class Border;
}

namespace lamina::session {

class EpochTalk;
struct FirstEpoch;
class GraphLinks;

// The hooks that a face lends to the engine.
struct FaceHooks {
  runtime::WorkerPool::Hooks thread_hooks;
  std::shared_ptr<value::Failures> failures;  // nullptr: those of C++
  // Called by waits of the main thread at least every 50 ms, while ranks join every 200 ms; may throw.
  std::function<void()> check_interrupt;
  // The call of the program that a wait of this thread is part of; empty: not known.
  std::function<base::Call()> call;
};

// The place of a rank on a machine.
struct Seat {
  int node = 0;          // its machine
  int process = 0;       // its number there
  std::string host;      // the machine's address for others, where it has one, else its name
  std::string launcher;  // where its launcher knows the job's door, as in JobDoor; "": nowhere
};

// The library on one rank, from init to shutdown: the configuration, this rank's place, and the subsystems, which are
// made in the order of their members.
class Session {
 public:
  // Checks that the configuration fits the world and is available, then connects the ranks; collective. Throws
  // base::ConfigError before anything is started, and what open_ucx throws. Of several machines the ranks tell each
  // other on which each of them is. `first`: of a session that follows another one; nullptr: the job begins.
  Session(config::Config config, environment::World world, FaceHooks hooks, const FirstEpoch* first = nullptr);
  // Leaves as close(false) does.
  ~Session();

  const config::Config& config() const { return config_; }
  // The one that the program has asked for, by init() or change(): a loss, or those who join, may have led to another
  // layout. A process that is to join a job is alone until then, and has a whole model.
  const config::Config& asked() const { return asked_; }
  void note_asked(config::Config asked) { asked_ = std::move(asked); }
  const environment::World& world() const { return world_; }
  const topology::Topology& topology() const { return topology_; }
  observe::Recorder& recorder() { return recorder_; }
  // Records a run that is to be compared with another; nullptr in any other.
  const std::shared_ptr<verification::RunRecorder>& run_recorder() const { return run_recorder_; }
  messaging::Mailbox& mailbox() { return messenger_->mailbox(); }
  transport::Transport& transport() { return messenger_->transport(); }
  pipeline::Job& job() { return *job_; }
  // As the configuration has them, for this copy's place among all.
  void share_out_microbatches();
  // Modules and parameters that ranks own and others use, outside steps.
  parameter_server::Service& parameter_server() { return *parameter_server_; }
  // Graphs of other libraries' operations over the ranks of a pipeline.
  graph::Border& graphs();
  // Groups for tensors; how torch's are made is for the face to say.
  collective::Groups& groups() { return *groups_; }

  // The ranks that have slices of the same layers as this one, and the name under which operators find them; nullptr
  // where layers are whole. Collective over them the first time.
  tensor_parallel::Team* team();
  // The team where there is one already.
  tensor_parallel::Team* known_team() const { return team_.get(); }
  std::string team_name() const;

  // The job's ranks, for parts that need no more of a session, and do not outlive it.
  collective::Ranks ranks();
  std::vector<base::Rank> members(topology::Group group) const { return topology_.members(group, world_.rank); }
  base::Partition partition() const;  // the one that this rank owns
  base::Rank owner(base::Partition partition) const;
  // Seats of all ranks, in a job whose ranks outlive others: `lamina run --elastic`. Else there are none.
  const std::vector<Seat>& seats() const { return seats_; }
  // Talk about the members of the job, where some are lost.
  EpochTalk& epochs() { return *epochs_; }
  // The machines of ranks that were lost to those who go on in this session, until that is told.
  std::vector<std::string>& lost_hosts() { return lost_hosts_; }

  // Refuses in the body of a step what every rank of a pipeline is to do, `what`: one rank alone runs it. Throws
  // base::UsageError.
  void require_everywhere(const std::string& what) const;

  // Throws base::PeerError, which begins with `what`, where one of these ranks is lost.
  void require_nobody_lost(const std::vector<base::Rank>& ranks, const std::string& what);

  // For waits of the main thread.
  base::Patience patience() const;
  // For waits of any thread of a step, with which they end.
  base::Patience patience_in_steps() const;
  // Words on its turn, for collectives that keep that.
  static collective::SameOrder::Turn turn_of_this_thread();

  // Records what this rank does in steps, until write_timeline(). Throws base::UsageError where events are kept
  // already.
  void start_timeline();

  // Why the job's model was not cut to the end once values had gone; "" where that did not happen.
  const std::string& half_cut() const { return half_cut_; }
  void note_half_cut(std::string why) { half_cut_ = std::move(why); }

  // Clips gradients as those of shards are, in a layout without shards, too: the job had some before.
  bool clips_as_shards() const { return clips_as_shards_; }
  void clip_as_shards() { clips_as_shards_ = true; }

  // Tells the other ranks how this one comes to leave, before it does.
  void tell_leaving(const std::string& how);
  // Has something called at close(), before it returns.
  void when_closed(std::function<void()> call) { when_closed_.push_back(std::move(call)); }

  // Ends the session; see Transport::close. Not inside a step. Idempotent. False when a thread is still in the user's
  // code of a step that failed: then the session must never be destroyed.
  bool close(bool orderly);
  // Closes the session, but keeps its connections until the process ends: the peers take the end of the process for
  // this rank's end. Where it was `interrupted` (Ctrl-C), they are told so at once. Afterwards the session must never
  // be destroyed.
  bool leave(bool interrupted = false);

 private:
  void learn_nodes();
  void learn_seats();
  FirstEpoch first_epoch(const FirstEpoch* before);
  observe::Timeline empty_timeline() const;
  bool end(bool orderly);

  config::Config asked_;
  const config::Config config_;
  const environment::World world_;
  topology::Topology topology_;
  const std::function<void()> check_interrupt_;
  const std::function<base::Call()> call_;
  const std::shared_ptr<value::Failures> failures_;
  bool open_ = true;
  std::vector<std::function<void()>> when_closed_;
  std::vector<Seat> seats_;
  std::vector<std::string> lost_hosts_;
  std::string half_cut_;
  bool clips_as_shards_ = false;
  observe::Recorder recorder_;
  std::shared_ptr<verification::RunRecorder> run_recorder_;
  std::unique_ptr<messaging::Messenger> messenger_;
  std::unique_ptr<EpochTalk> epochs_;
  std::unique_ptr<pipeline::Job> job_;
  std::unique_ptr<parameter_server::Service> parameter_server_;
  std::unique_ptr<collective::Groups> groups_;
  std::shared_ptr<tensor_parallel::Team> team_;
  std::shared_ptr<GraphLinks> graphs_;
};

// True where ranks whose batches differ may have to call the same modules in a step: they have as many microbatches.
bool needs_all_microbatches(const Session& session);

}  // namespace lamina::session
