// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/training_settings.h"

#include <algorithm>

#include "lamina/base/str.h"
#include "lamina/frontend/job.h"

namespace lamina {
namespace {

// The keys of init, own ones among them.
std::string init_json(const config::TrainingSettings& settings, const config::UserValue& own) {
  std::string json;
  const auto add = [&](const std::string& key, const std::string& value) {
    json += base::str(json.empty() ? "{" : ", ", config::show(key), ": ", value);
  };
  for (const auto& [key, value] : settings.keys) add(key, config::show(value));
  for (const auto& [key, shown, value] : *own.entries) {
    if (std::ranges::count(settings.keys, key, &config::InitKeys::value_type::first) == 0) add(key, value.shown);
  }
  return json.empty() ? "{}" : json + "}";
}

optim::LossScale loss_scale(const config::TrainingSettings& settings) {
  if (!settings.optimizer_scale && !settings.scales_losses) return optim::LossScale();
  const auto scale = settings.optimizer_scale.value_or(config::ScaleOptions());
  if (scale.fixed) return optim::LossScale(*scale.fixed);
  return optim::LossScale(scale.dynamic);
}

}  // namespace

TrainingSettings training_settings(const TrainingConfigs& given) {
  config::TrainingArguments arguments{.notation = config::Notation::kJson, .ranks = size()};
  if (given.fsdp_config) arguments.fsdp_config = config::user_value(*given.fsdp_config, "fsdp_config");
  if (given.deepspeed_config)
    arguments.deepspeed_config = config::user_value(*given.deepspeed_config, "deepspeed_config");
  if (!given.precision.empty()) arguments.precision = {given.precision, config::show(given.precision)};
  arguments.own = config::user_value(given.own, "lamina_config");
  arguments.batch_size = given.batch_size;
  const auto* microbatches = arguments.own->find("microbatches");
  const auto* count = microbatches == nullptr ? nullptr : std::get_if<std::int64_t>(&microbatches->value);
  if (count != nullptr) arguments.microbatches = *count;
  const auto found = config::training_settings(arguments);
  return {found, init_json(found, *arguments.own), loss_scale(found)};
}

}  // namespace lamina
