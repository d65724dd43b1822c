// SPDX-License-Identifier: Apache-2.0
// Joins and communication hooks over two ranks that are two copies of a model, as tests/multiprocess/cases_replicas.py
// has them for Python. Each check begins a job of its own.
//
//     lamina run -n 2 -c frontend_replicas
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <stdexcept>
#include <utility>

#include "tests/frontend/expect.h"
#include "tests/frontend/models.h"

namespace {

using namespace lamina;
using namespace lamina::frontend::test;

struct NetImpl : torch::nn::Module {
  Child<torch::nn::Linear> in, out;
  NetImpl() {
    in = register_module("in", torch::nn::Linear(6, 4));
    out = register_module("out", torch::nn::Linear(4, 1));
  }
  Tensor forward(const Tensor& x) { return out(torch::tanh(in(x))).square().mean(); }
};
using Net = torch::nn::ModuleHolder<NetImpl>;

struct NormedImpl : torch::nn::Module {
  Child<torch::nn::BatchNorm1d> norm;
  Child<torch::nn::Linear> out;
  NormedImpl() {
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    out = register_module("out", torch::nn::Linear(6, 1));
  }
  Tensor forward(const Tensor& x) { return out(norm(x)).square().mean(); }
};
using NormedNet = torch::nn::ModuleHolder<NormedImpl>;

template <class Model>
Model seeded() {
  torch::manual_seed(0);
  Model model;
  model->to(torch::kDouble);
  return model;
}

void start(int microbatches = 2, bool ddp = true) {
  init({{"ddp", ddp}, {"microbatches", microbatches}, {"timeout_s", 30}});
}

// Rows that copy `replica` reads in its step `number`.
Tensor batch(int replica, int number = 0) {
  torch::manual_seed(1000 + 10 * replica + number);
  return torch::randn({8, 6}, torch::kDouble);
}
Tensor share() { return batch(dp_rank()); }

bool close(const Tensor& ours, const Tensor& theirs) { return torch::allclose(ours, theirs, 1e-9, 1e-12); }
bool agrees(const Tensor& tensor) {
  const auto values = all_gather(Group::kDp, tensor.detach().clone());
  return std::ranges::all_of(values, [&](const Tensor& value) { return value.equal(values.front()); });
}

template <class Model>
void expect_gradients(const DistributedModel<Model>& model, const Model& plain) {
  for (const auto& named : plain->named_parameters()) {
    expect(close(model.named_parameters()[named.key()].grad(), named.value().grad()), named.key() + "'s gradient");
  }
}

// Compared with the plain loop, whose gradient is the sum over the copies that still have a batch, divided by the
// number of all or of those.
void train_unevenly(const std::vector<int>& batches, bool by_everyone) {
  start();
  auto plain = seeded<Net>();
  DistributedModel model(seeded<Net>());
  torch::optim::SGD theirs(plain->parameters(), 0.1);
  DistributedOptimizer ours(torch::optim::SGD(model.parameters(), 0.1));
  const auto train = step([&](const Tensor& x) { model.backward(model(x)); });
  const auto loop = [&] {
    for (int number = 0; number < batches[dp_rank()]; ++number) {
      ours.zero_grad();
      train(batch(dp_rank(), number));
      ours.step();
    }
  };
  model.join(loop, {.divide_by_initial_world_size = by_everyone});
  for (int number = 0; number < std::max(batches[0], batches[1]); ++number) {
    theirs.zero_grad();
    const auto present = std::ranges::count_if(batches, [&](int count) { return number < count; });
    for (int replica = 0; replica < 2; ++replica) {
      if (number < batches[replica]) (plain(batch(replica, number)) / (by_everyone ? 2 : present)).backward();
    }
    theirs.step();
  }
  for (const auto& named : plain->named_parameters()) {
    expect(close(model.named_parameters()[named.key()], named.value()), named.key() + " after a join");
  }
  shutdown();
}

void copies_with_fewer_batches_join_the_others() {
  for (const auto& batches : {std::vector{2, 4}, std::vector{4, 2}, std::vector{3, 3}}) {
    for (const bool by_everyone : {true, false}) train_unevenly(batches, by_everyone);
  }
}

void copies_join_in_a_plain_loop_and_keep_their_gradients() {
  start();
  DistributedModel model(seeded<Net>());
  std::vector<Tensor> mine;
  model.join([&] {
    for (int i = 0; i <= rank(); ++i) {
      model.zero_grad();
      model(share()).backward();
      mine.clear();
      for (const auto& parameter : model.parameters()) mine.push_back(parameter.grad().clone());
    }
  });
  const auto parameters = model.parameters();
  for (std::size_t i = 0; i < mine.size(); ++i) expect(parameters[i].grad().equal(mine[i]), "a gradient was changed");
  expect(!agrees(parameters[0].grad()), "gradients after a join agree");
  model.zero_grad();
  model(share()).backward();  // after it they need each other again
  expect(agrees(parameters[0].grad()), "gradients after the join and a pass differ");
  shutdown();
}

void buffers_in_join_are_those_of_a_copy_that_trains() {
  start(1);
  DistributedModel model(seeded<NormedNet>());
  const auto train = step([&](const Tensor& x) { model.backward(model(x)); });
  model.join([&] {
    for (int i = 0; i < 1 + 2 * rank(); ++i) train(share() + rank());
  });
  for (const auto& [name, buffer] : model.local_buffers()) {
    expect(agrees(buffer), name + " differs");
    if (name.ends_with("num_batches_tracked")) expect(buffer.item<std::int64_t>() == 3, name);
  }
  shutdown();
}

void the_first_copy_that_leaves_may_be_an_error_of_all() {
  start();
  DistributedModel model(seeded<Net>());
  const auto loop = [&] {
    for (int i = 0; i <= rank(); ++i) model(share()).backward();
  };
  const auto once = [&] { model(share()).backward(); };
  expect_error<UsageError>([&] { model.join(loop, {.throw_on_early_termination = true}); },
                           {"replicas [0] have run out of data"});
  model.join(once, {.throw_on_early_termination = true});
  model.join(once, {.enable = false});
  expect(agrees(model.parameters()[0].grad()), {"gradients differ"});
  shutdown();
}

void an_error_of_the_loop_leaves_join_as_it_is() {
  start();
  DistributedModel model(seeded<Net>());
  expect_error<std::out_of_range>([&] { model.join([] { throw std::out_of_range("of the loop"); }); }, {"of the loop"});
  model(share()).backward();
  expect(agrees(model.parameters()[0].grad()), "gradients differ");
  expect_error<Error>([&] { step([&] { model.join([] {}); })(); }, {"inside a step"});
  shutdown();
}

// The mean over the replicas, as DDP's allreduce_hook makes it.
CommHook allreduce_hook(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return [group](const GradBucket& bucket) {
    std::vector<Tensor> sum{bucket.gradients / group->getSize()};
    group->allreduce(sum)->wait();
    return sum[0];
  };
}

void a_communication_hook_makes_the_gradients() {
  constexpr int kCount = 4;
  start(kCount);
  auto plain = seeded<Net>();
  DistributedModel model(seeded<Net>(), {.bucket_cap_mb = 1e-4});
  std::vector<std::int64_t> indices;
  std::size_t parameters = 0;
  bool last = false;
  model.register_comm_hook([&, mean = allreduce_hook(process_group(Group::kDp))](const GradBucket& bucket) {
    indices.push_back(bucket.index);
    parameters += bucket.parameters.size();
    expect(!last, "a bucket after the last one");
    last = bucket.last;
    return mean(bucket) / kCount;
  });
  step([&](const Tensor& x) { model.backward(model(x)); })(share());
  for (int replica = 0; replica < 2; ++replica) (plain(batch(replica)) / 2).backward();
  expect_gradients(model, plain);
  expect(indices.size() > 1 && parameters == 4 && last, "the buckets are others");
  for (std::size_t i = 0; i < indices.size(); ++i) expect(indices[i] == static_cast<int>(i), "a bucket's index");
  expect_error<UsageError>([&] { model.register_comm_hook([](const GradBucket& b) { return b.gradients; }); },
                           {"once"});
  shutdown();
}

void a_communication_hook_in_join_is_called_by_all() {
  start();
  DistributedModel model(seeded<Net>());
  model.register_comm_hook(allreduce_hook(process_group(Group::kDp)));
  model.join([&] {
    for (int i = 0; i <= rank(); ++i) model(share()).backward();
  });
  for (const auto& parameter : model.parameters()) expect(agrees(parameter), "a parameter differs");
  shutdown();
}

void a_hook_that_returns_something_else_is_an_error() {
  start();
  DistributedModel model(seeded<Net>());
  model.register_comm_hook([](const GradBucket& bucket) { return bucket.gradients.narrow(0, 1, 1); });
  expect_error<UsageError>([&] { model(share()).backward(); }, {"the bucket's size and type"});
  shutdown();
}

void a_hook_of_a_copy_without_others_is_called() {
  init({{"partitions", 2}, {"ddp", true}, {"microbatches", 2}});
  DistributedModel model(seeded<Net>());
  int buckets = 0;
  model.register_comm_hook([&](const GradBucket& bucket) {
    ++buckets;
    return bucket.gradients * 3;
  });
  auto plain = seeded<Net>();
  step([&](const Tensor& x) { model.backward(model(x)); })(batch(0));
  (plain(batch(0)) * 2 * 3).backward();
  for (const auto& [name, parameter] : model.local_parameters()) {
    expect(close(parameter.grad(), plain->named_parameters()[name].grad()), name + "'s gradient by a hook");
  }
  expect(buckets == 1, "the hook was not called once");
  shutdown();
}

void a_model_that_was_converted_is_averaged() {
  start();
  DistributedModel model(seeded<Net>());
  for (const auto type : {torch::kFloat, torch::kDouble}) {
    model->to(type);
    model.zero_grad();
    model(share().to(type)).backward();
    for (const auto& parameter : model.parameters()) expect(agrees(parameter.grad()), "a gradient was left out");
  }
  shutdown();
}

void an_update_has_what_is_left_over_of_an_accumulation() {
  start();
  auto plain = seeded<Net>();
  DistributedModel model(seeded<Net>(), {.backward_passes_per_step = 2});
  torch::optim::SGD theirs(plain->parameters(), 0.1);
  DistributedOptimizer ours(torch::optim::SGD(model.parameters(), 0.1));
  for (int number = 0; number < 4; ++number) {
    model(batch(dp_rank(), number)).backward();
    for (int replica = 0; replica < 2; ++replica) (plain(batch(replica, number)) / 2).backward();
    if (number == 1) continue;
    const auto norm = model.clip_grad_norm_(0.01);
    expect(close(norm, torch::tensor(torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.01), torch::kDouble)),
           "the norm of what is left over");
    ours.step();
    theirs.step();
    ours.zero_grad();
    theirs.zero_grad();
  }
  for (const auto& named : plain->named_parameters()) {
    expect(close(model.named_parameters()[named.key()], named.value()), named.key() + " after a left-over pass");
  }
  shutdown();
}

