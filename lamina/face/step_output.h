// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace lamina {

// A tensor that a step function returned, once per microbatch.
struct StepOutput {
  std::vector<at::Tensor> outputs;  // in the order of the microbatches

  at::Tensor reduce_mean() const;  // over microbatches, of the shape of each; of integers in the default dtype
  at::Tensor reduce_sum() const;   // of integers and bool in int64
  at::Tensor concat() const;       // along axis 0: the whole batch again; 0-dimensional ones are stacked
  at::Tensor stack() const;        // along a new axis 0
};

// What microbatches returned, as one: a StepOutput in the place of each tensor; a vector of one value per microbatch in
// the place of anything else, inside tuples, pairs and maps by string as well. Maps have the same keys in all.
inline StepOutput merge(std::vector<at::Tensor> results) { return {std::move(results)}; }

template <class T>
auto merge(std::vector<T> results) {
  return results;
}

template <class... T>
auto merge(const std::vector<std::tuple<T...>>& results) {
  const auto one = [&]<std::size_t I>(std::integral_constant<std::size_t, I>) {
    std::vector<std::tuple_element_t<I, std::tuple<T...>>> column;
    for (const auto& result : results) column.push_back(std::get<I>(result));
    return merge(std::move(column));
  };
  return [&]<std::size_t... I>(std::index_sequence<I...>) {
    return std::tuple(one(std::integral_constant<std::size_t, I>())...);
  }(std::index_sequence_for<T...>());
}

template <class A, class B>
auto merge(const std::vector<std::pair<A, B>>& results) {
  std::vector<A> first;
  std::vector<B> second;
  for (const auto& [a, b] : results) {
    first.push_back(a);
    second.push_back(b);
  }
  return std::pair(merge(std::move(first)), merge(std::move(second)));
}

template <class T>
auto merge(const std::vector<std::map<std::string, T>>& results) {
  std::map<std::string, decltype(merge(std::vector<T>()))> merged;
  for (const auto& [key, ignored] : results.front()) {
    std::vector<T> column;
    for (const auto& result : results) column.push_back(result.at(key));
    merged.emplace(key, merge(std::move(column)));
  }
  return merged;
}

}  // namespace lamina
