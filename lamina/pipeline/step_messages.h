// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/transport/message.h"

// What the ranks of a pipeline tell each other of their steps.
namespace lamina::pipeline {

// The leading rank begins step `call.step`, as `body` says; from another one: why it refuses that step.
inline constexpr transport::Kind kNewStep = "new step";
// Step `call.step` ended; `body` holds its outputs, or the Failure that ended it.
inline constexpr transport::Kind kEndOfStep = "end of step";

}  // namespace lamina::pipeline
