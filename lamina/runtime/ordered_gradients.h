// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "lamina/base/ids.h"

namespace lamina::runtime {

// [Note: ordered gradients] Floating-point sums depend on the order of their parts, and microbatches reach a parameter
// in an order of their own in every run. So each microbatch finds the `.grad` of the parameters empty and fills its
// own, which moves with the compute slot as ProcessState does. At the end of the step the parts are added in the order
// of the microbatches. What a microbatch does in itself it does in one order when none of its calls is predicted. The
// price is one copy of the gradients per microbatch; no microbatch waits for another. Weight parts of split backwards
// run when there is nothing else to do, between any other turns of their microbatch, but in one order among themselves.
// So they fill gradients of their own, which are added next.
//
// The gradients of one step. Used by whoever has the compute slot, and where no microbatch computes.
class OrderedGradients {
 public:
  // Takes the gradients of `parameters` aside. Again in a step whose parameters were not known: they were none.
  void begin(std::vector<at::Tensor> parameters);

  // From now on `.grad` is that of `microbatch`: of its weight parts, or of all else.
  void turn_of(base::Microbatch microbatch, bool in_weights = false);

  // Adds what the microbatches have to the gradients that were there; or drops it, when the step failed.
  void end(bool keep);

 private:
  using Gradients = std::vector<at::Tensor>;
  using Part = std::pair<base::Microbatch, bool>;  // in weights

  void exchange(Gradients& gradients);  // with those in `.grad`

  std::vector<at::Tensor> parameters_;
  Gradients before_;
  std::map<Part, Gradients> parts_;
  std::optional<Part> current_;
};

}  // namespace lamina::runtime
