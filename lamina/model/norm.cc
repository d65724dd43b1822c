// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/norm.h"

#include <ATen/ops/linalg_vector_norm.h>
#include <c10/core/GradMode.h>

#include <optional>

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
  std::vector<at::Tensor> of_rows(all.size()), others;
  std::vector<at::Tensor> of;
  for (const auto& [tensor, measured] : given) of.push_back(tensor);
  const auto rows = table.find_with_gradients(of);
  for (std::size_t i = 0; i < given.size(); ++i) {
    const Parameter* row = rows[i];
    const at::Tensor& measured = given[i].second;
    if (!measured.defined() || (row != nullptr && !table.is_here(*row))) continue;
    auto norm = norm_of(measured, norm_type);
    if (row == nullptr) {
      others.push_back(std::move(norm));
    } else {
      of_rows[row - all.data()] = std::move(norm);
    }
  }
  value::Dict mine;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (of_rows[i].defined()) mine.items.emplace_back(static_cast<std::int64_t>(i), of_rows[i]);
  }
  const bool leads = mailbox.rank() == pipeline.front();
  if (leads) mine.items.emplace_back(kBeside, Value(value::List{{others.begin(), others.end()}}));
  others.clear();
  for (const auto& of_rank : mailbox.all_gather(pipeline, std::move(mine), patience)) {
    for (const auto& [row, norm] : of_rank.as<value::Dict>().items) {
      if (row.as<std::int64_t>() == kBeside) {
        for (const auto& other : norm.as<value::List>().items) others.push_back(other.as<at::Tensor>());
      } else {
        of_rows.at(row.as<std::int64_t>()) = norm.as<at::Tensor>();
      }
    }
  }
  std::erase_if(of_rows, [](const at::Tensor& norm) { return !norm.defined(); });
  of_rows.insert(of_rows.end(), others.begin(), others.end());
  return of_rows;
}

}  // namespace lamina::model
