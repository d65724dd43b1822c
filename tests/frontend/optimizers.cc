// SPDX-License-Identifier: Apache-2.0
// Optimizers of the C++ face over four ranks: those that measure parameters or need all of them, groups with options of
// their own, and states that are saved and loaded. Each check begins a job of its own.
//
//     lamina run -n 4 -c frontend_optimizers
#include <torch/serialize.h>

#include <cmath>
#include <limits>
#include <sstream>

#include "lamina/frontend/optimizer_state.h"
#include "tests/frontend/expect.h"
#include "tests/frontend/net.h"
#include "tests/soak.h"

namespace {

using namespace lamina;
using namespace lamina::frontend::test;

// One of a program's own, that looks at all of a parameter.
class Centred : public torch::optim::SGD {
 public:
  using torch::optim::SGD::SGD;
  Tensor step(LossClosure closure = nullptr) override {
    const torch::NoGradGuard no_grad;
    for (auto& group : param_groups()) {
      for (auto& parameter : group.params()) {
        if (!parameter.grad().defined()) continue;
        parameter.mutable_grad() = parameter.grad() - parameter.grad().mean() + 0.1 * parameter.norm();
      }
    }
    return SGD::step(std::move(closure));
  }
};

// Weights and biases have options of their own.
std::pair<std::vector<Tensor>, std::vector<Tensor>> apart(const std::vector<Tensor>& parameters) {
  std::pair<std::vector<Tensor>, std::vector<Tensor>> kinds;
  for (const auto& parameter : parameters) (parameter.dim() > 1 ? kinds.first : kinds.second).push_back(parameter);
  return kinds;
}

auto lamb(const std::vector<Tensor>& parameters) {
  const auto [weights, biases] = apart(parameters);
  return std::make_unique<FusedOptimizer>(
      "LAMB", std::vector<FusedOptimizer::Group>{{weights, {}}, {biases, {{"weight_decay", 0.0}, {"lr", 3e-3}}}},
      HyperValues{{"lr", 1e-2}, {"max_grad_norm", 0.5}});
}

auto novograd(const std::vector<Tensor>& parameters) {
  return std::make_unique<FusedOptimizer>("NovoGrad", parameters, HyperValues{{"lr", 1e-2}, {"weight_decay", 0.1}});
}

auto adamw(const std::vector<Tensor>& parameters) {
  const auto [weights, biases] = apart(parameters);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(weights, std::make_unique<torch::optim::AdamWOptions>(1e-2));
  groups.emplace_back(biases, std::make_unique<torch::optim::AdamWOptions>(
                                  torch::optim::AdamWOptions(3e-3).weight_decay(0.5).amsgrad(true)));
  return std::make_unique<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(1e-2));
}

auto centred(const std::vector<Tensor>& parameters) {
  return std::make_unique<Centred>(parameters, torch::optim::SGDOptions(0.05).momentum(0.9));
}

struct Layout {
  int partitions, degree;
  bool shared_states;
  std::string half;  // "fp16", "bf16", or nothing

  void start() const {
    init({{"ddp", true},
          {"pipeline_parallel_degree", partitions},
          {"sharded_data_parallel_degree", degree},
          {"shard_optimizer_state", shared_states},
          {"sdp_param_persistence_threshold", 10},
          {"sdp_gradient_clipping", 1e9},
          {"fp16", half == "fp16"},
          {"bf16", half == "bf16"},
          {"timeout_s", 30}});
  }
  torch::Dtype dtype() const { return half.empty() ? torch::kFloat : half == "fp16" ? torch::kHalf : torch::kBFloat16; }
  double tolerance() const { return half.empty() ? 1e-6 : half == "fp16" ? 3e-3 : 2e-2; }
  std::string text() const {
    return " with " + std::to_string(partitions) + " partitions, degree " + std::to_string(degree) +
           (shared_states ? ", shared states" : "") + ", " + half;
  }
};

// The plain loop over the whole batch, with masters.
template <class Make>
struct Plain {
  Plain(const Make& make, torch::Dtype its_dtype) : dtype(its_dtype) {
    model->to(dtype);
    for (const auto& parameter : model->parameters()) {
      masters.push_back(parameter.detach().to(torch::kFloat).clone().requires_grad_());
    }
    optimizer = make(masters);
  }
  void step() {
    model->forward(batch().to(dtype)).to(torch::kFloat).square().mean().backward();
    auto parameters = model->parameters();
    for (std::size_t i = 0; i < masters.size(); ++i) {
      masters[i].mutable_grad() = parameters[i].grad().to(torch::kFloat);
      parameters[i].mutable_grad().reset();
    }
    optimizer->step();
    for (std::size_t i = 0; i < masters.size(); ++i) parameters[i].set_data(masters[i].detach().to(dtype));
  }

