// SPDX-License-Identifier: Apache-2.0
// The C++ side of tests/python/test_both_faces_refuse.py: what each case is refused with, as a line `case<TAB>error`.
// Each begins a job of its own.
//
//     lamina run -n 2 -c frontend_refusals
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <sstream>
#include <string>

#include "tests/frontend/models.h"

namespace {

using namespace lamina;
using namespace lamina::frontend::test;

struct NetImpl : torch::nn::Module {
  Child<torch::nn::Linear> lower, upper;
  NetImpl() {
    lower = register_module("lower", torch::nn::Linear(4, 6));
    upper = register_module("upper", torch::nn::Linear(6, 2));
  }
  Tensor forward(const Tensor& x) { return upper(lower(x).tanh()); }
};
using Net = torch::nn::ModuleHolder<NetImpl>;

Tensor batch() { return torch::linspace(0, 1, 20).view({5, 4}); }

torch::optim::SGD sgd(DistributedModel<Net>& model, double lr = 0.1) {
  return torch::optim::SGD(model.parameters(), torch::optim::SGDOptions(lr));
}

void a_loss_that_was_not_scaled() {
  init({{"ddp", true}});
  DistributedModel model{Net()};
  DistributedOptimizer optimizer(sgd(model), LossScale(128));
  model(batch()).square().mean().backward();
  optimizer.step();
}

void gradients_of_no_backward() {
  init({{"ddp", true}});
  DistributedModel model{Net()};
  DistributedOptimizer optimizer(sgd(model), LossScale(128));
  for (auto& parameter : model.parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
  optimizer.step();
}

void clipping_what_was_not_scaled() {
  init({{"ddp", true}});
  DistributedModel model{Net()};
  DistributedOptimizer optimizer(sgd(model), LossScale(128));
  model(batch()).square().mean().backward();
  optimizer.clip_master_grads(1);
}

void a_closure_over_shards() {
  init({{"ddp", true}, {"sharded_data_parallel_degree", 2}});
  DistributedModel model{Net()};
  DistributedOptimizer optimizer(sgd(model));
  optimizer.step([]() -> Tensor { throw base::UsageError("the closure was called"); });
}

void two_loss_scales() {
  init({{"ddp", true}});
  DistributedModel model{Net()};
  DistributedOptimizer one(sgd(model), LossScale(128));
  DistributedOptimizer other(sgd(model), LossScale(2));
}

void options_that_differ() {
  init({{"ddp", true}});
  DistributedModel model{Net()};
  DistributedOptimizer optimizer(sgd(model, rank() == 0 ? 0.1 : 0.25));
  model(batch()).square().mean().backward();
  optimizer.step();
}

void lbfgs_over_partitions() {
  init({{"pipeline_parallel_degree", 2}});
  DistributedModel model{Net()};
  DistributedOptimizer optimizer(torch::optim::LBFGS(model.parameters(), torch::optim::LBFGSOptions()));
}

void masters_of_one_memory() {
  init({{"bf16", true}, {"ddp", true}});
  Net net;
  net->to(torch::kBFloat16);
  net->upper->weight.set_data(net->lower->weight.detach().view({-1}).narrow(0, 0, 12).view({2, 6}));
  DistributedModel model(net);
  DistributedOptimizer optimizer(sgd(model));
}

void options_of_models_that_differ() {
  init({{"ddp", true}});
  DistributedModel model(Net(), ModelOptions{.backward_passes_per_step = 1 + rank()});
}

void a_count_that_is_none() {
  init({{"ddp", true}});
  DistributedModel model(Net(), ModelOptions{.backward_passes_per_step = 0});
}

void a_size_that_is_none() {
  init({{"ddp", true}});
  DistributedModel model(Net(), ModelOptions{.bucket_cap_mb = -1});
}

void a_norm_that_is_none() {
  init({{"ddp", true}});
  DistributedModel model{Net()};
  DistributedOptimizer optimizer(sgd(model));
  model(batch()).square().mean().backward();
  optimizer.clip_master_grads(-1);
}

void parameters_in_another_order() {
  init({{"ddp", true}});
  DistributedModel model{Net()};
  auto parameters = model.parameters();
  if (rank() == 1) std::ranges::reverse(parameters);
  DistributedOptimizer optimizer(torch::optim::SGD(parameters, torch::optim::SGDOptions(0.1)));
  model(batch()).square().mean().backward();
  optimizer.step();
}

void gradients_without_tensors() {
  init({{"ddp", true}});
  DistributedModel model{Net()};
  const auto output = model(batch());
  model.backward(std::vector<Tensor>{output, output}, std::vector<Tensor>{output});
}

void a_backward_after_the_job() {
  init({{"ddp", true}});
  DistributedModel model{Net()};
  const auto output = model(batch()).sum();
  shutdown();
  model.backward(output);
}

void a_join_without_ddp() {
  init();
  DistributedModel model{Net()};
  model.join([] {});
}

void parts_before_the_cut() {
  init({{"pipeline_parallel_degree", 2}});
  DistributedModel model{Net()};
  model.local_parameters();
}

void a_partition_below_none() {
  init({{"pipeline_parallel_degree", 2}});
  set_partition(*Net(), -1);
}

void a_call_outside_of_a_step() {
  init({{"pipeline_parallel_degree", 2}});
  Net net;
  set_partition(*net->lower, 0);
  set_partition(*net->upper, 1);
  DistributedModel model(net);
  step([&](const Tensor& x) { model.backward(model(x).square().mean()); })(batch().narrow(0, 0, 4));
  if (rank() == 0) net->upper(torch::ones({2, 6}));
}

void clipping_after_the_job() {
  init({{"ddp", true}});
  DistributedModel model{Net()};
  DistributedOptimizer optimizer(sgd(model));
  shutdown();
  optimizer.clip_master_grads(1);
}

void load(DistributedOptimizer<torch::optim::SGD>& optimizer, torch::optim::SGD& other) {
  std::stringstream bytes;
  torch::save(other, bytes);
  torch::load(optimizer, bytes);
}

void a_state_with_other_groups() {
  init({{"ddp", true}, {"shard_optimizer_state", true}});
  DistributedModel model{Net()};
  DistributedOptimizer optimizer(sgd(model));
  torch::optim::SGD other(Net()->lower->parameters(), torch::optim::SGDOptions(0.1));
  other.add_param_group(torch::optim::OptimizerParamGroup(Net()->upper->parameters()));
  load(optimizer, other);
}

void a_state_with_other_members() {
  init({{"ddp", true}, {"shard_optimizer_state", true}});
  DistributedModel model{Net()};
  DistributedOptimizer optimizer(sgd(model));
  torch::optim::SGD other(Net()->lower->parameters(), torch::optim::SGDOptions(0.1));
  load(optimizer, other);
}

void a_parameter_in_two_groups() {
  init({{"ddp", true}, {"shard_optimizer_state", true}});
  DistributedModel model{Net()};
  DistributedOptimizer optimizer(sgd(model));
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({model.parameters().front()}));
}

const char* folder() { return std::getenv("REFUSALS_FOLDER"); }

// A checkpoint of a model with AdamW in the folder, and then another job.
void save_and_begin_anew() {
  init({{"ddp", true}});
  DistributedModel model{Net()};
  DistributedOptimizer optimizer(torch::optim::AdamW(model.parameters(), torch::optim::AdamWOptions(0.1)));
  model(batch()).square().mean().backward();
  optimizer.step();
  save_checkpoint(folder(), "a");
  shutdown();
  init({{"ddp", true}});
}

void a_save_without_a_model() {
  init({{"ddp", true}});
  save_checkpoint(folder(), "b");
}

void a_save_before_the_cut() {
  init({{"pipeline_parallel_degree", 2}});
  DistributedModel model{Net()};
  save_checkpoint(folder(), "b");
}

void a_resumption_without_a_model() {
  init({{"ddp", true}});
  resume_from_checkpoint(folder());
}

void a_checkpoint_that_is_not_there() {
  init({{"ddp", true}});
  DistributedModel model{Net()};
  resume_from_checkpoint(std::string(folder()) + "/elsewhere");
}

void a_checkpoint_of_a_newer_lamina() {
  init({{"ddp", true}});
  DistributedModel model{Net()};
  resume_from_checkpoint(std::string(folder()) + "/newer");
}

void optimizers_that_were_not_saved() {
  save_and_begin_anew();
  DistributedModel model{Net()};
  resume_from_checkpoint(folder(), {.tag = "a"});
}

void an_optimizer_of_another_class() {
  save_and_begin_anew();
  DistributedModel model{Net()};
  DistributedOptimizer optimizer(sgd(model));
  resume_from_checkpoint(folder(), {.tag = "a"});
}

void options_that_were_not_saved() {
  save_and_begin_anew();
  DistributedModel model{Net()};
  DistributedOptimizer optimizer(sgd(model));
  resume_from_checkpoint(folder(), {.tag = "a", .strict = false});
}

void groups_with_other_parameters() {
  save_and_begin_anew();
  DistributedModel model{Net()};
  DistributedOptimizer optimizer(torch::optim::AdamW({model.parameters().front()}, torch::optim::AdamWOptions(0.1)));
  resume_from_checkpoint(folder(), {.tag = "a"});
}

void a_change_without_a_model() {
  init({{"ddp", true}});
  change({{"partitions", 2}});
}

void a_change_to_more_ranks() {
  init({{"ddp", true}});
  DistributedModel model{Net()};
  change({{"partitions", 3}});
}

void a_change_of_another_key() {
  init({{"ddp", true}});
  DistributedModel model{Net()};
  change({{"bf16", true}});
}

void a_change_by_both_names() {
  init({{"ddp", true}});
  DistributedModel model{Net()};
  change({{"partitions", 2}, {"pipeline_parallel_degree", 2}});
}

void changes_that_differ() {
  init({{"ddp", true}});
  DistributedModel model{Net()};
  rank() == 0 ? change({{"partitions", 2}}) : change({{"schedule", "simple"}});
}

void a_change_with_gradients() {
  init({{"ddp", true}});
  DistributedModel model{Net()};
  model(batch()).square().mean().backward();
  change({{"partitions", 2}});
}

void a_change_with_another_parameter() {
  init({{"ddp", true}});
  DistributedModel model{Net()};
  auto parameters = model.parameters();
  parameters.push_back(torch::zeros({2}, torch::requires_grad()));
  DistributedOptimizer optimizer(torch::optim::SGD(parameters, torch::optim::SGDOptions(0.1)));
  change({{"partitions", 2}});
}

void a_change_of_lbfgs() {
  init({{"ddp", true}});
  DistributedModel model{Net()};
  DistributedOptimizer optimizer(torch::optim::LBFGS(model.parameters(), torch::optim::LBFGSOptions()));
  change({{"partitions", 2}});
}

void a_change_with_a_state_that_waits() {
  init({{"pipeline_parallel_degree", 2}, {"microbatches", 2}, {"ddp", true}});
  DistributedModel model{Net()};
  DistributedOptimizer optimizer(sgd(model));
  torch::optim::SGD other(Net()->parameters(), torch::optim::SGDOptions(0.1));
  load(optimizer, other);
  change({{"partitions", 1}});
}

// Doubles gradients on their way back.
struct Doubled : torch::autograd::Function<Doubled> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return {2 * gradients[0]};
  }
};

