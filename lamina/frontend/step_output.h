// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace lamina {

// A tensor that a step function returned, once per microbatch.
struct StepOutput {
  std::vector<at::Tensor> outputs;         // in the order of the microbatches
  std::vector<std::int64_t> samples = {};  // that each had; empty where they are not known

  // The mean over the samples of means over those of each microbatch, of the shape of each; of integers in the default
  // dtype.
  at::Tensor reduce_mean() const;
  at::Tensor reduce_sum() const;  // of integers and bool in int64
  at::Tensor concat() const;      // along axis 0: the whole batch again; 0-dimensional ones are stacked
  at::Tensor stack() const;       // along a new axis 0; throws base::UsageError where their shapes differ
};

using Samples = std::vector<std::int64_t>;  // of each microbatch

// Results of microbatches as one: a StepOutput in the place of each tensor, a vector of one value per microbatch in
// the place of anything else, inside tuples, pairs and maps by string as well. Maps have the same keys in all.
template <class T>
struct Merged {
  static std::vector<T> of(std::vector<T> results, const Samples&) { return results; }
};

template <class T>
auto merge(std::vector<T> results, const Samples& samples = {}) {
  return Merged<T>::of(std::move(results), samples);
}

template <>
struct Merged<at::Tensor> {
  static StepOutput of(std::vector<at::Tensor> results, const Samples& samples) {
    return {std::move(results), samples};
  }
};

template <class... T>
struct Merged<std::tuple<T...>> {
  static auto of(const std::vector<std::tuple<T...>>& results, const Samples& samples) {
    return columns(results, samples, std::index_sequence_for<T...>());
  }

 private:
  template <std::size_t... I>
  static auto columns(const std::vector<std::tuple<T...>>& results, const Samples& samples, std::index_sequence<I...>) {
    return std::tuple(column<I>(results, samples)...);
  }
  template <std::size_t I>
  static auto column(const std::vector<std::tuple<T...>>& results, const Samples& samples) {
    std::vector<std::tuple_element_t<I, std::tuple<T...>>> items;
    for (const auto& result : results) items.push_back(std::get<I>(result));
    return merge(std::move(items), samples);
  }
};

template <class A, class B>
struct Merged<std::pair<A, B>> {
  static auto of(const std::vector<std::pair<A, B>>& results, const Samples& samples) {
    std::vector<A> first;
    std::vector<B> second;
    for (const auto& [a, b] : results) {
      first.push_back(a);
      second.push_back(b);
    }
    return std::pair(merge(std::move(first), samples), merge(std::move(second), samples));
  }
};

template <class T>
struct Merged<std::map<std::string, T>> {
  static auto of(const std::vector<std::map<std::string, T>>& results, const Samples& samples) {
    std::map<std::string, decltype(merge(std::vector<T>()))> merged;
    for (const auto& [key, ignored] : results.front()) {
      std::vector<T> items;
      for (const auto& result : results) items.push_back(result.at(key));
      merged.emplace(key, merge(std::move(items), samples));
    }
    return merged;
  }
};

}  // namespace lamina
