// SPDX-License-Identifier: Apache-2.0
// Operators, states, failures and refusals of programs whose layers are cut over two ranks.
//
//     lamina run -n 2 -c sliced_jobs
#include <unistd.h>

#include <filesystem>

#include "lamina/dist/dist.h"
#include "lamina/frontend/current.h"
#include "tests/frontend/expect.h"
#include "tests/frontend/sliced_models.h"

namespace {

using namespace lamina;
using namespace lamina::frontend::test;

void begin(int degree = 2) {
  init({{"tensor_parallel_degree", degree}, {"ddp", true}, {"prescaled_batch", true}, {"timeout_s", 60}});
}

Tensor words(std::int64_t seed = 7) {
  torch::manual_seed(seed);
  return torch::randint(0, kWords, {4, kPositions}, torch::kLong);
}

auto adamw(std::vector<Tensor> parameters) { return torch::optim::AdamW(std::move(parameters), 0.01); }

void operators() {
  begin();
  const auto whole = torch::arange(6.0).view({2, 3});
  const std::vector<std::int64_t> sizes{2, 1};
  const auto part = whole.narrow(1, tp_rank() * 2, 2 - tp_rank());
  expect(tp_all_reduce(whole).equal(2 * whole), "tp_all_reduce");
  expect(tp_scatter(whole, 1, sizes).equal(part), "tp_scatter");
  expect(tp_gather(part, -1, sizes).equal(whole), "tp_gather");
  expect(tp_all_gather(part, 1, sizes).equal(whole), "tp_all_gather");
  expect(tp_reduce_scatter(whole, 1, sizes).equal(2 * part), "tp_reduce_scatter");
  expect(tp_all_to_all(part, 0, 1, {1, 1}, sizes).equal(whole.narrow(0, tp_rank(), 1)), "tp_all_to_all");
  const auto x = (whole + tp_rank()).requires_grad_();
  const auto gradient = [&](const Tensor& y, double factor) {
    return torch::autograd::grad({(y * factor).sum()}, {x})[0];
  };
  const double factor = 1 + tp_rank();
  expect(gradient(tp_copy(x), factor).equal(torch::full({2, 3}, 3.0)), "the gradient of tp_copy");
  expect(gradient(tp_all_reduce(x), 2).equal(torch::full({2, 3}, 2.0)), "the gradient of tp_all_reduce");
  expect(gradient(tp_all_gather(x, 0), factor).equal(torch::full({2, 3}, 3.0)), "the gradient of tp_all_gather");
  expect(gradient(tp_gather(x, 0), 2).equal(torch::full({2, 3}, 2.0)), "the gradient of tp_gather");
  expect_error<UsageError>([&] { tp_scatter(whole, 1); }, {"dimension 1", "[2, 3]", "2 equal parts"});
  expect_error<UsageError>([&] { tp_gather(whole, 2); }, {"no dimension 2"});
  expect_error<DesyncError>([&] { tp_all_reduce(torch::zeros({2 + tp_rank()})); }, {"[2]", "[3]", "[tp-order]"});
  expect(tp_all_reduce(whole).equal(2 * whole), "tp_all_reduce after an error");
  shutdown();
}

void one_rank_alone() {
  init({{"partitions", 1}});
  const auto x = torch::arange(4.0);
  expect(tp_gather(tp_scatter(tp_all_reduce(tp_copy(x)), 0), 0).equal(x), "operators of one rank");
  shutdown();
}

// The state of a job, its optimizer's and the losses of two more steps.
struct After {
  std::map<std::string, Tensor> state;
  std::vector<double> losses;
};

template <class Model, class Optimizer>
After go_on(Model& model, Optimizer& optimizer) {
  After after;
  for (const auto& item : model.state_dict()) after.state[item.key()] = item.value().clone();
  for (int i = 0; i < 2; ++i) {
    optimizer.zero_grad();
    const auto loss = model(words(i));
    loss.backward();
    optimizer.step();
    after.losses.push_back(loss.template item<double>());
  }
  return after;
}

void expect_same(const After& ours, const After& theirs, const std::string& where) {
  expect(ours.state.size() == theirs.state.size(), where + ": other names");
  for (const auto& [name, value] : theirs.state) expect(ours.state.at(name).equal(value), where + ": " + name);
  for (std::size_t i = 0; i < theirs.losses.size(); ++i) {
    expect(std::abs(ours.losses[i] - theirs.losses[i]) < 1e-10, where + ": another loss");
  }
}

LanguageModel in_double(std::int64_t seed) {
  torch::manual_seed(seed);
  LanguageModel model(gpt(0));
  model->to(torch::kDouble);
  return model;
}

// A checkpoint of slices loads into whole layers, and one of those into slices: bit by bit, with states.
void checkpoints(const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  std::map<int, After> saved;
  std::map<int, Tensor> archived;
  for (const int degree : {2, 1}) {
    begin(degree);
    DistributedModel model(in_double(3));
    DistributedOptimizer optimizer(adamw(model.parameters()));
    go_on(model, optimizer);
    save_checkpoint(folder.string(), "degree" + std::to_string(degree), {.partial = true});
    torch::serialize::OutputArchive archive;
    optimizer.save(archive);
    if (rank() == 0) archive.save_to((folder / ("adamw" + std::to_string(degree))).string());
    saved[degree] = go_on(model, optimizer);
    shutdown();
  }
  bool is_first = false;
  for (const int degree : {2, 1}) {
    for (const int by : {2, 1}) {
      begin(degree);
      DistributedModel model(in_double(4));
      DistributedOptimizer optimizer(adamw(model.parameters()));
      resume_from_checkpoint(folder.string(), {.tag = "degree" + std::to_string(by)});
      expect_same(go_on(model, optimizer), saved[by], base::str("degree ", by, " in ", degree));
      shutdown();
    }
    begin(degree);
    DistributedModel model(in_double(4));
    DistributedOptimizer optimizer(adamw(model.parameters()));
    torch::OrderedDict<std::string, Tensor> state;
    for (const auto& [name, value] : saved[2].state) state.insert(name, value);
    model.load_state_dict(state);
    torch::load(optimizer, (folder / "adamw2").string());
    expect_same(go_on(model, optimizer), saved[2], base::str("archives in ", degree));
    state.clear();
    for (const auto& [name, value] : saved[2].state) state.insert(name, value.slice(0, 0, 1));
    expect_error<UsageError>([&] { model.load_state_dict(state); },
                             {"model.word_embedding.weight has the shape [1, 12], the model's [21, 12]"});
    is_first = rank() == 0;
    barrier();
    shutdown();
  }
  if (is_first) std::filesystem::remove_all(folder);
}

struct FailingImpl : torch::nn::Module {
  Child<nn::DistributedLinear> first, second;
  FailingImpl() {
    first = register_module("first", nn::DistributedLinear(4, 4));
    second = register_module("second", nn::DistributedLinear(4, 1));
  }
  Tensor forward(const Tensor& x) {
    const auto y = first(x);
    if (fails && tp_rank() == 1) throw std::invalid_argument("one of two");
    return second(y).sum();
  }
  bool fails = false;
};
using Failing = torch::nn::ModuleHolder<FailingImpl>;

void failures_of_one() {
  begin();
  DistributedModel model(Failing{});
  const auto train = step([&](const Tensor& x) { model.backward(model(x)); });
  const auto x = torch::ones({2, 4});
  for (const bool in_step : {true, false}) {
    const auto run = [&] { in_step ? train(x) : model.backward(model(x)); };
    run();
    model->fails = true;
    tp_rank() == 1 ? expect_error<std::invalid_argument>(run, {"one of two"})
                   : expect_error<RemoteError>(run, {"rank 1", "one of two"});
    model->fails = false;
    barrier();
    run();
  }
  shutdown();
}

void other_batches() {
  begin();
  DistributedModel model(Failing{});
  expect_error<DesyncError>([&] { model(torch::full({2, 4}, 1.0 + rank())); },
                            {"ranks 0 and 1", "other values", "[tp-other-batch]"});
  model(torch::ones({2, 4}));
  shutdown();
}

// A slice is not taken for the whole outside of its layer.
void weights() {
  begin();
  auto model = torch::nn::Sequential(nn::SlicedEmbedding(21, 8), nn::DistributedLinear(8, 4));
  DistributedModel distributed(model);
  for (const std::string name : {"0.weight", "1.weight"}) {
    auto weight = distributed.named_parameters()[name];
    for (const auto& use : std::vector<std::function<void()>>{
             [&] { weight.pow(2).sum(); },
             [&] { torch::nn::init::xavier_uniform_(weight); },
             [&] { torch::linear(torch::ones({1, weight.size(1)}), weight); },
         }) {
      expect_error<UsageError>(use, {name + " is sliced, and this rank has", "gathered_parameters", "[tp-away]"});
    }
    distributed.zero_grad();
    distributed.backward(distributed(torch::tensor({std::int64_t{3}})).sum());
    for (const auto& use : std::vector<std::function<void()>>{
             [&] { weight.grad().norm(); },
             [&] { weight.grad().select(name == "0.weight" ? 0 : 1, 0); },
             [&] { dist::all_reduce(weight.grad()); },
         }) {
      expect_error<UsageError>(use, {"of its gradient's", "get_full_gradient", "[tp-away]"});
    }
    expect(distributed.grad_norm().item<double>() > 0, "the norm of all gradients");
    const torch::NoGradGuard no_grad;
    expect_error<UsageError>([&] { dist::broadcast(weight.detach(), 0); }, {name + " is sliced", "[tp-away]"});
    weight.clamp_(-0.1, 0.1);
    expect(distributed.state_dict()[name].abs().max().item<double>() <= 0.1001, "clamped weights");
  }
  expect(distributed.state_dict()["0.weight"].size(0) == 21, "whole states");
  const auto words = [](std::int64_t word) { return torch::tensor({std::int64_t{3}, word}); };
  expect(distributed(words(20)).size(0) == 2, "the last word");
  for (const auto word : {21, -1}) expect_error<c10::Error>([&] { distributed(words(word)); }, {"index out of range"});
  shutdown();
}

struct SharedKeysImpl : torch::nn::Module, WithHeads {
  torch::nn::Linear query{nullptr}, key{nullptr};
  std::int64_t heads = 2, keys = 1, width = 2;
  SharedKeysImpl() {
    query = register_module("query", torch::nn::Linear(4, 4));
    key = register_module("key", torch::nn::Linear(4, 2));
  }
  std::map<std::string, std::int64_t*> numbers() override {
    return {{"num_heads", &heads}, {"num_key_value_heads", &keys}, {"head_dim", &width}};
  }
  Tensor forward(const Tensor& x) { return query(x); }
};

// Layers that no member of a Child's type calls are cut, too, and what is computed of their weights is no call of them.
void layers_by_their_operations() {
  begin();
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
  const auto x = torch::randn({3, 4});
  const auto plain = net->forward(x).detach();
  set_tensor_parallelism(*net, {{"0", "colwise"}, {"1", "rowwise"}});
  DistributedModel model(net);
  const auto weight = net[0]->as<torch::nn::Linear>()->weight, bias = net[0]->as<torch::nn::Linear>()->bias;
  expect(weight.size(0) == 2 && model(x).allclose(plain), "layers of torch's Sequential");
  const auto refused = [&](const std::function<void()>& use) {
    expect_error<UsageError>(use, {"0.weight is sliced, and this rank has", "[tp-away]"});
  };
  refused([&] { torch::matmul(x, (weight * 2).t()); });
  refused([&] { torch::matmul(torch::ones({1, 2}), weight); });
  expect_error<UsageError>([&] { bias.sum(); }, {"0.bias is sliced", "[tp-away]"});
  shutdown();
}

void refusals() {
  const auto asks = [](Settings keys, const std::vector<std::string>& words) {
    expect_error<ConfigError>([&] { init(keys); }, words);
  };
  asks({{"tensor_parallel_degree", 2}, {"ddp", true}}, {"prescaled_batch", "TP_GROUP"});
  asks({{"tensor_parallel_degree", 2}}, {"ddp"});
  begin();
  auto options = gpt(0);
  options.num_attention_heads = 1;
  expect_error<UsageError>([&] { DistributedModel model(LanguageModel{options}); },
                           {"attention.query", "some rank would have none", "[tp-layer]"});
  const auto tied = std::make_shared<torch::nn::Module>();
  const nn::DistributedLinear cut(4, 4);
  tied->register_module("cut", cut.ptr());
  tied->register_parameter("same", cut->weight);
  expect_error<UsageError>([&] { frontend::slice_model(*tied, *frontend::current().session); },
                           {"same and cut.weight are one parameter", "[tp-layer]"});
  torch::nn::ModuleHolder<SharedKeysImpl> shared;
  set_tensor_parallelism(*shared, {{"query", "colwise"}, {"key", "colwise"}});
  expect_error<UsageError>([&] { DistributedModel model(shared); },
                           {"key gives heads of keys that several ranks have", "no lamina::Child", "[cpp-no-child]"});
  expect(shared->query->weight.size(0) == 4, "nothing is cut where a plan is refused");
  DistributedModel model(Failing{});
  expect_error<UsageError>([&] { DistributedOptimizer made(torch::optim::LBFGS(model.parameters())); },
                           {"LBFGS", "sliced", "[tp-optimizer]"});
  shutdown();
}

}  // namespace

int main() {
  torch::set_num_threads(1);
  operators();
  one_rank_alone();
  checkpoints(std::filesystem::temp_directory_path() / ("lamina_sliced_" + std::to_string(::getppid())));
  failures_of_one();
  other_batches();
  weights();
  layers_by_their_operations();
  refusals();
  return exit_code();
}