void no_sync_keeps_gradients_here_until_the_next_backward() {
  start();
  auto plain = seeded<Net>();
  DistributedModel model(seeded<Net>());
  model.no_sync([&] {
    for (int number = 0; number <= rank(); ++number) model(batch(rank(), number)).backward();
  });
  expect(!agrees(model.parameters()[0].grad()), "gradients were averaged in no_sync()");
  model(batch(rank(), 5)).backward();
  for (int replica = 0; replica < 2; ++replica) {
    for (const int number : {0, 1, 5}) {
      if (number != 1 || replica == 1) (plain(batch(replica, number)) / 2).backward();
    }
  }
  expect_gradients(model, plain);
  shutdown();
}

void a_copy_that_leaves_out_a_backward_is_told_of() {
  start();
  DistributedModel model(seeded<Net>());
  DistributedOptimizer optimizer(torch::optim::SGD(model.parameters(), 0.1));
  const auto iteration = [&] {
    optimizer.zero_grad();
    model(share()).backward();
    optimizer.step();
  };
  iteration();
  if (rank() == 1) model(share());
  expect_error<DesyncError>(iteration, {"from different iterations: replica 0", "[replica-iterations]"});
  shutdown();
}

void each_backward_since_the_last_update_is_to_be_scaled() {
  start(1);
  DistributedModel model(seeded<Net>());
  DistributedOptimizer optimizer(torch::optim::SGD(model.parameters(), 0.1), LossScale(1024));
  model.backward(model(share()));
  model(share()).backward();
  expect_error<UsageError>([&] { optimizer.step(); }, {"some came from a loss.backward()", "[optimizer-not-scaled]"});
  optimizer.zero_grad();
  model.backward(model(share()));
  optimizer.step();
  shutdown();
}

