// SPDX-License-Identifier: Apache-2.0
// Jobs of four ranks that change over how many ranks the layers of their model are sliced, as
// tests/multiprocess/cases_change_slices.py has them for Python. Each check begins a job of its own.
//
//     lamina run -n 4 -c frontend_change_slices
#include <map>
#include <string>
#include <vector>

#include "lamina/lamina.h"
#include "tests/frontend/expect.h"
#include "tests/frontend/sliced_models.h"

namespace {

using namespace lamina;
using namespace lamina::frontend::test;

constexpr int kSteps = 6, kRows = 16, kMicrobatches = 8;  // of a batch of all copies

using Keys = std::vector<std::pair<std::string, Setting>>;

std::string json(const Keys& keys) {
  std::string text;
  for (const auto& [key, value] : keys) text += (text.empty() ? "\"" : ", \"") + key + "\": " + value.json();
  return "{" + text + "}";
}

// Degrees of slices, partitions and shards.
struct Layout {
  int slices = 1, partitions = 1, shards = 1;

  Keys keys() const {
    return {{"tensor_parallel_degree", slices}, {"partitions", partitions}, {"sharded_data_parallel_degree", shards}};
  }
};

using Changes = std::map<int, Layout>;  // by the step before which they come

struct Way {
  std::string name;
  Layout begin;
  Changes changes;
};

const std::vector<Way> kWays{
    {"copies to slices and back", {}, {{1, {2}}, {3, {}}}},
    {"slices to copies and back", {2}, {{1, {}}, {4, {2}}}},
    {"slices of partitions", {1, 2}, {{2, {2, 2}}, {4, {1, 4}}}},
    {"slices of shards", {2}, {{1, {2, 1, 2}}, {3, {1, 1, 4}}, {4, {2}}}},
};
const Way kFour{"two slices to four and back", {2}, {{2, {4}}, {4, {2}}}};

at::Tensor batch(int number) {
  torch::manual_seed(1000 + number);
  return torch::randint(0, kWords, {kRows, kPositions}, torch::kLong);
}

struct Trained {
  std::vector<double> losses;
  std::map<std::string, at::Tensor> state;
};

template <class Make>
Trained plain(const Make& make) {
  auto model = build(make);
  auto optimizer = adamw(model->parameters());
  Trained trained;
  for (int number = 0; number < kSteps; ++number) {
    optimizer.zero_grad();
    const auto loss = model(batch(number));
    loss.backward();
    trained.losses.push_back(loss.template item<double>());
    optimizer.step();
  }
  for (const auto& item : model->named_parameters()) trained.state[item.key()] = item.value().detach();
  return trained;
}

void start(const Layout& layout, const Keys& more = {}) {
  const int copies = 4 / (layout.slices * layout.partitions);
  auto keys = layout.keys();
  keys.insert(keys.end(), more.begin(), more.end());
  for (const auto& each : Keys{{"ddp", true},
                               {"prescaled_batch", true},
                               {"microbatches", kMicrobatches / copies},
                               {"sdp_param_persistence_threshold", 0},
                               {"sdp_gradient_clipping", std::nullopt},
                               {"timeout_s", 60}}) {
    keys.push_back(each);
  }
  init(json(keys));
}

template <class Make>
Trained changed(const Make& make, const Way& way, const Keys& more = {}) {
  start(way.begin, more);
  Trained trained;
  {
    DistributedModel model(build(make));
    DistributedOptimizer optimizer(adamw(model.parameters()));
    const auto parameters = model.parameters();
    const auto train = step([&](const at::Tensor& words) {
      const auto loss = model(words);
      model.backward(loss);
      return loss;
    });
    for (int number = 0; number < kSteps; ++number) {
      if (const auto layout = way.changes.find(number); layout != way.changes.end())
        change(json(layout->second.keys()));
      optimizer.zero_grad();
      const auto loss = train(batch(number).chunk(rdp_size())[rdp_rank()]).reduce_mean().template item<double>();
      double sum = 0;
      for (const auto each : all_gather(Group::kRdp, loss)) sum += each;
      trained.losses.push_back(sum / rdp_size());
      optimizer.step();
      optimizer.zero_grad();
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      expect(parameters[i].is_same(model.parameters()[i]), way.name + ": parameters stay the same tensors");
    }
    for (const auto& item : model.state_dict()) trained.state[item.key()] = item.value().clone();
  }
  shutdown();
  return trained;
}

void compare(const std::string& what, const Trained& ours, const Trained& theirs) {
  const auto numbers = [](const std::vector<double>& values) { return torch::tensor(values, torch::kDouble); };
  expect(torch::allclose(numbers(ours.losses), numbers(theirs.losses), 1e-12, 1e-12),
         base::str(what, ": losses are ", numbers(ours.losses), ", not ", numbers(theirs.losses)));
  expect(ours.state.size() == theirs.state.size(), what + ": other names");
  for (const auto& [name, value] : theirs.state) {
    const auto found = ours.state.find(name);
    expect(found != ours.state.end() && torch::allclose(found->second, value, 1e-9, 1e-11), what + ": " + name);
  }
}

template <class Make>
void check(const std::string& name, const Make& make, bool has_four_heads) {
  const auto theirs = plain(make);
  for (const auto& way : kWays) compare(name + ", " + way.name, changed(make, way), theirs);
  if (has_four_heads) compare(name + ", " + kFour.name, changed(make, kFour), theirs);
}

void random_numbers_go_on() {
  const auto make = [] { return planned_blocks(0.25); };
  const auto theirs = changed(make, {"copies", {}, {}}, {{"seed", 5}});
  compare("dropout", changed(make, kWays[0], {{"seed", 5}}), theirs);
  compare("dropout of partitions", changed(make, kWays[2], {{"seed", 5}}), theirs);
}

void layers_are_what_they_were() {
  start({});
  {
    auto net = build([] { return planned_blocks(0); });
    DistributedModel model(net);
    DistributedOptimizer optimizer(adamw(model.parameters()));
    auto& up = (*net->blocks)[0]->up;
    const auto weight = up->weight;
    const auto is_here = [&](std::int64_t rows) {
      expect(up->weight.is_same(weight) && weight.size(0) == rows, "the weight has its slice");
      expect(up->options.out_features() == rows, "the layer says how many features it has");
    };
    model(batch(0)).backward();
    optimizer.step();
    optimizer.zero_grad();
    change({{"tensor_parallel_degree", 2}});
    is_here(4 - rank() % 2);
    expect_error<UsageError>([&] { weight.norm(); }, {"blocks.0.up.weight is sliced"});
    change({{"tensor_parallel_degree", 1}});
    is_here(7);
    expect(weight.norm().item<double>() > 0, "a whole weight has a norm");
  }
  shutdown();
}

void what_cannot_be_sliced_is_refused() {
  start({});
  {
    DistributedModel model(build([] { return LanguageModel(gpt(0)); }));
    expect_error<ConfigError>([] { change({{"tensor_parallel_degree", 3}}); }, {"tensor_parallel_degree"});
    expect_error<UsageError>([] { change({{"tensor_parallel_degree", 4}}); },
                             {"lamina.change()", "tensor_parallel_degree: 4", "some rank would have none"});
    change({{"tensor_parallel_degree", 2}});
    expect_error<UsageError>([] { change({{"tensor_parallel_degree", 4}}); }, {"some rank would have none"});
    model(batch(0)).backward();
  }
  shutdown();
  start({2, 2});
  {
    DistributedModel model(build([] { return LanguageModel(gpt(0)); }));
    expect_error<UsageError>([] { change({{"partitions", 1}}); }, {"no step has cut yet"});
  }
  shutdown();
}

}  // namespace

int main() {
  torch::set_num_threads(1);
  check("mixer", [] { return sliced_mixer(); }, true);
  check("planned blocks", [] { return planned_blocks(0); }, true);
  check("gpt", [] { return LanguageModel(gpt(0)); }, false);
  random_numbers_go_on();
  layers_are_what_they_were();
  what_cannot_be_sliced_is_refused();
  return exit_code();
}
