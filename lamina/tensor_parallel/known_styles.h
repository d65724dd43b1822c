// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lamina/tensor_parallel/layer_cuts.h"

// Styles of layers, and classes whose layers are known. Classes have whole names: "torch.nn.modules.linear.Linear".
namespace lamina::tensor_parallel {

// A style for each pattern of names, in which "*" stands for a part of a name: {"layers.*.q_proj", "colwise"}.
using Styles = std::vector<std::pair<std::string, std::string>>;

// Styles of plans, in the order in which messages list them.
inline constexpr std::string_view kStyles[] = {
    "colwise",                         // some of the outputs
    "rowwise",                         // some of the inputs
    "packed_colwise",                  // some of the outputs of each of several matrices that lie side by side
    "colwise_gather_output",           // some of the outputs, and all get the whole
    "rowwise_split_input",             // some of the inputs, of which all have the whole
    "embedding_rowwise",               // some of the words, and all get the whole
    "embedding_colwise",               // some of the features, and all get the whole
    "replicated_with_grad_allreduce",  // all of it, for a part of what is computed
};
inline constexpr std::string_view kWhole = "replicate";

// The style that a name of transformers' stands for; itself for any other.
std::string style_of_alias(const std::string& style);
// The style that a layer has besides, whose parent sees to the exchanges around it; "" for any other.
std::string_view style_by_parent(const std::string& style);
// True for a style of transformers' that leaves a module whole, with what is under it.
bool is_of_experts(const std::string& style);
// True for one that leaves the module around a layer whole, with all of its layers.
bool is_of_latent_keys(const std::string& style);

// The styles of layers in a module of a class.
Styles known_styles(std::span<const std::string> classes);
// True for torch's own Linear, and not for what is derived from it.
bool is_plain_linear(std::span<const std::string> classes);
LayerKind kind_of(std::span<const std::string> classes);
bool is_of_transformers(std::span<const std::string> classes);     // a module of it
bool has_transformers_plan(std::span<const std::string> classes);  // a model of it
// True for a wrapper of peft's that calls the layer in it, and never reads its weight.
bool only_calls(std::span<const std::string> classes);
bool is_list(std::span<const std::string> classes);  // a list or dictionary of modules, which is never called
// True for a module of torch's that computes with weights of what is in it.
bool reads_weights(std::span<const std::string> classes);

}  // namespace lamina::tensor_parallel
