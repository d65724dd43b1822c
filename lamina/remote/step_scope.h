// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "lamina/remote/deliveries.h"
#include "lamina/remote/outstanding_calls.h"
#include "lamina/remote/served_calls.h"
#include "lamina/runtime/execution_context.h"
#include "lamina/runtime/step_context.h"

namespace lamina::remote {

// One step on this rank, with the calls between ranks that are made in it.
class StepScope : public runtime::StepContext {
 public:
  using StepContext::StepContext;

  // The microbatches from this one on have their backwards in two parts: see [Note: parts of a backward]. Known when
  // the step has begun here.
  std::int64_t first_split = std::numeric_limits<std::int64_t>::max();
  bool splits(base::Microbatch microbatch) const { return microbatch.value >= first_split; }

  std::vector<base::Rank> pipeline;  // its ranks, by partition: a call's name says of which its caller is
  Deliveries deliveries;             // values from other ranks
  OutstandingCalls calls;            // of their modules
  ServedCalls served;                // of the modules here

  void close() override {
    served.close();
    deliveries.close();
    calls.close();
    StepContext::close();
  }

 protected:
  void cancel() override {
    StepContext::cancel();
    deliveries.cancel();
    calls.cancel();
  }
};

// The step of a context: steps of a job are made so.
inline StepScope& scope_of(const runtime::ExecutionContext& context) { return static_cast<StepScope&>(context.step()); }

}  // namespace lamina::remote
