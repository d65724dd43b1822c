// SPDX-License-Identifier: Apache-2.0
// Trains models over all ranks, in several layouts, and as plain torch::nn models, and compares: losses, the first
// step's gradients, and parameters after three steps of AdamW. In float64 two tensors are equal when max|a-b| is at
// most 1e-9 of max|b|, or of 1e-3 of the largest value.
//
//     lamina run -n P -c equivalence
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>

#include "lamina/environment/world.h"
#include "tests/frontend/models.h"

namespace {

using namespace lamina;
using namespace lamina::frontend::test;
using Named = std::map<std::string, at::Tensor>;

constexpr int kSteps = 3, kBatch = 24;

struct Layout {
  std::string schedule = "interleaved";
  int microbatches = 1;
  int hand = -1;       // every module is placed by hand, anywhere, drawn with this seed; -1: none is
  int replicas = 1;    // with ddp, each of which gets its part of the batch
  bool loop = false;   // a plain loop, without step functions
  bool apart = false;  // every rank has the whole model, and trains for itself

  std::string name() const {
    std::string text = schedule + " m" + std::to_string(microbatches);
    if (hand >= 0) text += " by hand " + std::to_string(hand);
    if (loop) text += " in a loop";
    return replicas == 1 ? text : text + " replicas " + std::to_string(replicas);
  }
};

int world() { return environment::read_world(environment::process_environment()).size; }

struct Trained {
  std::vector<double> losses;
  Named gradients, parameters;
  int spread = 1;  // over how many partitions its parameters are
};

std::vector<at::Tensor> batches() {
  torch::manual_seed(7);
  std::vector<at::Tensor> made;
  for (int i = 0; i < kSteps; ++i) made.push_back(torch::randn({kBatch, kWidth}, torch::kDouble));
  return made;
}

template <class Model>
Model build() {
  torch::manual_seed(11);
  Model model;
  model->to(torch::kDouble);
  return model;
}

torch::optim::AdamW adamw(std::vector<at::Tensor> parameters) {
  return torch::optim::AdamW(std::move(parameters), torch::optim::AdamWOptions(1e-2).weight_decay(0.1).eps(1e-4));
}

Named gradients(const Named& parameters) {
  Named found;
  for (const auto& [name, parameter] : parameters) {
    found[name] = parameter.grad().defined() ? parameter.grad().clone() : at::Tensor();
  }
  return found;
}

template <class Model>
Trained plain() {
  Model model = build<Model>();
  auto optimizer = adamw(model->parameters());
  Trained trained;
  for (const auto& named : model->named_parameters()) trained.parameters[named.key()] = named.value();
  for (const auto& x : batches()) {
    optimizer.zero_grad();
    const auto loss = model(x);
    loss.backward();
    trained.losses.push_back(loss.template item<double>());
    if (trained.gradients.empty()) trained.gradients = gradients(trained.parameters);
    optimizer.step();
  }
  return trained;
}

// Modules that share a parameter stay together: what is under the module that is called twice, and a GPT's embedding
// with its reader.
template <class Impl>
void place(Impl& root, int seed) {
  std::mt19937 draw(seed);
  int next = seed;  // those with parameters by turns, so that some are anywhere
  for (const auto& named : root.named_modules("", /*include_self=*/false)) {
    const auto& name = named.key();
    const bool fixed = name == "gpt" || name.ends_with("embedding");
    if (frontend::find_child(named.value().get()) == nullptr) continue;
    const bool holds = !named.value()->named_parameters(/*recurse=*/false).is_empty();
    const int partition = (holds ? next++ : static_cast<int>(draw() >> 1)) % pp_size();
    set_partition(*named.value(), fixed ? 0 : partition);
  }
}

template <class Model>
Trained distributed(const Layout& layout) {
  init({{"partitions", layout.apart ? 1 : world() / layout.replicas},
        {"ddp", layout.replicas > 1},
        {"microbatches", layout.microbatches},
        {"schedule", layout.schedule},
        {"auto_partition", layout.hand < 0},
        {"default_partition", 0}});
  Trained trained;
  {
    auto built = build<Model>();
    if (layout.hand >= 0) place(*built, layout.hand);
    DistributedModel model(built);
    DistributedOptimizer optimizer(adamw(model.parameters()));
    const auto forward_backward = [&](const at::Tensor& x) {
      const auto loss = model(x);
      model.backward(loss);
      return loss;
    };
    const auto train = step(forward_backward);
    for (const auto& batch : batches()) {
      optimizer.zero_grad();
      const auto x = batch.chunk(layout.replicas)[layout.replicas > 1 ? dp_rank() : 0];
      // Only the leading rank's inputs count.
      const auto mean = layout.loop ? forward_backward(x) : train(pp_rank() == 0 ? x : torch::empty({1})).reduce_mean();
      const auto loss = mean.detach().template item<double>();
      const auto losses = layout.replicas > 1 ? all_gather(Group::kDp, loss) : std::vector{loss};
      trained.losses.push_back(std::accumulate(losses.begin(), losses.end(), 0.0) / losses.size());
      Named local;
      for (const auto& [name, parameter] : model.local_parameters()) local[name] = parameter;
      if (trained.gradients.empty()) trained.gradients = gradients(local);
      optimizer.step();
    }
    const auto owned = all_gather(Group::kPp, static_cast<int>(model.local_parameters().size()));
    trained.spread = static_cast<int>(std::ranges::count_if(owned, [](int count) { return count > 0; }));
    for (const auto& item : model.state_dict()) trained.parameters[item.key()] = item.value();
  }
  shutdown();
  return trained;
}

double largest(const Named& tensors) {
  double found = 0;
  for (const auto& [name, tensor] : tensors) {
    if (tensor.defined()) found = std::max(found, tensor.abs().max().item<double>());
  }
  return found;
}

int failures = 0;

void fail(const std::string& where, const std::string& what) {
  ++failures;
  std::printf("%s: %s\n", where.c_str(), what.c_str());
}

void compare(const std::string& where, const Named& ours, const Named& theirs) {
  const double scale = largest(theirs);
  for (const auto& [name, a] : ours) {
    const auto found = theirs.find(name);
    if (found == theirs.end()) {
      fail(where, name + " is nothing of the plain model's");
    } else if (a.defined() != found->second.defined()) {
      fail(where, name + (a.defined() ? " is only here" : " is only in the plain run"));
    } else if (a.defined()) {
      const double bound = 1e-9 * std::max(found->second.abs().max().item<double>(), 1e-3 * scale);
      const double off = (a - found->second).abs().max().item<double>();
      if (!(off <= bound)) fail(where, name + " is off by " + std::to_string(off));
    }
  }
}

void compare(const std::string& where, const Trained& ours, const Trained& theirs) {
  const torch::NoGradGuard no_grad;
  for (int i = 0; i < kSteps; ++i) {
    const double a = ours.losses[i], b = theirs.losses[i];
    if (!(std::abs(a - b) <= 1e-9 * std::max(std::abs(b), 1e-3))) {
      fail(where, "loss of step " + std::to_string(i) + ": " + std::to_string(a) + ", not " + std::to_string(b));
    }
  }
  compare(where + ": gradient of", ours.gradients, theirs.gradients);
  compare(where + ": parameter", ours.parameters, theirs.parameters);
  if (ours.parameters.size() < theirs.parameters.size()) fail(where, "parameters are missing");
}

// On more than two ranks a soak has the schedules with all numbers of microbatches.
std::vector<Layout> layouts() {
  const bool every = world() <= 2 || std::getenv("LAMINA_SOAK") != nullptr;
  std::vector<Layout> all;
  for (const std::string schedule : {"interleaved", "simple", "zero_bubble"}) {
    for (const int microbatches : {1, 4}) {
      if (!every && (schedule == "simple") == (microbatches == 4)) continue;
      for (const int hand : {-1, schedule == "simple" ? 1 : 0}) all.push_back({schedule, microbatches, hand});
    }
  }
  for (const int replicas : {2, 3}) {
    if (world() % replicas == 0) all.push_back({.schedule = "interleaved", .microbatches = 2, .replicas = replicas});
  }
  if (world() > 1) all.push_back({.replicas = world(), .loop = true});
  return all;
}

template <class Model>
void check(const std::string& name) {
  const auto theirs = plain<Model>();
  int spread = 0;
  for (const auto& layout : layouts()) {
    const auto ours = distributed<Model>(layout);
    compare(name + " " + layout.name(), ours, theirs);
    if (layout.hand >= 0) spread = std::max(spread, ours.spread);
  }
  if (spread < std::min(world(), 2)) fail(name, "no placement by hand spread it over partitions");
}

// A model that draws random numbers, or has buffers, is compared with itself on one rank: a replica that trains apart,
// with the same microbatches.
template <class Model>
void check_against_one_rank(const std::string& name, const std::vector<int>& counts) {
  for (const int microbatches : counts) {
    const auto whole = distributed<Model>({.microbatches = microbatches, .apart = true});
    for (const auto& layout : layouts()) {
      if (layout.microbatches != microbatches || layout.replicas > 1) continue;
      const auto ours = distributed<Model>(layout);
      if (environment::read_world(environment::process_environment()).rank == base::Rank(0)) {
        compare(name + " " + layout.name(), ours, whole);
      }
    }
  }
}

}  // namespace

int main() {
  torch::set_num_threads(1);
  check<TiedGPT>("tied GPT");
  check<Skip>("skip");
  check<Twice>("twice");
  check<Nested>("nested arguments");
  check<Chain>("chain");
  check_against_one_rank<Drops>("drops", {1, 4});
  check_against_one_rank<Normed>("normed", {1, 4});
  return failures == 0 ? 0 : 1;
}
