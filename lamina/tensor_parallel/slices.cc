// SPDX-License-Identifier: Apache-2.0
#include "lamina/tensor_parallel/slices.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "lamina/base/str.h"
#include "lamina/faces/sayings.h"
#include "lamina/value/guarded.h"

namespace lamina::tensor_parallel {
namespace {

layout::ParameterLayout layout_of(std::vector<std::int64_t> shape, const layout::Slicing& slicing) {
  layout::ParameterLayout layout;
  layout.name = "a slice";
  layout.shape = std::move(shape);
  layout.slicing = slicing;
  return layout;
}

std::vector<std::int64_t> with_extent(at::IntArrayRef shape, int dim, std::int64_t extent) {
  auto result = shape.vec();
  result.at(static_cast<std::size_t>(dim)) = extent;
  return result;
}

layout::ParameterLayout layout_of_whole(const at::Tensor& slice, const layout::Slicing& slicing) {
  return layout_of(whole_shape(slice, slicing), slicing);
}

// The elements that one of so many members has.
layout::Region region_of(const layout::ParameterLayout& layout, int member, int members) {
  return layout::held(layout, member * layout.slices() / members, 0);
}

// A region that is all of a tensor may have its stripes along another dimension.
std::int64_t extent_along(const layout::Region& region, int dim) {
  return region.dim == dim ? region.extent : region.whole.at(static_cast<std::size_t>(dim));
}

}  // namespace

at::Tensor slice_of(const at::Tensor& whole, const layout::Slicing& slicing, int member, int members) {
  const at::NoGradGuard no_grad;
  const value::Unguarded own_work;
  const auto region = region_of(layout_of(whole.sizes().vec(), slicing), member, members);
  auto result = at::zeros(with_extent(whole.sizes(), region.dim, region.extent), whole.options());
  for (const auto& stripe : region.stripes) {
    result.narrow(region.dim, stripe.at, stripe.count).copy_(whole.narrow(region.dim, stripe.begin, stripe.count));
  }
  return result;
}

at::Tensor whole_of(std::span<const at::Tensor> slices, const layout::Slicing& slicing) {
  const at::NoGradGuard no_grad;
  const value::Unguarded own_work;
  const auto layout = layout_of_whole(slices.front(), slicing);
  auto whole = at::empty(layout.shape, slices.front().options());
  for (std::size_t member = 0; member < slices.size(); ++member) {
    const auto region = region_of(layout, static_cast<int>(member), static_cast<int>(slices.size()));
    for (const auto& stripe : region.stripes) {
      whole.narrow(region.dim, stripe.begin, stripe.count)
          .copy_(slices[member].narrow(region.dim, stripe.at, stripe.count));
    }
  }
  return whole;
}

at::Tensor whole_of(Team& team, const at::Tensor& slice, const layout::Slicing& slicing) {
  const at::NoGradGuard no_grad;
  const auto layout = layout_of_whole(slice, slicing);
  Cut cut{slicing.dim, {}};
  for (int member = 0; member < team.size(); ++member) {
    cut.sizes.push_back(extent_along(region_of(layout, member, team.size()), slicing.dim));
  }
  return whole_of(team.all_gather(value::unguarded(slice.detach()), cut).split_with_sizes(cut.sizes, slicing.dim),
                  slicing);
}

std::vector<std::int64_t> whole_shape(const at::Tensor& slice, const layout::Slicing& slicing) {
  std::int64_t extent = 0;
  for (const auto& section : slicing.sections) extent += section.extent;
  return with_extent(slice.sizes(), slicing.dim, extent);
}

std::vector<layout::Share> shares_of(std::int64_t extent, std::int64_t unit, int members) {
  std::vector<layout::Share> shares;
  for (int member = 0; member < members; ++member) {
    const auto units = layout::share_of(extent / unit, members, member);
    shares.push_back({units.begin * unit, units.end * unit, units.size * unit});
  }
  return shares;
}

void require_each(const std::string& what, const std::vector<layout::Share>& shares) {
  if (shares.back().count() > 0) return;
  throw faces::refusal("some-without-slices", what, base::str("tensor_parallel_degree: ", shares.size()));
}

std::vector<std::int64_t> sizes_of(const std::vector<layout::Share>& shares) {
  std::vector<std::int64_t> sizes;
  for (const auto& share : shares) sizes.push_back(share.count());
  return sizes;
}

}  // namespace lamina::tensor_parallel