  torch::Dtype dtype;
  Net model = seeded();
  std::vector<Tensor> masters;
  std::invoke_result_t<Make, std::vector<Tensor>> optimizer;
};

template <class Value>
std::string saved(const Value& optimizer) {
  std::stringstream bytes;
  torch::save(optimizer, bytes);
  return bytes.str();
}

template <class Value>
void load(Value& optimizer, const std::string& from) {
  std::stringstream bytes(from);
  torch::load(optimizer, bytes);
}

template <class Optimizer>
std::string saved_here(const DistributedOptimizer<Optimizer>& optimizer) {
  torch::serialize::OutputArchive archive;
  optimizer.save_local(archive);
  std::stringstream bytes;
  archive.save_to(bytes);
  return bytes.str();
}

// A new job loads the optimizer's state before its model is cut, and makes the same step of the same values.
template <class Make, class State, class Values>
void goes_on_in_a_new_job(const Layout& layout, const Make& make, const State& whole, Values& values,
                          const Values& expected, const std::string& name) {
  layout.start();
  DistributedModel next(seeded());
  DistributedOptimizer resumed(make(next.parameters()), LossScale(128));
  load(resumed, whole);
  const auto next_step = step([&](const Tensor& x) { next.backward(next(x).to(torch::kFloat).square().mean()); });
  next_step(share().to(layout.dtype()));
  resumed.zero_grad();
  next.load_state_dict(values);
  next_step(share().to(layout.dtype()));
  resumed.step();
  const auto found = next.state_dict();
  for (const auto& named : expected) {
    expect(torch::equal(found[named.key()], named.value()),
           named.key() + " in a new job, from the state of " + name + layout.text());
  }
  shutdown();
}

// Trains as the plain loop does; then goes on from what was saved, as if nothing had been between, and so does the
// plain optimizer from the whole state.
template <class Make>
void train(const Layout& layout, const Make& make, const std::string& name) {
  layout.start();
  Plain plain(make, layout.dtype());
  DistributedModel model(seeded());
  DistributedOptimizer ours(make(model.parameters()), LossScale(128));
  const auto step_once = step([&](const Tensor& x) { model.backward(model(x).to(torch::kFloat).square().mean()); });
  const auto both = [&] {
    plain.step();
    step_once(share().to(layout.dtype()));
    ours.step();
    expect(!ours.overflow(), "no overflow");
    ours.zero_grad();
  };
  const auto compare = [&](const std::string& when) {
    const auto state = model.state_dict();
    for (const auto& named : plain.model->named_parameters()) {
      expect(torch::allclose(state[named.key()], named.value(), layout.tolerance(), layout.tolerance()),
             named.key() + " " + when + " by " + name + layout.text());
    }
  };
  for (int number = 0; number < 3; ++number) both();
  compare("after three steps");

  auto values = model.state_dict();
  for (auto& named : values) named.value() = named.value().clone();
  const auto whole = saved(ours), here = saved_here(ours);
  const auto step_alone = [&] {
    step_once(share().to(layout.dtype()));
    ours.step();
    ours.zero_grad();
  };
  step_alone();
  const auto expected = model.state_dict();
  for (const auto& from : {whole, here}) {
    step_alone();
    model.load_state_dict(values);
    load(ours, from);
    step_alone();
    const auto again = model.state_dict();
    for (const auto& named : expected) {
      expect(torch::equal(again[named.key()], named.value()),
             named.key() + " from a saved state of " + name + layout.text());
    }
  }
  Plain other(make, layout.dtype());
  load(*other.optimizer, whole);
  expect(saved(*other.optimizer).size() > 0 && other.optimizer->state().size() == plain.optimizer->state().size(),
         "the plain optimizer has a state for each parameter from that of " + name + layout.text());
  load(ours, saved(*plain.optimizer));  // and the other way
  shutdown();
  goes_on_in_a_new_job(layout, make, whole, values, expected, name);
}

