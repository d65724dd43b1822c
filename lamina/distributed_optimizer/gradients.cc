// SPDX-License-Identifier: Apache-2.0
#include "lamina/distributed_optimizer/gradients.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "lamina/optim/step.h"
#include "lamina/value/guarded.h"

namespace lamina::distributed_optimizer {
namespace {

constexpr double kBeside = -1;  // the model, in the place of a row's number

// Squares of this rank's gradients: triples of the number of a row of the model, the slice of it and its square, and
// one of all that is not the model's.
std::vector<double> own_squares(std::span<const at::Tensor> sources, const Measurers& measurers,
                                optim::Threads& threads) {
  const value::Unguarded own_work;
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
      if (part.defined()) part = part.narrow(0, 0, sharding->share(*number).count());  // without what pads it
    }
  }
  auto squares = optim::squared_norms(gradients, threads);
  if (sharding != nullptr) {
    std::vector<double> parts;
    for (const auto shard : shards) parts.push_back(squares[shard]);
    const auto summed = sharding->sum_before_update(std::move(parts));
    for (std::size_t i = 0; i < shards.size(); ++i) squares[shards[i]] = summed[i];
  }
  std::vector<double> triples;
  double beside = 0;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const auto* row = measurers.table == nullptr ? nullptr : measurers.table->find(parameters[i]);
    if (row == nullptr) {
      beside += squares[i];
    } else {
      const auto number = row - measurers.table->all().data();
      const auto slice = measurers.table->slice_of(*row);
      triples.insert(triples.end(), {static_cast<double>(number), static_cast<double>(slice), squares[i]});
    }
  }
  triples.insert(triples.end(), {kBeside, 0, beside});
  return triples;
}

// Adds what the ranks of one copy know: the same bits on all of them.
GradientMeasure of_copy(std::span<const double> own, const Measurers& measurers) {
  const auto triples = at::empty({static_cast<std::int64_t>(own.size())}, at::kDouble);
  std::ranges::copy(own, triples.mutable_data_ptr<double>());
  const value::List word{{triples, measurers.options, static_cast<std::int64_t>(measurers.unscaled)}};
  GradientMeasure measure;
  std::vector<std::map<double, double>> squares(measurers.table == nullptr ? 0 : measurers.table->all().size());
  double beside = 0;
  const auto told = measurers.mailbox.all_gather(measurers.one_copy, word, measurers.patience);
  for (std::size_t i = 0; i < told.size(); ++i) {
    const auto& words = told[i].as<value::List>().items;
    const bool has_same_slices =
        std::ranges::find(measurers.pipeline, measurers.one_copy[i]) != measurers.pipeline.end();
    const auto given = words.at(0).as<at::Tensor>();
    for (const auto* each = given.const_data_ptr<double>(); each != given.const_data_ptr<double>() + given.numel();
         each += 3) {
      const double square = each[2];
      if (!std::isfinite(square)) measure.overflow = true;
      if (each[0] == kBeside) {
        beside += has_same_slices ? square : 0;  // each pipeline has all of it
      } else if (each[0] < static_cast<double>(squares.size())) {
        squares[static_cast<std::size_t>(each[0])][each[1]] = square;
      }
    }
    measure.are_alike = measure.are_alike && words.at(1).as<std::int64_t>() == measurers.options;
    measure.unscaled = std::max(measure.unscaled, static_cast<Unscaled>(words.at(2).as<std::int64_t>()));
  }
  if (measurers.table == nullptr) beside = own.back();  // each rank has a model of its own
  double sum = 0;
  for (const auto& slices : squares) {
    for (const auto& [slice, square] : slices) sum += square;
  }
  measure.norm = std::sqrt(sum + beside);
  return measure;
}

// Adds what only ranks of other copies know.
void hear_copies(GradientMeasure& measure, const Measurers& measurers) {
  const auto worse = [](const value::Value& low, const value::Value& high) -> value::Value {
    const auto number = [](const value::Value& word, std::size_t i) {
      return word.as<value::Tuple>().items.at(i).as<std::int64_t>();
    };
    const auto worst = [&](std::size_t i) { return std::max(number(low, i), number(high, i)); };
    const bool is_alike = number(low, 0) == number(high, 0);
    return value::Tuple{{number(low, 0), is_alike ? worst(1) : 1, worst(2), worst(3)}};
  };
  const value::Tuple own{{measurers.options, std::int64_t{!measure.are_alike}, std::int64_t{measure.overflow},
                          static_cast<std::int64_t>(measure.unscaled)}};
  const auto worst = measurers.mailbox.exchange(measurers.copies, "gradients", own, worse, measurers.patience);
  const auto said = [&](std::size_t i) { return worst.as<value::Tuple>().items.at(i).as<std::int64_t>(); };
  measure.overflow = said(2) != 0;
  measure.unscaled = static_cast<Unscaled>(said(3));
  if (measurers.trains_with_copies) measure.are_alike = said(1) == 0;
}

}  // namespace

GradientMeasure measure_gradients(std::span<const at::Tensor> sources, const Measurers& measurers,
                                  optim::Threads& threads) {
  auto measure = of_copy(own_squares(sources, measurers, threads), measurers);
  hear_copies(measure, measurers);
  return measure;
}

}  // namespace lamina::distributed_optimizer
