// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <sstream>
#include <utility>

#include "lamina/base/str.h"
#include "lamina/config/layout_configs.h"

namespace lamina::config {
namespace {

constexpr std::string_view kDeepSpeed = "deepspeed_config";
constexpr std::string_view kOffload = "states and parameters in the memory of the host are not there yet";
constexpr std::string_view kBatches = "it changes the sizes of batches, which the Trainer's loaders have: leave it out";
constexpr std::string_view kModel = "it changes the model, and is not there: leave it out";
constexpr std::string_view kLayout = "lamina_config={...} has partitions and slices, keys of lamina.init: leave it out";
constexpr std::string_view kQuantised = "values and gradients travel as communication_data_type says: leave it out";
constexpr std::string_view kAveraged =
    "gradients are summed in float32 and divided once, by the number of samples: leave it out";
constexpr std::string_view kMasters = "masters are float32";

using Count = std::optional<std::int64_t>;

struct Zero {
  std::int64_t stage = 0;
  Count reduce_bucket_size, max_live_parameters, param_persistence_threshold;
};

struct Half {
  bool enabled = false;
};

struct Fp16 : Half {
  double loss_scale = 0, min_loss_scale = 1;
  std::int64_t initial_scale_power = 16, loss_scale_window = 1000, hysteresis = 2;
  bool consecutive_hysteresis = false;
};

struct DeepSpeedConfig {
  Count train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps;
  double gradient_clipping = 0;
  std::optional<FloatType> communication_data_type;
  const UserValue *zero_section = nullptr, *fp16_section = nullptr, *bf16_section = nullptr, *dtypes = nullptr;
  Zero zero;
  Fp16 fp16;
  Half bf16;
  // Values that change no result.
  double time = 0;  // of elements: says when something travels
  bool choice = false;
};

UserTable table(DeepSpeedConfig& into) {
  return {
      {{"train_batch_size"}, as_number(into.train_batch_size, 1)},
      {{"train_micro_batch_size_per_gpu"}, as_number(into.train_micro_batch_size_per_gpu, 1)},
      {{"gradient_accumulation_steps"}, as_number(into.gradient_accumulation_steps, 1)},
      {{"zero_optimization"}, as_section(into.zero_section)},
      {{"fp16"}, as_section(into.fp16_section)},
      {{"bf16"}, as_section(into.bf16_section)},
      {{"gradient_clipping"}, as_number(into.gradient_clipping, 0)},
      {{"communication_data_type"}, as_dtype(into.communication_data_type)},
      {{"optimizer"}, as_absent("the Trainer's argument `optimizers` says which one: leave this out")},
      {{"scheduler"}, as_absent("the Trainer's argument `schedulers` says which one: leave this out")},
      {{"amp"}, as_absent("apex is not there: the Trainer's `precision`, or fp16, says it")},
      {{"torch_autocast"}, as_absent("the Trainer's `precision` says it: leave this out")},
      {{"zero_allow_untested_optimizer"}, as_ignored(as_flag(into.choice))},
      {{"prescale_gradients"}, as_only(false, kAveraged)},
      {{"gradient_predivide_factor"}, as_only(1.0, kAveraged)},
      {{"gradient_allreduce_op"}, as_only("mean", kAveraged)},
      {{"managed_gradient_accumulation"}, as_only(true, "the Trainer's microbatches are the accumulation")},
      {{"fp32_allreduce"}, as_only(false, "communication_data_type says it")},
      {{"data_types"}, as_section(into.dtypes)},
      {{"mp_size"}, as_only(std::int64_t{1}, "lamina_config={...} has partitions and slices, keys of lamina.init")},
      {{"elasticity", "autotuning", "curriculum_learning", "data_efficiency"}, as_absent(kBatches)},
      {{"progressive_layer_drop", "sparse_attention", "quantize_training", "compression_training", "eigenvalue",
        "hybrid_engine", "weight_quantization"},
       as_absent(kModel)},
      {{"pipeline", "tensor_parallel", "expert_parallel", "sequence_parallel_size"}, as_absent(kLayout)},
      {{"steps_per_print",
        "wall_clock_breakdown",
        "dump_state",
        "memory_breakdown",
        "log_level",
        "tensorboard",
        "wandb",
        "csv_monitor",
        "comet",
        "monitor_config",
        "comms_logger",
        "flops_profiler",
        "aio",
        "nebula",
        "compile",
        "graph_harvesting",
        "disable_allgather",
        "sparse_gradients",
        "zero_force_ds_cpu_optimizer",
        "dataloader_drop_last",
        "activation_checkpointing",
        "checkpoint",
        "load_universal_checkpoint",
        "vocabulary_size",
        "use_data_before_expert_parallelism",
        "seq_parallel_communication_data_type"},
       as_ignored()},
  };
}

// InitKeys of `zero_optimization` that it also takes without this word before them.
constexpr std::string_view kStage3 = "stage3_";
constexpr std::string_view kOfStage3[] = {"prefetch_bucket_size",
                                          "max_reuse_distance",
                                          "model_persistence_threshold",
                                          "max_live_parameters",
                                          "param_persistence_threshold",
                                          "gather_16bit_weights_on_model_save",
                                          "gather_fp16_weights_on_model_save",
                                          "module_granularity_threshold",
                                          "use_all_reduce_for_fetch_params",
                                          "allgather_sequential"};

UserTable table(Zero& into, DeepSpeedConfig& config) {
  const auto time = as_ignored(as_number(config.time, 0));
  const auto choice = as_ignored(as_flag(config.choice));
  return {
      {{"stage"}, as_number(into.stage, 0, 3)},
      {{"reduce_bucket_size"}, as_number(into.reduce_bucket_size, 1)},
      {{"allgather_bucket_size", "sub_group_size"}, time},
      {{"overlap_comm", "reduce_scatter", "allgather_partitions", "contiguous_gradients", "round_robin_gradients"},
       choice},
      {{"stage3_prefetch_bucket_size", "stage3_max_reuse_distance", "stage3_model_persistence_threshold"}, time},
      {{"stage3_max_live_parameters"}, as_number(into.max_live_parameters, 1)},
      {{"stage3_param_persistence_threshold"}, as_number(into.param_persistence_threshold, 0)},
      // State dicts are always whole.
      {{"stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"}, choice},
      {{"stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential"},
       as_ignored()},
      {{"offload_param", "offload_optimizer", "cpu_offload", "cpu_offload_param", "cpu_offload_params", "zenflow"},
       as_absent(kOffload)},
      {{"zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights",
        "zeropp_loco_param"},
       as_absent(kQuantised)},
      {{"use_multi_rank_bucket_allreduce", "grad_hooks", "load_from_fp32_weights", "elastic_checkpoint",
        "pipeline_loading_checkpoint", "legacy_stage1", "ignore_unused_parameters", "override_module_apply",
        "log_trace_cache_warnings", "leaf_module", "enable_sanity_checks", "memory_efficient_linear",
        "cpu_offload_use_pin_memory", "zero_hpz_partition_size", "mics_shard_size", "mics_hierarchical_params_gather",
        "save_muon_momentum_buffer_in_memory"},
       as_ignored()},
  };
}

UserTable table(Half& into) {
  return {
      {{"enabled"}, as_flag(into.enabled)},
      {{"immediate_grad_update", "check_grad_overflow", "check_overflow"}, as_ignored()},
      {{"bf16_master_weights_and_grads", "bf16_optimizer_states"}, as_absent(kMasters)},
  };
}

UserTable table(Fp16& into, DeepSpeedConfig& config) {
  return {
      {{"enabled"}, as_flag(into.enabled)},
      {{"loss_scale"}, as_number(into.loss_scale, 0)},
      {{"initial_scale_power"}, as_number(into.initial_scale_power, 0, 127)},
      {{"loss_scale_window"}, as_number(into.loss_scale_window, 1)},
      {{"hysteresis"}, as_number(into.hysteresis, 1)},
      {{"consecutive_hysteresis"}, as_flag(into.consecutive_hysteresis)},
      {{"min_loss_scale"}, as_number(into.min_loss_scale, 0x1p-126)},
      {{"auto_cast"}, as_ignored(as_flag(config.choice))},  // floating-point arguments are always converted
      {{"fp16_master_weights_and_grads"}, as_absent(kMasters)},
  };
}

UserTable table_of_dtypes() {
  return {{{"grad_accum_dtype", "param_dtype", "buffer_dtype"},
           as_only("fp32", "gradients add up in float32, and parameters and buffers are as the precision says")}};
}

// Gives keys the names that they have here; of two that become one, the later one counts.
template <class NameOf>
UserValue renamed(UserValue given, Notation notation, NameOf name_of) {
  if (!given.entries) return given;
  std::vector<UserEntry> entries;
  for (auto& [key, shown, value] : *given.entries) {
    const std::string name = name_of(key);
    const auto before = std::ranges::find(entries, name, &UserEntry::key);
    if (before != entries.end()) {
      before->value = std::move(value);
    } else {
      entries.push_back({name, name == key ? shown : show(name, notation), std::move(value)});
    }
  }
  given.entries = std::move(entries);
  return given;
}

std::string name_in_zero(const std::string& key) {
  return std::ranges::count(kOfStage3, key) > 0 ? base::str(kStage3, key) : key;
}

void read_sections(DeepSpeedConfig& config, Findings& findings) {
  const auto read = [&](std::string_view name, const UserValue* given, const UserTable& table) {
    if (given != nullptr) read_table(in_section(kDeepSpeed, name, findings.notation), *given, table, findings);
  };
  if (config.zero_section != nullptr) {
    const auto zero = renamed(*config.zero_section, findings.notation, name_in_zero);
    read("zero_optimization", &zero, table(config.zero, config));
  }
  read("data_types", config.dtypes, table_of_dtypes());
  read("fp16", config.fp16_section, table(config.fp16, config));
  read("bf16", config.bf16_section, table(config.bf16));
}

// Compares the sizes of batches and their number with the loader's and the Trainer's.
class Batches {
 public:
  Batches(const TrainingArguments& given, int readers, Findings& findings)
      : given_(given), readers_(readers), findings_(findings) {}

