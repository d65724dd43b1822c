// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lamina/layout/region.h"

// The heads of attention of a module whose layers are sliced: those of queries and of keys that a member of a team has.
namespace lamina::tensor_parallel {

// The number of heads that a script says a module has.
struct SaidHeads {
  std::string name;        // of the attribute that has it, "nhead" or "config.heads"; "" where the script says a number
  std::int64_t count = 0;  // 0: the module has no such attribute
};

// A module that computes with what sliced layers give.
struct ParentModule {
  std::string place;  // its name in the model
  std::string type;   // the name of its class
  bool in_transformers = false;
  std::map<std::string, std::int64_t> numbers;  // its attributes that are positive whole numbers, by name
};

// With at least as many heads of keys as members each member has whole groups, heads with those of their keys. With
// fewer, members compute the same heads of keys for their own.
struct Heads {
  ParentModule module;
  std::int64_t count = 0;  // of queries
  std::int64_t keys = 0;   // divides `count`
  std::int64_t width = 0;  // features of a head; 0 where the module does not say
  int degree = 1;          // of the team
  std::string said;        // name under which the script says that the module has their number

  // The number of parts that are never torn.
  std::int64_t units() const { return keys >= degree ? keys : count; }
  layout::Share own(int member) const;
  // True for a layer with so many outputs that gives keys or values of which members have the same.
  bool are_shared_keys(std::int64_t extent) const;
  // The heads of keys of a member: each for as many heads, or else one for each head.
  std::vector<std::int64_t> own_keys(int member) const;
  // The number of the features of a layer that are never torn. Throws base::UsageError where heads do not divide them.
  std::int64_t unit_of(const std::string& layer, std::int64_t extent) const;
  // The module's numbers of heads, and sizes of all heads, as they are on a member, by the name of the attribute.
  std::map<std::string, std::int64_t> numbers(int member) const;
};

// The heads of a module, of layers with so many outputs cut by columns and so many inputs cut by rows; none where it
// has none. A number that is said counts if it divides these sizes. Throws base::UsageError where a member would have
// none.
std::optional<Heads> heads_of(const ParentModule& module, const std::vector<std::int64_t>& columns,
                              const std::vector<std::int64_t>& rows, int degree,
                              const std::optional<SaidHeads>& said = {});

}  // namespace lamina::tensor_parallel
