// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "lamina/frontend/job.h"

namespace lamina {

// Has the ranks of the job share its work in another layout from the next step on: change({{"partitions", 4}}). Every
// rank calls it, between two steps, after zero_grad().
//
// The model, its optimizers and their schedules stay the same objects, and go on with the same values and states, loss
// scale and random numbers: losses are those of a run that nobody has changed. Values and states go from the ranks that
// have them to those that will, through memory: no rank has more than its parts of both layouts. Afterwards dp_rank()
// and dp_size() say which part of a batch this rank reads. A batch has as many microbatches as before, which the copies
// of the model share out.
//
// A model that was never traced, and is to be cut over several partitions, is whole until its next step, which traces
// and cuts it as a first one does.
//
// The keys are those of init() that say who does what: partitions, microbatches (of each copy), schedule,
// active_microbatches, placement_strategy, auto_partition, default_partition, optimize, memory_weight,
// sharded_data_parallel_degree with sdp_param_persistence_threshold, sdp_persistent_parameters and sdp_units,
// shard_optimizer_state, tensor_parallel_degree. What is not given stays; so does whether gradients are clipped as
// those of shards.
//
// Throws ConfigError for a layout that the number of ranks does not allow. UsageError comes for what cannot change, as
// layers that so many ranks cannot share, or not now: inside a step function, while a checkpoint is being saved, with
// gradients that are not used yet. Nothing has changed then. PeerError: a rank was lost; elastic() goes on without it.
// Once all ranks are connected anew, any other error ends the job. A torch::optim optimizer that no
// DistributedOptimizer holds is not seen: it goes on with what it has.
void change(Settings settings);
void change(const std::string& json);  // the same as a JSON object

}  // namespace lamina