// Has a fault on the second rank.
using Spoil = std::function<Tensor(torch::nn::LinearImpl& layer, const Tensor& y)>;
struct SpoiledImpl : torch::nn::LinearImpl {
  explicit SpoiledImpl(Spoil given) : LinearImpl(6, 2), spoil(std::move(given)) {}
  Tensor forward(const Tensor& x) {
    const auto y = LinearImpl::forward(x);
    return rank() == 1 ? spoil(*this, y) : y;
  }
  const Spoil spoil;
};
TORCH_MODULE(Spoiled);

struct SpoiledNetImpl : torch::nn::Module {
  Child<torch::nn::Linear> lower;
  Child<Spoiled> upper;
  explicit SpoiledNetImpl(const Spoil& spoil) {
    lower = register_module("lower", torch::nn::Linear(4, 6));
    torch::nn::Linear(6, 2);  // draws as the other side's, whose place its own takes
    upper = register_module("upper", Spoiled(spoil));
    set_partition(*upper, 1);
  }
  Tensor forward(const Tensor& x) { return upper(lower(x).tanh()); }
};
TORCH_MODULE(SpoiledNet);

void train_with(const Spoil& spoil) {
  init({{"partitions", 2},
        {"microbatches", 1},
        {"auto_partition", false},
        {"default_partition", 0},
        {"verify_steps", 1}});
  torch::manual_seed(0);
  DistributedModel model{SpoiledNet(spoil)};
  const auto train = step([&](const Tensor& x) { model.backward(model(x).square().mean()); });
  train(batch());
}