void joining_and_hooks_need_ddp() {
  start(2, /*ddp=*/false);
  DistributedModel model(seeded<Net>());
  expect_error<UsageError>([&] { model.join([] {}); }, {"join() needs ddp"});
  expect_error<UsageError>([&] { model.register_comm_hook([](const GradBucket& b) { return b.gradients; }); },
                           {"register_comm_hook() needs ddp"});
  shutdown();
  start();
  DistributedModel another(seeded<Net>());
  expect_error<UsageError>([&] { another.register_comm_hook(CommHook()); }, {"takes a function"});
  shutdown();
}

// Layouts of two ranks in which something stands for parameters in the groups.
void start_with(bool shared_states, int degree, bool bf16) {
  init({{"ddp", true},
        {"shard_optimizer_state", shared_states},
        {"sharded_data_parallel_degree", degree},
        {"sdp_param_persistence_threshold", 0},
        {"bf16", bf16},
        {"timeout_s", 30}});
}

void parameters_may_lie_in_any_memory() {
  std::vector<torch::OrderedDict<std::string, Tensor>> found;
  for (const bool moves : {false, true}) {
    start_with(/*shared_states=*/true, 1, /*bf16=*/false);
    DistributedModel model(seeded<Net>());
    DistributedOptimizer optimizer(torch::optim::AdamW(model.parameters(), torch::optim::AdamWOptions(0.01)));
    for (int number = 0; number < 3; ++number) {
      for (auto& parameter : model.parameters()) {
        if (moves && number > 0 && parameter.dim() > 1) {
          parameter.set_data(parameter.detach().t().contiguous().t());
        } else if (moves && number > 0) {
          parameter.set_data(torch::cat({parameter.detach(), parameter.detach()}).slice(0, parameter.numel()));
        }
      }
      model.backward(model(share()));
      optimizer.step();
      optimizer.zero_grad();
    }
    found.push_back(model.state_dict());
    shutdown();
  }
  for (const auto& named : found[0]) expect(close(found[1][named.key()], named.value()), named.key() + " was moved");
}

