// SPDX-License-Identifier: Apache-2.0
#include "lamina/sharding/transfer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <random>

#include "lamina/base/error.h"
#include "tests/message_of.h"
#include "tests/sharding/members.h"

namespace lamina::sharding {
namespace {

using namespace std::chrono_literals;

std::unique_ptr<Transfer> make(Over over, const std::vector<Spec>& parameters, std::int64_t gradients_at_once,
                               collective::Group& group, base::Patience patience = {30s}) {
  auto made = over == Over::kSharedMemory
                  ? make_shared_transfer(parameters, gradients_at_once, group, {"sharding", patience})
                  : make_collective_transfer(parameters, gradients_at_once, group, patience, nullptr);
  if (!made) throw base::InternalError("these members share no memory");
  return made;
}

at::Tensor elements(c10::DataPtr memory, std::int64_t count, at::ScalarType type) {
  auto* data = memory.get();
  return at::from_blob(data, {count}, at::TensorOptions(type)).clone();
}

class AnyTransfer : public ::testing::TestWithParam<std::tuple<Over, int>> {};

INSTANTIATE_TEST_SUITE_P(Each, AnyTransfer,
                         ::testing::Combine(::testing::Values(Over::kSharedMemory, Over::kGloo),
                                            ::testing::Values(2, 3, 4)));

TEST_P(AnyTransfer, TheWholeValueIsMadeOfTheShards) {
  const auto [over, size] = GetParam();
  together(size, over, [over, size](collective::Group& group) {
    std::vector<Spec> parameters;
    for (const std::int64_t numel : {1, 2, 3, 7, 12, 1000}) {
      parameters.push_back({numel, numel % 2 == 0 ? at::kFloat : at::kBFloat16});
    }
    const auto transfer = make(over, parameters, 100, group);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto shard = transfer->shard(i);
      ASSERT_EQ(shard.numel(), (parameters[i].numel + size - 1) / size);
      shard.copy_(at::arange(shard.numel()) + group.rank() * shard.numel());
    }
    group.barrier({"filling", {30s}})->wait();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto expected = at::arange(parameters[i].numel).to(parameters[i].dtype);
      transfer->expect({&i, 1});
      EXPECT_TRUE(at::equal(
          elements(std::move(transfer->values({&i, 1}).front()), parameters[i].numel, parameters[i].dtype), expected));
      EXPECT_TRUE(at::equal(transfer->copy(i), expected));
    }
    group.barrier({"reading", {30s}})->wait();
  });
}

TEST_P(AnyTransfer, SeveralValuesComeTogetherWhateverWasExpected) {
  const auto [over, size] = GetParam();
  together(size, over, [over, size](collective::Group& group) {
    const std::vector<Spec> parameters{{5}, {1}, {7, at::kBFloat16}, {12}, {3, at::kBFloat16}};
    const auto transfer = make(over, parameters, 100, group);
    const auto fill = [&](double more) {
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        auto shard = transfer->shard(i);
        shard.copy_(at::arange(shard.numel()) + group.rank() * shard.numel() + more);
      }
      group.barrier({"filling", {30s}})->wait();
    };
    using Numbers = std::vector<std::size_t>;
    const auto require = [&](const Numbers& wanted, double more) {
      auto values = transfer->values(wanted);
      ASSERT_EQ(values.size(), wanted.size());
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        const auto& spec = parameters[wanted[i]];
        const auto expected = (at::arange(spec.numel) + more).to(spec.dtype);
        EXPECT_TRUE(at::equal(elements(std::move(values[i]), spec.numel, spec.dtype), expected)) << wanted[i];
      }
      group.barrier({"reading", {30s}})->wait();
    };
    fill(0);
    require({0, 1, 2, 3, 4}, 0);
    transfer->expect(Numbers{4, 0, 3});
    transfer->expect(Numbers{3, 1});
    require({3, 2}, 0);
    require({0, 1}, 0);
    transfer->expect_nothing();
    group.barrier({"reading", {30s}})->wait();
    fill(10);
    require({4}, 10);
  });
}

