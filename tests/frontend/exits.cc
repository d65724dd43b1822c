// SPDX-License-Identifier: Apache-2.0
// A C++ program on two ranks, of which one calls std::exit in the middle of its third step. That is rank 1 in a module
// that rank 0 calls, or rank 0 in the body, in threads of the engine's.
//
//     lamina run -n 2 -c frontend_exits (module | body) EXIT_CODE
#include <cstdlib>

#include "tests/frontend/models.h"

namespace {

using namespace lamina;
using namespace lamina::frontend::test;

struct ExitsImpl : torch::nn::Module {
  torch::nn::Linear linear{nullptr};
  const int code;
  int calls = 0;
  explicit ExitsImpl(int code) : code(code) { linear = register_module("linear", torch::nn::Linear(kWidth, kWidth)); }
  Tensor forward(const Tensor& x) {
    if (code >= 0 && ++calls > 2 * num_microbatches()) std::exit(code);
    return linear(x);
  }
};
TORCH_MODULE(Exits);

struct NetImpl : torch::nn::Module {
  Child<torch::nn::Linear> here;
  Child<Exits> there;
  explicit NetImpl(int code) {
    here = register_module("here", torch::nn::Linear(kWidth, kWidth));
    const Partition on(1);
    there = register_module("there", Exits(code));
  }
  Tensor forward(const Tensor& x) { return there(here(x)).pow(2).mean(); }
};
TORCH_MODULE(Net);

}  // namespace

int main(int, char** arguments) {
  const bool in_body = arguments[1] == std::string("body");
  const int code = std::atoi(arguments[2]);
  init({{"partitions", 2}, {"microbatches", 4}, {"auto_partition", false}, {"default_partition", 0}});
  DistributedModel model(Net(in_body ? -1 : code));
  int steps = 0;
  const auto train = step([&](const Tensor& x) {
    if (in_body && steps == 2) std::exit(code);
    const auto loss = model(x);
    model.backward(loss);
    return loss;
  });
  for (; steps < 4; ++steps) train(torch::ones({8, kWidth}));
  shutdown();
}
