// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lamina/tensor_parallel/known_styles.h"
#include "lamina/tensor_parallel/layer_cuts.h"

// The layers of a model that are sliced, and how: by plans, and by what is known of classes.
//
// [Note: slicing plan] A layer cut by columns, "colwise", has some of the outputs, and each rank computes its own. One
// cut by rows, "rowwise", has the inputs that such outputs are, and the ranks add what they compute. In between lies
// what each rank has a part of: heads of attention, or inner features. A module around layers cut by columns that has
// heads gets those of its rank: its numbers of heads and sizes are divided, and no head is torn.
//
// Plans come from three places, and the first that names a layer counts: from the script, from what is known here of
// classes, and from transformers, whose models have one in their configuration. A model of which the script has given a
// plan does not use transformers'.
//
// [Note: positions] With `optimize: memory` activations between the layers of a stack lie in parts of positions: norms,
// dropout and sums take a part each, and a layer puts its input together. So it begins with an all-gather and ends with
// a reduce-scatter, in the place of an all-reduce at its end and one of gradients at its beginning. Either is once for
// all layers that take the same: the module around them makes their input ready.
//
// [Note: wrappers] A wrapper has the place of a layer, which it has as `base_layer` or `original_module`, and
// parameters of its own, as peft's have. Where it adds a product of two small layers, as LoRA does, one of these is cut
// with its layer. Any other one is computed whole, alike on all ranks: one cut by columns gives this rank's part of
// that, one cut by rows is given all parts. The layer in it keeps its slices where the wrapper only calls it, and is
// whole where that may read its weight. So any code in a wrapper computes what it would with one rank.
namespace lamina::tensor_parallel {

// A module that is made for slicing, and says how layers in it are cut.
struct OwnPlan {
  Styles styles;
  Styles in_parts;        // where activations lie in parts of positions
  bool is_stack = false;  // activations between the modules inside may lie so
};

// A module of a model, as far as slicing goes.
struct ModelModule {
  std::string type;                                               // the name of its class
  std::vector<std::string> classes;                               // whole names of that and of those it is derived from
  std::vector<std::pair<std::string, std::uint64_t>> parameters;  // of its own; a number for each that is alike for one
  std::int64_t in_features = 0;                                   // of a Linear
  bool reaches_base = true;  // its forward, if that is one of its own, calls the one of the class with the weights
  bool has_variant = false;  // of a wrapper: computes otherwise than its class says
  std::optional<std::pair<std::string, std::size_t>> wrapped;  // of a wrapper: the layer in it, by name and number

  bool is_marked = false;          // its layers are to be sliced
  bool is_replaced = false;        // and a Linear may become another one
  std::optional<Styles> plan;      // of the script
  std::optional<SaidHeads> heads;  // of the script, for modules of that plan
  Styles transformers_plan;        // that its configuration has
  std::optional<OwnPlan> own_plan;
  std::string own_style;  // of a layer that is sliced wherever it is; "" for any other
};

// A model: its modules, and their names, depth first from the model itself, "": several for a module in several places.
struct ModelModules {
  std::vector<ModelModule> modules;
  std::vector<std::pair<std::string, std::size_t>> names;
};

// The layers that are to be sliced over so many ranks, in the model's order; of plans the innermost counts. `layer`,
// `member` and `parent` of a row are numbers of modules; shapes and numbers of heads are left out. `in_parts`: whether
// activations between layers of stacks lie in parts of positions, see [Note: positions]. Throws base::UsageError where
// a plan names what is not there, or a style that is not known.
PlannedLayers plan_layers(const ModelModules& model, int degree, bool in_parts);

// The classes of marked modules with parameters of their own that are under none of the names of sliced layers.
std::vector<std::string> marked_but_whole(const ModelModules& model, const std::set<std::string>& sliced);

}  // namespace lamina::tensor_parallel