TEST_P(AnyTransfer, SumsAreThoseOfAllGradients) {
  const auto [over, size] = GetParam();
  for (const std::int64_t at_once : {1, 13, 1000}) {
    together(size, over, [over, size, at_once](collective::Group& group) {
      const std::vector<Spec> parameters{{5}, {12}, {1}};
      const auto transfer = make(over, parameters, at_once, group);
      for (int pass = 0; pass < 3; ++pass) {
        for (int times = 0; times < 2; ++times) {
          for (std::size_t i = 0; i < 2; ++i) {
            transfer->give(i, at::arange(parameters[i].numel, at::kFloat) * (group.rank() + 1), pass);
          }
        }
        transfer->reduce(pass, {30s});
        if (pass == 1) continue;  // the next pass adds to this one's sums
        const int passes = pass == 0 ? 1 : 2;
        for (std::size_t i = 0; i < 2; ++i) {
          const auto whole = at::arange(transfer->shard(i).numel() * size, at::kFloat) * (passes * size * (size + 1));
          auto expected = whole.narrow(0, group.rank() * transfer->shard(i).numel(), transfer->shard(i).numel());
          const auto first = group.rank() * transfer->shard(i).numel();
          for (std::int64_t each = 0; each < expected.numel(); ++each) {
            if (first + each >= parameters[i].numel) expected[each] = 0;
          }
          EXPECT_TRUE(at::equal(transfer->take_sum(i), expected)) << expected;
        }
        EXPECT_FALSE(transfer->take_sum(2).defined()) << "nobody had a gradient";
      }
    });
  }
}

TEST_P(AnyTransfer, GradientsTravelInATypeAndAreSummedInFloat32) {
  const auto [over, size] = GetParam();
  together(size, over, [over, size](collective::Group& group) {
    const std::vector<Spec> parameters{{.numel = 5, .dtype = at::kFloat, .travels = at::kBFloat16},
                                       {.numel = 12, .dtype = at::kBFloat16, .travels = at::kBFloat16},
                                       {.numel = 3, .dtype = at::kHalf, .travels = at::kFloat},
                                       {.numel = 4, .dtype = at::kDouble, .travels = at::kHalf}};
    const auto transfer = make(over, parameters, 10, group);
    for (int pass = 0; pass < 3; ++pass) {
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        const auto number = 1 + 0x1p-7 * group.rank();  // whose sums have more bits than travel
        transfer->give(i, at::full({parameters[i].numel}, number, parameters[i].gradient_type()), pass);
      }
      transfer->reduce(pass, {30s});
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto own = parameters[i].share(size, group.rank());
      const auto sum = transfer->take_sum(i);
      EXPECT_EQ(sum.scalar_type(), parameters[i].dtype == at::kDouble ? at::kDouble : at::kFloat);
      EXPECT_EQ(transfer->shard(i).scalar_type(), parameters[i].dtype);
      auto expected = at::zeros({own.size}, sum.scalar_type());
      expected.narrow(0, 0, own.count()).fill_(3 * (size + 0x1p-7 * size * (size - 1) / 2));
      EXPECT_TRUE(at::equal(sum, expected)) << sum << " and not " << expected;
    }
  });
}

