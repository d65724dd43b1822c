// SPDX-License-Identifier: Apache-2.0
#pragma once

// lamina for C++: docs/cpp.md. Trains a torch::nn model over several processes.
#include "lamina/base/error.h"
#include "lamina/face/child.h"
#include "lamina/face/containers.h"
#include "lamina/face/distributed_model.h"
#include "lamina/face/job.h"
#include "lamina/face/optimizer.h"
#include "lamina/face/placement.h"
#include "lamina/face/step.h"
#include "lamina/value/failure.h"

namespace lamina {

using base::CancelledError;
using base::ConfigError;
using base::DesyncError;
using base::Error;
using base::FormatError;
using base::PeerError;
using base::TimeoutError;
using base::UsageError;
using RemoteError = value::RemoteFailure;  // an error of another rank, thrown again here

}  // namespace lamina
