// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "lamina/plan/items.h"
#include "lamina/plan/route.h"

namespace lamina::plan {

// A value on its way through a forward.
struct ReadValue {
  int maker = 0;             // a visit
  std::vector<int> readers;  // later visits
  std::int64_t bytes = 0;
  bool everywhere = false;  // the program outside of a graph reads it, on every rank
};

// [Note: traffic] A workload as what is placed, and what that passes on: items, which a microbatch visits in an order,
// and values, each made by one visit and read by later ones. A value is sent once to each rank that reads it, but the
// one that makes it, however often it is read there.
class Traffic {
 public:
  // Throws base::ConfigError for an item or a visit that is not there, a value that is read before it is made, and
  // negative bytes.
  Traffic(int items, std::vector<int> visits, std::vector<ReadValue> values);
  // Makes those of a tree: a visit is a point of its route, and the last one the step body's, which reads the results.
  static Traffic of_tree(const Route& route, const Items& items);
  // Makes those of a graph of operations, whose root is what is outside of it.
  static Traffic of_graph(const Route& route, const Items& items);

  const std::vector<ReadValue>& all() const { return values_; }
  // The items that make or read a value, each once; without who reads it on every rank.
  std::vector<int> users(const ReadValue& value) const;
  // The bytes that each rank sends in a forward; `owners` are ranks by item.
  std::vector<std::int64_t> sent_bytes(const std::vector<int>& owners, int ranks) const;

 private:
  void check() const;

  int items_;
  std::vector<int> visits_;
  std::vector<ReadValue> values_;
};

}  // namespace lamina::plan
