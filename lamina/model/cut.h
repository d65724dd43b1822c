// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "lamina/messaging/mailbox.h"
#include "lamina/model/plan.h"

namespace lamina::model {

// A model that is cut: the partition of each of its nodes, and of all that has a name in it.
class Cut {
 public:
  Cut(const ModuleTree& tree, std::vector<int> owners, const std::vector<int>& anywhere, base::Partition here);

  const std::vector<int>& owners() const { return owners_; }       // per node
  const std::vector<bool>& anywhere() const { return anywhere_; }  // per node; see remote/anywhere.h
  base::Partition here() const { return here_; }

  // Returns the owner of a parameter, buffer or module, or of any other part of a state dict: that of the module which
  // the beginning of its name leads to.
  base::Partition owner_of(std::string_view name) const { return base::Partition(owners_[place_of(name).node]); }
  bool owns(std::string_view name) const { return owner_of(name) == here_; }
  // Returns where the module of a name comes on a walk over the model: the order of its state dict.
  int position_of(std::string_view name) const { return place_of(name).position; }

 private:
  struct Place {
    int node = 0, position = 0;
  };
  const Place& place_of(std::string_view name) const;

  std::vector<int> owners_;
  std::vector<bool> anywhere_;
  base::Partition here_;
  std::unordered_map<std::string, Place> by_path_;
};

// The words of the first rank to all others when the model is cut; of another one nothing.
struct Proposal {
  std::optional<Plan> plan;
  std::string error;  // of the plan; "" for none
  value::Value word;  // of the face
};
struct Agreed {
  Cut cut;
  std::string table;  // of the plan
  value::Value word;  // of the first rank
};

// Collective over `world`: the first rank's plan on every rank, once all have shown to have built its model. Throws
// what agree() does.
Agreed agree_on_cut(const ModuleTree& tree, const Proposal& proposal, base::Partition here,
                    std::span<const base::Rank> world, messaging::Mailbox& mailbox, const base::Patience& patience);

}  // namespace lamina::model
