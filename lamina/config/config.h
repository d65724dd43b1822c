// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lamina::config {

enum class Schedule { kSimple, kInterleaved, kZeroBubble, kForwardOnly };
enum class Optimize { kMemory, kSpeed };
enum class DistBackend { kAuto, kNccl };
enum class BackwardPrefetch { kPre, kPost, kNone };
enum class FloatType { kFp32, kFp16, kBf16, kOwn };  // own: that which each tensor has

// Everything a job can be told, under the names that docs/configuration.md explains. A field that is optional<> was
// not given, or has no default of its own; `with_defaults` fills those whose default depends on other fields.
struct Config {
  // Pipeline.
  int partitions = 1;  // also known as pipeline_parallel_degree
  int microbatches = 1;
  std::int64_t all_microbatches = 0;           // no key: the copies of the model share out so many; 0: as that says
  Schedule schedule = Schedule::kInterleaved;  // also known as pipeline
  std::optional<int> active_microbatches;      // default: 2 * partitions + 1
  bool deterministic_server = false;

  // The plan: who owns what.
  std::string placement_strategy = "cluster";
  bool auto_partition = true;
  std::optional<int> default_partition;  // default: 0, but required when auto_partition is off
  Optimize optimize = Optimize::kMemory;
  std::optional<double> memory_weight;  // default: 0.2 when optimize is speed, else 0.8
  bool skip_tracing = false;
  bool load_partition = false;
  std::optional<std::string> partition_file;
  bool contiguous = true;

  // Data and tensor parallelism.
  bool ddp = false;
  std::optional<int> ddp_port;
  std::optional<DistBackend> ddp_dist_backend;  // default: auto when ddp is on
  bool horovod = false;
  int tensor_parallel_degree = 1;
  bool prescaled_batch = false;
  bool prove_slices = true;

  // Precision, and memory for time.
  bool fp16 = false;
  bool bf16 = false;
  bool fp16_params = false;
  std::optional<FloatType> buffer_dtype;  // none: buffers are half where parameters are
  std::optional<FloatType> reduce_dtype;  // in which gradients travel between copies; none: their own
  bool shard_optimizer_state = false;
  bool offload_activations = false;
  int activation_loading_horizon = 4;

  // Sharded data parallelism. Sizes count elements.
  int sharded_data_parallel_degree = 1;
  std::int64_t sdp_reduce_bucket_size = 500'000'000;
  std::int64_t sdp_param_persistence_threshold = 1'000'000;
  std::int64_t sdp_max_live_parameters = 1'000'000'000;
  bool sdp_reshard_after_forward = true;
  bool sdp_reshard_after_backward = true;
  BackwardPrefetch sdp_backward_prefetch = BackwardPrefetch::kPre;
  std::optional<std::vector<std::string>> sdp_persistent_parameters;  // names of theirs, or of modules; none: by size
  std::optional<std::vector<std::string>> sdp_units;                  // names of modules; none: all that are called
  bool sdp_hierarchical_allgather = true;
  std::optional<double> sdp_gradient_clipping = 1.0;  // none: nothing is clipped

  // TensorFlow's compiler and fork server.
  bool xla = false;
  bool fork = false;

  // The job.
  std::string device = "auto";     // "cpu", an accelerator's type, or type:index
  double timeout_s = 1800.0;       // how long a live peer may take to answer
  std::optional<double> silent_s;  // after which a rank without a sign of life is lost; none: see silence_of()
  std::optional<std::int64_t> seed;
  int verify_steps = 0;  // so many steps are compared with the plain model

  friend bool operator==(const Config&, const Config&) = default;
};

// The sources that a configuration is read from.
struct ConfigInput {
  std::string json = "{}";                 // what the caller gave to init
  std::optional<std::string> environment;  // SM_HP_MP_PARAMETERS; when it says anything, `json` is not read at all
  bool several = true;                     // false: a job of one process, whoever started it
};

struct ParsedConfig {
  Config config;                      // checked and complete
  std::vector<std::string> warnings;  // one line each, for the caller to print
};

// Reads either the bare parameters, {"partitions": 2, ...}, or {"enabled": true, "parameters": {...}}. In a job of one
// process degrees above 1 become 1 before anything is checked, with one warning. Throws ConfigError naming every
// wrong key at once, with its value and what is allowed; the text depends on nothing but the input.
ParsedConfig parse_config(const ConfigInput& input);

// Checks ranges and the rules between keys of a Config filled by hand. Throws like `parse_config`.
void validate(const Config& config);

// Fills in the fields whose default depends on other fields.
Config with_defaults(Config config);

// Returns the same job with one rank for each copy of the model: without partitions, slices and shards.
Config collapsed(Config config);

// How long a rank may be without a sign of life: silent_s, else, where ranks outlive others, 30 s, or half of timeout_s
// where that is less; else none.
std::optional<double> silence_of(const Config& config, bool outlives);

// The default of active_microbatches.
int default_window(int partitions);

// The name by which a configuration knows it: "simple".
std::string schedule_name(Schedule schedule);

// Throws ConfigError naming every value that is right but whose part of lamina does not exist yet. `replicas` is the
// number of model copies in the job (its data-parallel size): what concerns replicas asks nothing of a job with one.
void require_available(const Config& config, int replicas);

// The keys in which two configurations differ, as "partitions: 2 and 4; ddp: false and true". Empty when equal.
std::string differences(const Config& a, const Config& b);

// Every key with its value, null where there is none; `parse_config` reads it back to an equal Config.
std::string to_json(const Config& config);

}  // namespace lamina::config
