// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/trace.h"

#include <cstdint>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "lamina/frontend/serializer.h"

template <>
struct lamina::Serializer<lamina::plan::Read> {
  using Fields = std::tuple<int, std::int64_t>;
  static Value to_value(const plan::Read& read) { return lamina::to_value(Fields(read.at, read.bytes)); }
  static plan::Read from_value(const Value& value) {
    const auto [at, bytes] = lamina::from_value<Fields>(value);
    return {.at = at, .bytes = bytes};
  }
};

template <>
struct lamina::Serializer<lamina::plan::Stretch> {
  using Fields = std::tuple<int, double, double, std::int64_t, bool, std::optional<double>,
                            std::optional<std::vector<plan::Read>>>;
  static Value to_value(const plan::Stretch& of) {
    return lamina::to_value(
        Fields(of.at, of.forward_us, of.backward_us, of.value_bytes, of.works, of.weights_us, of.reads));
  }
  static plan::Stretch from_value(const Value& value) {
    auto [at, forward, backward, bytes, works, weights, reads] = lamina::from_value<Fields>(value);
    return {.at = at,
            .forward_us = forward,
            .backward_us = backward,
            .value_bytes = bytes,
            .works = works,
            .weights_us = weights,
            .reads = std::move(reads)};
  }
};

template <>
struct lamina::Serializer<lamina::model::Cost> {
  using Nodes = std::vector<int>;
  using Fields = std::tuple<std::optional<int>, int, double, double, std::int64_t, std::int64_t, Nodes, Nodes,
                            std::vector<plan::Stretch>>;
  static Value to_value(const model::Cost& of) {
    return lamina::to_value(Fields(of.order, of.calls, of.forward_us, of.backward_us, of.activation_bytes,
                                   of.output_bytes, Nodes(of.reads.begin(), of.reads.end()),
                                   Nodes(of.ties.begin(), of.ties.end()), of.stretches));
  }
  static model::Cost from_value(const Value& value) {
    auto [order, calls, forward, backward, activations, outputs, reads, ties, stretches] =
        lamina::from_value<Fields>(value);
    return {.order = order,
            .calls = calls,
            .forward_us = forward,
            .backward_us = backward,
            .activation_bytes = activations,
            .output_bytes = outputs,
            .reads = {reads.begin(), reads.end()},
            .ties = {ties.begin(), ties.end()},
            .stretches = std::move(stretches)};
  }
};

namespace lamina::frontend {
namespace {

using TraceFields = std::tuple<std::vector<std::string>, model::Costs>;

}  // namespace

value::Value Trace::as_value() const { return lamina::to_value(TraceFields(modules, costs)); }

Trace Trace::read(const value::Value& value) {
  auto [modules, costs] = lamina::from_value<TraceFields>(value);
  return {.modules = std::move(modules), .costs = std::move(costs)};
}

}  // namespace lamina::frontend