// Members give other gradients, in other orders, other numbers of them, at other times, and fail.
TEST(SharedTransfer, NeedsNoOrder) {
  constexpr int kParameters = 6, kPasses = 40;
  for (const int size : {2, 3}) {
    for (const std::int64_t at_once : {1, 40, 10000}) {
      std::mutex mutex;
      std::vector<std::vector<double>> expected(kPasses, std::vector<double>(kParameters, -1));  // -1: none
      together(size, Over::kSharedMemory, [&](collective::Group& group) {
        std::vector<Spec> parameters;
        for (int i = 0; i < kParameters; ++i) parameters.push_back({1 + 9 * i, at::kDouble});
        const auto transfer = make(Over::kSharedMemory, parameters, at_once, group);
        std::mt19937 random(static_cast<unsigned>(size * 1000 + at_once + group.rank()));
        std::mt19937 shared(5);  // what all know
        for (int pass = 0; pass < kPasses; ++pass) {
          const bool fails = shared() % 5 == 0;
          std::vector<std::pair<int, double>> mine;
          for (int i = 0; i < kParameters; ++i) {
            for (auto times = random() % 4; times > 0; --times) mine.emplace_back(i, 1 + random() % 100);
          }
          std::ranges::shuffle(mine, random);
          for (const auto& [i, number] : mine) {
            if (random() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
            transfer->give(i, at::full({parameters[i].numel}, number, at::kDouble), pass);
            const std::lock_guard lock(mutex);
            expected[pass][i] = std::max(expected[pass][i], 0.) + number;
          }
          if (fails) {
            group.barrier({"failing", {30s}})->wait();
            transfer->abandon({.rank = base::Rank(0)});
            continue;
          }
          transfer->reduce(pass, {30s});
          group.barrier({"summing", {30s}})->wait();
          for (int i = 0; i < kParameters; ++i) {
            const auto sum = transfer->take_sum(i);
            ASSERT_EQ(sum.defined(), expected[pass][i] >= 0) << "parameter " << i << " in pass " << pass;
            const auto begin = group.rank() * sum.numel();
            for (std::int64_t each = 0; sum.defined() && each < sum.numel(); ++each) {
              const auto number = begin + each < parameters[i].numel ? expected[pass][i] : 0;
              ASSERT_EQ(sum[each].item<double>(), number) << "parameter " << i << " in pass " << pass;
            }
          }
        }
      });
    }
  }
}

TEST(SharedTransfer, SumsHaveTheSameBitsInEveryRun) {
  std::vector<at::Tensor> sums[2];
  std::mutex mutex;
  for (int run = 0; run < 2; ++run) {
    sums[run].resize(3);
    together(3, Over::kSharedMemory, [&](collective::Group& group) {
      const auto transfer = make(Over::kSharedMemory, {{1000}}, run == 0 ? 1 : 10000, group);
      auto generator = at::make_generator<at::CPUGeneratorImpl>(group.rank() + 1);
      for (int times = 0; times < 5; ++times) {
        if (group.rank() == (run + times) % 3) std::this_thread::sleep_for(2ms);
        transfer->give(0, at::randn({1000}, generator), 0);
      }
      transfer->reduce(0, {30s});
      const std::lock_guard lock(mutex);
      sums[run][group.rank()] = transfer->take_sum(0);
    });
  }
  for (int rank = 0; rank < 3; ++rank) EXPECT_TRUE(at::equal(sums[0][rank], sums[1][rank]));
}

TEST(SharedTransfer, AMemberThatIsFarAheadLetsTheOthersComeNearer) {
  constexpr int kParameters = 80;
  constexpr std::int64_t kNumel = 1 << 20;  // 4 MiB
  std::array<std::atomic<int>, 2> given{};
  int most_ahead = 0;
  together(2, Over::kSharedMemory, [&](collective::Group& group) {
    const auto transfer = make(Over::kSharedMemory, std::vector<Spec>(kParameters, {kNumel}), 1 << 30, group);
    for (int i = 0; i < kParameters; ++i) {
      if (group.rank() == 1) std::this_thread::sleep_for(2ms);
      transfer->give(i, at::ones({kNumel}), 0);
      ++given[group.rank()];
      if (group.rank() == 0) most_ahead = std::max(most_ahead, given[0] - given[1]);
    }
    transfer->reduce(0, {30s});
    EXPECT_EQ(transfer->take_sum(kParameters - 1)[0].item<float>(), 2);
  });
  EXPECT_LE(most_ahead, (32 + 64) / 4 + 2);
}

TEST(SharedTransfer, MembersThatWaitForEachOtherGoOn) {
  constexpr int kParameters = 80;
  constexpr std::int64_t kNumel = 1 << 20;
  together(2, Over::kSharedMemory, [&](collective::Group& group) {
    const auto transfer = make(Over::kSharedMemory, std::vector<Spec>(kParameters, {kNumel}), 1 << 30, group);
    for (int i = 0; i < kParameters; ++i) {
      transfer->give(group.rank() == 0 ? i : kParameters - 1 - i, at::ones({kNumel}), 0);
    }
    transfer->reduce(0, {30s});
    EXPECT_EQ(transfer->take_sum(0)[0].item<float>(), 2);
  });
}

TEST(SharedTransfer, AMemberThatDoesNotComeIsNamed) {
  together(3, Over::kSharedMemory, [](collective::Group& group) {
    const auto transfer = make(Over::kSharedMemory, {{10}}, 100, group);
    if (group.rank() != 1) {
      const auto text = message_of<base::TimeoutError>([&] { transfer->reduce(0, {200ms}); });
      EXPECT_NE(text.find("summing gradients over ranks 0-2 without rank 1, which has not come: no answer for 0 s"),
                std::string::npos)
          << text;
    }
    group.barrier({"waiting", {30s}})->wait();
  });
}

TEST(SharedTransfer, AMemberThatStopsAfterItsLastGradientIsNamed) {
  together(3, Over::kSharedMemory, [](collective::Group& group) {
    const auto transfer = make(Over::kSharedMemory, {{10}}, 10, group);
    transfer->give(0, at::ones({10}), 0);
    if (group.rank() == 1) {
      transfer->give(0, at::ones({10}), 0);  // which waits for the first one to be summed
      EXPECT_THROW(transfer->reduce(0, {30s, [] { throw base::CancelledError("stopped"); }}), base::CancelledError);
    }
    group.barrier({"waiting", {30s}})->wait();
    if (group.rank() != 1) {
      const auto text = message_of<base::TimeoutError>([&] { transfer->reduce(0, {200ms}); });
      EXPECT_NE(text.find("summing gradients over ranks 0-2 without rank 1"), std::string::npos) << text;
    }
    group.barrier({"waiting", {30s}})->wait();
  });
}

TEST(CollectiveTransfer, NamesFewOfManyParameters) {
  const auto words = words_of({"a", "b", "c", "d", "e"});
  EXPECT_EQ(words.in_words({"values", {1}}), "values of b");
  EXPECT_EQ(words.in_words({"gradients", {0, 1, 2, 3, 4}}), "gradients of a, b, c and 2 more");
}

}  // namespace
}  // namespace lamina::sharding
