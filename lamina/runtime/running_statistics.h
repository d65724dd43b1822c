// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lamina/base/ids.h"

namespace lamina::runtime {

// A BatchNorm of the model, by its buffers.
struct BatchNorm {
  std::string name;
  at::Tensor mean, var, count;     // running_mean, running_var, num_batches_tracked
  std::optional<double> momentum;  // nothing: the running statistics are the mean over all calls
};

// [Note: running statistics] In the plain loop BatchNorm folds the statistics of one microbatch after the other into
// its running ones. Here microbatches reach it in an order of their own. So each has running statistics of its own,
// which are at first what the step found, and move with the compute slot as ProcessState does. At the end of the step
// what each microbatch has folded in is folded into what there was, in the order of the microbatches: how often a
// microbatch called, `count` tells. (A class that does not count its calls is taken to make one in each microbatch.)
//
// No microbatch waits for another, so one that reads running statistics, in evaluation mode, does not see what earlier
// ones of the same step fold in. Where that would differ from the plain loop, it is an error.
//
// The statistics of one step. Used by whoever has the compute slot, and where no microbatch computes.
class RunningStatistics {
 public:
  // Takes the buffers of these modules aside.
  void begin(std::vector<BatchNorm> modules);

  // From now on the buffers are those of `microbatch`.
  void turn_of(base::Microbatch microbatch);

  // The current microbatch calls the module with this running mean, which `trains` or only reads it. Throws
  // base::UsageError where what it reads lacks what an earlier microbatch folds in.
  void note_call(const at::Tensor& running_mean, bool trains);

  // Folds what the microbatches have into what there was; or drops it, when the step failed.
  void end(bool keep);

 private:
  using Memory = std::vector<at::Tensor>;  // per pool, one flat tensor

  // Buffers of one kind, dtype and device, one after the other in one memory.
  struct Pool {
    bool counts = false;
    std::vector<at::Tensor> buffers;
    std::vector<std::size_t> modules;  // of each buffer
    std::vector<std::int64_t> offsets;
    std::vector<at::Tensor> aside;  // tensors with the buffers' memory outside of the step
    at::Tensor before;              // what the step found
    at::Tensor current;   // its storage is that of the buffers; the memory is that of the microbatch that computes
    at::Tensor elements;  // of which module each element is

    void install();
    void put_back();
    at::Tensor part(const at::Tensor& flat, std::size_t buffer) const;
    at::Tensor spread(const at::Tensor& of_modules) const;  // to the elements
    void write(const at::Tensor& flat);                     // what the buffers have after the step
  };
  struct Calls {
    std::optional<base::Microbatch> first_to_train, last_to_read;
  };

  void add(const at::Tensor& buffer, std::size_t module, bool is_count);
  void exchange(const Memory& own) const;
  void fold();
  at::Tensor counts(const Memory& memory) const;
  at::Tensor changed(const Memory& own) const;  // modules, as bools

  std::vector<BatchNorm> modules_;
  std::vector<Calls> calls_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> by_mean_;
  std::vector<Pool> pools_;
  std::map<base::Microbatch, Memory> own_;
  std::optional<base::Microbatch> current_;
};

}  // namespace lamina::runtime
