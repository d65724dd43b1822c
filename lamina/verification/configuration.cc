// SPDX-License-Identifier: Apache-2.0
#include "lamina/verification/configuration.h"

#include <utility>

#include "lamina/config/layout_text.h"
#include "lamina/environment/rank_contract.h"
#include "lamina/environment/world.h"
#include "lamina/verification/run_recorder.h"

namespace lamina::verification {
namespace {

config::Config in_run(config::Config config, const RecordingOptions& recording_options) {
  // Shards clip by themselves: both runs do as the script's configuration does.
  if (config.sharded_data_parallel_degree == 1) config.sdp_gradient_clipping.reset();
  if (!recording_options.layout.empty()) {
    config = config::in_layout(std::move(config), recording_options.layout);
    config::validate(config);
  }
  config.reduce_dtype.reset();  // what gradients lose on their way is no difference between layouts
  return recording_options.collapsed ? config::collapsed(std::move(config)) : config;
}

}  // namespace

config::GivenConfig read_configuration(const std::string& json, const environment::Environment& environment) {
  const auto recording_options = read_terms(environment);
  // The command has started one process where the script wants more, or it is to join others.
  const bool several = environment::read_world(environment).size > 1 || environment(environment::kNewcomerVariable) ||
                       (recording_options && recording_options->collapsed);
  auto parsed = config::parse_sources(
      {{json, environment(config::kSageMakerVariable), several}, environment(config::kOwnVariable)});
  if (recording_options) parsed.config = in_run(std::move(parsed.config), *recording_options);
  return parsed;
}

}  // namespace lamina::verification
