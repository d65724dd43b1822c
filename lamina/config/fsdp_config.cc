// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "lamina/base/str.h"
#include "lamina/config/layout_configs.h"

namespace lamina::config {
namespace {

constexpr std::string_view kFsdp = "fsdp_config";
constexpr std::string_view kCheckpoints = "checkpoints are lamina's, which load in any layout: leave it out";
constexpr std::string_view kShardDegree =
    R"(lamina_config={"sharded_data_parallel_degree": n} shards over n ranks: leave it out)";

using Dtype = std::optional<FloatType>;

struct FsdpConfig {
  std::string sharding_strategy = "FULL_SHARD", backward_prefetch = "BACKWARD_POST", mixed_precision = "DEFAULT";
  const UserValue* dtypes = nullptr;  // `mixed_precision` as a dictionary
  double min_params = 1e8;
  bool activation_checkpointing = false, activation_cpu_offload = false, verbose = false;
  std::vector<std::string> ignored_modules;
};

UserReader mixed_precision(FsdpConfig& into) {
  return
      [of_name = as_one_of(into.mixed_precision, {"FULL", "DEFAULT", "PURE"}), of_dtypes = as_section(into.dtypes)](
          const UserValue& given, Notation notation) { return (given.entries ? of_dtypes : of_name)(given, notation); };
}

// Reads whether all ranks get the values of rank 0, which they always do.
Reading sync_module_states(const UserValue& given, Notation notation) {
  bool syncs = false;
  auto reading = as_flag(syncs)(given, notation);
  reading.has_effect = syncs;
  return reading;
}

UserReader modules(std::vector<std::string>& into) {
  return [&into](const UserValue& given, Notation) -> Reading {
    if (const auto* names = std::get_if<std::vector<std::string>>(&given.value)) {
      into = *names;
    } else if (!std::holds_alternative<std::monostate>(given.value)) {
      return refused(given, "modules of the model");
    }
    return {};
  };
}

// Later versions of Composer, and torch, have keys that the first ones do not.
UserTable table(FsdpConfig& into) {
  return {
      {{"sharding_strategy"}, as_one_of(into.sharding_strategy, {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"})},
      {{"min_params"}, as_number(into.min_params, 0)},
      {{"cpu_offload"}, as_absent("parameters in the memory of the host are not there yet")},
      {{"mixed_precision"}, mixed_precision(into)},
      {{"backward_prefetch"}, as_one_of(into.backward_prefetch, {"BACKWARD_PRE", "BACKWARD_POST", "NONE"})},
      {{"activation_checkpointing"}, as_flag(into.activation_checkpointing)},
      {{"activation_cpu_offload"}, as_flag(into.activation_cpu_offload)},
      {{"verbose"}, as_flag(into.verbose)},
      {{"sync_module_states"}, sync_module_states},
      {{"ignored_modules"}, modules(into.ignored_modules)},
      {{"keep_low_precision_grads"}, as_absent("masters, and their gradients, are float32")},
      {{"te_shard_fp8_weight"}, as_absent("fp8 is not there")},
      {{"load_planner", "save_planner"}, as_absent(kCheckpoints)},
      {{"device_mesh", "process_group", "data_parallel_shard_degree", "data_parallel_replicate_degree"},
       as_absent(kShardDegree)},
      {{"limit_all_gathers", "forward_prefetch", "forward_prefetch_limit", "backward_prefetch_limit", "use_orig_params",
        "flatten_parameters", "activation_checkpointing_reentrant", "te_checkpoint_wrapper", "state_dict_type",
        "load_fsdp_monolith_rank0_only", "load_monolith_rank0_only", "sharded_ckpt_prefix_dir", "auto_wrap"},
       as_ignored()},
  };
}

// The keys of init for the dtypes that `mixed_precision` says.
InitKeys keys_of_precision(const FsdpConfig& config, FloatType half, Findings& findings) {
  const bool is_pure = config.mixed_precision == "PURE";
  Dtype param = is_pure ? Dtype(half) : Dtype(), buffer = param;
  Dtype reduce = config.mixed_precision == "FULL" ? Dtype() : Dtype(half);
  if (config.dtypes != nullptr) {
    param = reduce = buffer = std::nullopt;
    const UserTable dtypes{
        {{"param_dtype"}, as_dtype(param)}, {{"reduce_dtype"}, as_dtype(reduce)}, {{"buffer_dtype"}, as_dtype(buffer)}};
    read_table(in_section(kFsdp, "mixed_precision", findings.notation), *config.dtypes, dtypes, findings);
  }
  return keys_of_dtypes(param, reduce, buffer);
}

std::string prefetch(const std::string& name) {
  return name == "NONE" ? "none" : name == "BACKWARD_PRE" ? "pre" : "post";
}

}  // namespace

TrainingSettings read_fsdp(const UserValue& given, Precision precision, Findings& findings) {
  FsdpConfig config;
  read_table(std::string(kFsdp), given, table(config), findings);
  TrainingSettings settings{.precision = precision,
                            .autocast = precision,
                            .layout = config.sharding_strategy,
                            .optimizer_scale = ScaleOptions()};
  settings.keys = keys_of_precision(config, dtype_of(precision), findings);
  if (config.sharding_strategy != "NO_SHARD") {
    settings.keys.emplace_back("sdp_backward_prefetch", prefetch(config.backward_prefetch));
  }
  if (config.activation_cpu_offload) {
    settings.keys.emplace_back("offload_activations", true);
    const auto name = in_section(kFsdp, "activation_cpu_offload", findings.notation);
    if (!config.activation_checkpointing) {
      findings.problems.add(name, base::str(name,
                                            ": of modules that are not checkpointed it is not there yet; expected it "
                                            "with activation_checkpointing"));
    }
  }
  settings.activation_checkpointing = config.activation_checkpointing;
  settings.min_params = config.min_params;
  settings.verbose = config.verbose;
  settings.ignored = config.ignored_modules;
  return settings;
}

}  // namespace lamina::config
