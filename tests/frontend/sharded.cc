// SPDX-License-Identifier: Apache-2.0
// Sharded parameters over four ranks, as tests/multiprocess/cases_sharded.py has them for Python. Each check begins a
// job of its own.
//
//     lamina run -n 4 -c frontend_sharded
#include <cmath>

#include "tests/frontend/data_of_copies.h"
#include "tests/frontend/expect.h"

namespace {

using namespace lamina;
using namespace lamina::frontend::test;

struct Layout {
  int degree, partitions, accumulate, threshold;
  std::optional<double> clipping;
  bool reshards = true;
  std::vector<std::string> units = {"in", "hidden", "out"};
};

// Compared with the plain loop over the data of all copies.
void train(const Layout& layout) {
  Setting clipping(std::nullopt);
  if (layout.clipping) clipping = *layout.clipping;
  init({{"ddp", true},
        {"pipeline_parallel_degree", layout.partitions},
        {"microbatches", 2},
        {"sharded_data_parallel_degree", layout.degree},
        {"sdp_param_persistence_threshold", layout.threshold},
        {"sdp_gradient_clipping", clipping},
        {"sdp_reshard_after_forward", layout.reshards},
        {"sdp_reshard_after_backward", layout.reshards},
        {"sdp_backward_prefetch", "post"},
        {"sdp_units", layout.units},
        {"timeout_s", 30}});
  auto plain = seeded();
  DistributedModel model(seeded(rank()), ModelOptions{.backward_passes_per_step = layout.accumulate});
  const auto options = torch::optim::AdamWOptions(1e-2);
  torch::optim::AdamW theirs(plain->parameters(), options);
  DistributedOptimizer ours(torch::optim::AdamW(model.parameters(), options));
  const auto step_once = step([&](const Tensor& x) { model.backward(model(x)); });
  for (int number = 0; number < 3; ++number) {
    for (int pass = 0; pass < layout.accumulate; ++pass) {
      step_once(batch(rank_in(Group::kRdp), 10 * number + pass));
      plain->forward(everybodys(10 * number + pass)).backward();
    }
    const auto norm = model.grad_norm();
    const auto clipped = torch::nn::utils::clip_grad_norm_(plain->parameters(), layout.clipping.value_or(1e9));
    expect(std::abs(norm.item<double>() - clipped) < 1e-9, "the norm of the gradients");
    ours.step();
    theirs.step();
    ours.zero_grad();
    theirs.zero_grad();
  }
  const auto state = model.state_dict();
  for (const auto& named : plain->named_parameters()) {
    expect(close(state[named.key()], named.value()), named.key() + " after three steps");
  }
  const auto other = seeded(7);
  model.load_state_dict(other->named_parameters());
  const auto loaded = model.state_dict();
  for (const auto& named : other->named_parameters()) {
    expect(close(loaded[named.key()], named.value()), named.key() + " loaded");
  }
  shutdown();
}

// One of a program's own, that may look at whole parameters.
struct Own : torch::optim::SGD {
  using torch::optim::SGD::SGD;
};

void refusals() {
  init({{"ddp", true}, {"sharded_data_parallel_degree", 2}, {"sdp_param_persistence_threshold", 0}, {"timeout_s", 30}});
  DistributedModel model(seeded());
  expect_error<UsageError>([&] { DistributedOptimizer own(Own(model.parameters(), 0.1)); },
                           {"Own with sharded_data_parallel_degree", "kWhole", "[shard-optimizer]"});
  expect_error<UsageError>([&] { DistributedOptimizer lbfgs(torch::optim::LBFGS(model.parameters())); },
                           {"LBFGS with sharded_data_parallel_degree"});
  shutdown();
}

}  // namespace

int main() {
  torch::set_num_threads(1);
  train({4, 1, 1, 0, 1e9});
  train({2, 1, 1, 0, 0.05});
  train({2, 1, 3, 6, 0.05});
  train({2, 2, 1, 0, 0.05});
  train({2, 2, 2, 0, {}, /*reshards=*/false, {"hidden"}});
  refusals();
  return exit_code();
}
