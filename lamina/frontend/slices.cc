// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/slices.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <set>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/joined.h"
#include "lamina/base/log.h"
#include "lamina/base/outer.h"
#include "lamina/base/str.h"
#include "lamina/faces/sayings.h"
#include "lamina/frontend/plan_cuts.h"
#include "lamina/session/slicing.h"
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

layout::Slicing slicing_of(const std::string& name, const at::Tensor& parameter, const Sliced::Cut& cut, int degree) {
  const auto extent = parameter.size(cut.dim);
  tensor_parallel::require_each(base::str(name, " has ", extent, " features in units of ", cut.unit),
                                tensor_parallel::shares_of(extent, cut.unit, degree));
  return {cut.dim, {{extent, cut.unit}}, degree};
}

// All parameters in all their places.
std::vector<HeldAt> places_of(const torch::nn::Module& root, int degree, const PlanCuts& planned) {
  std::vector<HeldAt> places;
  for (const auto& module : root.named_modules()) {
    const auto* sliced = dynamic_cast<const Sliced*>(module.value().get());
    const auto cuts = sliced == nullptr ? std::vector<Sliced::Cut>() : sliced->cuts();
    for (const auto& own : module.value()->named_parameters(/*recurse=*/false)) {
      auto& place = places.emplace_back(
          HeldAt{joined(module.key(), own.key()), own.value(), planned.slicing(*module.value(), own.key())});
      const auto cut = std::ranges::find(cuts, own.key(), &Sliced::Cut::parameter);
      if (cut != cuts.end()) place.slicing = slicing_of(place.name, place.tensor, *cut, degree);
    }
  }
  return places;
}

void tell_of_whole(const PlanCuts& planned, const std::vector<HeldAt>& places, int degree) {
  std::set<std::string> sliced;
  for (const auto& place : places) {
    if (place.slicing) sliced.emplace(base::outer(place.name));
  }
  if (sliced.empty() && planned.empty()) {
    base::log_warning(faces::said("nothing-sliced", degree,
                                  "give it layers of lamina::nn, or a plan by lamina::set_tensor_parallelism()"));
  } else if (const auto whole = planned.whole(std::move(sliced)); !whole.empty()) {
    base::log_info(faces::said("stay-whole", base::joined(whole)));
  }
}

}  // namespace

layout::Share Member::positions(std::int64_t count) const {
  return tensor_parallel::shares_of(count, 1, degree)[static_cast<std::size_t>(index)];
}

tensor_parallel::Cut Member::cut(std::int64_t count) const {
  return {1, tensor_parallel::sizes_of(tensor_parallel::shares_of(count, 1, degree))};
}

std::vector<std::int64_t> whole_shape(const Slicings& slicings, const at::Tensor& tensor) {
  const auto found = slicings.find(tensor.unsafeGetTensorImpl());
  return found == slicings.end() ? std::vector<std::int64_t>() : tensor_parallel::whole_shape(tensor, found->second);
}

Slicings slice_model(torch::nn::Module& root, session::Session& session) {
  const Member member{session.team_name(), session.topology().index(Group::kTp, session.world().rank),
                      session.topology().size(Group::kTp), session.config().optimize == config::Optimize::kMemory};
  if (member.degree == 1) return {};
  session.team();  // which operators find from now on
  Slicings slicings;
  std::vector<session::ToSlice> cut;
  std::map<const void*, const HeldAt*> firsts;  // by TensorImpl
  PlanCuts planned(root, member.team, member.index, member.degree);
  const auto places = places_of(root, member.degree, planned);
  for (const auto& place : places) {
    const auto* tensor = place.tensor.unsafeGetTensorImpl();
    const auto [first, is_new] = firsts.emplace(tensor, &place);
    if (first->second->slicing != place.slicing) {
      throw cannot(base::str(first->second->name, " and ", place.name,
                             " are one parameter, and their modules do not cut it alike: untie them, or make both one "
                             "of lamina::nn that is cut along the same features"));
    }
    if (!is_new || !place.slicing) continue;
    slicings.emplace(tensor, *place.slicing);
    cut.push_back({place.name, place.tensor, *place.slicing});
  }
  if (session.world().rank == base::Rank(0)) tell_of_whole(planned, places, member.degree);
  session::slice(session, cut, [](const auto&) {});
  for (const auto& module : root.modules()) {
    if (auto* sliced = dynamic_cast<Sliced*>(module.get())) sliced->begin(member);
  }
  planned.begin();
  return slicings;
}

}  // namespace lamina::frontend
