// SPDX-License-Identifier: Apache-2.0
// Checkpoints of programs in C++ have the random numbers of the rank's device.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "lamina/lamina.h"
#include "tests/emulated/emulated.h"

namespace {

using namespace lamina;
using at::Tensor;
namespace fs = std::filesystem;

struct NetImpl : torch::nn::Module {
  Child<torch::nn::Linear> in, out;
  Child<torch::nn::Dropout> drop;
  NetImpl() {
    in = register_module("in", torch::nn::Linear(6, 16));
    drop = register_module("drop", torch::nn::Dropout(0.5));
    out = register_module("out", torch::nn::Linear(16, 1));
  }
  Tensor forward(const Tensor& x) { return out(drop(in(x))); }
};
using Net = torch::nn::ModuleHolder<NetImpl>;

struct Job {
  explicit Job(const std::string& device)
      : model((init({{"device", device}, {"timeout_s", 60}}), torch::manual_seed(0), Net())),
        optimizer(std::make_unique<torch::optim::AdamW>(model.parameters(), torch::optim::AdamWOptions(1e-2))) {}
  ~Job() { shutdown(); }
  Job(const Job&) = delete;

  // The loss of a step, and what the program draws after it on its device and the host.
  std::vector<float> train() {
    const auto x = torch::ones({4, 6}, device());
    const auto found = step([this](const Tensor& x) {
      const auto loss = model(x).square().mean();
      model.backward(loss);
      return loss;
    })(x);
    optimizer.step();
    optimizer.zero_grad();
    const auto on_host = torch::rand({1}).item<float>();
    const auto on_device = device() == at::kCPU ? 0 : torch::rand({1}, device()).item<float>();
    return {found.reduce_mean().item<float>(), on_device, on_host};
  }

  DistributedModel<Net> model;
  DistributedOptimizer<torch::optim::AdamW> optimizer;
};

class Checkpoints : public testing::Test {
 protected:
  Checkpoints() {
    emulated::reset_counts();  // the linker keeps a library of which something is called
    fs::remove_all(folder_);
  }
  ~Checkpoints() override { fs::remove_all(folder_); }

  // Has a job on that device, which goes on from the checkpoint that is there, save another; gives what its next two
  // steps come to.
  std::vector<std::vector<float>> saved(const std::string& device, bool goes_on = false) {
    Job job(device);
    if (goes_on) resume_from_checkpoint(folder_, {.tag = "one"});
    job.train();
    save_checkpoint(folder_, "one");
    return {job.train(), job.train()};
  }
  std::vector<std::vector<float>> resumed(const std::string& device) {
    Job job(device);
    torch::rand({7}, lamina::device());
    resume_from_checkpoint(folder_, {.tag = "one"});
    return {job.train(), job.train()};
  }

  const fs::path folder_ = fs::temp_directory_path() / ("lamina_device_checkpoints_" + std::to_string(::getpid()));
};

TEST_F(Checkpoints, GoOnWithTheNumbersOfTheDevice) {
  const auto expected = saved("emulated:1");
  EXPECT_EQ(resumed("emulated:2"), expected);
}

TEST_F(Checkpoints, OfADeviceLoadOnTheHostAndBack) {
  saved("emulated");
  const auto expected = saved("cpu", /*goes_on=*/true), found = resumed("emulated");
  for (int step = 0; step < 2; ++step) EXPECT_EQ(found[step][2], expected[step][2]) << "the host's, in step " << step;
}

}  // namespace
