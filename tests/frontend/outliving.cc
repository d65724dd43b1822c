// SPDX-License-Identifier: Apache-2.0
// Copies of a model of which some are killed: the others go on, with the losses and weights of one process, as
// tests/fault/outliving.py has it for Python.
//
//     lamina run -n 3 --elastic 1 -c frontend_outliving PLACE RANK[:STEP]... [half] [back] [slow]
//
// The ranks die in those steps: in the forward, before the update or after it. With `behind`, ranks die after an update
// that the first rank has not made; with `leaves`, they are told to end in the forward. `half` trains in half
// precision, in which masters and their states stay. `back`: they come back, and steps take long while one is missing,
// of FULL, where others are started by hand. With `slow` all of them do, and leave a file.
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "lamina/base/str.h"
#include "lamina/frontend/current.h"
#include "lamina/lamina.h"
#include "tests/frontend/undisturbed.h"

namespace {

using namespace lamina;
using namespace lamina::frontend::test;
using at::Tensor;

constexpr int kFatal = 3;
constexpr auto kSlow = std::chrono::milliseconds(400);
int steps = 9;

std::string place;          // where ranks die
std::map<int, int> deaths;  // steps, by ranks of the beginning
int self = 0, now = -1;     // this rank of the beginning; the step
bool is_new = false;        // this process has come in the place of one that died

void die(const std::string& where) {
  const auto death = deaths.find(self);
  if (is_new || death == deaths.end() || death->second != now) return;
  if (where == "forward" && place == "leaves") ::kill(::getpid(), SIGTERM);
  if (where == place) ::kill(::getpid(), SIGKILL);
}

struct NetImpl : torch::nn::Module {
  torch::nn::Linear first{nullptr}, last{nullptr};
  Tensor steps;
  NetImpl() {
    first = register_module("first", torch::nn::Linear(6, 9));
    last = register_module("last", torch::nn::Linear(9, 1));
    steps = register_buffer("steps", torch::zeros({}));
  }
  Tensor forward(const Tensor& x) {
    steps += 1.0 / (is_initialized() ? num_microbatches() : 1);
    die("forward");
    return last(torch::tanh(first(x))).square().mean();
  }
};
using Net = torch::nn::ModuleHolder<NetImpl>;

// Tensors that the optimizer updates, and their states.
std::vector<Tensor> bits(torch::optim::Optimizer& optimizer) {
  std::vector<Tensor> tensors;
  for (const auto& member : optimizer.param_groups().front().params()) {
    const auto& state =
        static_cast<torch::optim::AdamWParamState&>(*optimizer.state().at(member.unsafeGetTensorImpl()));
    tensors.insert(tensors.end(), {member.detach().clone(), state.exp_avg().clone(), state.exp_avg_sq().clone(),
                                   torch::tensor(state.step())});
  }
  return tensors;
}

// Loses rank 1 before an update, which that one has made, on the first rank of the beginning.
struct Fatal : torch::optim::AdamW {
  using AdamW::AdamW;
  Tensor step(LossClosure closure) override {
    if (place == "behind" && self == 0 && now == kFatal && lamina::size() == 3) {
      const std::vector<base::Rank> second{base::Rank(1)};
      const auto loss = frontend::current().session->mailbox().loss(second, std::chrono::seconds(20));
      expect(loss.has_value(), "rank 1 dies");
      throw PeerError("rank 1 is lost before the update", loss);
    }
    return AdamW::step(std::move(closure));
  }
};

void train(bool half, bool back, bool slow) {
  const char* const all = std::getenv("FULL");
  const int full = all != nullptr ? std::atoi(all) : size();
  init({{"ddp", true}, {"microbatches", kRows / size()}, {"timeout_s", 30}, {"seed", 5}, {"bf16", half}});
  DistributedModel<Net> model(made<Net>());
  DistributedOptimizer<Fatal> optimizer(std::make_unique<Fatal>(model.parameters(), options()));
  Schedule schedule(*optimizer);
  Run run({.state = [&] { return schedule.state(); }, .take = [&](const Value& state) { schedule.take(state); }});
  auto step = lamina::step([&](const Tensor& x) {
    auto loss = model(half ? x.to(torch::kBFloat16) : x);
    model.backward(loss);
    return loss;
  });
  std::vector<double> losses(steps);
  std::int64_t last = 0;
  std::vector<Tensor> before;
  int epochs = 0, first = -1;
  elastic(run, [&](Epoch& epoch) {
    if (epochs++ == 0) first = is_new ? static_cast<int>(epoch.updates) : 0;
    if (epoch.updates == last && last > 0) {
      const auto after = bits(*optimizer);
      for (std::size_t i = 0; i < after.size(); ++i) expect(torch::equal(before[i], after[i]), "states stay");
    }
    for (now = static_cast<int>(epoch.updates); now < steps; ++now) {
      optimizer.zero_grad();
      losses[now] = loss_of(step, now);
      die("before");
      optimizer.step();
      schedule.step();
      last = now + 1;
      before = bits(*optimizer);
      die(place == "behind" ? "behind" : "after");
      if (slow || (back && size() < full)) std::this_thread::sleep_for(kSlow);
      if (slow) std::ofstream(base::str("steps.", self)) << now;
    }
  });
  expect(epochs > 1 || is_new, "ranks were lost");
  expect(size() == (back ? full : full - static_cast<int>(deaths.size())), base::str(size(), " ranks at the end"));
  expect(!is_new || first > 0, "a newcomer goes on with what the others have");
  if (half) {
    for (const auto& state : before) expect(!state.is_floating_point() || state.dtype() == torch::kFloat, "masters");
  } else {
    const auto state = model.state_dict();
    expect_undisturbed<Net>(losses, first, state);
    expect(std::abs(state["steps"].template item<double>() - steps) < 1e-12, "buffers count updates once");
  }
  shutdown();
  std::puts("went on to the end");
}

}  // namespace

int main(int count, char** words) {
  if (count < 3) {
    std::fputs("usage: PLACE RANK[:STEP]... [half] [back] [slow]\n", stderr);
    return 2;
  }
  self = std::atoi(std::getenv("RANK"));
  is_new = std::getenv("LAMINA_NEWCOMER") != nullptr;
  place = words[1];
  bool half = false, back = false, slow = false;
  for (int i = 2; i < count; ++i) {
    const std::string word = words[i];
    const auto colon = word.find(':');
    if (word == "half")
      half = true;
    else if (word == "back")
      back = true;
    else if (word == "slow")
      slow = true;
    else
      deaths[std::stoi(word)] = colon == std::string::npos ? kFatal : std::stoi(word.substr(colon + 1));
  }
  if (back || slow) steps = 40;
  train(half, back, slow);
  return exit_code();
}