void scales_go_on() {
  const Layout layout{2, 1, false, "fp16"};
  layout.start();
  DistributedModel model(seeded());
  const LossScale scale(DynamicLossScale{.init_scale = 256, .scale_window = 100});
  DistributedOptimizer ours(adamw(model.parameters()), scale);
  const auto step_once = step([&](const Tensor& x) { model.backward(model(x).to(torch::kFloat).square().mean()); });
  const auto infinite = (share() * std::numeric_limits<float>::infinity()).to(torch::kHalf);
  step_once(infinite);
  ours.step();
  expect(ours.overflow() && ours.loss_scale() == 128, "an overflow makes the scale smaller");
  const auto state = saved(ours);
  ours.zero_grad();
  step_once(infinite);
  ours.step();
  expect(ours.loss_scale() == 64, "and another one again");
  load(ours, state);
  expect(ours.loss_scale() == 128, "the scale goes on from the state");
  shutdown();
}

// It was made, and used, before the model was cut: its states become those of parts.
void the_state_of_a_plain_optimizer_goes_on() {
  for (const auto& layout : {Layout{1, 1, true, ""}, Layout{1, 4, false, ""}, Layout{2, 2, false, ""}}) {
    layout.start();
    auto plain = seeded(), net = seeded();
    const auto theirs = adamw(plain->parameters());
    auto own = adamw(net->parameters());
    const auto alone = [](Net& model, torch::optim::Optimizer& optimizer) {
      model->forward(batch()).square().mean().backward();
      optimizer.step();
      optimizer.zero_grad();
    };
    for (int number = 0; number < 2; ++number) {
      alone(plain, *theirs);
      alone(net, *own);
    }
    DistributedModel model(net);
    DistributedOptimizer ours(std::move(own));
    const auto step_once = step([&](const Tensor& x) { model.backward(model(x).square().mean()); });
    for (int number = 0; number < 2; ++number) {
      alone(plain, *theirs);
      step_once(share());
      ours.step();
      ours.zero_grad();
    }
    const auto state = model.state_dict();
    for (const auto& named : plain->named_parameters()) {
      expect(torch::allclose(state[named.key()], named.value(), 1e-6, 1e-6), named.key() + " goes on" + layout.text());
    }
    shutdown();
  }
}

void parameters_that_groups_are_given_again_are_this_ranks_part() {
  for (const auto& layout : {Layout{1, 1, true, ""}, Layout{1, 4, false, ""}}) {
    layout.start();
    Plain plain(adamw, torch::kFloat);
    DistributedModel model(seeded());
    const auto [weights, biases] = apart(model.parameters());
    DistributedOptimizer ours(adamw(model.parameters()));
    for (int number = 0; number < 3; ++number) {
      plain.step();
      model.backward(model(share()).square().mean());
      ours.param_groups()[0].params() = weights;
      ours.step();
      ours.zero_grad();
    }
    const auto state = model.state_dict();
    for (const auto& named : plain.model->named_parameters()) {
      expect(torch::allclose(state[named.key()], named.value(), 1e-6, 1e-6), named.key() + " again" + layout.text());
    }
    shutdown();
  }
}

// Groups that come when the model is cut already.
void groups_come_later() {
  Layout{2, 2, false, ""}.start();
  DistributedModel model(seeded());
  const auto [weights, biases] = apart(model.parameters());
  DistributedOptimizer ours(torch::optim::SGD(weights, 0.1));
  auto plain = seeded();
  const auto [own_weights, own_biases] = apart(plain->parameters());
  torch::optim::SGD theirs(own_weights, 0.1);
  const auto step_once = step([&](const Tensor& x) { model.backward(model(x).square().mean()); });
  for (int number = 0; number < 4; ++number) {
    if (number == 2) {
      ours.add_param_group({biases, std::make_unique<torch::optim::SGDOptions>(0.3)});
      theirs.add_param_group({own_biases, std::make_unique<torch::optim::SGDOptions>(0.3)});
    }
    step_once(share());
    ours.step();
    model.zero_grad();
    plain->forward(batch()).square().mean().backward();
    theirs.step();
    plain->zero_grad();
  }
  const auto state = model.state_dict();
  for (const auto& named : plain->named_parameters()) {
    expect(torch::allclose(state[named.key()], named.value(), 1e-5, 1e-6),
           named.key() + " with a group that came later");
  }
  shutdown();
}

