// SPDX-License-Identifier: Apache-2.0
// Gradients that travel inside the backward, over shared memory between threads.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <random>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/collective/backend.h"
#include "lamina/data_parallel/reducer.h"
#include "tests/messaging/mailboxes.h"

namespace lamina::data_parallel {
namespace {

using namespace std::chrono_literals;

// One replica of a model without buffers.
class Replica {
 public:
  Replica(int index, messaging::Mailboxes& boxes, const c10::intrusive_ptr<c10d::Store>& store, ReducerOptions options)
      : index(index),
        size(static_cast<int>(boxes.ranks().size())),
        reducer(options, boxes[index], boxes.ranks(), {30s}, std::make_shared<value::Failures>(),
                {[this] { return named(); }, [] { return std::vector<NamedTensor>(); },
                 [this](const base::Patience&) -> collective::Group& { return *group; }}) {
    const collective::BackendOptions made{.store = store, .rank = index, .members = boxes.ranks(), .timeout = 30s};
    auto torchs = collective::make_group(made, collective::make_backend(made));
    recorder.start({.ranks = {observe::RankRecord()}});
    group = collective::wrap(std::move(torchs), {"dp", boxes.ranks(), base::Rank(index)},
                             {.mailbox = &boxes[index], .recorder = &recorder});
  }

  void add_parameter(at::IntArrayRef shape, at::ScalarType type = at::kDouble) {
    parameters.push_back(at::zeros(shape, type).set_requires_grad(true));
  }

  // Does what autograd does with a gradient, whose elements are all this number.
  void accumulate(std::size_t parameter, double number) {
    const c10::AutoGradMode no_grad(false);
    auto& gradient = parameters[parameter].mutable_grad();
    if (gradient.defined()) {
      gradient.add_(number);
    } else {
      gradient = at::full_like(parameters[parameter], number).detach();
    }
    reducer.note_gradient(parameters[parameter]);
  }

  void step(const std::function<void()>& backward) {
    reducer.run_step({}, /*training=*/true, [&](const pipeline::StepSpec&) {
      reducer.run_backward(backward);
      return pipeline::StepResult{{}, /*backward=*/true};
    });
  }

  void zero() {
    for (auto& parameter : parameters) parameter.mutable_grad() = at::Tensor();
  }

  // The element that all elements of this gradient are; none where there is no gradient.
  std::optional<double> gradient(std::size_t parameter) const {
    const auto& gradient = parameters[parameter].grad();
    if (!gradient.defined()) return std::nullopt;
    EXPECT_TRUE(at::equal(gradient.min(), gradient.max()));
    return gradient.max().item<double>();
  }

  const int index, size;
  std::vector<at::Tensor> parameters;
  observe::Recorder recorder;
  std::unique_ptr<collective::Group> group;
  Reducer reducer;

