// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/schedule/team_turns.h"
#include "lamina/transport/message.h"
#include "lamina/value/failure.h"

// Messages by which the ranks of a pipeline tell each other of their steps: see [Note: step identity]. Each struct is
// one message, from rank `from`; to_message() writes it, and the reader with its name reads it. The readers throw
// base::FormatError.
namespace lamina::pipeline {

inline constexpr transport::Kind kNewStep = "new step";
inline constexpr transport::Kind kRefusal = "refusal";
inline constexpr transport::Kind kEndOfStep = "end of step";
inline constexpr transport::Kind kTurn = "turn";

// To those that follow: the leading rank begins a step, whose function `call` names.
struct NewStep {
  base::Step step;
  base::Rank from;
  base::Call call;               // its name, and where it is
  std::int64_t first_split = 0;  // see StepScope
};

// To the leading rank: another one will not take part in the step that it has begun.
struct Refusal {
  base::Step step;
  base::Rank from;
  std::string why;
};

// A step ended: with the outputs of its microbatches, or with the failure of any rank.
struct EndOfStep {
  base::Step step;
  base::Rank from;
  std::vector<value::Value> outputs;
  bool backward = false;                   // there was one
  std::string flags;                       // of parameters, as the step leaves them: ParameterFlags::to_bytes()
  std::optional<value::Failure> failure;   // instead of all these
  std::vector<std::int64_t> samples = {};  // see StepSpec
};

// A word of a team's first rank to the others, on their turns in a step.
transport::Message to_message(base::Step step, base::Rank from, const schedule::Pick& word);

transport::Message to_message(const NewStep& begin);
transport::Message to_message(Refusal refusal);
transport::Message to_message(EndOfStep end);

schedule::Pick to_pick(const transport::Message& message);
NewStep to_new_step(const transport::Message& message);
Refusal to_refusal(transport::Message&& message);
EndOfStep to_end_of_step(transport::Message&& message);

}  // namespace lamina::pipeline
