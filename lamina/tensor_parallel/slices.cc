// SPDX-License-Identifier: Apache-2.0
#include "lamina/tensor_parallel/slices.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

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

// A region that is all of a tensor may have its stripes along another dimension.
std::int64_t extent_along(const layout::Region& region, int dim) {
  return region.dim == dim ? region.extent : region.whole.at(static_cast<std::size_t>(dim));
}

}  // namespace

at::Tensor slice_of(const at::Tensor& whole, const layout::Slicing& slicing, int slice) {
  const at::NoGradGuard no_grad;
  const auto region = layout::held(layout_of(whole.sizes().vec(), slicing), slice, 0);
  auto result = at::zeros(with_extent(whole.sizes(), region.dim, region.extent), whole.options());
  for (const auto& stripe : region.stripes) {
    result.narrow(region.dim, stripe.at, stripe.count).copy_(whole.narrow(region.dim, stripe.begin, stripe.count));
  }
  return result;
}

at::Tensor whole_of(Team& team, const at::Tensor& slice, const layout::Slicing& slicing) {
  const at::NoGradGuard no_grad;
  std::int64_t extent = 0;
  for (const auto& section : slicing.sections) extent += section.extent;
  const auto layout = layout_of(with_extent(slice.sizes(), slicing.dim, extent), slicing);
  std::vector<layout::Region> regions;
  Cut cut{slicing.dim, {}};
  for (int member = 0; member < team.size(); ++member) {
    regions.push_back(layout::held(layout, member * slicing.degree / team.size(), 0));
    cut.sizes.push_back(extent_along(regions.back(), slicing.dim));
  }
  const auto all = team.all_gather(slice.detach(), cut);
  auto whole = at::empty(layout.shape, slice.options());
  std::int64_t begin = 0;
  for (std::size_t member = 0; member < regions.size(); ++member) {
    const auto part = all.narrow(slicing.dim, begin, cut.sizes[member]);
    const int dim = regions[member].dim;
    for (const auto& stripe : regions[member].stripes) {
      whole.narrow(dim, stripe.begin, stripe.count).copy_(part.narrow(dim, stripe.at, stripe.count));
    }
    begin += cut.sizes[member];
  }
  return whole;
}

}  // namespace lamina::tensor_parallel
