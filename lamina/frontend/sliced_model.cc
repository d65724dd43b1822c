// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/sliced_model.h"

#include <c10/util/ScopeExit.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/joined.h"
#include "lamina/base/log.h"
#include "lamina/base/outer.h"
#include "lamina/base/str.h"
#include "lamina/faces/sayings.h"
#include "lamina/tensor_parallel/slices.h"

namespace lamina::frontend {
namespace {

using topology::Group;

base::UsageError cannot(const std::string& what) { return base::UsageError(what, base::Code{"tp-layer"}); }

std::string joined(const std::string& path, const std::string& name) { return path.empty() ? name : path + "." + name; }

// A parameter under one of its names, and how the module there has it cut.
struct HeldAt {
  std::string name;
  at::Tensor tensor;
  std::optional<layout::Slicing> slicing;
};

bool is_in_parts(const config::Config& config) { return config.optimize == config::Optimize::kMemory; }

layout::Slicing slicing_of(const std::string& name, std::int64_t extent, const Sliced::Cut& cut, int degree) {
  tensor_parallel::require_each(base::str(name, " has ", extent, " features in units of ", cut.unit),
                                tensor_parallel::shares_of(extent, cut.unit, degree));
  return {cut.dim, {{extent, cut.unit}}, degree};
}

// All parameters in all their places.
std::vector<HeldAt> places_of(const torch::nn::Module& root, int degree, const PlanCuts& planned, const Slicings& now) {
  std::vector<HeldAt> places;
  for (const auto& module : root.named_modules()) {
    const auto* sliced = dynamic_cast<const Sliced*>(module.value().get());
    const auto cuts = sliced == nullptr ? std::vector<Sliced::Cut>() : sliced->cuts();
    for (const auto& own : module.value()->named_parameters(/*recurse=*/false)) {
      auto& place = places.emplace_back(
          HeldAt{joined(module.key(), own.key()), own.value(), planned.slicing(*module.value(), own.key())});
      const auto cut = std::ranges::find(cuts, own.key(), &Sliced::Cut::parameter);
      if (cut == cuts.end()) continue;
      const auto extent = sizes_of_whole(now, place.tensor).at(static_cast<std::size_t>(cut->dim));
      place.slicing = slicing_of(place.name, extent, *cut, degree);
    }
  }
  return places;
}

}  // namespace

SlicedLayers::SlicedLayers(torch::nn::Module& root, Member member, const Slicings& now)
    : root_(root), member_(std::move(member)), planned_(std::make_unique<PlanCuts>(root, member_, now)) {
  const auto places = places_of(root, member_.degree, *planned_, now);
  std::map<const void*, const HeldAt*> firsts;  // by TensorImpl
  for (const auto& place : places) {
    const auto* tensor = place.tensor.unsafeGetTensorImpl();
    const auto [first, is_new] = firsts.emplace(tensor, &place);
    if (first->second->slicing != place.slicing) {
      throw cannot(base::str(first->second->name, " and ", place.name,
                             " are one parameter, and their modules do not cut it alike: untie them, or make both one "
                             "of lamina::nn that is cut along the same features"));
    }
    if (!place.slicing) continue;
    names_.emplace(base::outer(place.name));
    if (!is_new) continue;
    slicings_.emplace(tensor, *place.slicing);
    parameters_.push_back({place.name, place.tensor, *place.slicing});
  }
}

SlicedLayers::~SlicedLayers() = default;

void SlicedLayers::tell_of_whole() const {
  if (names_.empty() && planned_->empty()) {
    base::log_warning(faces::said("nothing-sliced", member_.degree,
                                  "give it layers of lamina::nn, or a plan by lamina::set_tensor_parallelism()"));
  } else if (const auto whole = planned_->whole(names_); !whole.empty()) {
    base::log_info(faces::said("stay-whole", base::joined(whole)));
  }
}

void SlicedLayers::begin() {
  for (const auto& module : root_.modules()) {
    if (auto* sliced = dynamic_cast<Sliced*>(module.get())) sliced->begin(member_);
  }
  planned_->begin();
}

void SlicedLayers::end() {
  planned_->end();
  for (const auto& module : root_.modules()) {
    if (auto* sliced = dynamic_cast<Sliced*>(module.get())) sliced->make_whole();
  }
}

std::unique_ptr<SlicedLayers> slice_model(torch::nn::Module& root, session::Session& session) {
  const auto& topology = session.topology();
  const auto rank = session.world().rank;
  const int degree = topology.size(Group::kTp);
  if (degree == 1) return nullptr;
  session.team();  // which operators find from now on
  auto layers = std::make_unique<SlicedLayers>(
      root, Member{session.team_name(), topology.index(Group::kTp, rank), degree, is_in_parts(session.config())});
  if (rank == base::Rank(0)) layers->tell_of_whole();
  session::slice(session, layers->parameters(), [](const auto&) {});
  layers->begin();
  return layers;
}

std::string why_not_slices(torch::nn::Module& root, const config::Config& config, SlicedLayers* now) {
  if (now != nullptr) now->end();
  const auto again = c10::make_scope_exit([now] {
    if (now != nullptr) now->begin();
  });
  try {
    const Member member{"", 0, config.tensor_parallel_degree, is_in_parts(config)};
    const SlicedLayers other(root, member, now == nullptr ? Slicings() : now->slicings());
  } catch (const base::UsageError& wrong) {
    return wrong.what();
  }
  return "";
}

}  // namespace lamina::frontend
