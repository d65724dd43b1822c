// SPDX-License-Identifier: Apache-2.0
// Ranks with parts of a model, of which some are killed: the others go on in another layout, with the losses and
// weights of one process, as tests/fault/outliving_parts.py has it for Python.
//
//     lamina run -n 4 --elastic 2 -c frontend_outliving_parts LAYOUT PLACE RANK[:STEP]... [into-one]
//
// LAYOUT: partitions, both (with copies), shards, divided (states). The ranks die in those steps: in the forward,
// before the update or after it. `into-one` gives the layout in which they go on: one partition.
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lamina/base/str.h"
#include "lamina/lamina.h"
#include "tests/frontend/expect.h"

namespace {

using namespace lamina;
using namespace lamina::frontend::test;
using at::Tensor;

constexpr int kSteps = 8, kRows = 12, kFatal = 3;

const std::map<std::string, std::string> kLayouts = {
    {"partitions", R"("partitions": 4, "microbatches": 12)"},
    {"both", R"("partitions": 2, "microbatches": 6)"},
    {"shards", R"("sharded_data_parallel_degree": 4, "microbatches": 3, "sdp_param_persistence_threshold": 0,
                  "sdp_gradient_clipping": null)"},
    {"divided", R"("shard_optimizer_state": true, "microbatches": 3)"},
};

std::string place;          // where ranks die
std::map<int, int> deaths;  // steps, by ranks of the beginning
int self = 0, now = -1;     // this rank of the beginning; the step

void die(const std::string& where) {
  const auto death = deaths.find(self);
  if (where == place && death != deaths.end() && death->second == now) ::kill(::getpid(), SIGKILL);
}

struct LayerImpl : torch::nn::Module {
  torch::nn::Linear inner{nullptr};
  LayerImpl(int in, int out) { inner = register_module("inner", torch::nn::Linear(in, out)); }
  Tensor forward(const Tensor& x) {
    die("forward");
    return torch::tanh(inner(x));
  }
};
using Layer = torch::nn::ModuleHolder<LayerImpl>;

struct NetImpl : torch::nn::Module {
  Child<Layer> first, second, third, last;
  NetImpl() {
    first = register_module("first", Layer(6, 9));
    second = register_module("second", Layer(9, 7));
    third = register_module("third", Layer(7, 9));
    last = register_module("last", Layer(9, 2));
  }
  Tensor forward(const Tensor& x) { return last(third(second(first(x)))).square().mean(); }
};
using Net = torch::nn::ModuleHolder<NetImpl>;

Net net() {
  torch::manual_seed(3);
  Net net;
  net->to(torch::kDouble);
  return net;
}

Tensor batch(int number) {
  torch::manual_seed(1000 + number);
  return torch::randn({kRows, 6}, torch::kDouble);
}

torch::optim::AdamWOptions options() { return torch::optim::AdamWOptions(0.02).weight_decay(0.1); }

struct Schedule : torch::optim::StepLR {
  explicit Schedule(torch::optim::Optimizer& optimizer) : StepLR(optimizer, 3, 0.5) {}
  Value state() const { return to_value(static_cast<std::int64_t>(step_count_)); }
  void take(const Value& state) { step_count_ = static_cast<unsigned>(from_value<std::int64_t>(state)); }
};

// One process that nobody disturbs.
struct Plain {
  Net model = net();
  std::vector<double> losses;
  Plain() {
    torch::optim::AdamW optimizer(model->parameters(), options());
    Schedule schedule(optimizer);
    for (int number = 0; number < kSteps; ++number) {
      optimizer.zero_grad();
      auto loss = model->forward(batch(number));
      loss.backward();
      optimizer.step();
      schedule.step();
      losses.push_back(loss.item<double>());
    }
  }
};

void train(const std::string& keys, bool into_one) {
  init("{" + keys + R"(, "ddp": true, "timeout_s": 30, "seed": 5})");
  DistributedModel<Net> model(net());
  DistributedOptimizer optimizer(torch::optim::AdamW(model.parameters(), options()));
  Schedule schedule(*optimizer);
  RunOptions kept{.state = [&] { return schedule.state(); }, .take = [&](const Value& state) { schedule.take(state); }};
  if (into_one) kept.layouts = {LayoutKeys{{"partitions", 4}}, LayoutKeys{{"partitions", 1}}};
  Run run(kept);
  auto step = lamina::step([&](const Tensor& x) {
    auto loss = model(x);
    model.backward(loss);
    return loss;
  });
  std::vector<double> losses(kSteps);
  const int epochs = elastic(run, [&, epochs = 0](Epoch& epoch) mutable {
    ++epochs;
    for (now = static_cast<int>(epoch.updates); now < kSteps; ++now) {
      optimizer.zero_grad();
      const auto own = step(batch(now).chunk(dp_size())[dp_rank()]).reduce_mean().template item<double>();
      const auto all = all_gather(Group::kDp, own);
      losses[now] = 0;
      for (const auto each : all) losses[now] += each / static_cast<double>(all.size());
      die("before");
      optimizer.step();
      schedule.step();
      die("after");
    }
    return epochs;
  });
  expect(epochs == static_cast<int>(deaths.size()) + 1, base::str(epochs, " epochs"));
  expect(!into_one || pp_size() == 1, "the layout that was given");
  const Plain plain;
  for (int number = 0; number < kSteps; ++number) {
    expect(std::abs(losses[number] - plain.losses[number]) < 1e-12, base::str("the loss of step ", number));
  }
  const auto state = model.state_dict();
  for (const auto& item : plain.model->named_parameters()) {
    expect(torch::allclose(state[item.key()], item.value(), 1e-12, 1e-12), item.key());
  }
  if (lamina::rank() == 0) std::printf("went on to the end: %d ranks, %d partitions\n", lamina::size(), pp_size());
  shutdown();
}

}  // namespace

int main(int count, char** words) {
  if (count < 3 || !kLayouts.contains(words[1])) {
    std::fputs("usage: LAYOUT PLACE [RANK[:STEP]]... [into-one]\n", stderr);
    return 2;
  }
  self = lamina::rank();
  place = words[2];
  bool into_one = false;
  for (int i = 3; i < count; ++i) {
    const std::string word = words[i];
    const auto colon = word.find(':');
    if (word == "into-one")
      into_one = true;
    else
      deaths[std::stoi(word)] = colon == std::string::npos ? kFatal : std::stoi(word.substr(colon + 1));
  }
  train(kLayouts.at(words[1]), into_one);
  return exit_code();
}