void a_step_with_another_output() {
  train_with([](auto&, const Tensor& y) { return 1.5 * y; });
}

void a_step_with_another_gradient() {
  train_with([](auto&, const Tensor& y) { return Doubled::apply(y); });
}

void a_step_with_another_gradient_of_a_weight() {
  train_with([](torch::nn::LinearImpl& layer, const Tensor& y) {
    layer.weight.register_hook([](const Tensor& gradient) { return 1.5 * gradient; });
    return y;
  });
}

}  // namespace

int main() {
  const std::map<std::string, std::function<void()>> cases{
      {"a_loss_that_was_not_scaled", a_loss_that_was_not_scaled},
      {"gradients_of_no_backward", gradients_of_no_backward},
      {"clipping_what_was_not_scaled", clipping_what_was_not_scaled},
      {"a_closure_over_shards", a_closure_over_shards},
      {"two_loss_scales", two_loss_scales},
      {"options_that_differ", options_that_differ},
      {"lbfgs_over_partitions", lbfgs_over_partitions},
      {"masters_of_one_memory", masters_of_one_memory},
      {"options_of_models_that_differ", options_of_models_that_differ},
      {"a_count_that_is_none", a_count_that_is_none},
      {"a_size_that_is_none", a_size_that_is_none},
      {"a_norm_that_is_none", a_norm_that_is_none},
      {"parameters_in_another_order", parameters_in_another_order},
      {"gradients_without_tensors", gradients_without_tensors},
      {"a_backward_after_the_job", a_backward_after_the_job},
      {"a_join_without_ddp", a_join_without_ddp},
      {"parts_before_the_cut", parts_before_the_cut},
      {"a_partition_below_none", a_partition_below_none},
      {"a_call_outside_of_a_step", a_call_outside_of_a_step},
      {"clipping_after_the_job", clipping_after_the_job},
      {"a_state_with_other_groups", a_state_with_other_groups},
      {"a_state_with_other_members", a_state_with_other_members},
      {"a_parameter_in_two_groups", a_parameter_in_two_groups},
      {"a_save_without_a_model", a_save_without_a_model},
      {"a_save_before_the_cut", a_save_before_the_cut},
      {"a_resumption_without_a_model", a_resumption_without_a_model},
      {"a_checkpoint_that_is_not_there", a_checkpoint_that_is_not_there},
      {"a_checkpoint_of_a_newer_lamina", a_checkpoint_of_a_newer_lamina},
      {"optimizers_that_were_not_saved", optimizers_that_were_not_saved},
      {"an_optimizer_of_another_class", an_optimizer_of_another_class},
      {"options_that_were_not_saved", options_that_were_not_saved},
      {"groups_with_other_parameters", groups_with_other_parameters},
      {"a_change_without_a_model", a_change_without_a_model},
      {"a_change_to_more_ranks", a_change_to_more_ranks},
      {"a_change_of_another_key", a_change_of_another_key},
      {"a_change_by_both_names", a_change_by_both_names},
      {"changes_that_differ", changes_that_differ},
      {"a_change_with_gradients", a_change_with_gradients},
      {"a_change_with_another_parameter", a_change_with_another_parameter},
      {"a_change_of_lbfgs", a_change_of_lbfgs},
      {"a_change_with_a_state_that_waits", a_change_with_a_state_that_waits},
      {"a_step_with_another_output", a_step_with_another_output},
      {"a_step_with_another_gradient", a_step_with_another_gradient},
      {"a_step_with_another_gradient_of_a_weight", a_step_with_another_gradient_of_a_weight}};
  for (const auto& [name, act] : cases) {
    std::string text = "nothing";
    try {
      act();
    } catch (const base::Error& error) {
      text = error.what();
    }
    if (!is_initialized() || rank() == 0) std::printf("%s\t%s\n", name.c_str(), text.c_str());
    shutdown();
  }
}
