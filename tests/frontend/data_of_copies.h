// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/torch.h>

#include <vector>

#include "lamina/lamina.h"

// A model, and what each copy of it reads: for programs that compare a layout with the plain loop over all data.
namespace lamina::frontend::test {

using at::Tensor;

struct NetImpl : torch::nn::Module {
  Child<torch::nn::Linear> in, hidden, out;
  NetImpl() {
    in = register_module("in", torch::nn::Linear(6, 5));
    hidden = register_module("hidden", torch::nn::Linear(5, 3));
    out = register_module("out", torch::nn::Linear(3, 1));
  }
  Tensor forward(const Tensor& x) { return out(torch::tanh(hidden(torch::tanh(in(x))))).square().mean(); }
};
using Net = torch::nn::ModuleHolder<NetImpl>;

inline Net seeded(int seed = 0) {
  torch::manual_seed(seed);
  Net model;
  model->to(torch::kDouble);
  return model;
}

// Rows that copy `replica` reads in its step `number`.
inline Tensor batch(int replica, int number) {
  torch::manual_seed(1000 + 10 * replica + number);
  return torch::randn({8, 6}, torch::kDouble);
}
inline Tensor everybodys(int number) {
  std::vector<Tensor> all;
  for (int replica = 0; replica < size_of(Group::kRdp); ++replica) all.push_back(batch(replica, number));
  return torch::cat(all);
}

inline bool close(const Tensor& ours, const Tensor& theirs) { return torch::allclose(ours.cpu(), theirs, 1e-9, 1e-12); }

}  // namespace lamina::frontend::test
