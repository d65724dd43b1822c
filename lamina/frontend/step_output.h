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

// Results of microbatches as one: a StepOutput in the place of each tensor, a vector of one value per microbatch in
// the place of anything else, inside tuples, pairs and maps by string as well. Maps have the same keys in all.
template <class T>
struct Merged {
  static std::vector<T> of(std::vector<T> results) { return results; }
};

template <class T>
auto merge(std::vector<T> results) {
  return Merged<T>::of(std::move(results));
}

template <>
struct Merged<at::Tensor> {
  static StepOutput of(std::vector<at::Tensor> results) { return {std::move(results)}; }
};

template <class... T>
struct Merged<std::tuple<T...>> {
  static auto of(const std::vector<std::tuple<T...>>& results) {
    return columns(results, std::index_sequence_for<T...>());
  }

 private:
  template <std::size_t... I>
  static auto columns(const std::vector<std::tuple<T...>>& results, std::index_sequence<I...>) {
    return std::tuple(column<I>(results)...);
  }
  template <std::size_t I>
  static auto column(const std::vector<std::tuple<T...>>& results) {
    std::vector<std::tuple_element_t<I, std::tuple<T...>>> items;
    for (const auto& result : results) items.push_back(std::get<I>(result));
    return merge(std::move(items));
  }
};

template <class A, class B>
struct Merged<std::pair<A, B>> {
  static auto of(const std::vector<std::pair<A, B>>& results) {
    std::vector<A> first;
    std::vector<B> second;
    for (const auto& [a, b] : results) {
      first.push_back(a);
      second.push_back(b);
    }
    return std::pair(merge(std::move(first)), merge(std::move(second)));
  }
};

template <class T>
struct Merged<std::map<std::string, T>> {
  static auto of(const std::vector<std::map<std::string, T>>& results) {
    std::map<std::string, decltype(merge(std::vector<T>()))> merged;
    for (const auto& [key, ignored] : results.front()) {
      std::vector<T> items;
      for (const auto& result : results) items.push_back(result.at(key));
      merged.emplace(key, merge(std::move(items)));
    }
    return merged;
  }
};

}  // namespace lamina
