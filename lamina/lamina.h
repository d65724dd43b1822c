// SPDX-License-Identifier: Apache-2.0
#pragma once

// lamina for C++: docs/cpp.md. Trains a torch::nn model over several processes.
#include "lamina/base/error.h"
#include "lamina/frontend/change.h"
#include "lamina/frontend/checkpoint.h"
#include "lamina/frontend/child.h"
#include "lamina/frontend/containers.h"
#include "lamina/frontend/distributed_model.h"
#include "lamina/frontend/job.h"
#include "lamina/frontend/optimizer.h"
#include "lamina/frontend/placement.h"
#include "lamina/frontend/remote.h"
#include "lamina/frontend/run.h"
#include "lamina/frontend/slicing_plan.h"
#include "lamina/frontend/step.h"
#include "lamina/frontend/tensor_parallel.h"
#include "lamina/frontend/training_settings.h"
#include "lamina/frontend/transformer.h"
#include "lamina/value/failure.h"

namespace lamina {

using base::CancelledError;
using base::ConfigError;
using base::DesyncError;
using base::Error;
using base::FileError;
using base::FormatError;
using base::InternalError;
using base::PeerError;
using base::TimeoutError;
using base::UsageError;
using RemoteError = value::RemoteFailure;  // an error of another rank, thrown again here

}  // namespace lamina
