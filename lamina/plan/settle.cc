// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/settle.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace lamina::plan {
namespace {

constexpr int kNowhere = -1;  // a call before all stretches

// Takes what a call of `from` costs, and reads, to where it runs.
void pass(Node& from, const Stretch& call, Node& to, Stretch& before, std::size_t calls) {
  const auto bytes = from.activation_bytes / static_cast<std::int64_t>(calls);
  before.forward_us += call.forward_us;
  before.backward_us += call.backward_us;
  before.value_bytes = call.value_bytes;
  if (!call.weights_us) before.weights_us.reset();
  if (before.weights_us) *before.weights_us += *call.weights_us;
  if (before.reads && call.reads) before.reads->insert(before.reads->end(), call.reads->begin(), call.reads->end());
  to.forward_us += call.forward_us;
  to.backward_us += call.backward_us;
  to.activation_bytes += bytes;
}

// Has a stretch read what has become of those that it reads: a call is now part of the stretch that it runs in.
void follow(std::vector<Read>& reads, int at, const std::map<int, int>& runs_in) {
  std::map<int, std::int64_t> bytes;
  for (const Read& read : reads) {
    const auto found = runs_in.find(read.at);
    const int maker = found == runs_in.end() ? read.at : found->second;
    if (maker != at && maker != kNowhere) bytes[maker] += read.bytes;
  }
  reads.clear();
  for (const auto& [maker, size] : bytes) reads.push_back({maker, size});
}

}  // namespace

ModuleTree settled(ModuleTree tree) {
  std::vector<std::tuple<int, int, std::size_t>> order;  // place, node, which of its stretches
  for (int node = 0; node < static_cast<int>(tree.size()); ++node) {
    for (std::size_t i = 0; i < tree[node].stretches.size(); ++i)
      order.emplace_back(tree[node].stretches[i].at, node, i);
  }
  std::ranges::sort(order);
  Node* last = nullptr;
  Stretch* before = nullptr;
  std::map<int, int> runs_in;  // by place of a call, that of the stretch
  for (const auto& [at, node, i] : order) {
    Node& module = tree[node];
    if (!module.anywhere) {
      last = &module;
      before = &module.stretches[i];
    } else if (last == nullptr) {
      runs_in[at] = kNowhere;
    } else {
      runs_in[at] = before->at;
      if (!module.follows) module.follows = static_cast<int>(last - tree.data());
      pass(module, module.stretches[i], *last, *before, module.stretches.size());
    }
  }
  for (Node& node : tree) {
    for (Stretch& stretch : node.stretches) {
      if (stretch.reads) follow(*stretch.reads, stretch.at, runs_in);
    }
    if (!node.anywhere) continue;
    node.stretches.clear();
    node.forward_us = node.backward_us = 0;
    node.activation_bytes = node.output_bytes = 0;
  }
  return tree;
}

}  // namespace lamina::plan
