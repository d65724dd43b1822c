// SPDX-License-Identifier: Apache-2.0
// Trains models whose layers are cut over two ranks, alone, with partitions and as copies, and compares them with whole
// ones: losses, norms of gradients, parameters after three steps of AdamW. In float64 two tensors are equal when
// max|a-b| is at most 1e-9 of max|b|, or of 1e-3.
//
//     lamina run -n (2 | 4) -c sliced
#include <algorithm>
#include <numeric>

#include "lamina/environment/world.h"
#include "tests/frontend/expect.h"
#include "tests/frontend/sliced_models.h"

namespace {

using namespace lamina;
using namespace lamina::frontend::test;
using Named = std::map<std::string, at::Tensor>;

constexpr int kSteps = 3, kBatch = 8;

struct Layout {
  int degree = 2, partitions = 1, replicas = 1, microbatches = 1;
  bool loop = false;  // a plain loop, without step functions
  std::string schedule = "interleaved";
  int shards = 1;
  std::string optimize = "memory";

  std::string name() const {
    return "tp " + std::to_string(degree) + " pp " + std::to_string(partitions) + " rdp " + std::to_string(replicas) +
           " m " + std::to_string(microbatches) + (loop ? " loop" : " " + schedule) + (shards > 1 ? " sharded" : "") +
           " " + optimize;
  }
};

struct Trained {
  std::vector<double> losses, norms;
  Named state;
};

int world() { return environment::read_world(environment::process_environment()).size; }

std::vector<at::Tensor> batches() {
  torch::manual_seed(7);
  std::vector<at::Tensor> made;
  for (int i = 0; i < kSteps; ++i) made.push_back(torch::randint(0, kWords, {kBatch, kPositions}, torch::kLong));
  return made;
}

template <class Make>
Trained plain(const Make& make) {
  auto model = build(make);
  auto optimizer = adamw(model->parameters());
  Trained trained;
  for (const auto& words : batches()) {
    optimizer.zero_grad();
    const auto loss = model(words);
    loss.backward();
    trained.losses.push_back(loss.template item<double>());
    trained.norms.push_back(torch::nn::utils::clip_grad_norm_(model->parameters(), 0.5));
    optimizer.step();
  }
  for (const auto& item : model->named_parameters()) trained.state[item.key()] = item.value().detach();
  return trained;
}

void begin(const Layout& layout) {
  init({{"tensor_parallel_degree", layout.degree},
        {"partitions", layout.partitions},
        {"microbatches", layout.microbatches},
        {"schedule", layout.schedule},
        {"optimize", layout.optimize},
        {"ddp", layout.degree * layout.replicas > 1},
        {"prescaled_batch", layout.degree > 1},
        {"sharded_data_parallel_degree", layout.shards},
        {"sdp_param_persistence_threshold", 1},
        {"timeout_s", 60}});
}

template <class Model, class Optimizer>
void train(Model& model, Optimizer& optimizer, const Layout& layout, Trained& trained) {
  const auto forward_backward = [&](const at::Tensor& words) {
    const auto loss = model(words);
    model.backward(loss);
    return loss;
  };
  const auto in_step = step(forward_backward);
  for (const auto& batch : batches()) {
    optimizer.zero_grad();
    const auto words = batch.chunk(layout.replicas)[layout.replicas > 1 ? rdp_rank() : 0];
    const auto mean = layout.loop ? forward_backward(words) : in_step(words).reduce_mean();
    const auto loss = mean.detach().template item<double>();
    const auto losses = layout.replicas > 1 ? all_gather(Group::kRdp, loss) : std::vector{loss};
    trained.losses.push_back(std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(losses.size()));
    trained.norms.push_back(model.clip_grad_norm_(0.5).template item<double>());
    optimizer.step();
  }
  trained.state.clear();
  for (const auto& item : model.state_dict()) trained.state[item.key()] = item.value().clone();
}

template <class Make>
Trained distributed(const Make& make, const Layout& layout) {
  begin(layout);
  Trained trained;
  {
    DistributedModel model(build(make));
    DistributedOptimizer optimizer(adamw(model.parameters()));
    train(model, optimizer, layout, trained);
    std::int64_t own = 0, all = 0;
    for (const auto& [name, parameter] : model.local_parameters()) own += parameter.numel();
    for (const auto& [name, value] : trained.state) all += value.numel();
    if (layout.degree > 1)
      expect(own < 0.8 * static_cast<double>(all), layout.name() + ": a rank has all of the model");
  }
  shutdown();
  return trained;
}

bool near(const at::Tensor& a, const at::Tensor& b) {
  const double scale = std::max(b.abs().max().item<double>(), 1e-3);  // keys' biases have no gradients but rounding
  return a.sizes() == b.sizes() && (a - b).abs().max().item<double>() <= 1e-9 * scale;
}

void compare(const std::string& where, const Trained& ours, const Trained& theirs) {
  const auto numbers = [](const std::vector<double>& values) { return torch::tensor(values, torch::kDouble); };
  expect(near(numbers(ours.losses), numbers(theirs.losses)),
         base::str(where, ": losses are ", numbers(ours.losses), ", not ", numbers(theirs.losses)));
  expect(near(numbers(ours.norms), numbers(theirs.norms)),
         base::str(where, ": norms are ", numbers(ours.norms), ", not ", numbers(theirs.norms)));
  expect(ours.state.size() == theirs.state.size(), where + ": other names");
  for (const auto& [name, value] : theirs.state) {
    const auto found = ours.state.find(name);
    expect(found != ours.state.end() && near(found->second, value), where + ": " + name + " is another");
  }
}

std::vector<Layout> layouts() {
  if (world() == 2) return {{}, {.microbatches = 4}, {.loop = true}, {.loop = true, .optimize = "speed"}};
  return {{.partitions = 2, .microbatches = 4},
          {.partitions = 2, .microbatches = 2, .schedule = "simple", .optimize = "speed"},
          {.replicas = 2, .microbatches = 2},
          {.replicas = 2, .microbatches = 2, .shards = 2},
          {.degree = 4, .loop = true}};
}

template <class Make, class Plain>
void check(const std::string& name, const Make& make, const Plain& make_plain, int most = 4) {
  const auto theirs = plain(make_plain);
  for (const auto& layout : layouts()) {
    if (layout.degree <= most) compare(name + " " + layout.name(), distributed(make, layout), theirs);
  }
}

// Random numbers of dropout are those of a whole model with as many microbatches, which each rank trains for itself.
template <class Make>
void check_dropout(const Make& make) {
  for (const auto& layout : layouts()) {
    if (layout.degree > 3 || layout.replicas > 1) continue;
    const auto whole = distributed(make, {.degree = 1, .microbatches = layout.microbatches, .loop = layout.loop});
    if (layout.loop) torch::manual_seed(5);
    const auto ours = distributed(make, layout);
    if (environment::read_world(environment::process_environment()).rank == base::Rank(0)) {
      compare("dropout " + layout.name(), ours, whole);
    }
  }
}

void check_models() {
  check("mixer", [] { return sliced_mixer(); }, [] { return plain_mixer(); });
  check("planned mixer", [] { return planned_mixer(); }, [] { return plain_mixer(); });
  check("planned blocks", [] { return planned_blocks(0); }, [] { return Blocks(); });
  const auto language_model = [](const nn::TransformerOptions& options) {
    return [=] { return LanguageModel(options); };
  };
  check("gpt", language_model(gpt(0)), language_model(gpt(0)), 3);
  check("odd", language_model(odd()), language_model(odd()), 3);
  check("bert", language_model(bert()), language_model(bert()), 3);
  const auto translator = [] { return Translator(); };
  check("translator", translator, translator, 3);
}

}  // namespace

int main() {
  torch::set_num_threads(1);
  check_models();
  check_dropout([] { return LanguageModel(gpt(0.25)); });
  check_dropout([] { return planned_blocks(0.25); });
  return exit_code();
}
