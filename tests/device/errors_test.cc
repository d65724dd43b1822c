// SPDX-License-Identifier: Apache-2.0
// Errors of a device say in programs in C++, too, what the memory was for, and where to look for a failed kernel. With
// EMULATED_MEMORY of 8 MB.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <thread>

#include "lamina/lamina.h"
#include "tests/emulated/emulated.h"

namespace {

using namespace lamina;
using at::Tensor;
using testing::AllOf;
using testing::HasSubstr;

constexpr int kWidth = 300, kRows = 6000;  // a layer of 353 KiB, and activations of 6.9 MiB

struct NetImpl : torch::nn::Module {
  Child<torch::nn::Linear> layer;
  NetImpl() { layer = register_module("layer", torch::nn::Linear(kWidth, kWidth)); }
  Tensor forward(const Tensor& x) { return layer(x); }
};
using Net = torch::nn::ModuleHolder<NetImpl>;

template <class Thrown>
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Thrown& error) {
    return error.what_without_backtrace();
  }
  return "none";
}

TEST(FullMemory, IsToldWithTheModuleTheBytesByKindAndWhatLowersThem) {
  init({{"device", "emulated"}});
  DistributedModel model((Net()));
  DistributedOptimizer optimizer(torch::optim::Adam(model.parameters(), {}));
  const auto run = step([&](const Tensor& x) { model.backward(model(x).sum()); });
  run(torch::ones({2, kWidth}, device()));
  optimizer.step();
  const auto batch = torch::ones({1, kWidth}, device()).expand({kRows, kWidth});
  const auto told =
      AllOf(HasSubstr("emulated out of memory. Tried to allocate "), HasSubstr("in layer"),
            HasSubstr("rank 0 of 1: the memory of emulated:0 was full. It had 352.7 KiB of parameters and "
                      "buffers, 352.7 KiB of gradients, 705.5 KiB of optimizer states, and up to "),
            HasSubstr("activations shrink with more microbatches (1)"));
  EXPECT_THAT(error_of<c10::OutOfMemoryError>([&] { run(batch); }), told);
  EXPECT_THAT(error_of<c10::OutOfMemoryError>([&] { model(batch); }), told);
  shutdown();
}

// The last one: the process has lost that device then.
TEST(FailedKernel, IsToldWithWhereToLook) {
  init({{"device", "emulated:1"}});
  DistributedModel model((Net()));
  const auto run = step([&](const Tensor& x) {
    const auto beyond = torch::full({1}, 9, torch::dtype(torch::kLong).device(device()));
    model.backward(model(x + x.new_ones({4}).gather(0, beyond)).sum());
  });
  const auto batch = torch::ones({2, kWidth}, device());
  const auto fail = [&] {
    for (int i = 0; i < 1000; ++i) {  // however late the device comes to it
      run(batch);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  };
  const auto told =
      AllOf(HasSubstr("a kernel failed on device 1"), HasSubstr("rank 0 of 1: kernels run later than they are called"));
  EXPECT_THAT(error_of<c10::AcceleratorError>(fail), told);
  EXPECT_EQ(error_of<c10::AcceleratorError>([] { shutdown(); }).find("none"), std::string::npos);
}

}  // namespace

int main(int argc, char** argv) {
  emulated::reset_counts();  // the linker keeps a library of which something is called
  testing::InitGoogleTest(&argc, argv);
  const int failed = RUN_ALL_TESTS();
  std::fflush(nullptr);
  ::_exit(failed);  // of a process that has lost its device the exit code is another one
}
