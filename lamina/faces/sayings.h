// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

// Words that both faces say at their border to the user's program, each written once. C++ takes them by name, checked
// when it is compiled, and Python by the same name through `lamina.errors`.
namespace lamina::faces {

struct Saying {
  std::string_view name;
  std::string_view text;  // with `{}` for each value, in their order
  base::Code code{};      // of an error that the docs tell more of
};

inline constexpr Saying kSayings[] = {
    // The job.
    {"not-initialised", "lamina is not initialised in this process: call {} first", {"start-not-initialised"}},
    {"other-configuration",
     "init() was called before with another configuration; call shutdown() first to change it. Then and now: {}",
     {"start-initialised-twice"}},
    {"inside-step",
     "{} was called inside a step function, which runs once per microbatch and on one rank of the pipeline only: call "
     "it before or after the step",
     {"step-nested"}},
    {"outside-step", "{} outside a step; with more than one partition call it inside a function {}", {"step-outside"}},
    {"job-ended", "{} of a {} whose job was shut down", {"step-after-shutdown"}},
    {"needs-ddp", "{} needs ddp: true", {"group-no-ddp"}},
    {"no-group",
     "{}: the world_size({}) > 1, but the distributed package is not available or has not been initialized: call {} "
     "first",
     {"group-none"}},
    {"not-positive", "{} is a number above 0, not {}"},
    {"not-a-count", "{} is an integer, at least 1, not {}"},
    {"not-a-function", "{} takes a function, not {}"},
    {"no-seed", "{} needs the key `seed`; without it the state of torch's generator says"},
    {"end-of-program", "came to the end of its program"},
    {"as-many-calls",
     "copies of the model with different numbers of batches train inside of model.join(), or with the weights that an "
     "exact sampler gives each batch (in Python lamina.dist.exact_batches); when to stop is decided by all together"},
    // The model.
    {"model-twice",
     "there is a DistributedModel already: a job has one; call shutdown() to begin another job",
     {"model-twice"}},
    {"arguments-differ", "DistributedModel(): {}", {"model-ranks-differ"}},
    {"not-cut", "the model is partitioned at the first call of a step function; {} before", {"model-uncut"}},
    {"half-cut",
     "the model was not cut to the end, and has lost values: {}. Call shutdown(), and make model and optimizers anew",
     {"model-half-cut"}},
    {"not-a-partition", "a partition is an integer from 0, not {}"},
    {"called-elsewhere",
     "{} lives on rank {}: call it inside a step function, in the thread that runs the step's body",
     {"step-outside"}},
    {"gradients-for-tensors", "backward: {} tensors, but {} gradients"},
    {"cut-already", "{} after the model was partitioned; call it before the first step", {"model-cut-already"}},
    {"untraced", "it is cut by the bytes of its parameters"},
    {"ignored-scopes",
     "{} modules {}, which auto_partition ignores: set auto_partition to false, or place them by set_partition()"},
    {"copies-apart", "{} replicas of the model train apart: their gradients are not averaged without ddp: true"},
    {"no-step-in-join", "join(): this replica made no step; give each at least one batch", {"replica-no-step"}},
    {"gradient-elsewhere",
     "autograd.grad(), or backward(inputs=...), of a parameter whose gradient is not here: {}; use model.backward() "
     "and read .grad on the rank that owns it",
     {"step-autograd-grad"}},
    {"left-changed",
     "the step body left {} than it found, when the next microbatch had begun, which in one process begins with what "
     "this one left: set {}, or put {} back at the end; or set schedule: interleaved and active_microbatches: 1"},
    {"other-job", "{} is of another job: this one has begun since; begin a context in it", {"remote-other-job"}},
    {"too-deep", "a value nested more than {} levels deep cannot be sent", {"step-cannot-travel"}},
    // The batch.
    {"fewer-microbatches", "a batch has {} microbatches instead of {}: there is no more to split"},
    {"nothing-to-split",
     "nothing in its arguments can be split: each of {} microbatches gets all of them. Pass tensors, or containers of "
     "them; {}"},
    {"no-axis", "{} has no axis {} to split it along"},
    {"uneven",
     "{} cannot be split into {} microbatches: its size is a multiple of neither that number nor the size of {}. If "
     "each microbatch is to have all of it, {}",
     {"step-uneven"}},
    {"list-not-clear",
     "it is not clear how {} is cut: it may hold an element for each sample, or tensors with a row for each. {}",
     {"step-list"}},
    {"outputs-differ",
     "microbatches have returned tensors of the shapes {} and {}, which no stack, sum or mean takes: take concat() of "
     "them, or return what has the same shape for any number of samples",
     {"step-outputs-differ"}},
    {"offsets",
     "{} looks like offsets into another one, which have no pieces: each microbatch would get the offsets of other "
     "rows. Pass padded tensors and lengths, or {}; if it has a value for each row, {}",
     {"step-offsets"}},
    // Optimizers.
    {"lbfgs-in-parts",
     "LBFGS measures all parameters of a model at once, and a rank has those of its partition: with several "
     "partitions take an optimizer that updates each parameter by itself",
     {"model-one-rank-optimizer"}},
    {"sharded-optimizer",
     "{} with sharded_data_parallel_degree: a rank has a part of each parameter, and {}",
     {"shard-optimizer"}},
    {"divided-optimizer",
     "{} with shard_optimizer_state: a rank has a part of each parameter, and {}",
     {"optimizer-divided"}},
    {"measures-all", "it measures all parameters of a model at once: take one that updates each parameter by itself"},
    {"needs-unknown",
     "it is not known whether it looks at more of one than the element that it updates. Say so before: {}, with which "
     "each parameter is updated on one rank that has all of it"},
    {"two-loss-scales",
     "a job has one loss scale, which model.backward() takes: give every DistributedOptimizer the same static one, or "
     "have one optimizer, with the parameters as groups",
     {"optimizer-loss-scale"}},
    {"state-waits", "{} waits for the model to be partitioned: {} after the first step", {"state-before-cut"}},
    {"nothing-local", "{}: nothing is local before the model is partitioned", {"state-before-cut"}},
    {"as-many-gradients",
     "the gradients passed in does not equal to the size of the parameters! Params length: {}. Gradients length: {}"},
    {"in-two-groups", "some parameters appear in more than one parameter group: {} does"},
    {"groups-apart", "the optimizer has {} or {} groups, depending on the rank", {"state-other-optimizer"}},
    {"mixed-states",
     "the rank of partition {} was given a partial {} and that of partition {} a full one: load the same kind on every "
     "rank",
     {"state-mixed"}},
    {"other-state", "the state is not this optimizer's: {}", {"state-other-optimizer"}},
    {"other-groups", "it has {} parameter groups, the optimizer {}"},
    {"other-members", "group {} has {} parameters in the state and {} in the optimizer"},
    {"other-master", "the master of {} has {} elements in the state, and the parameter {}"},
    {"broken-off", "the number of updates that an error broke off = {}"},
    {"loads", "the number of states that were loaded into it = {}"},
    // Checkpoints.
    {"pickled",
     "{} has objects of classes, and making them may execute anything: give allow_pickle=True where you trust who "
     "wrote it",
     {"checkpoint-pickle"}},
    {"no-tag",
     "{} is no tag: it has characters that cannot be printed, or that are no UTF-8. Take one of letters, digits, - and "
     "_"},
    {"no-room", "{}: the checkpoint needs {} bytes, and {} are free: make room, or take another folder"},
    {"no-file-beside", "{} is no name of a file beside it"},
    // Slices of layers.
    {"nothing-sliced",
     "tensor_parallel_degree is {}, and no layer of the model is sliced: {}; every rank of a TP_GROUP computes all of "
     "it"},
    {"stay-whole", "layers that are marked for tensor parallelism and stay whole: {}"},
    {"no-heads",
     "set_tensor_parallelism(heads=...) takes the name of the attribute that says how many heads modules of a plan "
     "have, or their number, beside plan=..., not {}",
     {"tp-plan"}},
    {"some-without-slices",
     "{}, and with {} some rank would have none: take a smaller degree, or leave it whole",
     {"tp-layer"}},
    {"sliced-optimizer", "{} with parameters of a model whose layers are sliced: {}", {"tp-optimizer"}},
    {"mask-of-booleans",
     "a mask of attention is added to scores: give 0 where a position is seen and a large negative number where it is "
     "not, no booleans",
     {"tp-layer"}},
    {"too-many-positions", "a sequence of {} positions, and causal_mask_size is {}", {"tp-layer"}},
    {"other-activation", "activation is one of {}, not \"{}\"", {"tp-layer"}},
    {"not-a-size", "{} of a layer is above 0, not {}", {"tp-layer"}},
    {"not-a-probability", "{} of a layer is from 0 to 1, not {}", {"tp-layer"}},
    {"not-an-option", "{} of a layer is {}, not {}", {"tp-layer"}},
    {"no-layernorm", "one of pre_layernorm and post_layernorm is to be true", {"tp-layer"}},
    {"parallel-parts",
     "parallel_attn_output is for layers with pre_layernorm alone, and without cross attention",
     {"tp-layer"}},
    {"unused-states", "other states are for layers with add_cross_attention", {"tp-layer"}},
};

// The place of the one of that name; that behind the last where there is none. A sanitizer does not let a constant
// expression compare the address.
constexpr std::size_t find(std::string_view name) {
  std::size_t place = 0;
  while (place < std::size(kSayings) && kSayings[place].name != name) ++place;
  return place;
}

// A name that is in the table: any other one does not compile.
class Name {
 public:
  consteval Name(const char* name) : place_(find(name)) {
    if (place_ == std::size(kSayings)) throw std::invalid_argument("no saying has this name");
  }
  constexpr const Saying& saying() const { return kSayings[place_]; }

 private:
  std::size_t place_;
};

// The text with its values. Throws base::InternalError where there are more or fewer than it has places.
std::string fill(std::string_view text, const std::vector<std::string>& values);

template <class... Values>
std::string said(Name name, const Values&... values) {
  return fill(name.saying().text, {base::str(values)...});
}

template <class Error = base::UsageError, class... Values>
Error refusal(Name name, const Values&... values) {
  return Error(said(name, values...), name.saying().code);
}

}  // namespace lamina::faces
