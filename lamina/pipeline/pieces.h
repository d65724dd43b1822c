// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "lamina/base/ids.h"

namespace lamina::pipeline {

// [Note: uneven batches] The loss of a body is a mean over its samples. So the gradient of each microbatch counts as
// much as its part of all samples, those of the batches of other copies of the model included. The sum is the gradient
// of the mean over everything, as one device has it. A batch that does not divide therefore has microbatches that
// differ by one sample, and one of fewer samples has fewer microbatches. The samples of a batch are the rows of the
// first tensor that is cut. Where copies have to make the same calls, a batch of fewer samples has as many microbatches
// all the same: the last sample is repeated, counts nothing, and leaves no output. Copies tell each other theirs in the
// first backward of a step, so that a step without one waits for nobody.

// How the tensors of a batch are cut into microbatches: at the same places, in units of the rows of the shortest one.
class Pieces {
 public:
  // `sizes`: of the tensors along the axes that they are cut along, in the order of the arguments. No sizes: nothing is
  // cut, and as many microbatches as asked for get all. `needs_all`: there are as many as asked for in any case.
  Pieces(std::span<const std::int64_t> sizes, int microbatches, bool needs_all = false);

  // A tensor that cannot be cut beside the others, and one of these, by their places: its rows are no multiple of that
  // one's, and not all sizes are multiples of the number of microbatches.
  struct Misfit {
    std::size_t misfit, beside;
  };
  const std::optional<Misfit>& misfit() const { return misfit_; }

  int microbatches() const { return microbatches_; }
  // How many there are before the last one is repeated.
  int distinct() const { return distinct_; }
  struct Piece {
    std::int64_t begin, length;
  };
  // The rows of a tensor of that size that a microbatch gets.
  Piece of(std::int64_t size, base::Microbatch microbatch) const;
  // The samples of each microbatch, 0 of one that is repeated; none where nothing is cut.
  std::vector<std::int64_t> samples() const;

 private:
  int microbatches_, distinct_;
  std::int64_t units_ = 0, rows_ = 0;  // of the batch; rows of the first tensor
  bool cuts_;
  std::optional<Misfit> misfit_;
};

// All copies of the model that average their gradients, in one step.
struct Copies {
  int count = 1;
  std::int64_t samples = -1;  // of all their batches; -1: not known
};

// How many of so many microbatches count: all but those that are repeated.
std::size_t counted(std::span<const std::int64_t> samples, std::size_t microbatches);

// The part of a microbatch in the mean over the batches of all copies, as a mean of the copies' sums has it, times
// `scale`. `samples`: see Pieces; `all` without samples: this copy alone.
double share(std::span<const std::int64_t> samples, base::Microbatch microbatch, int microbatches, const Copies& all,
             double scale);

}  // namespace lamina::pipeline