  void compare(const DeepSpeedConfig& config) {
    const auto& size = given_.batch_size;
    const auto* micro = std::get_if<std::int64_t>(&given_.microbatch_size);
    const bool is_cut_by_number = std::holds_alternative<std::monostate>(given_.microbatch_size);
    std::optional<double> pieces, samples, whole;
    if (is_cut_by_number) pieces = given_.microbatches.value_or(0) == 0 ? 1 : *given_.microbatches;
    if (micro != nullptr) samples = *micro;
    if (size) {
      whole = *size * readers_;
      if (micro != nullptr) {
        samples = std::min(*micro, *size);
        pieces = (*size + *micro - 1) / *micro;
      } else if (is_cut_by_number) {
        samples = *size / *pieces;
      }
    }
    compare("train_batch_size", config.train_batch_size, whole);
    compare("train_micro_batch_size_per_gpu", config.train_micro_batch_size_per_gpu, samples);
    compare("gradient_accumulation_steps", config.gradient_accumulation_steps, pieces);
  }

 private:
  void compare(std::string_view key, const Count& asked, const std::optional<double>& here) {
    if (!asked || (here && static_cast<double>(*asked) == *here)) return;
    const auto notation = findings_.notation;
    const auto* word = std::get_if<std::string>(&given_.microbatch_size);
    const bool is_of_size = key == "train_micro_batch_size_per_gpu" && word != nullptr;
    const auto said = [&](const Count& count) { return count ? std::to_string(*count) : show(Scalar(), notation); };
    const auto name = in_section(kDeepSpeed, key, notation);
    findings_.problems.add(
        name, base::str(name, ": ", *asked, ", but the Trainer has ",
                        here         ? in_short(*here)
                        : is_of_size ? *word
                                     : "none",
                        ": ", readers_, " x ", said(given_.batch_size), " samples, device_train_microbatch_size=",
                        word != nullptr ? *word : show(given_.microbatch_size, notation),
                        ", grad_accum=", said(given_.microbatches)));
  }

