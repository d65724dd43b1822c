// SPDX-License-Identifier: Apache-2.0
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <iostream>

#include "lamina/lamina.h"

struct NetImpl : torch::nn::Module {
  lamina::Child<torch::nn::Linear> in, out;  // instead of: torch::nn::Linear in{nullptr}, out{nullptr};
  NetImpl() {
    in = register_module("in", torch::nn::Linear(8, 64));
    out = register_module("out", torch::nn::Linear(64, 8));
  }
  at::Tensor forward(const at::Tensor& x) { return out(in(x).relu()); }
};
TORCH_MODULE(Net);

int main() {
  lamina::init({{"partitions", 2}, {"microbatches", 4}});
  torch::manual_seed(0);
  lamina::DistributedModel model(Net{});
  lamina::DistributedOptimizer sgd(torch::optim::SGD(model.parameters(), 0.5));
  const auto train = lamina::step([&](const at::Tensor& x, const at::Tensor& y) {
    const auto loss = (model(x) - y).pow(2).mean();
    model.backward(loss);
    return loss;
  });
  const auto x = at::randn({16, 8});
  double loss = 0;
  for (int step = 0; step < 20; ++step) {
    loss = train(x, x.flip(1)).reduce_mean().item<double>();
    sgd.step();
    sgd.zero_grad();
  }
  if (lamina::rank() == 0) std::cout << "loss " << loss << std::endl;
  lamina::shutdown();
  return loss < 0.5 ? 0 : 1;
}
