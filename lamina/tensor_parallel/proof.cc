// SPDX-License-Identifier: Apache-2.0
#include "lamina/tensor_parallel/proof.h"
#include "lamina/device/capabilities.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <optional>

namespace lamina::tensor_parallel {
namespace {

constexpr std::int64_t kMostDims = 8;
constexpr std::int64_t kRow =
    kMostDims + 4;               // what a member says of a value: dimensions, alike, scattered, above the floor, sizes
constexpr int kProjections = 4;  // of what lies at a position: equal ones are almost surely one

// Numbers that can be compared: of half and whole ones doubles.
at::Tensor as_numbers(const at::Tensor& value) {
  const auto plain = value.is_complex() ? at::view_as_real(value.resolve_conj()) : value;
  return plain.detach().to(at::kDouble);
}

bool is_close(const at::Tensor& whole, const at::Tensor& own, double tolerance, double floor) {
  if (whole.sizes() != own.sizes()) return false;
  auto left = as_numbers(whole), right = as_numbers(own).to(left.device());
  const auto same = (left == right).logical_or(left.isnan().logical_and(right.isnan()));
  left = at::where(same, at::zeros_like(left), left);  // infinities, and what is no number, among them
  right = at::where(same, at::zeros_like(right), right);
  if (left.numel() == 0) return true;
  const auto off = at::linalg_vector_norm(left - right).item<double>();
  const auto norm =
      at::linalg_vector_norm(at::where(as_numbers(whole).isfinite(), as_numbers(whole), 0.)).item<double>();
  return off <= tolerance * (norm + floor * std::sqrt(static_cast<double>(left.numel())));
}

// The one dimension in which a member's value is no larger than the whole one, and that differs; none for any other.
std::optional<std::int64_t> cut_dim(at::IntArrayRef whole, at::IntArrayRef own) {
  std::optional<std::int64_t> found;
  if (whole.size() != own.size()) return std::nullopt;
  for (std::size_t dim = 0; dim < whole.size(); ++dim) {
    if (whole[dim] == own[dim]) continue;
    if (found || own[dim] > whole[dim]) return std::nullopt;
    found = static_cast<std::int64_t>(dim);
  }
  return found;
}

// A few numbers for each position along a dimension, of all that lies there.
at::Tensor projected(const at::Tensor& value, std::int64_t dim) {
  const auto moved = as_numbers(value).nan_to_num().movedim(dim, 0);
  const auto rows = moved.reshape({moved.size(0), c10::multiply_integers(moved.sizes().slice(1))});
  const auto places = at::arange(rows.size(1) * kProjections, rows.options()).view({rows.size(1), kProjections});
  return rows.matmul(at::sin(places * 12.9898 + 4.1414) * 43.7585);
}

bool is_scattered(const at::Tensor& whole, const at::Tensor& own, std::int64_t dim, double tolerance) {
  const auto all = projected(whole, dim), mine = projected(own, dim);
  const auto scale = all.abs().mean().item<double>() + mine.abs().mean().item<double>();
  const auto off = (mine.unsqueeze(1) - all.unsqueeze(0)).abs().amax(2).amin(1);
  return off.le(tolerance * (scale + 1e-30)).all().item<bool>();
}

// Rows of what all members say of all values.
class Said {
 public:
  Said(Team& team, std::span<const Twice> values, double tolerance) : size_(team.size()), count_(std::ssize(values)) {
    std::vector<std::int64_t> own;
    for (const auto& each : values) describe(each, tolerance, own);
    const auto device = values.empty() || !values.front().own.defined() ? devices::kHost : values.front().own.device();
    const auto given = at::tensor(own, at::TensorOptions(at::kLong)).to(device);
    all_ = devices::on_host(team.all_gather(given, {0, {}}));
  }

  bool all_alike(std::int64_t value) const {
    return every(value, [](auto* row) { return row[1] == 1; });
  }
  bool all_scattered(std::int64_t value) const {
    return every(value, [](auto* row) { return row[2] == 1; });
  }
  bool all_above_floor(std::int64_t value) const {
    return every(value, [](auto* row) { return row[0] < 0 || row[3] == 1; });
  }
  bool all_have(std::int64_t value) const {
    return every(value, [](auto* row) { return row[0] >= 0; });
  }

