// SPDX-License-Identifier: Apache-2.0
// Loss scales, masters of half-precision models and divided states over four ranks, as
// tests/multiprocess/cases_precision.py has them for Python. Each check begins a job of its own.
//
//     lamina run -n 4 -c frontend_precision
#include <cmath>
#include <limits>

#include "tests/frontend/expect.h"
#include "tests/frontend/net.h"

namespace {

using namespace lamina;
using namespace lamina::frontend::test;

struct Layout {
  int partitions, degree;
  bool shared_states;
  std::string half;  // "fp16", "bf16", or nothing
  std::string reduce_dtype = half.empty() ? "fp32" : half;

  void start() const {
    init({{"ddp", true},
          {"pipeline_parallel_degree", partitions},
          {"sharded_data_parallel_degree", degree},
          {"shard_optimizer_state", shared_states},
          {"sdp_param_persistence_threshold", 10},
          {"sdp_gradient_clipping", 1e9},
          {"fp16", half == "fp16"},
          {"bf16", half == "bf16"},
          {"reduce_dtype", reduce_dtype},
          {"timeout_s", 30}});
  }
  torch::Dtype dtype() const { return half.empty() ? torch::kFloat : half == "fp16" ? torch::kHalf : torch::kBFloat16; }
};

// Compared with the plain loop over the whole batch, which has masters.
void train(const Layout& layout) {
  layout.start();
  auto plain = seeded();
  plain->to(layout.dtype());
  std::vector<Tensor> masters;
  for (const auto& parameter : plain->parameters()) {
    masters.push_back(parameter.detach().to(torch::kFloat).clone().requires_grad_());
  }
  const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
  torch::optim::SGD theirs(masters, options);
  DistributedModel model(seeded());
  DistributedOptimizer ours(torch::optim::SGD(model.parameters(), options), LossScale(128));
  const auto step_once = step([&](const Tensor& x) { model.backward(model(x).to(torch::kFloat).square().mean()); });
  for (int number = 0; number < 4; ++number) {
    step_once(share().to(layout.dtype()));
    plain->forward(batch().to(layout.dtype())).to(torch::kFloat).square().mean().backward();
    auto parameters = plain->parameters();
    for (std::size_t i = 0; i < masters.size(); ++i) {
      masters[i].mutable_grad() = parameters[i].grad().to(torch::kFloat);
      parameters[i].mutable_grad().reset();
    }
    const auto norm = torch::nn::utils::clip_grad_norm_(masters, 0.3);
    expect(std::abs(ours.clip_master_grads(0.3) - norm) < 2e-2 * norm, "the norm of the gradients");
    theirs.step();
    for (std::size_t i = 0; i < masters.size(); ++i) parameters[i].set_data(masters[i].detach().to(layout.dtype()));
    ours.step();
    expect(!ours.overflow(), "no overflow");
    ours.zero_grad();
  }
  const bool is_exact = layout.half.empty() && layout.reduce_dtype == "fp32";
  const double tolerance = is_exact ? 1e-6 : layout.half == "fp16" ? 3e-3 : 2e-2;
  const auto state = model.state_dict();
  for (const auto& named : plain->named_parameters()) {
    expect(torch::allclose(state[named.key()], named.value(), tolerance, tolerance), named.key() + " after four steps");
  }
  shutdown();
}

void infinities(const Layout& layout) {
  layout.start();
  DistributedModel model(seeded());
  DistributedOptimizer ours(torch::optim::AdamW(model.parameters(), torch::optim::AdamWOptions(1e-2)),
                            LossScale(DynamicLossScale{.init_scale = 256}));
  const auto step_once = step([&](const Tensor& x) { model.backward(model(x).to(torch::kFloat).square().mean()); });
  for (int where = 0; where < 4; ++where) {
    const auto x = share().to(layout.dtype());
    const auto loss = where == rank_in(Group::kDp) * layout.partitions ? std::numeric_limits<float>::infinity() : 1.f;
    step_once(x * loss);
    const auto before = model.state_dict();
    ours.step();
    ours.zero_grad();
    const bool left_out = where % layout.partitions == 0;
    expect(ours.overflow() == left_out, "a step is left out where a copy reads infinities");
    const auto after = model.state_dict();
    for (const auto& named : before) {
      if (left_out) expect(torch::equal(named.value(), after[named.key()]), named.key() + " stays");
    }
  }
  expect(ours.loss_scale() == 256 / std::pow(2, 4 / layout.partitions), "the scale is smaller after each");
  shutdown();
}

// Gradients of a backward that comes between clipping and the step are clipped with the others, on all ranks alike.
void adds_after_clipping(const Layout& layout) {
  std::vector<torch::OrderedDict<std::string, Tensor>> found;
  for (const bool clips_early : {false, true}) {
    layout.start();
    DistributedModel model(seeded());
    DistributedOptimizer ours(torch::optim::SGD(model.parameters(), torch::optim::SGDOptions(0.1)), LossScale(128));
    const auto step_once = step([&](const Tensor& x) { model.backward(model(x).to(torch::kFloat).square().mean()); });
    step_once(share().to(layout.dtype()));
    if (clips_early) ours.clip_master_grads(1e-3);
    step_once(share().to(layout.dtype()));
    if (!clips_early) ours.clip_master_grads(1e-3);
    ours.step();
    ours.zero_grad();
    found.push_back(model.state_dict());
    shutdown();
  }
  for (const auto& named : found[0]) {
    expect(torch::equal(named.value(), found[1][named.key()]), named.key() + " is clipped alike");
  }
}

void converts_buffers(const char* buffer_dtype, torch::Dtype expected) {
  init({{"ddp", true}, {"bf16", true}, {"buffer_dtype", buffer_dtype}, {"timeout_s", 30}});
  auto module = seeded();
  const auto buffer = module->register_buffer("mean", torch::full({3}, 1. / 3));
  const DistributedModel model(module);
  expect(buffer.dtype() == expected, "a buffer has the dtype that buffer_dtype says");
  expect(module->parameters().front().dtype() == torch::kBFloat16, "a parameter is half");
  shutdown();
}

// An optimizer may live longer than its job: then its masters are of no model any more.
void ends(bool begins_another) {
  const Layout layout{4, 1, false, "bf16"};
  layout.start();
  DistributedModel model(seeded());
  DistributedOptimizer ours(torch::optim::SGD(model.parameters(), torch::optim::SGDOptions(0.1)));
  const auto step_once = step([&](const Tensor& x) { model.backward(model(x).to(torch::kFloat).square().mean()); });
  step_once(share().to(layout.dtype()));
  ours.step();
  shutdown();
  if (begins_another) layout.start();
  const std::vector<std::string> words{"whose job was shut down", "[step-after-shutdown]"};
  expect_error<UsageError>([&] { ours.clip_master_grads(1); }, words);
  if (!ours.param_groups()[0].params().empty()) expect_error<UsageError>([&] { ours.step(); }, words);
  if (begins_another) shutdown();
}

}  // namespace

int main() {
  torch::set_num_threads(1);
  for (const auto* half : {"", "fp16", "bf16"}) {
    train({4, 1, false, half});
    train({2, 1, false, half});
    train({1, 1, true, half});
    train({2, 1, true, half});
    train({1, 4, false, half});
    train({2, 2, false, half});
  }
  for (const auto* half : {"", "bf16"}) {
    for (const auto* reduce_dtype : {"bf16", "fp32"}) {
      train({1, 1, false, half, reduce_dtype});
      train({2, 2, false, half, reduce_dtype});
    }
  }
  converts_buffers("own", torch::kFloat);
  converts_buffers("fp32", torch::kFloat);
  converts_buffers("fp16", torch::kHalf);
  infinities({2, 1, false, "fp16"});
  infinities({1, 4, false, "fp16"});
  infinities({1, 1, true, "fp16"});
  adds_after_clipping({4, 1, false, ""});
  adds_after_clipping({2, 2, false, "fp16"});
  ends(false);
  ends(true);
  return exit_code();
}
