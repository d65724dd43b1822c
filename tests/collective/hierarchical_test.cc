// SPDX-License-Identifier: Apache-2.0
// Members are threads; those of one "host" have a group of their own. All-gathers cross over Gloo, and into posted
// memory.
#include "lamina/collective/hierarchical.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <numeric>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/collective/backend.h"
#include "lamina/transport/inproc/network.h"
#include "tests/message_of.h"

namespace lamina::collective {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Tensors = std::vector<at::Tensor>;
constexpr auto kTimeout = std::chrono::seconds(30);

// Passes calls on to another backend, and counts what they have this member send.
class Counting : public c10d::Backend {
 public:
  explicit Counting(c10::intrusive_ptr<Backend> under)
      : Backend(under->getRank(), under->getSize()), under_(std::move(under)) {}
  const std::string getBackendName() const override { return "counting"; }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<Tensors>& all, Tensors& mine,
                                           const c10d::AllgatherOptions& options) override {
    sent += (size_ - 1) * static_cast<std::int64_t>(mine.front().nbytes());
    return under_->allgather(all, mine, options);
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& to, at::Tensor& from, std::vector<std::int64_t>& to_rows,
                                               std::vector<std::int64_t>& from_rows,
                                               const c10d::AllToAllOptions& options) override {
    sent += static_cast<std::int64_t>(from.nbytes()) * (size_ - 1) / size_;
    return under_->alltoall_base(to, from, to_rows, from_rows, options);
  }
  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    sent += static_cast<std::int64_t>(tensors.front().nbytes()) * 2 * (size_ - 1) / size_;
    return under_->allreduce(tensors, options);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& mine, at::Tensor& all,
                                                      const c10d::ReduceScatterOptions& options) override {
    return under_->_reduce_scatter_base(mine, all, options);
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    return under_->barrier(options);
  }
  std::int64_t sent = 0;

 private:
  const c10::intrusive_ptr<Backend> under_;
};

// Passes puts on to another transport, and counts what they have this member send.
class CountingPuts : public transport::Transport {
 public:
  CountingPuts(std::unique_ptr<Transport> under, std::int64_t& sent) : under_(std::move(under)), sent_(sent) {}
  base::Rank rank() const override { return under_->rank(); }
  int size() const override { return under_->size(); }
  void start(Events) override {}
  void send(base::Rank, const transport::Message&) override { ADD_FAILURE() << "a message"; }
  void send_packed(base::Rank, transport::Frame, base::Step) override { ADD_FAILURE() << "a message"; }
  std::unique_ptr<transport::Transfer> post(base::Rank from, transport::Parcel parcel) override {
    return under_->post(from, std::move(parcel));
  }
  std::unique_ptr<transport::Transfer> put(base::Rank to, transport::Parcel parcel) override {
    sent_ += static_cast<std::int64_t>(parcel.memory.nbytes());
    return under_->put(to, std::move(parcel));
  }
  void close(bool orderly) override { under_->close(orderly); }

 private:
  const std::unique_ptr<Transport> under_;
  std::int64_t& sent_;
};

struct Shape {
  int hosts, locals;
  bool shared;  // the memory of a host, or Gloo throughout
  bool posted = false;
};

struct Member {
  int rank, size;
  Group flat, levels;
  Counting* across;
  Levels under;
};