  // The cut of which the members have parts, of a whole of that shape.
  std::optional<Cut> cut(std::int64_t value, at::IntArrayRef whole) const {
    Cut cut{-1, {}};
    for (int member = 0; member < size_; ++member) {
      const auto dim = cut_dim(whole, shape(value, member));
      if (!dim || (cut.dim >= 0 && cut.dim != *dim)) return std::nullopt;
      cut.dim = *dim;
      cut.sizes.push_back(shape(value, member)[static_cast<std::size_t>(*dim)]);
    }
    return cut;
  }
  bool all_have_one_shape(std::int64_t value) const { return all_have_shape(value, shape(value, 0)); }
  bool all_have_shape(std::int64_t value, at::IntArrayRef whole) const {
    for (int member = 0; member < size_; ++member) {
      if (shape(value, member) != whole) return false;
    }
    return true;
  }

 private:
  static void describe(const Twice& value, double tolerance, std::vector<std::int64_t>& said) {
    const auto begin = said.size();
    said.resize(begin + kRow, 0);
    auto* row = &said[begin];
    row[0] = -1;
    if (!value.own.defined() || !value.whole.defined() || value.own.dim() > kMostDims) {
      row[1] = value.own.defined() == value.whole.defined() ? 1 : 0;
      return;
    }
    row[0] = value.own.dim();
    row[1] = is_close(value.whole, value.own, tolerance, value.floor) ? 1 : 0;
    row[3] = value.floor == 0 || is_close(value.whole, value.own, tolerance, 0) ? 1 : 0;
    const auto dim = cut_dim(value.whole.sizes(), value.own.sizes());
    row[2] = dim && is_scattered(value.whole, value.own, *dim, tolerance) ? 1 : 0;
    std::ranges::copy(value.own.sizes(), row + 4);
  }

  const std::int64_t* row(std::int64_t value, int member) const {
    return all_.const_data_ptr<std::int64_t>() + (member * count_ + value) * kRow;
  }
  at::IntArrayRef shape(std::int64_t value, int member) const {
    const auto* found = row(value, member);
    return {found + 4, static_cast<std::size_t>(std::max<std::int64_t>(found[0], 0))};
  }
  template <class Holds>
  bool every(std::int64_t value, const Holds& holds) const {
    for (int member = 0; member < size_; ++member) {
      if (!holds(row(value, member))) return false;
    }
    return true;
  }

  const int size_;
  const std::int64_t count_;
  at::Tensor all_;
};

// True where all members have the same bits.
bool is_same(Team& team, const at::Tensor& own) {
  const auto row = as_numbers(own).reshape({1, -1});
  return team.all_gather(row, {0, {}}).eq(row).all().item<bool>();
}

Compared compare_one(Team& team, const Said& said, std::int64_t number, const Twice& value, double tolerance) {
  if (said.all_alike(number)) {
    const auto same = said.all_above_floor(number) || (said.all_have_one_shape(number) && is_same(team, value.own));
    return {same ? Verdict::kAlike : Verdict::kZero, 0, {}};
  }
  if (!said.all_have(number)) return {};
  const auto cut = said.cut(number, value.whole.sizes());
  const auto own = as_numbers(value.own);
  if (cut && c10::sum_integers(cut->sizes) == value.whole.size(cut->dim) && !value.whole.is_complex()) {
    const auto parts = team.all_gather(own, *cut);
    if (is_close(value.whole, parts, tolerance, value.floor)) return {Verdict::kPart, cut->dim, cut->sizes};
  }
  if (said.all_scattered(number)) return {Verdict::kScattered, cut ? cut->dim : 0, {}};
  if (!value.whole.is_complex() && said.all_have_shape(number, value.whole.sizes())) {
    if (is_close(value.whole, team.all_reduce(own), tolerance, value.floor)) return {Verdict::kTerms, 0, {}};
  }
  return {};
}

}  // namespace

std::vector<Compared> compare(Team& team, std::span<const Twice> values, double tolerance) {
  const at::NoGradGuard no_grad;
  std::vector<Compared> found;
  if (values.empty()) return found;
  const Said said(team, values, tolerance);
  for (std::int64_t number = 0; number < std::ssize(values); ++number) {
    found.push_back(compare_one(team, said, number, values[static_cast<std::size_t>(number)], tolerance));
  }
  return found;
}

}  // namespace lamina::tensor_parallel
