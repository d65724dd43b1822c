// SPDX-License-Identifier: Apache-2.0
// A pipeline whose values go from device to device trains, bit by bit, as it does through the host. UCX knows no
// emulated memory; it is lent to it by its twin, as the host's.
//
//     LAMINA_LANES=1 lamina run -n 2 -c device_lanes
#include <atomic>

#include "lamina/device/lending.h"
#include "tests/emulated/device.h"
#include "tests/emulated/emulated.h"
#include "tests/frontend/expect.h"
#include "tests/frontend/models.h"

namespace {

using namespace lamina;
using namespace lamina::frontend::test;
using at::Tensor;

constexpr int kRows = 256, kWide = 256;  // a microbatch of doubles is 256 KiB

std::atomic<int> lent = 0;  // how often UCX was given an address on the device

struct NetImpl : torch::nn::Module {
  Child<torch::nn::Linear> in, there, out;
  NetImpl() {
    in = register_module("in", torch::nn::Linear(kWide, kWide));
    {
      const Partition second(1);
      there = register_module("there", torch::nn::Linear(kWide, kWide));
    }
    out = register_module("out", torch::nn::Linear(kWide, 1));
  }
  Tensor forward(const Tensor& x) { return out(torch::tanh(there(torch::tanh(in(x))))).square().mean(); }
};
using Net = torch::nn::ModuleHolder<NetImpl>;

// The parameters after five steps.
std::map<std::string, Tensor> trained(const char* lanes) {
  ::setenv("LAMINA_LANES", lanes, 1);
  init({{"partitions", 2},
        {"microbatches", 2},
        {"auto_partition", false},
        {"default_partition", 0},
        {"device", "emulated"},
        {"timeout_s", 60}});
  torch::manual_seed(1);
  Net net;
  net->to(torch::kDouble);
  DistributedModel model(std::move(net));
  DistributedOptimizer sgd(torch::optim::SGD(model.parameters(), 0.1));
  const auto train = step([&](const Tensor& x) { model.backward(model(x)); });
  for (int number = 0; number < 5; ++number) {
    torch::manual_seed(number);
    train(torch::randn({2 * kRows, kWide}, torch::kDouble).to(device()));
    sgd.step();
    sgd.zero_grad();
  }
  std::map<std::string, Tensor> values;
  const auto state = model.state_dict();
  for (const auto* module : {"in", "there", "out"}) {
    for (const auto* kind : {".weight", ".bias"}) {
      const auto name = std::string(module) + kind;
      values[name] = state[name].cpu().clone();
    }
  }
  shutdown();
  return values;
}

void refuses_other_words() {
  ::setenv("LAMINA_LANES", "yes", 1);
  expect_error<ConfigError>([] { init({{"partitions", 2}, {"device", "emulated"}}); },
                            {"LAMINA_LANES: \"yes\" is not allowed; expected 1"});
}

}  // namespace

int main() {
  torch::set_num_threads(1);
  refuses_other_words();
  devices::lend(at::kPrivateUse1, {"host", [](const void* address) -> void* {
                                     ++lent;
                                     return emulated::twin(address);
                                   }});
  const auto staged = trained("0");
  expect(lent == 0, "a value went from device to device unasked");
  const auto through_lanes = trained("1");
  expect(lent > 0, "no value went from device to device");
  for (const auto& [name, value] : staged) expect(torch::equal(value, through_lanes.at(name)), name + " differs");
  return exit_code();
}
