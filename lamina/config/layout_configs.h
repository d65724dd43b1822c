// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lamina/config/config.h"
#include "lamina/config/dynamic_loss_scale.h"
#include "lamina/config/scalar.h"
#include "lamina/config/user_table.h"
#include "lamina/config/user_value.h"

// Layouts of a training in the words of FSDP and of DeepSpeed.
namespace lamina::config {

// Numbers of a forward and its loss. Parameters stay as they are; torch's autocast chooses what is half.
enum class Precision { kFp32, kAmpFp16, kAmpBf16 };

// "fp32", "amp_fp16", "amp_bf16".
std::string_view name_of(Precision precision);
// Finds a precision by its name or an older one, `amp`, `fp16` or `bf16`, in any case of its letters.
std::optional<Precision> find_precision(std::string_view name);
// The precision of that name; null is float32 on the CPU, float16 on accelerators. Throws ConfigError for others.
Precision read_precision(const UserValue& given, std::string_view device_type);
// The dtype of autocast, or float32.
FloatType dtype_of(Precision precision);

// Arguments of a training that say how it is spread.
struct TrainingArguments {
  std::optional<UserValue> fsdp_config{}, deepspeed_config{};
  UserValue precision{{}, "None"};
  std::optional<UserValue> own{};  // `lamina_config`: keys of init
  Notation notation = Notation::kPython;

  int ranks = 1;  // of the job
  std::string device_type = "cpu";
  std::optional<std::int64_t> batch_size{};      // of a rank's loader, where it says that
  Scalar microbatch_size{};                      // `device_train_microbatch_size`: samples, "auto" or null
  std::optional<std::int64_t> microbatches = 1;  // `grad_accum`
};

using InitKeys = std::vector<std::pair<std::string, Scalar>>;  // of init

// The loss scale of an optimizer whose model is half; see optim/loss_scale.h.
struct ScaleOptions {
  std::optional<double> fixed{};
  DynamicLossScale dynamic{.init_scale = 65536, .scale_window = 2000};  // where it is not fixed; as GradScaler begins
};

// Settings of a training.
struct TrainingSettings {
  Precision precision = Precision::kFp32;
  Precision autocast = Precision::kFp32;  // of forwards and losses; under `deepspeed_config` the model alone is half
  // The name of the layout for readers, a sharding strategy or a stage of DeepSpeed's; "": `lamina_config` alone.
  std::string layout{};
  InitKeys keys{};                                // which count before those of `lamina_config`
  bool scales_losses = false;                     // by `lamina.amp.GradScaler`
  std::optional<ScaleOptions> optimizer_scale{};  // where the model is half
  std::optional<double> clipping_norm{};          // what the norm of all gradients is clipped to
  bool activation_checkpointing = false;          // of the modules that the model chooses
  std::optional<double> min_params{};         // see sharding/units.h; nothing: all modules that are called are units
  bool verbose = false;                       // the table of units is printed
  std::vector<std::string> ignored{};         // modules that stay whole on every rank, with all that is in them
  std::vector<std::string> without_effect{};  // keys that were given, and that change no result
};

// Reads an `fsdp_config`: `{}` is all defaults; strings in any case, numbers as text, too.
TrainingSettings read_fsdp(const UserValue& config, Precision precision, Findings& findings);

// Reads a `deepspeed_config`: `{}` is stage 0, no clipping, and the precision of the argument, which may be none.
// `readers`: the number of loaders that read different data.
TrainingSettings read_deepspeed(const TrainingArguments& given, std::optional<Precision> argument, int readers,
                                Findings& findings);

// The keys of init for the dtypes of parameters in a forward, of gradients that travel, and of buffers; none: those
// they have. A model of float32, whose gradients and buffers are to be that, too, stays as it is.
InitKeys keys_of_dtypes(std::optional<FloatType> param, std::optional<FloatType> reduce,
                        std::optional<FloatType> buffer);

// The name of a section in problems: fsdp_config['mixed_precision'].
std::string in_section(std::string_view config, std::string_view key, Notation notation);

}  // namespace lamina::config
