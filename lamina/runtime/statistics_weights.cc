// SPDX-License-Identifier: Apache-2.0
#include "lamina/runtime/statistics_weights.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>

#include <cmath>
#include <utility>

#include "lamina/device/capabilities.h"
#include "lamina/device/upload.h"

namespace lamina::runtime {
namespace {

// Operations on the numbers of one module, doubles, and on those of all, tensors.
double choose(bool condition, double one, double other) { return condition ? one : other; }
template <class One>
at::Tensor choose(const at::Tensor& condition, const One& one, const at::Tensor& other) {
  return at::where(condition, one, other);
}
bool either(bool one, bool other) { return one || other; }
at::Tensor either(const at::Tensor& one, const at::Tensor& other) { return one.logical_or(other); }
template <class Ask>
bool both(bool one, const Ask& other) {
  return one && other();
}
template <class Ask>
at::Tensor both(const at::Tensor& one, const Ask& other) {
  return one.logical_and(other());
}
double power(double base, double exponent) { return std::pow(base, exponent); }
at::Tensor power(const at::Tensor& base, const at::Tensor& exponent) { return at::pow(base, exponent); }

template <class Number>
struct Weighed {
  Number own, sum, before, counted;
};

// A microbatch that has made its statistics anew, for its count is smaller, has none of those before. A class that does
// not count calls has made one where its statistics have changed.
template <class Number, class Truth, class Changed>
Weighed<Number> weigh(const Number& found, const Number& counted, const Number& after, const Number& kept_by_call,
                      const Truth& has_momentum, const Changed& changed) {
  const Number calls = after - found;
  const Truth is_anew = calls < 0, is_still = calls == 0;
  const Number now = choose(is_anew, after, counted + calls);
  const Number kept = power(kept_by_call, choose(both(is_still, changed), 1.0, calls));
  const auto of = [&](const Number& count, const Number& with_momentum) {
    return choose(has_momentum, with_momentum, choose(is_still, 1.0, count / now));
  };
  return {.own = choose(either(either(is_anew, is_still), has_momentum), 1.0, after / now),
          .sum = choose(is_anew, 0.0, of(counted, kept)),
          .before = choose(is_anew, 0.0, of(found, kept)),
          .counted = now};
}

}  // namespace

StatisticsWeights::StatisticsWeights(const std::vector<std::optional<double>>& momenta, at::Tensor found)
    : found_(std::move(found)), counts_(found_) {
  std::vector<double> kept, momentum;
  for (const auto& each : momenta) {
    kept.push_back(1 - each.value_or(0));
    momentum.push_back(each ? 1 : 0);
  }
  kept_by_call_ = devices::upload(at::tensor(kept, at::kDouble), found_.device());
  has_momentum_ = devices::upload(at::tensor(momentum, at::kDouble), found_.device()).gt(0);
}

StatisticsWeights::Factors StatisticsWeights::next(const at::Tensor& after, const Changed& changed) {
  if (devices::is_host(found_)) return next_on_host(after, changed);
  auto weighed = weigh(found_, counts_, after, kept_by_call_, has_momentum_, changed);
  counts_ = std::move(weighed.counted);
  return {std::move(weighed.own), std::move(weighed.sum), std::move(weighed.before)};
}

// A loop, which is quicker here.
StatisticsWeights::Factors StatisticsWeights::next_on_host(const at::Tensor& after, const Changed& changed) {
  const auto counted = at::empty_like(found_);
  const Factors factors{at::empty_like(found_), at::empty_like(found_), at::empty_like(found_)};
  at::Tensor all;
  for (std::int64_t i = 0; i < found_.numel(); ++i) {
    const auto number = [i](const at::Tensor& of) { return of.const_data_ptr<double>()[i]; };
    const auto put = [i](const at::Tensor& into, double value) { into.mutable_data_ptr<double>()[i] = value; };
    const auto is_changed = [&] {
      if (!all.defined()) all = changed();
      return all.const_data_ptr<bool>()[i];
    };
    const auto weighed = weigh(number(found_), number(counts_), number(after), number(kept_by_call_),
                               has_momentum_.const_data_ptr<bool>()[i], is_changed);
    put(factors.own, weighed.own);
    put(factors.sum, weighed.sum);
    put(factors.before, weighed.before);
    put(counted, weighed.counted);
  }
  counts_ = counted;
  return factors;
}

}  // namespace lamina::runtime
