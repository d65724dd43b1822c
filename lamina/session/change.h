// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/config/config.h"
#include "lamina/model/parameter_table.h"
#include "lamina/session/session.h"
#include "lamina/sharding/sharding.h"

namespace lamina::session {

// [Note: change of layout] The ranks of a job share its work in another way: the processes are the same, between two
// steps, and so are the batch, its microbatches and their random numbers. Refusals come first, while the old layout is
// whole. Then each rank lists what it holds (checkpoint/held_pieces.h), and opens a session of the other layout beside
// its own, whose connections tell of a rank that is lost meanwhile. Until then an error leaves the old layout as it is.
// Afterwards the old session ends, the model is cut as in the other layout, and its values and states travel to their
// new owners. An error in that ends the job, but for a loss in a training that outlives ranks: see
// PartSurvivors::open_after().

// The error of a change that cannot be.
base::UsageError refused_change(const std::string& why);

// The configuration of this job in the layout that `json`, an object of keys of init(), asks for. Copies of the model
// share out as many microbatches as before, one more or less, unless it has `microbatches`. Gradients are clipped as
// before. The same on all ranks, and nothing is done yet; collective over the world. Throws base::ConfigError for a
// layout that the number of ranks does not allow. base::UsageError comes for keys that are no layout's or that ranks
// give differently, and for what a job or a layout has that cannot change.
config::Config changed_config(Session& session, const std::string& json);

// True for a key that says who does what, by the name that a Config's JSON has it under.
bool is_layout_key(std::string_view key);

// Does so for so many ranks, of which this one alone is asked, and looks at no more than what `json` and the
// configuration of the session say.
config::Config config_of(Session& session, const std::string& json, int ranks);

// Has so many copies of the model share out the microbatches that there are: `microbatches` at most.
void share_out(Session& session, int copies, config::Config& config);

// True where gradients are clipped as those of shards are, in the layouts that follow, too: clipping is the training's.
bool clips_as_shards(const Session& session);

// Throws base::UsageError for what a session has that cannot change, whatever is asked.
void require_may_change(Session& session);

// An optimizer of the job, as far as its face knows it.
struct ChangingOptimizer {
  std::string name;           // of its class
  std::string beside;         // the place in its groups of a parameter that is not the model's; "" for none
  std::string why_not_parts;  // why it cannot update parts of parameters; "" where it can
  bool measures_all = false;  // parameters at once, as LBFGS does
  bool takes_sparse = false;  // gradients, and no others
  bool waits = false;         // for the cut of the model, with a state
};

// A job that is to go over to another layout, as far as its face knows it.
struct ChangingJob {
  bool has_model = false;
  bool is_cut = false;                   // its model
  bool saves = false;                    // a checkpoint is being saved
  std::vector<std::string> relies;       // clauses that say what relies on the layout that there is
  bool waits = false;                    // for the cut of the model, with a checkpoint
  bool has_hook = false;                 // its model has one of communication
  bool joins = false;                    // its copies are in a join
  std::vector<std::string> odd_buffers;  // the names of those that are sparse or quantised
  std::vector<ChangingOptimizer> optimizers;
  // Says why layers cannot be sliced as in that layout, "" where they can; empty for no model.
  std::function<std::string(const config::Config&)> why_not_slices;
};

// Throws base::UsageError where a job cannot go over to that layout, of so many copies of the model, or not now.
void require_fits(const ChangingJob& job, const config::Config& config, int copies);

// Throws base::UsageError, on all ranks, where a job cannot go over to that layout, or not now; collective over the
// world. What is asked of a model that is cut: job_checkpoint::require_changeable().
void require_changeable(Session& session, const config::Config& config, const ChangingJob& job);

// True where the model stays whole until the next step, which traces and cuts it: nobody has traced it yet, and every
// rank has all of it, with whole states. The first rank alone knows of a trace. Collective over the world.
bool waits_for_trace(Session& session, const config::Config& config, bool is_traced, bool is_whole);

// Opens a session of `world` beside one whose `members` go over to it: random numbers and clipping go on. Throws
// base::PeerError, which begins with `what`, where a member is lost meanwhile, and what a Session's constructor throws.
std::shared_ptr<Session> open_beside(Session& before, config::Config config, environment::World world, FaceHooks hooks,
                                     std::vector<base::Rank> members, std::string what);

// Opens a session of the same ranks in that layout, in which random numbers go on. Throws base::PeerError where a rank
// is lost meanwhile, and what a Session's constructor throws. It is in charge once `before` is closed: see take_over().
std::shared_ptr<Session> open_after(Session& before, config::Config config, FaceHooks hooks);

// Leaves the memory of values and shards to whoever else keeps it, until they are in the other layout. Nothing is
// sharded: nullptr.
void put_aside(const model::ParameterTable& table, sharding::Sharding* sharding);

// The session before has closed, and taken back what a process has once: `session` has it from now on.
void take_over(Session& session);

}  // namespace lamina::session