// As 0.2.0 has saved it: by numbers of the whole optimizer.
void a_part_of_an_older_program_goes_on() {
  Layout{1, 1, true, "bf16"}.start();
  DistributedModel model(seeded());
  DistributedOptimizer ours(adamw(model.parameters()));
  const auto train_once = [&] {
    step([&](const Tensor& x) { model.backward(model(x).to(torch::kFloat).square().mean()); })(
        share().to(torch::kBFloat16));
    ours.step();
    ours.zero_grad();
  };
  train_once();
  std::stringstream bytes(saved_here(ours));
  torch::serialize::InputArchive archive;
  archive.load_from(bytes);
  auto state = frontend::read(archive);
  state.names.reset();
  state.parts.reset();
  state.saved_by = {0, 1, rank(), size()};
  auto values = model.state_dict();
  for (auto& named : values) named.value() = named.value().clone();
  train_once();
  const auto expected = model.state_dict();
  const auto load_again = [&] {
    torch::serialize::OutputArchive written;
    frontend::write(state, written);
    std::stringstream old;
    written.save_to(old);
    load(ours, old.str());
  };
  train_once();
  model.load_state_dict(values);
  load_again();
  train_once();
  const auto found = model.state_dict();
  for (const auto& named : expected) {
    expect(torch::equal(found[named.key()], named.value()), named.key() + " goes on from a part of 0.2.0");
  }
  state.saved_by = {0, 1, (rank() + 1) % size(), size()};
  expect_error<UsageError>(load_again, {"part of another rank", "[state-other-optimizer]"});
  shutdown();
}

void refusals() {
  Layout{2, 1, false, ""}.start();
  DistributedModel model(seeded());
  DistributedOptimizer ours(adamw(model.parameters()));
  torch::serialize::OutputArchive archive;
  expect_error<UsageError>([&] { ours.save_local(archive); }, {"nothing is local", "[state-before-cut]"});
  const auto step_once = step([&](const Tensor& x) { model.backward(model(x).square().mean()); });
  step_once(share());
  ours.step();
  const auto other = seeded();
  const auto one_group = saved(torch::optim::AdamW(other->parameters()));
  expect_error<UsageError>([&] { load(ours, one_group); },
                           {"not this optimizer's", "1 parameter groups, the optimizer 2", "[state-other-optimizer]"});
  std::stringstream tensor;
  torch::save(torch::ones({2}), tensor);
  expect_error<UsageError>([&] { load(ours, tensor.str()); }, {"no state of an optimizer"});
  const auto here = saved_here(ours);
  shutdown();
  Layout{1, 1, true, ""}.start();
  DistributedModel next(seeded());
  DistributedOptimizer another(adamw(next.parameters()));
  step([&](const Tensor& x) { next.backward(next(x).square().mean()); })(share());
  expect_error<UsageError>([&] { load(another, here); }, {"another number of partitions"});
  expect_error<UsageError>([&] { register_functional_optimizer<Centred>(Needs::kNorms); }, {"kWhole"});
  shutdown();
}

// Alone, in the place of torch's.
void fused_is_torchs() {
  const auto compare = [](auto& ours, auto& theirs, const Net& a, const Net& b, const std::string& name) {
    for (int number = 0; number < 5; ++number) {
      for (auto model : {a, b}) {
        model->zero_grad();
        model->forward(batch()).square().mean().backward();
      }
      ours.step();
      theirs.step();
    }
    for (std::size_t i = 0; i < a->parameters().size(); ++i) {
      expect(torch::allclose(a->parameters()[i], b->parameters()[i], 1e-5, 1e-6), name + " is torch's");
    }
  };
  {
    const auto a = seeded(), b = seeded();
    FusedOptimizer ours("AdamW", a->parameters(), {{"lr", 1e-2}, {"beta1", 0.8}, {"weight_decay", 0.1}});
    torch::optim::AdamW theirs(b->parameters(), torch::optim::AdamWOptions(1e-2).betas({0.8, 0.999}).weight_decay(0.1));
    compare(ours, theirs, a, b, "AdamW");
    torch::optim::StepLR schedule(ours, 1, 0.5);
    schedule.step();
    schedule.step();
    expect(ours.param_groups()[0].options().get_lr() == 5e-3, "torch's schedulers move its learning rate");
  }
  {
    const auto a = seeded(), b = seeded();
    const auto [weights, biases] = apart(a->parameters());
    FusedOptimizer ours("SGD", {{weights, {}}, {biases, {{"lr", 0.3}}}}, {{"lr", 0.1}, {"momentum", 0.9}});
    std::vector<torch::optim::OptimizerParamGroup> groups;
    const auto [own_weights, own_biases] = apart(b->parameters());
    groups.emplace_back(own_weights,
                        std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(0.1).momentum(0.9)));
    groups.emplace_back(own_biases,
                        std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(0.3).momentum(0.9)));
    torch::optim::SGD theirs(groups, torch::optim::SGDOptions(0.1));
    compare(ours, theirs, a, b, "SGD");
  }
  const auto net = seeded();
  const auto make = [&](const HyperValues& hyper) { FusedOptimizer("AdamW", net->parameters(), hyper); };
  expect_error<UsageError>([&] { make({{"lr", -1.0}}); }, {"Invalid learning rate: -1"});
  expect_error<UsageError>([&] { make({{"rate", 1.0}}); }, {"rate"});
  expect_error<UsageError>([&] { FusedOptimizer("Adam7", net->parameters()); }, {"no optimizer with the name Adam7"});
}