void what_is_written_to_half_parameters_stays() {
  for (const bool shared_states : {false, true}) {
    start_with(shared_states, 1, /*bf16=*/true);
    DistributedModel model(seeded<Net>());
    DistributedOptimizer optimizer(torch::optim::SGD(model.parameters(), torch::optim::SGDOptions(0.0)));
    for (const bool counted : {true, false}) {  // by torch, as a change of the tensor
      model.backward(model(share().to(torch::kBFloat16)));
      optimizer.step();
      const torch::NoGradGuard no_grad;
      for (auto& parameter : model.parameters()) {
        counted ? parameter.fill_(3) : parameter.variable_data().fill_(5);
      }
      const torch::AutoGradMode grad(true);
      model.backward(model(share().to(torch::kBFloat16)));
      optimizer.step();
      for (const auto& parameter : model.parameters()) {
        expect(parameter.eq(counted ? 3 : 5).all().item<bool>(), "a parameter has what was written to it");
      }
    }
    shutdown();
  }
}

void parameters_beside_the_model_are_averaged() {
  for (const bool before : {true, false}) {
    start();
    auto plain = seeded<Net>();
    torch::manual_seed(1 + dp_rank());
    auto weight = torch::randn({6}, torch::kDouble).requires_grad_();
    const auto first = all_gather(Group::kDp, weight.detach().clone()).front();
    auto whole = first.clone().requires_grad_();
    DistributedModel model(seeded<Net>());
    if (!before) model(share());  // is cut
    auto parameters = model.parameters();
    parameters.push_back(weight);
    DistributedOptimizer ours(torch::optim::SGD(parameters, torch::optim::SGDOptions(0.1)));
    torch::optim::SGD theirs({whole}, torch::optim::SGDOptions(0.1));
    for (int number = 0; number < 2; ++number) {
      model.backward(model(batch(dp_rank(), number) * weight));
      for (const int replica : {0, 1}) (plain->forward(batch(replica, number) * whole) / 2).backward();
      expect(close(weight.grad(), whole.grad()), "the gradient beside the model");
      torch::optim::SGD(plain->parameters(), torch::optim::SGDOptions(0.1)).step();
      ours.step();
      theirs.step();
      ours.zero_grad();
      theirs.zero_grad();
      plain->zero_grad();
    }
    expect(close(weight, whole) && agrees(weight), "the parameter beside the model");
    torch::serialize::OutputArchive archive;
    ours.save(archive);
    shutdown();
  }
}