 private:
  std::vector<NamedTensor> named() const {
    std::vector<NamedTensor> named;
    for (std::size_t i = 0; i < parameters.size(); ++i) named.push_back({base::str("p", i), parameters[i]});
    return named;
  }
};

void run(int size, const std::function<void(Replica&)>& body, ReducerOptions options = {}) {
  messaging::Mailboxes boxes(size);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto errors = boxes.run([&](int i) {
    Replica replica(i, boxes, store, options);
    body(replica);
  });
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

TEST(Overlap, BucketsStartInsideTheBackwardFromTheSecondPassOn) {
  const auto body = [](Replica& replica) {
    for (int i = 0; i < 3; ++i) replica.add_parameter({100});
    for (int pass = 0; pass < 3; ++pass) {
      std::int64_t last_gradient_ns = 0;
      replica.zero();
      replica.recorder.start({.ranks = {observe::RankRecord()}});
      replica.step([&] {
        for (const std::size_t parameter : {2, 1}) replica.accumulate(parameter, replica.index);
        last_gradient_ns = observe::now_ns();
        replica.accumulate(0, replica.index);
      });
      for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(replica.gradient(i), 0.5);
      int early = 0;
      const auto timeline = replica.recorder.stop();
      for (const auto& event : timeline.ranks.at(0).events) early += event.begin_ns < last_gradient_ns;
      EXPECT_EQ(early, pass == 0 ? 0 : 2) << "of pass " << pass;
    }
  };
  run(2, body, {.bucket_bytes = 1});
}

TEST(Overlap, GradientsTravelInATypeEarlyAndLate) {
  for (const auto gradients : {Gradients::kCopied, Gradients::kViews}) {
    const auto body = [](Replica& replica) {
      for (int i = 0; i < 3; ++i) replica.add_parameter({10}, i == 2 ? at::kDouble : at::kFloat);
      for (int pass = 0; pass < 3; ++pass) {
        replica.zero();
        replica.recorder.start({.ranks = {observe::RankRecord()}});
        replica.step([&] {
          for (const std::size_t parameter : {2, 1, 0}) replica.accumulate(parameter, 1 + 0x1p-7 * replica.index);
        });
        std::int64_t bytes = 0;
        const auto timeline = replica.recorder.stop();
        for (const auto& event : timeline.ranks.at(0).events) {
          if (event.bytes == 20) bytes += event.bytes;
        }
        EXPECT_EQ(bytes, 3 * 20) << "of two bytes an element";
        for (std::size_t i = 0; i < 3; ++i) {
          EXPECT_EQ(replica.gradient(i), 1) << "1 + 2^-8, to even";
          EXPECT_EQ(replica.parameters[i].grad().scalar_type(), replica.parameters[i].scalar_type());
        }
      }
    };
    run(2, body, {.bucket_bytes = 1, .gradients = gradients, .travels = at::kBFloat16});
  }
}

TEST(Overlap, AGradientThatChangedSinceItWasSentIsReducedAgain) {
  const auto body = [](Replica& replica) {
    for (int i = 0; i < 2; ++i) replica.add_parameter({10});
    const auto once = [&] {
      replica.accumulate(1, 1);
      replica.accumulate(0, 1);
    };
    replica.step(once);
    replica.zero();
    replica.step([&] {
      once();
      if (replica.index == 0) replica.accumulate(1, 4);  // more than in the pass before
    });
    EXPECT_EQ(replica.gradient(1), 3);
    replica.zero();
    replica.step([&] {
      replica.accumulate(1, 1);
      if (replica.index == 0) replica.accumulate(1, 4);
      replica.accumulate(0, 1);
      const c10::AutoGradMode no_grad(false);
      if (replica.index == 1) replica.parameters[0].mutable_grad().mul_(5);  // the user's own
      if (replica.index == 1) replica.parameters[1].mutable_grad() = at::full({10}, 2., at::kDouble);
    });
    EXPECT_EQ(replica.gradient(0), 3);
    EXPECT_EQ(replica.gradient(1), 3.5);
  };
  run(2, body, {.bucket_bytes = 1});
}

TEST(Overlap, NoneStaysNoneAndSparseIsMadeDense) {
  const auto body = [](Replica& replica) {
    for (int i = 0; i < 3; ++i) replica.add_parameter({4, 2});
    for (int pass = 0; pass < 4; ++pass) {
      replica.zero();
      replica.step([&] {
        if (pass < 2) replica.accumulate(2, 1);
        if (replica.index == 1) replica.accumulate(1, 4);
        const auto rows = at::tensor({std::int64_t{1}}).unsqueeze(0);
        replica.parameters[0].mutable_grad() = at::sparse_coo_tensor(rows, at::ones({1, 2}, at::kDouble), {4, 2});
        replica.reducer.note_gradient(replica.parameters[0]);
      });
      EXPECT_EQ(replica.gradient(2), pass < 2 ? std::optional(1.) : std::nullopt);
      EXPECT_EQ(replica.gradient(1), 2);
      EXPECT_EQ(replica.parameters[0].grad().sum().item<double>(), 2);
    }
  };
  run(2, body, {.bucket_bytes = 1});
}

TEST(Overlap, AReplicaThatFailsInItsBackwardLeavesTheNextPassExact) {
  const auto body = [](Replica& replica) {
    for (int i = 0; i < 4; ++i) replica.add_parameter({1000});
    const auto backward = [&](int failing) {
      for (std::size_t i = 4; i-- > 0;) {
        if (i == 1 && replica.index == failing) throw std::invalid_argument("a bad batch");
        replica.accumulate(i, replica.index);
      }
    };
    for (int pass = 0; pass < 12; ++pass) {
      replica.zero();
      const int failing = pass % 3 == 2 ? pass % replica.size : -1;
      if (failing == replica.index) {
        EXPECT_THROW(replica.step([&] { backward(failing); }), std::invalid_argument);
      } else if (failing >= 0) {
        EXPECT_THROW(replica.step([&] { backward(failing); }), value::RemoteFailure);
      } else {
        replica.step([&] { backward(failing); });
        for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(replica.gradient(i), (replica.size - 1) / 2.);
      }
    }
    EXPECT_FALSE(replica.reducer.stuck());
  };
  for (const int size : {2, 3}) run(size, body, {.bucket_bytes = 1});
}

// A replica's part of one drawn pass: to which parameters gradients come, in order, and where it fails.
struct Drawn {
  std::vector<std::pair<std::size_t, double>> gradients;
  bool fails = false;
  std::optional<std::size_t> scaled;  // by the user, at the end
};

constexpr std::size_t kParameters = 6;

Drawn draw(std::mt19937& random, bool as_usual) {
  Drawn drawn;
  for (std::size_t i = kParameters; i-- > 0;) {
    const int times = as_usual ? 1 + static_cast<int>(i % 2) : static_cast<int>(random() % 4);
    for (int time = 0; time < times; ++time) drawn.gradients.emplace_back(i, static_cast<double>(random() % 32));
  }
  if (!as_usual && random() % 2 == 0) std::ranges::shuffle(drawn.gradients, random);
  if (!as_usual && random() % 3 == 0) drawn.scaled = random() % kParameters;
  return drawn;
}

TEST(Overlap, AnyPassesHaveTheResultsOfAReductionAtTheEnd) {
  for (const int seed : {1, 2, 3, 4, 5, 6}) {
    const int size = seed % 2 == 0 ? 4 : 2;
    const int passes_per_reduction = 1 + seed / 3 % 2;
    const auto body = [&](Replica& replica) {
      for (std::size_t i = 0; i < kParameters; ++i) {
        replica.add_parameter({static_cast<std::int64_t>(1 + 7 * i)}, i == 3 ? at::kFloat : at::kDouble);
      }
      std::mt19937 common(seed);
      std::vector<std::vector<std::optional<double>>> all(size, std::vector<std::optional<double>>(kParameters));
      int passes = 0;
      for (int number = 0; number < 80; ++number) {
        std::vector<Drawn> drawn;
        for (int i = 0; i < size; ++i) drawn.push_back(draw(common, common() % 4 != 0));
        const bool fails = common() % 6 == 0;
        drawn[common() % size].fails = fails;
        const auto& mine = drawn[replica.index];
        const auto backward = [&] {
          for (std::size_t i = 0; i < mine.gradients.size(); ++i) {
            if (mine.fails && i == mine.gradients.size() / 2) throw std::invalid_argument("drawn");
            replica.accumulate(mine.gradients[i].first, mine.gradients[i].second);
          }
          const c10::AutoGradMode no_grad(false);
          if (mine.scaled && replica.parameters[*mine.scaled].grad().defined()) {
            replica.parameters[*mine.scaled].mutable_grad().mul_(2);
          }
        };
        if (fails) {
          EXPECT_ANY_THROW(replica.step(backward));
          replica.zero();
          all.assign(size, std::vector<std::optional<double>>(kParameters));
          continue;
        }
        replica.step(backward);
        for (int i = 0; i < size; ++i) {
          for (const auto& [parameter, number_added] : drawn[i].gradients) {
            all[i][parameter] = all[i][parameter].value_or(0) + number_added;
          }
          if (drawn[i].scaled && all[i][*drawn[i].scaled]) *all[i][*drawn[i].scaled] *= 2;
        }
        if (++passes % passes_per_reduction != 0) continue;
        for (std::size_t parameter = 0; parameter < kParameters; ++parameter) {
          std::optional<double> mean;
          for (int i = 0; i < size; ++i) {
            if (all[i][parameter]) mean = mean.value_or(0) + *all[i][parameter] / size;
          }
          ASSERT_EQ(replica.gradient(parameter), mean) << "seed " << seed << ", pass " << number << ", " << parameter;
        }
        replica.zero();
        all.assign(size, std::vector<std::optional<double>>(kParameters));
      }
    };
    run(size, body,
        {.passes_per_reduction = passes_per_reduction,
         .bucket_bytes = seed < 3   ? 1
                         : seed < 5 ? 100
                                    : 1 << 20});
  }
}

}  // namespace
}  // namespace lamina::data_parallel
