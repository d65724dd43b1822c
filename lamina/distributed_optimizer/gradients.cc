// SPDX-License-Identifier: Apache-2.0
#include "lamina/distributed_optimizer/gradients.h"

#include <ATen/ops/full.h>

#include <algorithm>
#include <cmath>

#include "lamina/optim/step.h"

namespace lamina::distributed_optimizer {
namespace {

constexpr double kNotHere = -1;

// Squares of this rank's gradients: of the model's rows, kNotHere for those of others, and of all that is not the
// model's, which comes last.
at::Tensor own_squares(std::span<const at::Tensor> sources, const Measurers& measurers, optim::Threads& threads) {
  std::vector<at::Tensor> parameters, gradients;
  std::vector<std::size_t> shards;
  auto* const sharding = measurers.sharding;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    parameters.push_back(sources[i]);
    gradients.push_back(sources[i].grad());
    if (sharding == nullptr) continue;
    if (const auto number = sharding->find_shard(sources[i])) {
      parameters.back() = sharding->named(*number).parameter;
      shards.push_back(i);
      auto& part = gradients.back();
      if (part.defined()) part = part.narrow(0, 0, sharding->elements(*number));  // without what pads it
    }
  }
  auto squares = optim::squared_norms(gradients, threads);
  if (sharding != nullptr) {
    std::vector<double> parts;
    for (const auto shard : shards) parts.push_back(squares[shard]);
    const auto summed = sharding->sum_before_update(std::move(parts));
    for (std::size_t i = 0; i < shards.size(); ++i) squares[shards[i]] = summed[i];
  }
  const auto rows = measurers.table == nullptr ? 0 : measurers.table->all().size();
  auto result = at::full({static_cast<std::int64_t>(rows) + 1}, kNotHere, at::kDouble);
  auto* of_rows = result.mutable_data_ptr<double>();
  of_rows[rows] = 0;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const auto* row = measurers.table == nullptr ? nullptr : measurers.table->find(parameters[i]);
    if (row == nullptr) {
      of_rows[rows] += squares[i];
    } else {
      of_rows[row - measurers.table->all().data()] = squares[i];
    }
  }
  return result;
}

std::span<const double> numbers(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<double>(), static_cast<std::size_t>(tensor.numel())};
}

}  // namespace

Measure measure_gradients(std::span<const at::Tensor> sources, const Measurers& measurers, optim::Threads& threads) {
  auto mine = own_squares(sources, measurers, threads);
  const auto unscaled = static_cast<std::int64_t>(measurers.unscaled);
  std::vector<value::Value> told{value::List{{mine, measurers.options, unscaled}}};
  if (measurers.everyone.size() > 1) {
    told = measurers.mailbox.all_gather(measurers.everyone, told.front(), measurers.patience);
  }
  Measure measure;
  std::vector<double> squares(numbers(mine).begin(), numbers(mine).end());
  double beside = 0;  // the model, which one rank of a copy has
  for (std::size_t i = 0; i < told.size(); ++i) {
    const auto& words = told[i].as<value::List>().items;
    const auto of_rank = numbers(words.at(0).as<at::Tensor>());
    measure.options.push_back(words.at(1).as<std::int64_t>());
    measure.unscaled = std::max(measure.unscaled, static_cast<Unscaled>(words.at(2).as<std::int64_t>()));
    if (std::ranges::any_of(of_rank, [](double each) { return !std::isfinite(each); })) measure.overflow = true;
    const bool same_model = told.size() > 1 && std::ranges::count(measurers.one_copy, measurers.everyone[i]) > 0;
    for (std::size_t row = 0; same_model && row + 1 < of_rank.size() && row + 1 < squares.size(); ++row) {
      if (of_rank[row] != kNotHere) squares[row] = of_rank[row];
    }
    if (same_model) beside += of_rank.back();
  }
  if (measurers.table != nullptr && told.size() > 1) squares.back() = beside;
  double sum = 0;
  for (const double each : squares) sum += each == kNotHere ? 0 : each;
  measure.norm = std::sqrt(sum);
  return measure;
}

}  // namespace lamina::distributed_optimizer
