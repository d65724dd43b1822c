// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/norm.h"

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>

#include <map>
#include <optional>
#include <utility>

#include "lamina/value/dtype.h"
#include "lamina/value/guarded.h"

namespace lamina::model {

using value::Value;

namespace {

constexpr std::int64_t kBeside = -1;  // the model, in the place of a row's number

using Norms = std::vector<at::Tensor>;

// Norms of a row, by slice; a row that was given twice has two of each.
using OfSlices = std::map<std::int64_t, Norms>;

// The norm of what is cut into parts with these norms. Of order 0, that is the number of elements that are not 0.
at::Tensor put_together(const Norms& parts, double norm_type) {
  if (parts.size() == 1) return parts.front();
  const auto all = at::stack(parts);
  return norm_type == 0 ? all.sum() : norm_of(all, norm_type);
}

Norms put_together(const OfSlices& slices, double norm_type) {
  Norms all;
  for (std::size_t i = 0;; ++i) {
    Norms parts;
    for (const auto& [slice, norms] : slices) {
      if (i < norms.size()) parts.push_back(norms[i]);
    }
    if (parts.empty()) return all;
    all.push_back(put_together(parts, norm_type));
  }
}

}  // namespace

at::Tensor norm_of(const at::Tensor& tensor, double norm_type) {
  const auto type = value::is_half(tensor.scalar_type()) ? std::optional(at::kFloat) : std::nullopt;
  return at::linalg_vector_norm(tensor, norm_type, {}, false, type);
}

Norms norms(const ParameterTable& table, std::span<const Measured> given, double norm_type,
            std::span<const base::Rank> one_copy, messaging::Mailbox& mailbox, const base::Patience& patience) {
  const at::NoGradGuard no_grad;
  const value::Unguarded own_work;
  const auto& all = table.all();
  std::vector<OfSlices> of_rows(all.size());
  Norms others, of;
  for (const auto& [tensor, measured] : given) of.push_back(tensor);
  const auto rows = table.find_with_gradients(of);
  for (std::size_t i = 0; i < given.size(); ++i) {
    const Parameter* row = rows[i];
    const at::Tensor& measured = given[i].second;
    if (!measured.defined() || (row != nullptr && !table.is_here(*row))) continue;
    auto& found = row == nullptr ? others : of_rows[row - all.data()][table.slice_of(*row)];
    found.push_back(norm_of(measured, norm_type));
  }
  value::Dict mine;
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (const auto& [slice, norms] : std::exchange(of_rows[i], {})) {
      mine.items.emplace_back(value::Tuple{{static_cast<std::int64_t>(i), slice}},
                              value::List{{norms.begin(), norms.end()}});
    }
  }
  const bool leads = mailbox.rank() == one_copy.front();
  if (leads) {
    mine.items.emplace_back(value::Tuple{{kBeside, std::int64_t{0}}},
                            Value(value::List{{others.begin(), others.end()}}));
  }
  others.clear();
  for (const auto& of_rank : mailbox.all_gather(one_copy, std::move(mine), patience)) {
    for (const auto& [row, of_row] : of_rank.as<value::Dict>().items) {
      const auto& place = row.as<value::Tuple>().items;
      const auto number = place.at(0).as<std::int64_t>(), slice = place.at(1).as<std::int64_t>();
      auto& found = number == kBeside ? others : of_rows.at(number)[slice];
      found.clear();  // another rank has the same slice
      for (const auto& norm : of_row.as<value::List>().items) found.push_back(norm.as<at::Tensor>());
    }
  }
  Norms norms;
  for (const auto& slices : of_rows) {
    for (auto& norm : put_together(slices, norm_type)) norms.push_back(std::move(norm));
  }
  norms.insert(norms.end(), others.begin(), others.end());
  return norms;
}

}  // namespace lamina::model
