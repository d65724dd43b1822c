// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lamina/layout/parameter_layout.h"
#include "lamina/layout/region.h"
#include "lamina/tensor_parallel/heads.h"

// The cuts of planned layers: which dimensions of their parameters, in what units, and what each member of a team
// computes.
namespace lamina::tensor_parallel {

enum class LayerKind {
  kOther,
  kLinear,
  kConv1d,  // of transformers, whose weight is turned round
  kEmbedding,
};

// A style of any layer, which all members have whole, each for a part of what is computed.
inline constexpr std::string_view kReplicated = "replicated_with_grad_allreduce";

// True for a style of a Linear of which each rank gives some of the outputs.
bool is_by_columns(std::string_view style);

// Styles that a layer gets where its plan says another one.
inline constexpr const char* kChosen = "chosen";  // whole on all members, which compute some outputs each
inline constexpr const char* kGivingPart = "whole, cut by columns";  // of a wrapper
inline constexpr const char* kTakingParts = "whole, cut by rows";    // of a wrapper

// A layer that is to be sliced.
struct PlannedLayer {
  std::string name;  // in the model
  std::string type;  // the name of its class
  LayerKind kind = LayerKind::kOther;
  std::vector<std::int64_t> shape;  // of its weight, where it is one that can be cut
  bool has_bias = false;
  bool has_own_forward = false;         // its class computes something else than torch's
  bool has_options = false;             // of an embedding: max_norm, scale_grad_by_freq or sparse
  std::optional<std::int64_t> padding;  // of an embedding: the word that has no gradient
  std::string style;                    // as plans have it
  std::size_t layer = 0;                // which module it is
  std::size_t member = 0;               // which one has its place in the parent: itself, or a wrapper
  std::size_t parent = 0;               // which one computes with what it gives
  std::optional<SaidHeads> heads;       // of the parent, by the script
  bool may_stay_whole = true;           // no script has asked for it
  bool by_parent = false;               // the parent has a part in the exchanges with other ranks
  bool is_around = false;               // a wrapper that is computed whole around its layer
};

// Layers of a model and the modules that compute with them.
struct PlannedLayers {
  std::map<std::size_t, ParentModule> parents;  // by their numbers
  std::vector<PlannedLayer> layers;             // in the model's order, each with a name of its own
  std::vector<PlannedLayer> elsewhere;          // layers of these that have other parents, too: a row for each of those
  std::vector<std::vector<std::string>> tied;   // names of each parameter that several layers have
};

// A part of positions: so many, from the first of them on, of all.
struct SlicePart {
  std::int64_t own = 0;
  std::int64_t first = 0;
  std::int64_t all = 0;

  friend bool operator==(const SlicePart&, const SlicePart&) = default;
};

// The cut of a layer, as a member of a team has it.
struct LayerCut {
  std::string name;
  std::string style;                                            // of the plan, or one of those above
  std::vector<std::pair<std::string, layout::Slicing>> slices;  // of its parameters
  std::vector<std::int64_t> sizes;                              // of what is cut, how much each member has
  SlicePart part;                                               // this member's
  std::optional<std::vector<std::int64_t>> chosen;  // outputs that are computed here, or given on; none for all
  std::vector<layout::Section> sections;            // of a wrapper: those of what is cut
  bool by_parent = false;
  std::optional<std::int64_t> padding;  // the word of an embedding's slice that has no gradient
  // The layer's attributes that say how many features it has, as they are then.
  std::vector<std::pair<std::string, std::optional<std::int64_t>>> numbers;
};

// A module around layers that give parts, and what a member has of them.
struct ParentCut {
  struct Member {
    std::size_t row = 0;             // of `layers`, and then of `elsewhere`
    std::optional<SlicePart> gives;  // none for one that takes parts
  };
  std::size_t parent = 0;
  std::vector<Member> members;
  std::optional<SlicePart> heads;  // none for a module without
  std::vector<std::int64_t> own_keys;
  std::int64_t keys = 0;
  std::map<std::string, std::int64_t> numbers;  // see Heads::numbers
};

struct LayerCuts {
  std::vector<LayerCut> layers;  // without those that stay whole
  std::vector<ParentCut> parents;
};

// The cuts for one of so many members of a team. A parameter that several layers have is cut alike in all of them; else
// these stay whole where no script has asked for them. Throws base::UsageError where sizes do not allow what the plan
// asks for.
LayerCuts cut_layers(const PlannedLayers& planned, int degree, int member);

}  // namespace lamina::tensor_parallel
