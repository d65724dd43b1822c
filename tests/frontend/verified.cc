// SPDX-License-Identifier: Apache-2.0
// A program with a fault that only its layout has, as tests/verify/faulty.py has them for Python, with the same names.
//
//     lamina verify -n 2 -c frontend_verified FAULT (pipeline | shards | loop)
#include <cstdlib>

#include "tests/frontend/models.h"

namespace {

using namespace lamina;
using namespace lamina::frontend::test;

std::string fault;

// True of a fault that is asked for, in the run that is to have it.
bool has(const std::string& kind) { return fault == kind && std::getenv("LAMINA_VERIFY_COLLAPSED") == nullptr; }

struct BlockImpl : torch::nn::Module {
  Child<torch::nn::Linear> linear;
  Child<torch::nn::Dropout> dropout;
  const int number;
  explicit BlockImpl(int number) : number(number) {
    linear = register_module("linear", torch::nn::Linear(kWidth, kWidth));
    dropout = register_module("dropout", torch::nn::Dropout(0.1));
  }
  Tensor forward(const Tensor& x) {
    const auto y = dropout(torch::relu(linear(x)));
    return x + (number == 2 && has("output") ? y * 1.001 : y);
  }
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  Child<Sequential> layers;
  Child<torch::nn::Linear> head;
  NetImpl() {
    Sequential blocks;
    for (int number = 0; number < 4; ++number) blocks->push_back(Block(number));
    layers = register_module("layers", blocks);
    head = register_module("head", torch::nn::Linear(kWidth, 4));
  }
  Tensor forward(const Tensor& x) { return head(layers(x)); }
};
TORCH_MODULE(Net);

Tensor loss_of(const Tensor& output) { return output.pow(2).mean(); }

}  // namespace

int main(int, char** arguments) {
  fault = arguments[1];
  const std::string kind = arguments[2];
  if (kind == "pipeline") {
    init({{"partitions", 2}, {"microbatches", 2}});
  } else {
    init({{"ddp", true}, {"sharded_data_parallel_degree", 2}, {"sdp_param_persistence_threshold", 1}});
  }
  torch::manual_seed(0);
  DistributedModel model(Net{});
  DistributedOptimizer adam(torch::optim::Adam(model.parameters(), 0.01));
  torch::manual_seed(1 + dp_rank());
  if (fault == "throws") throw std::runtime_error("the program's own error");
  const auto train = step([&](const Tensor& x) {
    const auto loss = loss_of(model(x));
    model.backward(loss);
    return loss;
  });
  for (int number = 0; number < 10; ++number) {
    adam.zero_grad();
    const auto x = torch::randn({8, kWidth});
    if (kind == "loop") {
      loss_of(model(x)).backward();
    } else {
      train(x);
    }
    adam.step();
    if (number == 0 && has("rate")) static_cast<torch::optim::AdamOptions&>(adam.param_groups()[0].options()).lr(0.1);
  }
  std::printf("the program has gone on\n");
  shutdown();
}
