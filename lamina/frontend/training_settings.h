// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "lamina/config/training_settings.h"
#include "lamina/optim/loss_scale.h"

namespace lamina {

// A layout in the words of FSDP or DeepSpeed, as JSON objects; one of the two at most.
struct TrainingConfigs {
  std::optional<std::string> fsdp_config{}, deepspeed_config{};
  std::string precision{};                   // "fp32", "amp_fp16", "amp_bf16"; "": as the configuration says
  std::string own = "{}";                    // keys of init, which may not contradict them
  std::optional<std::int64_t> batch_size{};  // of this rank, to be compared with that of `deepspeed_config`
};

struct TrainingSettings : config::TrainingSettings {
  std::string init_json;        // of init()
  optim::LossScale loss_scale;  // of DistributedOptimizer
};

// Reads them as the Trainer of Python does (docs/trainer.md). The program itself clips gradients to `clipping_norm`, by
// clip_master_grads(), computes in `autocast`, and checkpoints activations. `min_params` and what a model says of units
// have no effect: `sdp_units` among its own keys names them. Throws ConfigError with all that is wrong.
TrainingSettings training_settings(const TrainingConfigs& given);

}  // namespace lamina