class Hierarchical : public ::testing::TestWithParam<Shape> {
 protected:
  // Runs `work` in a thread for each member.
  static void together(const std::function<void(Member& member)>& work) {
    const auto shape = GetParam();
    const auto store = c10::make_intrusive<c10d::HashStore>();
    transport::inproc::Network network(shape.hosts * shape.locals, /*seed=*/1);
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < shape.hosts * shape.locals; ++rank) {
      threads.emplace_back([=, &network] {
        const int host = rank / shape.locals, index = rank % shape.locals;
        const auto options = [&](const std::string& name, int own, int first, int stride, int size) {
          BackendOptions options{.store = c10::make_intrusive<c10d::PrefixStore>(name, store),
                                 .rank = own,
                                 .timeout = kTimeout,
                                 .gloo_host = "127.0.0.1"};
          for (int member = 0; member < size; ++member) options.members.emplace_back(first + member * stride);
          return options;
        };
        try {
          const int size = shape.hosts * shape.locals;
          const auto flat = options("flat", rank, 0, 1, size);
          const auto within = options(base::str("host", host), index, host * shape.locals, 1, shape.locals);
          const auto across = options(base::str("index", index), host, index, shape.locals, shape.hosts);
          const auto counting = c10::make_intrusive<Counting>(make_gloo(across));
          CountingPuts puts(network.connect(base::Rank(rank)), counting->sent);
          Levels levels{make_group(within, shape.shared ? make_backend(within) : make_gloo(within)),
                        make_group(across, counting),
                        nullptr,
                        {},
                        nullptr};
          if (shape.posted) levels.posted = std::make_shared<PostedGather>(puts, "across", across.members);
          Member member{rank,           size,  make_group(flat, make_gloo(flat)), make_hierarchical(levels, kTimeout),
                        counting.get(), levels};
          EXPECT_EQ(member.levels->getRank(), rank);
          work(member);
          member.levels->barrier()->wait();
        } catch (const std::exception& error) {
          ADD_FAILURE() << "member " << rank << ": " << error.what();
        }
      });
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Of, Hierarchical,
                         ::testing::Values(Shape{2, 2, true}, Shape{2, 3, true}, Shape{3, 2, true}, Shape{2, 2, false},
                                           Shape{3, 2, false}, Shape{1, 2, true}, Shape{2, 1, true},
                                           Shape{2, 2, true, true}, Shape{2, 3, true, true}, Shape{3, 2, true, true},
                                           Shape{3, 2, false, true}, Shape{1, 2, true, true}, Shape{2, 1, true, true}),
                         [](const auto& info) {
                           return base::str(info.param.hosts, "x", info.param.locals,
                                            info.param.shared ? "" : "OverGloo", info.param.posted ? "Posted" : "");
                         });

// Different ones of each member, whose sums are exact in every type.
at::Tensor numbers(int rank, std::int64_t count, at::ScalarType dtype) {
  return (at::arange(count) % 13 + rank).to(dtype);
}

constexpr at::ScalarType kTypes[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kByte};
constexpr std::int64_t kCounts[] = {1, 2, 7, 50000};

TEST_P(Hierarchical, ResultsAreThoseOfTheFlatGroup) {
  together([](Member& member) {
    for (const auto dtype : kTypes) {
      for (const auto count : kCounts) {
        const auto empty = [&](std::int64_t elements) { return at::empty({elements}, dtype); };
        auto mine = numbers(member.rank, count, dtype), all = numbers(member.rank, count * member.size, dtype);
        auto gathered = empty(all.numel()), flat_gathered = empty(all.numel());
        member.levels->all_gather_single(gathered, mine)->wait();
        member.flat->all_gather_single(flat_gathered, mine)->wait();
        EXPECT_TRUE(at::equal(gathered, flat_gathered)) << dtype << " " << count;
        auto part = empty(count), flat_part = empty(count);
        member.levels->reduce_scatter_single(part, all)->wait();
        member.flat->reduce_scatter_single(flat_part, all)->wait();
        EXPECT_TRUE(at::equal(part, flat_part)) << dtype << " " << count;
        for (const auto operation : {c10d::ReduceOp::SUM, c10d::ReduceOp::MAX}) {
          Tensors sum{mine.clone()}, flat_sum{mine.clone()};
          c10d::AllreduceOptions options;
          options.reduceOp = operation;
          member.levels->allreduce(sum, options)->wait();
          member.flat->allreduce(flat_sum, options)->wait();
          EXPECT_TRUE(at::equal(sum.front(), flat_sum.front())) << dtype << " " << count;
        }
      }
    }
  });
}

TEST_P(Hierarchical, EachPartCrossesOnceToEachOtherHost) {
  together([hosts = GetParam().hosts, locals = GetParam().locals](Member& member) {
    constexpr std::int64_t kEach = 1200, kBytes = kEach * 4;
    auto mine = numbers(member.rank, kEach, at::kFloat), all = at::empty({kEach * member.size});
    const auto sent = [&] { return std::exchange(member.across->sent, 0); };
    member.levels->all_gather_single(all, mine)->wait();
    EXPECT_EQ(sent(), (hosts - 1) * kBytes);
    member.levels->reduce_scatter_single(mine, all)->wait();
    EXPECT_EQ(sent(), (hosts - 1) * kBytes);
    Tensors sum{mine};
    member.levels->allreduce(sum)->wait();
    EXPECT_EQ(sent(), kBytes / locals * 2 * (hosts - 1) / hosts);
  });
}

TEST_P(Hierarchical, SeveralAreUnderWayAndAwaitedInAnyOrder) {
  together([](Member& member) {
    std::vector<std::pair<at::Tensor, c10::intrusive_ptr<c10d::Work>>> gathers, sums;
    for (int i = 0; i < 5; ++i) {
      auto mine = at::full({10000}, 10. * i + member.rank), all = at::empty({10000L * member.size});
      gathers.emplace_back(all, member.levels->all_gather_single(all, mine));
      Tensors sum{mine.clone()};
      sums.emplace_back(sum.front(), member.levels->allreduce(sum));
    }
    for (int i = 4; i >= 0; --i) {
      const int at = member.rank % 2 == 0 ? i : 4 - i;
      gathers[at].second->wait();
      const auto expected = (at::arange(member.size, at::kFloat) + 10. * at).repeat_interleave(10000);
      EXPECT_TRUE(at::equal(gathers[at].first, expected));
      sums[at].second->wait();
      EXPECT_EQ(sums[at].first[0].item<double>(), expected.sum().item<double>() / 10000);
    }
  });
}

TEST_P(Hierarchical, WhatIsTooLargeForTheLimitsIsGatheredFlat) {
  together([hosts = GetParam().hosts](Member& member) {
    auto levels = member.under;
    levels.flat = member.flat;
    levels.limits.scratch_bytes = 8192;
    const auto group = make_hierarchical(levels, kTimeout);
    for (const std::int64_t count : {2048, 2049, 4096}) {
      auto mine = numbers(member.rank, count, at::kFloat), all = at::empty({count * member.size}), flat = all.clone();
      group->all_gather_single(all, mine)->wait();
      EXPECT_EQ(std::exchange(member.across->sent, 0), count == 2048 ? (hosts - 1) * 8192 : 0);
      member.flat->all_gather_single(flat, mine)->wait();
      EXPECT_TRUE(at::equal(all, flat));
    }
    group->barrier()->wait();
  });
}

TEST_P(Hierarchical, PartsOfAllToAllGoOverTheFlatGroup) {
  together([](Member& member) {
    auto levels = member.under;
    levels.flat = member.flat;
    const auto group = make_hierarchical(levels, kTimeout);
    // Member i gives each member i + 1 rows that say whose they are.
    std::vector<std::int64_t> sent_rows(member.size, member.rank + 1), received_rows(member.size);
    std::iota(received_rows.begin(), received_rows.end(), 1);
    auto sent = at::full({member.size * (member.rank + 1)}, static_cast<float>(member.rank));
    auto received = at::empty({member.size * (member.size + 1) / 2});
    group->all_to_all_single(received, sent, received_rows, sent_rows, c10d::AllToAllOptions())->wait();
    std::vector<float> expected;
    for (int from = 0; from < member.size; ++from) expected.insert(expected.end(), from + 1, static_cast<float>(from));
    EXPECT_TRUE(at::equal(received, at::tensor(expected))) << received;
  });
}

TEST_P(Hierarchical, TensorsThatDoNotFitAreRefusedBeforeAnythingIsStarted) {
  together([](Member& member) {
    auto mine = at::zeros({4}), all = at::zeros({4L * member.size + 1}), longs = at::zeros({4}, at::kLong);
    const auto text = message_of<base::UsageError>([&] { member.levels->all_gather_single(all, mine); });
    EXPECT_NE(text.find("elements for"), std::string::npos) << text;
    EXPECT_THROW(member.levels->reduce_scatter_single(longs, all), base::UsageError);
    Tensors transposed{at::zeros({2, 3}).t()};
    EXPECT_THROW(member.levels->allreduce(transposed), base::UsageError);
  });
}

}  // namespace
}  // namespace lamina::collective
