// SPDX-License-Identifier: Apache-2.0
// Trains a small model of a text's bytes without waiting for each other: the last rank owns it, all others train it.
//
//     lamina run -n 4 -c parameter_server FILE [STEPS]
//
// Exits with 1 on a trainer whose loss has not fallen.
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

#include "lamina/lamina.h"

namespace {

constexpr int kBytes = 256, kContext = 8, kWidth = 32, kHidden = 128, kBatch = 64;

// Says which byte comes after eight others.
struct NetImpl : torch::nn::Module {
  torch::nn::Embedding embedding{register_module("embedding", torch::nn::Embedding(kBytes, kWidth))};
  torch::nn::Linear hidden{register_module("hidden", torch::nn::Linear(kContext* kWidth, kHidden))};
  torch::nn::Linear output{register_module("output", torch::nn::Linear(kHidden, kBytes))};

  torch::Tensor forward(const torch::Tensor& x_BC) { return output(torch::relu(hidden(embedding(x_BC).flatten(1)))); }
};
TORCH_MODULE(Net);

torch::Tensor text(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(file)), {});
  return torch::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size())}, torch::kUInt8).to(torch::kLong);
}

// Some windows of the text, and the byte after each.
std::pair<torch::Tensor, torch::Tensor> batch(const torch::Tensor& text) {
  const auto begins = torch::randint(text.size(0) - kContext, {kBatch, 1});
  const auto windows = text.index({begins + torch::arange(kContext + 1)});
  return {windows.slice(1, 0, kContext), windows.select(1, kContext)};
}

// The mean loss of the first, or of the last, ten steps.
double mean_of_ten(const std::vector<double>& losses, bool first) {
  const std::size_t count = std::min<std::size_t>(10, losses.size());
  double sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += losses[first ? i : losses.size() - 1 - i];
  return sum / static_cast<double>(count);
}

int train(const torch::Tensor& bytes, int steps) {
  const auto net = lamina::remote::find("net", /*owner=*/lamina::size() - 1);
  lamina::optim::DistributedOptimizer adamw("AdamW", net.parameters(), {{"lr", 2e-3}});
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    const auto [x_BC, y_B] = batch(bytes);
    lamina::remote::Context context;
    const auto loss = torch::nn::functional::cross_entropy(net(x_BC), y_B);
    context.backward(loss);
    adamw.step(context);
    losses.push_back(loss.item<double>());
  }
  const double first = mean_of_ten(losses, true), last = mean_of_ten(losses, false);
  std::printf("trainer %d: loss %.3f, after %d steps %.3f\n", lamina::rank(), first, steps, last);
  return last < 0.8 * first ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) {
    std::fprintf(stderr, "parameter_server FILE [STEPS]\n");
    return 2;
  }
  lamina::init();
  torch::manual_seed(lamina::rank());
  int result = 0;
  if (lamina::rank() == lamina::size() - 1) {
    lamina::remote::place<torch::Tensor>("net", Net());
    lamina::remote::serve();
  } else {
    result = train(text(arguments[1]), count > 2 ? std::atoi(arguments[2]) : 200);
  }
  lamina::shutdown();
  return result;
}
