// SPDX-License-Identifier: Apache-2.0
// Memory that is alive after many steps whose results were references.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>

#include "tests/pipeline/reference_fixture.h"
#include "tests/value/sent.h"

namespace lamina::pipeline {
namespace {

using value::Value;

std::atomic<std::int64_t> live_bytes = 0;

// Torch's allocator, while it lives; knows how many bytes of tensors made meanwhile are alive.
class Counting : public c10::Allocator {
 public:
  Counting() { c10::SetCPUAllocator(this); }
  ~Counting() override { c10::SetCPUAllocator(usual_); }

  c10::DataPtr allocate(std::size_t size) override {
    live_bytes += static_cast<std::int64_t>(size);
    auto* block = new Block{usual_->allocate(size), size};
    return {block->memory.get(), block, &free, block->memory.device()};
  }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }

 private:
  struct Block {
    c10::DataPtr memory;
    std::size_t size;
  };
  static void free(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    live_bytes -= static_cast<std::int64_t>(block->size);
  }
  c10::Allocator* const usual_ = c10::GetCPUAllocator();
};

// A model of three ranks that passes results on unread, nests calls, returns several, and drops some.
struct Busy {
  Busy() : model(3, "interleaved", /*seed=*/7) {
    first = model.add_scaling("first", 1, weights[0]);
    inner = model.add_scaling("inner", 2, weights[1]);
    middle = model.add("middle", 1, [this](Job& job) {
      return [this, &job](Value v) {
        const auto y = tensor_in(job.call(inner, tensor_in(v) * 2));
        return Value(value::List{{y, tensor_in(v) * weights[2], tensor_in(job.call(inner, y))}});
      };
    });
    last = model.add_scaling("last", 2, weights[3]);
  }

  // One of the four microbatches is only evaluated, and one is not read at all.
  void step() {
    model.run(4, [this](base::Microbatch microbatch) {
      const auto outputs = model.job(0).call(middle, model.call(first, at::ones({kSize}, at::kDouble)));
      const auto y = model.call(last, value::tensor_at(outputs, 0)) + value::tensor_at(outputs, 2);
      if (microbatch.value == 0) return;
      const auto loss = (y + value::tensor_at(outputs, 1)).sum();
      if (microbatch.value == 1) {
        EXPECT_GT(loss.item<double>(), 0);
      }
      if (microbatch.value > 1) model.backward(loss);
    });
  }

  static constexpr std::int64_t kSize = 1000;
  std::vector<at::Tensor> weights{leaf(2, kSize), leaf(3, kSize), leaf(5, kSize), leaf(7, kSize)};
  Model model;
  base::ModuleId first, inner, middle, last;
};

TEST(ReferenceMemory, ALiveByteOfOneStepIsNotAliveAHundredStepsLater) {
  Counting counting;
  {
    Busy busy;
    for (int step = 0; step < 5; ++step) busy.step();
    const auto early = live_bytes.load();
    EXPECT_EQ(early, 8 * Busy::kSize * 8) << "four weights and four gradients of doubles";
    for (int step = 0; step < 100; ++step) {
      busy.step();
      ASSERT_EQ(live_bytes, early) << "after " << step + 1 << " more steps";
    }
  }
  EXPECT_EQ(live_bytes, 0);
}

TEST(ReferenceMemory, AStepThatFailsLeavesNothingOfABackwardThatWaitedForItsForward) {
  Counting counting;
  {
    Model model(3, "simple");
    Gate gate;
    const auto weight = leaf(2, 1000);
    const auto slow = model.add_function("slow", 2, [&](const at::Tensor& x) {
      gate.pass();
      return x * 1;
    });
    const auto module = model.add_scaling("module", 1, weight);
    const auto echo = model.add_function("echo", 1, [](const at::Tensor& x) { return x * 1; });
    const auto body = [&](bool fails) {
      const auto x = at::ones({1000}, at::kDouble);
      const auto y = model.call(module, model.call(slow, x));
      model.job(0).backward({y}, {x}, 1);
      for (int i = 0; i < 3; ++i) model.call(echo, at::ones({1})).item<float>();  // the backward is there by then
      if (fails) throw std::runtime_error("of the body");
    };
    for (int step = 0; step < 2; ++step) model.run(1, [&](base::Microbatch) { body(/*fails=*/false); });
    const auto early = live_bytes.load();
    for (int step = 0; step < 10; ++step) {
      gate.shut();
      model.traffic().clear();
      std::thread opener([&] {
        while (model.traffic().count(kEndOfStep) < 2) std::this_thread::yield();
        gate.open();
      });
      const auto outcomes = model.attempt(1, [&](base::Microbatch) { body(/*fails=*/true); });
      opener.join();
      for (const auto& outcome : outcomes) EXPECT_NE(message_of(outcome.error), "");
      model.run(1, [&](base::Microbatch) { body(/*fails=*/false); });
      EXPECT_EQ(live_bytes, early) << "after " << step + 1 << " failed steps";
    }
  }
  EXPECT_EQ(live_bytes, 0);
}

}  // namespace
}  // namespace lamina::pipeline
