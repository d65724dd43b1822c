// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "lamina/optim/loss_scale.h"
#include "lamina/plan/kept_partition.h"
#include "lamina/topology/topology.h"
#include "lamina/value/value.h"

namespace lamina::job_checkpoint {

// The version of what the manifest of a job's checkpoint tells beside its tensors. One that says none is of version 1,
// in which the generators of all ranks that are not torch's stand in the manifest.
inline constexpr std::int64_t kVersion = 2;

// How the ranks of a job share the work.
struct JobLayout {
  std::int64_t pp = 1, rdp = 1, shard = 1, tp = 1, world = 1;

  static JobLayout of(const topology::Topology& topology);
  friend bool operator==(const JobLayout&, const JobLayout&) = default;
};

// An optimizer of a job, but for its tensors.
struct OptimizerAbout {
  struct Group {
    value::Dict options;
    std::vector<std::string> parameters;  // see [Note: names of parameters]
  };

  std::string class_name;  // "" where nobody has said
  std::vector<Group> groups;
  value::Value rest = value::Dict();  // of its state, besides
};

// [Note: about] The manifest of a checkpoint tells, beside its tensors, what this struct has. Nothing else reads or
// writes that.
struct About {
  std::int64_t version = kVersion;
  std::string lamina, saved_at;     // the version of the program that saved it, and when
  std::string form;                 // of other files than lamina's own; "" for those
  std::string no_optimizer;         // why nobody can load its states; "" where they can
  std::optional<JobLayout> layout;  // none: nobody has said
  plan::KeptPartition partition;    // of each module
  std::vector<OptimizerAbout> optimizers;
  std::vector<value::Value> generators;  // of version 1: by rank
  std::optional<std::uint64_t> seeded_steps;
  std::optional<optim::LossScale::State> loss_scale;  // where it is dynamic
  value::Value extra_state;                           // of modules, a dictionary by name; none where they have none
  value::Value user_content;
};

struct AboutWanted {
  bool optimizers = true;
  bool allow_objects = false;  // of classes that are no plain data
};

// Puts tensors behind `tensors`, where they stand by their number. Throws as checkpoint::to_json().
nlohmann::json write_about(const About& about, std::vector<at::Tensor>& tensors, bool allow_objects);

// `tensor` gives the one of a number. Throws base::UsageError for a later version than this program knows and for
// objects that are not wanted, base::FormatError for what write_about() does not write.
About read_about(const nlohmann::json& about, const std::function<at::Tensor(std::size_t)>& tensor,
                 const AboutWanted& wanted);

// The value of a key; None where there is none.
const value::Value& at(const value::Dict& dict, const std::string& key);

}  // namespace lamina::job_checkpoint