// Hyper-parameters that a trainer sets travel with its next steps.
void remote_options() {
  init({{"timeout_s", 30}});
  torch::manual_seed(0);
  const torch::nn::Linear net(6, 1);
  if (rank() == 0) {
    remote::place<Tensor>("net", net);
    remote::serve();
  } else if (rank() == 1) {
    const auto there = remote::find("net", 0);
    optim::DistributedOptimizer sgd("SGD", there.parameters(), {{"lr", 0.1}, {"momentum", 0.9}});
    auto plain = net;
    torch::optim::SGD theirs(plain->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int number = 0; number < 4; ++number) {
      remote::Context context;
      const auto loss = there(batch()).square().mean(), expected = plain(batch()).square().mean();
      expect(torch::allclose(loss, expected), "a remote loss is the plain one's in step " + std::to_string(number));
      context.backward(loss);
      sgd.step(context);
      theirs.zero_grad();
      expected.backward();
      theirs.step();
      const double lr = 0.1 / (2 << number);
      sgd.set_options({{"lr", lr}});
      theirs.param_groups()[0].options().set_lr(lr);
    }
    expect_error<UsageError>([&] { sgd.set_options({{"rate", 1.0}}); }, {"SGD has no hyper-parameter", "rate"});
    expect_error<UsageError>([&] { sgd.set_options({{"lr", -1.0}}); }, {"Invalid learning rate: -1"});
  }
  shutdown();
}

void refuses_the_unknown() {
  for (const Layout& layout : {Layout{1, 4, false, ""}, Layout{1, 1, true, ""}}) {
    layout.start();
    DistributedModel model(seeded());
    const auto key = layout.degree > 1 ? "sharded_data_parallel_degree" : "shard_optimizer_state";
    expect_error<UsageError>([&] { DistributedOptimizer own(centred(model.parameters())); },
                             {"Centred with " + std::string(key), "not known", "register_functional_optimizer<"});
    expect_error<UsageError>([&] { DistributedOptimizer lbfgs(torch::optim::LBFGS(model.parameters())); },
                             {"LBFGS with " + std::string(key), "measures all parameters"});
    shutdown();
  }
}

}  // namespace

int main() {
  torch::set_num_threads(1);
  fused_is_torchs();
  refuses_the_unknown();
  register_functional_optimizer<Centred>(Needs::kWhole);
  int number = 0;  // of a layout in some precision: in one of them each layout meets each optimizer
  for (const auto* half : {"", "bf16", "fp16"}) {
    for (const Layout& layout : {Layout{1, 4, false, half}, Layout{2, 2, false, half}, Layout{1, 1, true, half},
                                 Layout{2, 1, true, half}, Layout{4, 1, false, half}}) {
      const auto is_drawn = [&](int optimizer) { return lamina::test::in_a_soak(true, number % 3 == optimizer); };
      if (is_drawn(0)) train(layout, adamw, "AdamW");
      if (is_drawn(1)) train(layout, centred, "Centred");
      if (is_drawn(2)) train(layout, lamb, "LAMB");
      ++number;
      if (*half == '\0') train(layout, novograd, "NovoGrad");
    }
  }
  scales_go_on();
  the_state_of_a_plain_optimizer_goes_on();
  parameters_that_groups_are_given_again_are_this_ranks_part();
  groups_come_later();
  a_part_of_an_older_program_goes_on();
  refusals();
  remote_options();
  return exit_code();
}
