// SPDX-License-Identifier: Apache-2.0
// Programs in C++ whose ranks compute on emulated accelerators, each on one of its own, train as one process does on
// the host. Each check begins a job of its own.
//
//     lamina run -n 4 -c device_groups
#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lamina/frontend/current.h"
#include "tests/emulated/emulated.h"
#include "tests/frontend/data_of_copies.h"
#include "tests/frontend/expect.h"

namespace {

using namespace lamina;
using namespace lamina::frontend::test;

struct Layout {
  int partitions, degree;
  std::string name() const { return std::to_string(partitions) + " partitions, shards of " + std::to_string(degree); }
};

void begin(const Layout& layout) {
  init({{"ddp", true},
        {"pipeline_parallel_degree", layout.partitions},
        {"microbatches", 2},
        {"sharded_data_parallel_degree", layout.degree},
        {"sdp_param_persistence_threshold", 0},
        {"device", "emulated"},
        {"timeout_s", 60}});
}

// Compared with the plain loop over the data of all copies.
void train(const Layout& layout) {
  begin(layout);
  expect(device() == at::Device(at::kPrivateUse1, static_cast<at::DeviceIndex>(local_rank())), "its own device");
  auto plain = seeded();
  DistributedModel model(seeded(rank()));
  const auto options = torch::optim::AdamWOptions(1e-2);
  torch::optim::AdamW theirs(plain->parameters(), options);
  DistributedOptimizer ours(torch::optim::AdamW(model.parameters(), options));
  const auto step_once = step([&](const Tensor& x) { model.backward(model(x)); });
  for (int number = 0; number < 3; ++number) {
    step_once(batch(rank_in(Group::kRdp), number));
    plain->forward(everybodys(number)).backward();
    const auto norm = model.grad_norm();
    const auto clipped = torch::nn::utils::clip_grad_norm_(plain->parameters(), 1e9);
    expect(std::abs(norm.item<double>() - clipped) < 1e-9, layout.name() + ": the norm of the gradients");
    ours.step();
    theirs.step();
    ours.zero_grad();
    theirs.zero_grad();
  }
  const auto state = model.state_dict();
  for (const auto& named : plain->named_parameters()) {
    expect(close(state[named.key()], named.value()), layout.name() + ": " + named.key() + " after three steps");
  }
  shutdown();
}

// Collectives of torch's group, of tensors of the device and of the host.
void use_groups() {
  begin({1, 1});
  const auto group = process_group(Group::kWorld);
  const auto mine = static_cast<double>(rank());
  for (const auto where : {device(), at::Device(at::kCPU)}) {
    auto sum = torch::full({3}, mine, at::device(where));
    std::vector<Tensor> one{sum};
    group->allreduce(one)->wait();
    sum += 1;
    expect(close(sum, torch::full({3}, size() * (size() - 1) / 2 + 1.)), "a sum on " + where.str());
    std::vector<std::vector<Tensor>> all{{}};
    for (int i = 0; i < size(); ++i) all[0].push_back(torch::empty({2}, at::device(where)));
    std::vector<Tensor> given{torch::full({2}, mine, at::device(where))};
    group->allgather(all, given)->wait();
    for (int i = 0; i < size(); ++i) expect(close(all[0][i], torch::full({2}, 1. * i)), "all parts on " + where.str());
    const int next = (rank() + 1) % size(), last = (rank() + size() - 1) % size();
    std::vector<Tensor> received{torch::empty({2}, at::device(where))};
    const auto sends = group->send(given, next, 0), receives = group->recv(received, last, 0);
    sends->wait();
    receives->wait();
    expect(close(received[0], torch::full({2}, 1. * last)), "a message on " + where.str());
  }
  shutdown();
}

// While the device has to compute for long, the host goes on: it waits where it waits for the others.
void host_goes_on() {
  begin({1, 1});
  const auto group = process_group(Group::kWorld);
  auto x = torch::ones({1000}, at::device(device()));
  emulated::reset_counts();
  for (int i = 0; i < 20; ++i) {
    std::vector<Tensor> one{x};
    group->allreduce(one)->wait();
    x.div_(size());
  }
  expect(emulated::counts().waits == 0, "the host waited for the device");
  expect(close(x, torch::ones({1000})), "the mean of equal values");
  shutdown();
}

// Has the first to end a sum leave while others are amid it: it ends well for them.
void leave_at_once() {
  for (int round = 0; round < 5; ++round) {
    begin({1, 1});
    std::vector<Tensor> one{torch::full({1 << 20}, 1. + rank(), at::device(device()))};
    process_group(Group::kWorld)->allreduce(one)->wait();
    if (rank() != round % size()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    expect(close(one[0].slice(0, 0, 2), torch::full({2}, size() * (size() + 1) / 2.)), "the last sum of a job");
    shutdown();
  }
}

// Hears of ranks that end while the groups are let go of: another thread says so.
void hear_of_ends_at_the_end() {
  for (int round = 0; round < 5; ++round) {
    begin({1, 1});
    for (const auto axis : {Group::kWorld, Group::kDp, Group::kPp, Group::kTp, Group::kRdp}) process_group(axis);
    auto& groups = frontend::current().session->groups();
    std::atomic<bool> hears = false;
    std::jthread transport([&](const std::stop_token& over) {
      while (!over.stop_requested()) {
        groups.lose(base::Rank(size()));  // no member of any
        hears = true;
      }
    });
    while (!hears) std::this_thread::yield();
    groups.close();
    transport = {};
    shutdown();
  }
}

}  // namespace

int main() {
  torch::set_num_threads(1);
  use_groups();
  host_goes_on();
  leave_at_once();
  hear_of_ends_at_the_end();
  const int ranks = std::atoi(std::getenv("WORLD_SIZE"));
  train({1, 1});
  train({1, 2});
  train({2, 1});
  if (ranks == 4) {
    train({1, 4});
    train({2, 2});
  }
  return exit_code();
}
