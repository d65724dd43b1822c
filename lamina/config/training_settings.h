// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/config/layout_configs.h"

namespace lamina::config {

// [Note: layouts of the Trainer] `fsdp_config` and `deepspeed_config` choose a layout, a row of the table in
// docs/trainer.md, and the loop knows nothing of it. How long values are kept is said by `sdp_reshard_after_forward`
// and `sdp_reshard_after_backward`. Where ranks share memory, values lie there once for all, and rows that shard take
// the same bytes.

// Reads the configurations of a training; starts nothing. Throws ConfigError with all that is wrong, at once, with
// nearest names and both numbers of a contradiction.
TrainingSettings training_settings(const TrainingArguments& given);

}  // namespace lamina::config