  static std::string in_short(double number) {
    std::ostringstream text;
    text.precision(10);
    text << number;
    return text.str();
  }

  const TrainingArguments& given_;
  int readers_;
  Findings& findings_;
};

// The precision that the sections and the argument say, which may not contradict each other.
Precision precision_of(const UserValue& written, const DeepSpeedConfig& config, std::optional<Precision> argument,
                       std::string_view device_type, Findings& findings) {
  struct Section {
    Precision precision;
    std::string_view name;
    bool is_there, is_on;
  };
  const Section sections[] = {{Precision::kAmpFp16, "fp16", written.find("fp16") != nullptr, config.fp16.enabled},
                              {Precision::kAmpBf16, "bf16", written.find("bf16") != nullptr, config.bf16.enabled}};
  const auto first_on = std::ranges::find(sections, true, &Section::is_on);
  const bool is_on = first_on != std::end(sections);
  const auto is_off = [&](Precision precision) {
    return std::ranges::any_of(
        sections, [&](const Section& each) { return each.precision == precision && each.is_there && !each.is_on; });
  };
  if (config.fp16.enabled && config.bf16.enabled) {
    findings.problems.add(kDeepSpeed, "deepspeed_config has fp16 and bf16, both enabled; expected one of them");
  }
  if (!argument) {
    const auto usual = read_precision({}, device_type);
    return is_on ? first_on->precision : is_off(usual) ? Precision::kFp32 : usual;
  }
  const bool is_one_on =
      std::ranges::any_of(sections, [&](const Section& each) { return each.is_on && each.precision == *argument; });
  if (is_off(*argument) || (is_on && !is_one_on)) {
    const auto name = *argument == Precision::kAmpFp16 ? "fp16" : "bf16";
    const auto says = is_on ? base::str("has ", name_of(first_on->precision), " enabled")
                            : base::str("has ", name, ", which is not enabled");
    findings.problems.add(kDeepSpeed, base::str("deepspeed_config ", says, ", but the Trainer has precision=",
                                                show(std::string(name_of(*argument)), findings.notation)));
  }
  return *argument;
}

ScaleOptions scale_of(const Fp16& fp16) {
  if (fp16.loss_scale > 0) return {.fixed = fp16.loss_scale};
  return {.dynamic = {.init_scale = std::exp2(static_cast<double>(fp16.initial_scale_power)),
                      .scale_window = fp16.loss_scale_window,
                      .min_scale = fp16.min_loss_scale,
                      .delayed_shift = fp16.hysteresis,
                      .consecutive_hysteresis = fp16.consecutive_hysteresis}};
}

// InitKeys of init for `zero_optimization`, from the first stage on in which they say something.
void add_sizes(const Zero& zero, InitKeys& keys) {
  const auto add = [&](int first, const char* name, const Count& count) {
    if (zero.stage >= first && count) keys.emplace_back(name, *count);
  };
  add(2, "sdp_reduce_bucket_size", zero.reduce_bucket_size);
  add(3, "sdp_max_live_parameters", zero.max_live_parameters);
  add(3, "sdp_param_persistence_threshold", zero.param_persistence_threshold);
}

}  // namespace

TrainingSettings read_deepspeed(const TrainingArguments& given, std::optional<Precision> argument, int readers,
                                Findings& findings) {
  const auto written = renamed(*given.deepspeed_config, findings.notation,
                               [](const std::string& key) { return key == "bfloat16" ? "bf16" : key; });
  DeepSpeedConfig config;
  read_table(std::string(kDeepSpeed), written, table(config), findings);
  read_sections(config, findings);
  Batches(given, readers, findings).compare(config);
  TrainingSettings settings{.precision = precision_of(written, config, argument, given.device_type, findings)};
  const auto half = settings.precision == Precision::kFp32 ? std::optional<FloatType>() : dtype_of(settings.precision);
  const auto travelling = config.communication_data_type;
  settings.layout = base::str("stage ", config.zero.stage);
  settings.keys = keys_of_dtypes(half, travelling ? travelling : half, half);
  add_sizes(config.zero, settings.keys);
  if (config.gradient_clipping > 0) {
    settings.clipping_norm = config.gradient_clipping;
    settings.keys.emplace_back("sdp_gradient_clipping", Scalar());
  }
  settings.optimizer_scale = scale_of(config.fp16);
  return settings;
}

}  // namespace lamina::config
