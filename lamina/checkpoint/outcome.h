// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/messaging/outcome.h"

namespace lamina::checkpoint {

// The names that these functions had here; for who has not changed to the others yet.
using messaging::to_error;
using messaging::to_text;

}  // namespace lamina::checkpoint
