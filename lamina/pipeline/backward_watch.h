// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "lamina/remote/graph.h"

namespace lamina::pipeline {

// On the rank that runs step bodies: tells, once, of a body that calls loss.backward(). That works, but adds up the
// gradients of the microbatches, which the model's own backward divides by their number: another training than the
// plain loop's, without a word. Looks until it has seen one backward or the other.
class BackwardWatch {
 public:
  explicit BackwardWatch(int microbatches) : microbatches_(microbatches), over_(microbatches == 1) {}

  bool over() const { return over_; }

  // Before a step: the model's parameters, and how many backwards of other ranks' modules this one has asked for.
  void begin_step(const remote::Tensors& parameters, std::int64_t backwards);
  // The model's own backward is called.
  void announce() { announced_ = true; }
  void end_step(const remote::Tensors& parameters, std::int64_t backwards);

 private:
  using Mark = std::pair<const void*, std::uint64_t>;  // of a gradient: another one after each change of it
  static std::vector<Mark> marks(const remote::Tensors& parameters);

  const int microbatches_;
  bool over_;
  bool announced_ = false;
  std::int64_t backwards_ = 0;
  std::vector<Mark> before_;
};

}  // namespace lamina::pipeline
