// SPDX-License-Identifier: Apache-2.0
// A member whose process is killed, or frozen, while a collective of each kind runs over and over.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "lamina/collective/backend.h"
#include "tests/member_processes.h"

namespace lamina::collective {
namespace {

using Backend = c10d::Backend;
using Tensors = std::vector<at::Tensor>;
using Clock = std::chrono::steady_clock;
constexpr int kLast = MemberProcesses::kLast;
constexpr std::int64_t kCount = 100000;
constexpr auto kTimeout = std::chrono::seconds(2);

// Tensors of a member: a part, all parts together and apart, and the same for results.
struct Given {
  at::Tensor mine, all, all_too;
  std::vector<Tensors> apart;
  Tensors part() const { return {mine}; }
  std::vector<Tensors> at_root(int rank) const { return rank == 0 ? apart : std::vector<Tensors>(); }
};

struct CollectiveKind {
  const char* name;
  std::function<c10::intrusive_ptr<c10d::Work>(Backend& backend, Given& given)> call;
  bool allocated = false;
};

const std::vector<CollectiveKind>& kinds() {
  const auto with = [](auto call) {
    return [call](Backend& backend, Given& given) {
      auto one = given.part();
      auto lists = given.apart, at_root = given.at_root(backend.getRank());
      return call(backend, given, one, lists, at_root);
    };
  };
  const auto all_reduce = with([](auto& backend, auto&, auto& one, auto&, auto&) { return backend.allreduce(one); });
  const auto all_gather = [](Backend& backend, Given& given) { return backend._allgather_base(given.all, given.mine); };
  const auto reduce_scatter = [](Backend& backend, Given& given) {
    return backend._reduce_scatter_base(given.mine, given.all);
  };
  static const std::vector<CollectiveKind> kAll{
      {"all_reduce", all_reduce},
      {"all_reduce_in_place", all_reduce, true},
      {"all_reduce_coalesced",
       [](Backend& backend, Given& given) {
         Tensors both{given.mine, given.all};
         return backend.allreduce_coalesced(both);
       }},
      {"reduce", with([](auto& backend, auto&, auto& one, auto&, auto&) { return backend.reduce(one); })},
      {"broadcast", with([](auto& backend, auto&, auto& one, auto&, auto&) { return backend.broadcast(one); })},
      {"all_gather", all_gather},
      {"all_gather_in_place", all_gather, true},
      {"all_gather_of_lists",
       with([](auto& backend, auto&, auto& one, auto& lists, auto&) { return backend.allgather(lists, one); })},
      {"all_gather_coalesced",
       [](Backend& backend, Given& given) {
         Tensors all{given.all}, mine{given.mine};
         return backend.allgather_into_tensor_coalesced(all, mine);
       }},
      {"reduce_scatter", reduce_scatter},
      {"reduce_scatter_in_place", reduce_scatter, true},
      {"reduce_scatter_of_lists",
       with([](auto& backend, auto&, auto& one, auto& lists, auto&) { return backend.reduce_scatter(one, lists); })},
      {"gather",
       with([](auto& backend, auto&, auto& one, auto&, auto& at_root) { return backend.gather(at_root, one); })},
      {"scatter",
       with([](auto& backend, auto&, auto& one, auto&, auto& at_root) { return backend.scatter(one, at_root); })},
      {"all_to_all",
       [](Backend& backend, Given& given) {
         std::vector<std::int64_t> even;
         return backend.alltoall_base(given.all, given.all_too, even, even);
       }},
      {"barrier", [](Backend& backend, Given&) { return backend.barrier(); }},
      {"send_to_it", with([](auto& backend, auto&, auto& one, auto&, auto&) {
         if (backend.getRank() != kLast) return backend.send(one, kLast, 0);
         backend.recv(one, 0, 0)->wait();
         return backend.recv(one, 1, 0);
       })},
      {"receive_from_it", with([](auto& backend, auto&, auto& one, auto&, auto&) {
         if (backend.getRank() != kLast) return backend.recv(one, kLast, 0);
         backend.send(one, 0, 0)->wait();
         return backend.send(one, 1, 0);
       })},
  };
  return kAll;
}

// Members with world ranks 10, 11 and 12.
class Processes : public MemberProcesses {
 public:
  explicit Processes(const CollectiveKind& kind)
      : MemberProcesses([&](const std::string& folder, int rank, const Say& say) {
          try {
            BackendOptions options{.store = c10::make_intrusive<c10d::FileStore>(folder + "/store", kMembers),
                                   .rank = rank,
                                   .timeout = std::chrono::seconds(60)};
            for (int member = 0; member < kMembers; ++member) options.members.emplace_back(10 + member);
            const auto backend = make_backend(options);
            const auto tensor = [&](std::int64_t count) {
              return kind.allocated ? backend->allocateTensor(count).fill_(1) : at::ones({count});
            };
            Given given{tensor(kCount), tensor(kCount * kMembers), tensor(kCount * kMembers), {{}}};
            for (int member = 0; member < kMembers; ++member) given.apart.front().push_back(at::ones({kCount}));
            backend->barrier()->wait();
            backend->setTimeout(kTimeout);
            for (int round = 0;; ++round) {
              kind.call(*backend, given)->wait();
              if (round == 20) say("runs");
            }
          } catch (const std::exception& error) {
            say(error.what());
          }
        }) {}
};

class Lost : public ::testing::TestWithParam<int> {};

TEST_P(Lost, AMemberThatIsKilledIsNamedByEveryOtherWithin2s) {
  const Processes processes(kinds()[GetParam()]);
  const auto killed = Clock::now();
  processes.signal_the_last(SIGKILL);
  for (int rank = 0; rank < kLast; ++rank) {
    const auto error = processes.hear(rank);
    EXPECT_LT(Clock::now() - killed, std::chrono::seconds(2));
    EXPECT_NE(error.find("rank 12 is lost: its process ended"), std::string::npos) << error;
  }
}

INSTANTIATE_TEST_SUITE_P(During, Lost, ::testing::Range(0, static_cast<int>(kinds().size())),
                         [](const auto& info) { return std::string(kinds()[info.param].name); });

// One of the others names it first, and ends the collective of both. Some kinds at a time, as each takes the time-out.
TEST(Frozen, AMemberIsNamedByEveryOtherAtTheTimeoutInEachKind) {
  constexpr std::size_t kAtOnce = 6;
  for (std::size_t begin = 0; begin < kinds().size(); begin += kAtOnce) {
    std::vector<std::unique_ptr<Processes>> jobs;
    const auto end = std::min(kinds().size(), begin + kAtOnce);
    for (std::size_t i = begin; i < end; ++i) {
      jobs.push_back(std::make_unique<Processes>(kinds()[i]));
      jobs.back()->signal_the_last(SIGSTOP);
    }
    for (std::size_t i = begin; i < end; ++i) {
      for (int rank = 0; rank < kLast; ++rank) {
        const auto error = jobs[i - begin]->hear(rank);
        EXPECT_NE(error.find("rank 12 has not come for 2 s"), std::string::npos) << kinds()[i].name << ": " << error;
      }
    }
  }
}

}  // namespace
}  // namespace lamina::collective
