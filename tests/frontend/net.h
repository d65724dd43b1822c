// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/frontend/models.h"

// A small net with a batch, of which each copy of the model reads its rows.
namespace lamina::frontend::test {

struct NetImpl : torch::nn::Module {
  Child<torch::nn::Linear> in, hidden, out;
  NetImpl() {
    in = register_module("in", torch::nn::Linear(6, 9));
    hidden = register_module("hidden", torch::nn::Linear(9, 5));
    out = register_module("out", torch::nn::Linear(5, 1));
  }
  Tensor forward(const Tensor& x) { return out(torch::tanh(hidden(torch::tanh(in(x))))); }
};
using Net = torch::nn::ModuleHolder<NetImpl>;

inline Net seeded() {
  torch::manual_seed(0);
  return Net();
}

inline Tensor batch() {
  torch::manual_seed(7);
  return torch::randn({8, 6});
}

inline Tensor share() { return batch().chunk(size_of(Group::kDp))[rank_in(Group::kDp)]; }

}  // namespace lamina::frontend::test
