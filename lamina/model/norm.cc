// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/norm.h"

#include <ATen/ops/linalg_vector_norm.h>
#include <c10/core/GradMode.h>

#include <optional>
#include <utility>

namespace lamina::model {

using value::Value;

namespace {

constexpr std::int64_t kBeside = -1;  // the model, in the place of a row's number

}  // namespace

at::Tensor norm_of(const at::Tensor& tensor, double norm_type) {
  const auto type = tensor.scalar_type();
  const bool is_half = type == at::kHalf || type == at::kBFloat16;
  return at::linalg_vector_norm(tensor, norm_type, {}, false, is_half ? std::optional(at::kFloat) : std::nullopt);
}

std::vector<at::Tensor> norms(const ParameterTable& table, std::span<const Measured> given, double norm_type,
                              std::span<const base::Rank> pipeline, messaging::Mailbox& mailbox,
                              const base::Patience& patience) {
  const at::NoGradGuard no_grad;
  const auto& all = table.all();
  std::vector<std::vector<at::Tensor>> of_rows(all.size());  // a row that was given twice counts twice
  std::vector<at::Tensor> others, of;
  for (const auto& [tensor, measured] : given) of.push_back(tensor);
  const auto rows = table.find_with_gradients(of);
  for (std::size_t i = 0; i < given.size(); ++i) {
    const Parameter* row = rows[i];
    const at::Tensor& measured = given[i].second;
    if (!measured.defined() || (row != nullptr && !table.is_here(*row))) continue;
    (row == nullptr ? others : of_rows[row - all.data()]).push_back(norm_of(measured, norm_type));
  }
  value::Dict mine;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (of_rows[i].empty()) continue;
    value::List of_row;
    for (const auto& norm : std::exchange(of_rows[i], {})) of_row.items.emplace_back(norm);
    mine.items.emplace_back(static_cast<std::int64_t>(i), std::move(of_row));
  }
  const bool leads = mailbox.rank() == pipeline.front();
  if (leads) mine.items.emplace_back(kBeside, Value(value::List{{others.begin(), others.end()}}));
  others.clear();
  for (const auto& of_rank : mailbox.all_gather(pipeline, std::move(mine), patience)) {
    for (const auto& [row, of_row] : of_rank.as<value::Dict>().items) {
      const auto number = row.as<std::int64_t>();
      auto& found = number == kBeside ? others : of_rows.at(number);
      for (const auto& norm : of_row.as<value::List>().items) found.push_back(norm.as<at::Tensor>());
    }
  }
  std::vector<at::Tensor> norms;
  for (const auto& of_row : of_rows) norms.insert(norms.end(), of_row.begin(), of_row.end());
  norms.insert(norms.end(), others.begin(), others.end());
  return norms;
}

}  // namespace lamina::model
