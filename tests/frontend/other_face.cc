// SPDX-License-Identifier: Apache-2.0
// The C++ side of tests/python/checkpoints/test_both_faces.py: writes a checkpoint that Python loads, or loads one
// of Python's and compares it with a plain loop.
//
//     frontend_other_face write|read|plain FOLDER OPTIMIZER
//
// The optimizer is torch's AdamW, "torch", or one of ours by its name, with options of every kind.
#include <torch/serialize.h>

#include <map>
#include <memory>
#include <string>

#include "tests/frontend/expect.h"
#include "tests/frontend/models.h"

namespace {

using namespace lamina;
using namespace lamina::frontend::test;

constexpr int kSteps = 3;

struct NetImpl : torch::nn::Module {
  Child<torch::nn::Linear> in, out;
  Child<torch::nn::BatchNorm1d> norm;
  NetImpl() {
    in = register_module("in", torch::nn::Linear(4, 6));
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    out = register_module("out", torch::nn::Linear(6, 2));
    const torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) {
      parameter.copy_(torch::linspace(-1, 1, parameter.numel()).view(parameter.sizes()));
    }
  }
  Tensor forward(const Tensor& x) { return out(norm(in(x).tanh())); }
};
using Net = torch::nn::ModuleHolder<NetImpl>;

// And a parameter that is not the model's.
std::vector<Tensor> with_one_beside(std::vector<Tensor> parameters) {
  parameters.push_back(torch::ones({3}).requires_grad_());
  return parameters;
}

std::unique_ptr<torch::optim::Optimizer> make(const std::string& kind, const std::vector<Tensor>& parameters) {
  const std::map<std::string, HyperValues> ours{
      {"AdamW", {{"lr", 0.01}, {"beta1", 0.8}, {"beta2", 0.99}, {"amsgrad", 1}}},
      {"NAdam", {{"lr", 0.01}, {"beta2", 0.9}, {"decoupled_weight_decay", 1}, {"weight_decay", 0.1}}},
      {"Rprop", {{"lr", 0.01}, {"etaminus", 0.4}, {"etaplus", 1.3}, {"step_size_max", 0.02}}},
      {"QHM", {{"lr", 0.1}, {"momentum", 0.8}, {"nu", 0.7}, {"weight_decay", 0.1}, {"weight_decay_type", "direct"}}},
      {"NovoGrad", {{"lr", 0.01}, {"beta1", 0.8}, {"norm_type", 0.0}}}};
  if (const auto own = ours.find(kind); own != ours.end()) {
    return std::make_unique<FusedOptimizer>(kind, parameters, own->second);
  }
  return std::make_unique<torch::optim::AdamW>(with_one_beside(parameters),
                                               torch::optim::AdamWOptions(0.01).betas({0.8, 0.99}).weight_decay(0.1));
}

// One with other options, which a checkpoint replaces.
std::unique_ptr<torch::optim::Optimizer> fresh(const std::string& kind, const std::vector<Tensor>& parameters) {
  if (kind == "torch") {
    return std::make_unique<torch::optim::AdamW>(with_one_beside(parameters), torch::optim::AdamWOptions(0.5));
  }
  const HyperValues qhm{{"lr", 0.5}, {"momentum", 0.1}, {"nu", 0.1}};
  return std::make_unique<FusedOptimizer>(kind, parameters, kind == "QHM" ? qhm : HyperValues{{"lr", 0.5}});
}

template <class Model, class Optimizer>
void train(Model& model, Optimizer& optimizer, int steps) {
  for (int number = 0; number < steps; ++number) {
    optimizer.zero_grad();
    model(torch::linspace(0, 9, 20).sin().view({5, 4})).square().mean().backward();
    optimizer.step();
  }
}

void compare(DistributedModel<Net>& model, const Net& plain, const std::string& when) {
  const auto state = model.state_dict();
  for (const auto& named : plain->named_parameters()) {
    expect(torch::allclose(state[named.key()], named.value(), 1e-5, 1e-6), named.key() + when);
  }
  for (const auto& named : plain->named_buffers()) {
    expect(torch::allclose(state[named.key()], named.value(), 1e-5, 1e-6), named.key() + when);
  }
}

void read(const std::string& folder, const std::string& kind) {
  DistributedModel model(Net{});
  DistributedOptimizer ours(fresh(kind, model.parameters()));
  for (const std::string tag : {"python", "original"}) {
    Net plain;
    const auto theirs = make(kind, plain->parameters());
    train(plain, *theirs, kSteps);
    const auto content = resume_from_checkpoint(folder, {.tag = tag});
    expect(content.at("step").toInt() == kSteps && content.at("pair").toTupleRef().elements()[1].toDouble() == 2.5,
           "the content of " + tag);
    compare(model, plain, " of " + tag);
    train(plain, *theirs, kSteps);
    train(model, ours, kSteps);
    compare(model, plain, " with the optimizer's states and options of " + tag);
  }
}

void write(const std::string& folder, const std::string& kind) {
  DistributedModel model(Net{});
  DistributedOptimizer ours(make(kind, model.parameters()));
  train(model, ours, kSteps);
  save_checkpoint(folder, "cpp", {.user_content = {{"step", kSteps}, {"pair", std::make_tuple(1, 2.5)}}});
}

// Loads state dicts that torch.save wrote: each is that of write() in Python.
void read_plain(const std::string& folder) {
  Net plain;
  const auto theirs = make("torch", plain->parameters());
  train(plain, *theirs, kSteps);
  const auto translate = [](const StateDict& state) {
    StateDict translated;
    for (const auto& [name, tensor] : state) translated.emplace(name.substr(std::string("theirs.").size()), tensor);
    return translated;
  };
  DistributedModel model(Net{});
  const auto change = [&] {
    auto state = model.state_dict();
    for (auto& each : state) each.value().zero_();
    model.load_state_dict(state);
  };
  const auto look = step([&](const Tensor& x) { return model(x); });
  model.eval();
  resume_from_checkpoint(folder + "/two", {.partial = false});  // waits for the cut
  look(torch::zeros({5, 4}));
  compare(model, plain, " of what was loaded before the cut");
  for (const std::string place : {"one", "two", "one/pytorch_model.bin"}) {
    change();
    resume_from_checkpoint(folder + "/" + place, {.partial = false});
    compare(model, plain, " of " + place);
  }
  change();
  resume_from_checkpoint(folder, {.tag = "theirs.pt", .partial = false, .translate_function = translate});
  compare(model, plain, " of translated names");
  expect_error<FormatError>([&] { resume_from_checkpoint(folder, {.tag = "damaged", .partial = false}); },
                            {"in.weight: its elements are damaged"});
  expect_error<UsageError>([&] { resume_from_checkpoint(folder, {.tag = "theirs.pt", .partial = false}); },
                           {"theirs."});
  expect_error<FormatError>([&] { resume_from_checkpoint(folder, {.tag = "hostile", .partial = false}); },
                            {"names posix.system"});
  expect_error<UsageError>([&] { resume_from_checkpoint(folder, {.translate_function = translate}); },
                           {"partial = false"});
  compare(model, plain, " after what was refused");
}

}  // namespace

int main(int count, char** arguments) {
  const std::string mode = count == 4 ? arguments[1] : "";
  if (mode != "read" && mode != "write" && mode != "plain") return 2;
  init({{"partitions", mode == "plain" ? 2 : 1}});
  if (mode == "plain") read_plain(arguments[2]);
  if (mode == "read") read(arguments[2], arguments[3]);
  if (mode == "write") write(arguments[2], arguments[3]);
  shutdown();
  return exit_code();
}