void options_that_differ_are_an_error_of_all() {
  for (const double scale : {1.0, 8.0}) {  // measured, or not
    start();
    DistributedModel model(seeded<Net>());
    torch::optim::SGD sgd(model.parameters(), torch::optim::SGDOptions(0.1));
    DistributedOptimizer optimizer(std::move(sgd), LossScale(scale));
    model.backward(model(share()));
    auto& options = static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[0].options());
    options.lr(0.1 * (1 + dp_rank()));
    const auto before = model.parameters()[0].detach().clone();
    expect_error<UsageError>([&] { optimizer.step(); },
                             {"lr of group 0 is 0.1 on rank 0 and 0.2 on rank 1", "[optimizer-differs]"});
    expect(model.parameters()[0].equal(before), "nothing was updated");
    options.lr(0.3);
    optimizer.step();
    shutdown();
  }
}

class BreaksOff : public torch::optim::SGD {
 public:
  using SGD::SGD;
  bool breaks = false;

  torch::Tensor step(LossClosure closure = nullptr) override {
    if (std::exchange(breaks, false)) throw std::runtime_error("broken off");
    return SGD::step(std::move(closure));
  }
};

void an_update_that_one_breaks_off_is_an_error_of_all() {
  start();
  DistributedModel model(seeded<Net>());
  auto sgd = std::make_unique<BreaksOff>(model.parameters(), torch::optim::SGDOptions(0.1));
  sgd->breaks = dp_rank() == 1;
  DistributedOptimizer<BreaksOff> optimizer(std::move(sgd));
  model.backward(model(share()));
  const auto update = [&] { optimizer.step(); };
  dp_rank() == 1 ? expect_error<std::runtime_error>(update, {"broken off"}) : update();
  model.backward(model(share()));
  expect_error<UsageError>([&] { optimizer.step(); },
                           {"the number of updates that an error broke off is 0 on rank 0 and 1 on rank 1"});
  shutdown();
}

}  // namespace

int main() {
  torch::set_num_threads(1);
  for (const auto& check : {copies_with_fewer_batches_join_the_others,
                            copies_join_in_a_plain_loop_and_keep_their_gradients,
                            buffers_in_join_are_those_of_a_copy_that_trains,
                            the_first_copy_that_leaves_may_be_an_error_of_all,
                            an_error_of_the_loop_leaves_join_as_it_is,
                            a_communication_hook_makes_the_gradients,
                            a_communication_hook_in_join_is_called_by_all,
                            a_hook_that_returns_something_else_is_an_error,
                            a_hook_of_a_copy_without_others_is_called,
                            a_model_that_was_converted_is_averaged,
                            an_update_has_what_is_left_over_of_an_accumulation,
                            no_sync_keeps_gradients_here_until_the_next_backward,
                            a_copy_that_leaves_out_a_backward_is_told_of,
                            each_backward_since_the_last_update_is_to_be_scaled,
                            joining_and_hooks_need_ddp,
                            parameters_may_lie_in_any_memory,
                            what_is_written_to_half_parameters_stays,
                            parameters_beside_the_model_are_averaged,
                            options_that_differ_are_an_error_of_all,
                            an_update_that_one_breaks_off_is_an_error_of_all}) {
    check();
  }
  return exit_code();
}
