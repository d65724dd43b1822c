// SPDX-License-Identifier: Apache-2.0
// Collectives of devices over a library with NCCL's interface, which stands in for it on emulated devices.
#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/collective/device_backend.h"
#include "lamina/device/rank_device.h"
#include "tests/comes_true.h"
#include "tests/dist/rank_forks.h"
#include "tests/emulated/emulated.h"
#include "tests/message_of.h"

namespace lamina::collective {
namespace {

using dist::testing::RankForks;
using dist::testing::Variables;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using Clock = std::chrono::steady_clock;
using Tensors = std::vector<at::Tensor>;

constexpr auto kTimeout = std::chrono::seconds(30);

// A member in its process.
struct Member {
  int rank = 0, size = 0;
  std::filesystem::path folder;
  BackendPtr backend;

  at::Tensor tensor(at::IntArrayRef sizes, double value, at::ScalarType type = at::kFloat) const {
    return at::full(sizes, value, at::TensorOptions(type).device(devices::rank_device()));
  }
  BackendOptions options(const std::string& name) const {
    const auto store = c10::make_intrusive<c10d::FileStore>((folder / "store").string(), size);
    BackendOptions made{
        .store = c10::make_intrusive<c10d::PrefixStore>(name, store), .rank = rank, .timeout = kTimeout};
    for (int each = 0; each < size; ++each) made.members.emplace_back(each);
    return made;
  }
  void make(const std::function<void()>& check_members = {}) {
    auto own = options("device");
    own.check_members = check_members;
    backend = make_device_backend(own, make_backend(options("host")));
  }
  // The calls that the library has seen, but for those of its beginning.
  std::vector<std::string> calls() const {
    std::ifstream in(folder / ("log." + std::to_string(rank)));
    std::vector<std::string> lines;
    for (std::string line; std::getline(in, line);) {
      if (!line.starts_with("GetUniqueId") && !line.starts_with("CommInit")) lines.push_back(line);
    }
    return lines;
  }
};

class Nccl : public testing::Test {
 protected:
  Nccl() {
    std::string name = "/tmp/lamina_nccl_XXXXXX";
    folder_ = ::mkdtemp(name.data());
  }
  ~Nccl() override { std::filesystem::remove_all(folder_); }

  using Body = std::function<void(Member& member)>;
  // Each member is a process with a device of its own, `device_of` says which.
  void in_members(int size, const Body& body, const std::function<Variables(int rank)>& more = {},
                  const std::function<int(int rank)>& device_of = {}, const std::vector<int>& killed = {}) const {
    RankForks ranks(size);
    for (int rank = 0; rank < size; ++rank) {
      Variables variables{{"LAMINA_NCCL", LAMINA_STANDIN_NCCL},
                          {"STANDIN_NCCL_LOG", (folder_ / "log").string()},
                          {"TMPDIR", folder_.string()},
                          {"EMULATED_DELAY_US", "500"}};
      if (more) {
        for (const auto& [variable, value] : more(rank)) variables[variable] = value;
      }
      variables["RANK"] = std::to_string(rank);
      const int device = device_of ? device_of(rank) : rank;
      ranks.start(
          rank,
          [&, rank, device] {
            devices::set_rank_device({at::kPrivateUse1, static_cast<at::DeviceIndex>(device)});
            Member member{rank, size, folder_, nullptr};
            body(member);
          },
          variables);
    }
    ranks.expect_success(killed);
  }

