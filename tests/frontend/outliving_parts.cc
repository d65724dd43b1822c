// SPDX-License-Identifier: Apache-2.0
// Ranks with parts of a model, of which some are killed: the others go on in another layout, with the losses and
// weights of one process, as tests/fault/outliving_parts.py has it for Python.
//
//     lamina run -n 4 --elastic 2 -c frontend_outliving_parts LAYOUT PLACE RANK[:STEP]... [into-one] [back] [to LAYOUT]
//         [traced]
//
// LAYOUT: copies, partitions, both (with copies), shards, divided (states). The ranks die in those steps: at the start,
// in the forward, before the update or after it. With `leaves` they are told to end before the step. `into-one` gives
// the layout in which they go on: one partition. `back`: they come back, and steps take long while one is missing.
// `to`: before step 3 all change to that layout. The ranks die after that (`changed`), or so many milliseconds after it
// began (`amid-MILLISECONDS`). `traced`: the last layer has the fewest parameters, and computes most, which the ranks
// that are left know.
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "lamina/base/str.h"
#include "lamina/frontend/current.h"
#include "lamina/frontend/model.h"
#include "lamina/lamina.h"
#include "tests/frontend/undisturbed.h"

namespace {

using namespace lamina;
using namespace lamina::frontend::test;
using at::Tensor;

constexpr int kFatal = 3;
constexpr auto kSlow = std::chrono::milliseconds(400);
int steps = 8;

const std::map<std::string, std::string> kLayouts = {
    {"copies", R"("microbatches": 3, "sdp_gradient_clipping": null)"},
    {"partitions", R"("partitions": 4, "microbatches": 12)"},
    {"both", R"("partitions": 2, "microbatches": 6)"},
    {"shards", R"("sharded_data_parallel_degree": 4, "microbatches": 3, "sdp_param_persistence_threshold": 0,
                  "sdp_gradient_clipping": null)"},
    {"divided", R"("shard_optimizer_state": true, "microbatches": 3)"},
};

// The keys of change() that lead to them.
const std::map<std::string, std::string> kOthers = {
    {"copies", R"({"partitions": 1, "sharded_data_parallel_degree": 1, "shard_optimizer_state": false})"},
    {"partitions", R"({"partitions": 4})"},
    {"both", R"({"partitions": 2})"},
    {"shards", R"({"partitions": 1, "sharded_data_parallel_degree": 4, "sdp_param_persistence_threshold": 0})"},
    {"divided", R"({"partitions": 1, "shard_optimizer_state": true})"},
};

std::string place;          // where ranks die
std::string other;          // the layout to which they change
std::map<int, int> deaths;  // steps, by ranks of the beginning
int self = 0, now = -1;     // this rank of the beginning; the step
bool is_new = false;        // this process has come in the place of one that died
int work = 1;               // forwards of the last layer

void die(const std::string& where) {
  const auto death = deaths.find(self);
  if (is_new || where != place || death == deaths.end() || death->second != now) return;
  ::kill(::getpid(), where == "leaves" ? SIGTERM : SIGKILL);
}

void change_layout() {
  const auto death = deaths.find(self);
  const bool dies = !is_new && death != deaths.end() && death->second == now;
  if (dies && place.starts_with("amid-")) {
    const std::chrono::milliseconds after(std::stoi(place.substr(place.find('-') + 1)));
    std::thread([after] {
      std::this_thread::sleep_for(after);
      ::kill(::getpid(), SIGKILL);
    }).detach();
  }
  lamina::change(kOthers.at(other));
  die("changed");
}

struct LayerImpl : torch::nn::Module {
  torch::nn::Linear inner{nullptr};
  int times;
  LayerImpl(int in, int out, int times = 1) : times(times) {
    inner = register_module("inner", torch::nn::Linear(in, out));
  }
  Tensor forward(const Tensor& x) {
    die("forward");
    for (int i = 1; i < times; ++i) torch::tanh(inner(x));
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
    last = register_module("last", Layer(9, 2, work));
  }
  Tensor forward(const Tensor& x) { return last(third(second(first(x)))).square().mean(); }
};
using Net = torch::nn::ModuleHolder<NetImpl>;

void train(const std::string& keys, bool into_one, bool back) {
  const int full = size();
  init("{" + keys + (work > 1 ? R"(, "memory_weight": 0)" : "") + R"(, "ddp": true, "timeout_s": 30, "seed": 5})");
  DistributedModel<Net> model(made<Net>());
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
  std::vector<double> losses(steps);
  int first = -1;
  const int epochs = elastic(run, [&, epochs = 0](Epoch& epoch) mutable {
    if (++epochs == 1) first = is_new ? static_cast<int>(epoch.updates) : 0;
    for (now = static_cast<int>(epoch.updates); now < steps; ++now) {
      die("start");
      optimizer.zero_grad();
      die("leaves");
      if (now == kFatal && !other.empty() && size() == full) change_layout();
      losses[now] = loss_of(step, now);
      die("before");
      optimizer.step();
      schedule.step();
      die("after");
      if (back && size() < full) std::this_thread::sleep_for(kSlow);
    }
    return epochs;
  });
  const int lost = static_cast<int>(deaths.size());
  std::set<int> times;  // ranks that die in one step may be lost at once
  for (const auto& death : deaths) times.insert(death.second);
  const int least = static_cast<int>(times.size()), each = back ? 2 : 1;
  expect(is_new || (epochs > each * least && epochs <= each * lost + 1), base::str(epochs, " epochs"));
  expect(!is_new || first > 0, "a newcomer goes on with what the others have");
  expect(size() == (back ? full : full - lost), base::str(size(), " ranks at the end"));
  expect(!into_one || pp_size() == 1, "the layout that was given");
  if (work > 1) {
    auto partitions = frontend::current().model->partition();
    expect(partitions.at("last") != partitions.at("third"), "the layer that computes most has a partition of its own");
  }
  expect_undisturbed<Net>(losses, first, model.state_dict());
  if (lamina::rank() == 0) std::printf("went on to the end: %d ranks, %d partitions\n", lamina::size(), pp_size());
  shutdown();
}

}  // namespace

int main(int count, char** words) {
  if (count < 3 || !kLayouts.contains(words[1])) {
    std::fputs("usage: LAYOUT PLACE [RANK[:STEP]]... [into-one] [back] [to LAYOUT] [traced]\n", stderr);
    return 2;
  }
  self = std::atoi(std::getenv("RANK"));
  is_new = std::getenv("LAMINA_NEWCOMER") != nullptr;
  place = words[2];
  bool into_one = false, back = false;
  for (int i = 3; i < count; ++i) {
    const std::string word = words[i];
    const auto colon = word.find(':');
    if (word == "into-one")
      into_one = true;
    else if (word == "back")
      back = true;
    else if (word == "traced")
      work = 400;
    else if (word == "to")
      other = words[++i];
    else
      deaths[std::stoi(word)] = colon == std::string::npos ? kFatal : std::stoi(word.substr(colon + 1));
  }
  if (back) steps = 40;
  train(kLayouts.at(words[1]), into_one, back);
  return exit_code();
}