  std::filesystem::path folder_;
};

bool is_full_of(const at::Tensor& tensor, double value) { return (tensor.cpu() == value).all().item<bool>(); }

TEST_F(Nccl, MakesOneCallForEachCollectiveAndComputesWhatItSays) {
  in_members(3, [](Member& member) {
    member.make();
    EXPECT_EQ(member.backend->getBackendName(), "nccl");
    auto& backend = *member.backend;
    const double mine = member.rank + 1;

    Tensors one{member.tensor({3}, mine)};
    c10d::AllreduceOptions by;
    for (const auto& [operation, result] : std::vector<std::pair<c10d::ReduceOp, double>>{{c10d::ReduceOp::SUM, 6},
                                                                                          {c10d::ReduceOp::PRODUCT, 6},
                                                                                          {c10d::ReduceOp::MAX, 3},
                                                                                          {c10d::ReduceOp::AVG, 2}}) {
      one[0].fill_(mine);
      by.reduceOp = operation;
      backend.allreduce(one, by)->wait();
      EXPECT_TRUE(is_full_of(one[0], result)) << result;
    }
    Tensors two{member.tensor({4}, mine, at::kLong), member.tensor({5}, 10 * mine, at::kLong)};
    backend.allreduce_coalesced(two, {})->wait();
    EXPECT_TRUE(is_full_of(two[0], 6) && is_full_of(two[1], 60));
    one[0].fill_(mine);
    c10d::BroadcastOptions from_the_last;
    from_the_last.rootRank = 2;
    backend.broadcast(one, from_the_last)->wait();
    EXPECT_TRUE(is_full_of(one[0], 3));
    one[0].fill_(mine);
    c10d::ReduceOptions to_the_last;
    to_the_last.rootRank = 2;
    backend.reduce(one, to_the_last)->wait();
    if (member.rank == 2) EXPECT_TRUE(is_full_of(one[0], 6));

    auto part = member.tensor({2}, mine), all = member.tensor({6}, 0);
    backend._allgather_base(all, part)->wait();
    EXPECT_TRUE(at::equal(all.cpu(), at::tensor({1, 1, 2, 2, 3, 3}, at::kFloat)));
    backend._reduce_scatter_base(part, all)->wait();
    EXPECT_TRUE(is_full_of(part, 3 * mine));
    EXPECT_THAT(member.calls(), ElementsAre("AllReduce 3 7 0", "AllReduce 3 7 1", "AllReduce 3 7 2", "AllReduce 3 7 4",
                                            "AllReduce 4 4 0", "AllReduce 5 4 0", "Broadcast 12 1 2", "Reduce 3 7 0 2",
                                            "AllGather 8 1", "ReduceScatter 2 7 0"));
  });
}

TEST_F(Nccl, PartsListsByMembers) {
  in_members(3, [](Member& member) {
    member.make();
    auto& backend = *member.backend;
    const double mine = member.rank + 1;
    std::vector<Tensors> lists{{member.tensor({2}, 0), member.tensor({2}, 0), member.tensor({2}, 0)}};
    Tensors one{member.tensor({2}, mine)};
    backend.allgather(lists, one)->wait();
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(is_full_of(lists[0][i], i + 1));
    backend.reduce_scatter(one, lists)->wait();
    EXPECT_TRUE(is_full_of(one[0], 3 * mine));

    c10d::GatherOptions to_the_first;
    std::vector<Tensors> at_root = member.rank == 0 ? lists : std::vector<Tensors>();
    one[0].fill_(10 * mine);
    backend.gather(at_root, one, to_the_first)->wait();
    if (member.rank == 0) {
      for (int i = 0; i < 3; ++i) EXPECT_TRUE(is_full_of(lists[0][i], 10 * (i + 1)));
    }
    one[0].zero_();
    backend.scatter(one, at_root, {})->wait();
    EXPECT_TRUE(is_full_of(one[0], 10 * mine));

    auto sent = member.tensor({6, 2}, mine), received = member.tensor({6, 2}, 0);
    std::vector<std::int64_t> equal;
    backend.alltoall_base(received, sent, equal, equal, {})->wait();
    EXPECT_TRUE(at::equal(received.cpu().select(1, 0), at::tensor({1, 1, 2, 2, 3, 3}, at::kFloat)));
    std::vector<std::int64_t> given{1, 2, 3}, got(3, member.rank + 1);  // member i gets i + 1 rows of each
    auto rows = member.tensor({3 * (member.rank + 1), 2}, 0);
    backend.alltoall_base(rows, sent, got, given, {})->wait();
    EXPECT_EQ(rows.cpu().sum().item<double>(), 2 * 6 * (member.rank + 1));
  });
}

TEST_F(Nccl, OrdersStreamsAndLetsNoHostWait) {
  in_members(2, [](Member& member) {
    member.make();
    const c10::impl::VirtualGuardImpl devices_of(at::kPrivateUse1);
    for (int round = 0; round < 5; ++round) {
      Tensors one{member.tensor({1000}, member.rank)};
      emulated::reset_counts();
      for (int i = 0; i < 5; ++i) one[0].add_(1);
      const auto work = member.backend->allreduce(one);
      at::Tensor read;
      c10::Event has_read(at::kPrivateUse1);
      {
        const c10::StreamGuard side(devices_of.getStreamFromGlobalPool(devices::rank_device()));
        work->wait();
        read = one[0] * 2;
        has_read.record(side.current_stream());
      }
      work->wait();
      has_read.block(devices_of.getStream(devices::rank_device()));
      one[0].add_(1);
      EXPECT_EQ(emulated::counts().waits, 0);
      EXPECT_TRUE(is_full_of(one[0], 12)) << round;
      EXPECT_TRUE(is_full_of(read, 22)) << round;
      const auto unread = [&] {  // it keeps what nobody else does
        Tensors given{member.tensor({1000}, 1)};
        return member.backend->allreduce(given);
      }();
      for (int i = 0; i < 5; ++i) member.tensor({1000}, 5);
      unread->wait();
      EXPECT_TRUE(is_full_of(unread->result()[0], 2)) << round;
    }
  });
}

TEST_F(Nccl, LeavesToTheHostWhatNcclHasNot) {
  in_members(2, [](Member& member) {
    member.make();
    Tensors bits{member.tensor({3}, 1 << member.rank, at::kInt)};
    c10d::AllreduceOptions by;
    by.reduceOp = c10d::ReduceOp::BOR;
    member.backend->allreduce(bits, by)->wait();
    EXPECT_TRUE(is_full_of(bits[0], 3));
    Tensors sent{member.tensor({3}, member.rank)}, received{member.tensor({3}, 9)};
    const int other = 1 - member.rank;
    const auto given = member.backend->send(sent, other, 0), taken = member.backend->recv(received, other, 0);
    given->wait();
    taken->wait();
    EXPECT_TRUE(is_full_of(received[0], other));
    EXPECT_THAT(member.calls(), ElementsAre());
  });
}

TEST_F(Nccl, RefusesTensorsThatDoNotFit) {
  in_members(2, [](Member& member) {
    member.make();
    Tensors apart{member.tensor({4, 4}, 1).t()}, elsewhere{at::ones({3})};
    for (auto* tensors : {&apart, &elsewhere}) {
      EXPECT_THAT(message_of<base::UsageError>([&] { member.backend->allreduce(*tensors); }),
                  HasSubstr("lamina:all_reduce takes contiguous tensors of emulated:"));
    }
    auto part = member.tensor({2}, 1), all = member.tensor({5}, 1);
    EXPECT_THAT(message_of<base::UsageError>([&] { member.backend->_allgather_base(all, part); }),
                HasSubstr("lamina:all_gather: a tensor of 5 Float in place of 4 Float"));
  });
}

TEST_F(Nccl, EndsKernelsThatWaitForALostMember) {
  const auto body = [](Member& member) {
    member.make();
    Tensors one{member.tensor({3}, 1)};
    member.backend->allreduce(one)->wait();
    EXPECT_TRUE(is_full_of(one[0], 3));
    if (member.rank == 2) ::raise(SIGKILL);
    const auto work = member.backend->allreduce(one);
    EXPECT_FALSE(work->isCompleted());
    const auto since = Clock::now();
    member.backend->abort();
    c10::impl::VirtualGuardImpl(at::kPrivateUse1).synchronizeDevice(devices::rank_device().index());
    EXPECT_LT(Clock::now() - since, std::chrono::seconds(2));
    EXPECT_EQ(member.calls().back(), "CommAbort");
    EXPECT_THAT(message_of<base::CancelledError>([&] { member.backend->allreduce(one); }),
                HasSubstr("lamina:all_reduce: the group over NCCL 2.28.9 was aborted"));
  };
  in_members(3, body, {}, {}, {2});
}

TEST_F(Nccl, SaysWhatIsRefusedInItsWords) {
  const auto body = [](Member& member) {
    member.make();
    Tensors one{member.tensor({3}, 1)};
    EXPECT_EQ(message_of<base::UsageError>([&] { member.backend->allreduce(one); }),
              "lamina:all_reduce: NCCL 2.28.9: invalid usage; the stand-in refuses AllReduce");
    member.backend->broadcast(one)->wait();  // the group goes on
    EXPECT_TRUE(is_full_of(one[0], 1));
  };
  in_members(2, body, [](int) { return Variables{{"STANDIN_NCCL_REFUSES", "AllReduce"}}; });
}

TEST_F(Nccl, TellsALateErrorToWhoeverWaitsOrCallsNext) {
  const auto body = [](Member& member) {
    member.make();
    Tensors one{member.tensor({3}, 1)};
    const auto work = member.backend->broadcast(one);
    EXPECT_TRUE(comes_true([&] { return work->isCompleted(); }));
    EXPECT_THAT(message_of<base::Error>([&] { work->wait(); }),
                HasSubstr("NCCL 2.28.9: stand-in error; the stand-in broke in Broadcast"));
    EXPECT_THAT(message_of<base::Error>([&] { member.backend->allreduce(one); }),
                HasSubstr("lamina:all_reduce: NCCL 2.28.9: stand-in error; the stand-in broke in Broadcast"));
  };
  in_members(2, body, [](int) { return Variables{{"STANDIN_NCCL_BREAKS", "Broadcast"}}; });
}

TEST_F(Nccl, AMemberThatIsLostWhileTheGroupIsMadeEndsItForAll) {
  const auto body = [](Member& member) {
    if (member.rank == 1) {
      EXPECT_EQ(message_of<base::UsageError>([&] { member.make(); }),
                "making a communicator: NCCL 2.28.9: invalid usage; the stand-in refuses CommInitRankConfig");
    } else {
      const auto since = Clock::now();
      const auto check = [&] {
        if (Clock::now() - since > std::chrono::milliseconds(300))
          throw base::PeerError("rank 1 is lost", std::nullopt);
      };
      EXPECT_EQ(message_of<base::PeerError>([&] { member.make(check); }), "rank 1 is lost");
    }
    EXPECT_THAT(member.calls(), ElementsAre("CommAbort"));
  };
  in_members(2, body, [](int rank) {
    return rank == 1 ? Variables{{"STANDIN_NCCL_REFUSES", "CommInitRankConfig"}} : Variables{};
  });
}

// Makes a group, and expects that it goes through the host; returns what was said of it.
std::string said_of_staged(Member& member) {
  testing::internal::CaptureStderr();
  member.make();
  EXPECT_EQ(member.backend->getBackendName(), "staged");
  Tensors one{member.tensor({3}, 1)};
  member.backend->allreduce(one)->wait();
  EXPECT_TRUE(is_full_of(one[0], 2));
  EXPECT_THAT(member.calls(), ElementsAre());
  return testing::internal::GetCapturedStderr();
}

TEST_F(Nccl, IsLeftByAllWhereOneHasNoLibrary) {
  const std::string begins =
      "tensors of devices in the group of ranks 0, 1 go through the host, not over NCCL: rank 1: ";
  const std::string old = LAMINA_STANDIN_NCCL " is of version 2.13.4; it has to be 2.14.0 or later";
  const std::vector<std::pair<Variables, std::string>> rows{
      {{{"LAMINA_NCCL", "/nowhere/libnccl.so"}}, "/nowhere/libnccl.so: cannot open shared object file"},
      {{{"LAMINA_NCCL", LAMINA_EMULATED}}, LAMINA_EMULATED " has no ncclGetVersion"},
      {{{"STANDIN_NCCL_VERSION", "21304"}}, old},
      {{{"LAMINA_NCCL", ""}}, "its device has no such library"}};
  for (const auto& [variables, words] : rows) {
    const auto body = [&](Member& member) {
      const auto said = said_of_staged(member);
      if (member.rank == 0) EXPECT_THAT(said, HasSubstr(begins + words));
      if (member.rank == 1) EXPECT_EQ(said, "");
    };
    in_members(2, body, [&](int rank) { return rank == 1 ? variables : Variables{}; });
    std::filesystem::remove(folder_ / "store");
  }
}

TEST_F(Nccl, IsNoCodeThatOthersMayHavePutThere) {
  const auto copy = folder_ / "libnccl.so";
  std::filesystem::copy_file(LAMINA_STANDIN_NCCL, copy);
  std::filesystem::permissions(copy, std::filesystem::perms::all);
  in_members(
      1,
      [](Member& member) {
        EXPECT_THAT(message_of<base::ConfigError>([&] { member.make(); }),
                    HasSubstr("LAMINA_NCCL names code that others may have put there"));
      },
      [&](int) { return Variables{{"LAMINA_NCCL", copy.string()}}; });
}

TEST_F(Nccl, IsNotUsedWhereTwoMembersShareADevice) {
  const auto body = [](Member& member) {
    const auto said = said_of_staged(member);
    if (member.rank == 0) EXPECT_THAT(said, HasSubstr("not over NCCL: ranks 0 and 1 compute on one device"));
  };
  in_members(2, body, {}, [](int) { return 0; });
}

TEST_F(Nccl, IsNotSpokenOfWhereDevicesHaveNoSuchLibrary) {
  in_members(
      2, [](Member& member) { EXPECT_EQ(said_of_staged(member), ""); },
      [](int) { return Variables{{"LAMINA_NCCL", ""}}; });
}

}  // namespace
}  // namespace lamina::collective
