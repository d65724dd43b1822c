// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "lamina/base/error.h"
#include "lamina/dist/dist.h"
#include "lamina/value/failure.h"
#include "tests/dist/rank_forks.h"

namespace lamina::dist {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

class LocalZero : public ::testing::Test {
 protected:
  LocalZero() { fs::create_directories(folder_); }
  ~LocalZero() override { fs::remove_all(folder_); }

  const fs::path folder_ = fs::temp_directory_path() / ("lamina-dist-" + std::to_string(::getpid()));
};

struct Unusual : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using Guard = std::function<void(const std::function<void()>&)>;

// Local rank 0 gets its own exception, the others learn of it.
void fail_on_local_rank_0(const Guard& guard) {
  bool ran = false;
  const auto body = [&] {
    ran = true;
    if (get_local_rank() == 0) throw Unusual("no such file");
  };
  try {
    guard(body);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Unusual& error) {
    EXPECT_EQ(get_local_rank(), 0);
  } catch (const value::RemoteFailure& error) {
    EXPECT_NE(get_local_rank(), 0);
    EXPECT_EQ(error.failure().rank, base::Rank(0));
    EXPECT_EQ(error.failure().message, "no such file");
    EXPECT_THAT(error.what(), HasSubstr("Unusual"));
  }
}

TEST_F(LocalZero, GoesFirst) {
  for (int size : {1, 2, 3}) {
    testing::in_world(size, [&] {
      const fs::path file = folder_ / std::to_string(get_world_size());
      run_local_rank_zero_first([&] {
        EXPECT_EQ(fs::exists(file), get_local_rank() != 0);
        std::ofstream(file) << "made";
      });
    });
  }
}

TEST_F(LocalZero, WhenItThrowsNobodyHangsAndTheJobGoesOn) {
  for (int size : {2, 3}) {
    testing::in_world(size, [] {
      fail_on_local_rank_0([](const auto& body) {
        bool entered = false;
        try {
          run_local_rank_zero_first([&] {
            entered = true;
            body();
          });
        } catch (...) {
          EXPECT_EQ(entered, get_local_rank() == 0) << "the others do not run the body";
          throw;
        }
      });
      barrier();
    });
  }
}

TEST_F(LocalZero, AnotherRankMayThrowForItself) {
  testing::in_world(2, [] {
    const auto body = [] {
      if (get_local_rank() == 1) throw Unusual("mine");
    };
    if (get_local_rank() == 0) return run_local_rank_zero_first(body);
    EXPECT_THROW(run_local_rank_zero_first(body), Unusual);
  });
}

TEST_F(LocalZero, ABusyWaitEndsWithTheWorkOrItsFailureAndLeavesNoFile) {
  const std::string signals = folder_ / "signals";
  testing::in_world(3, [&] {
    busy_wait_for_local_rank_zero(
        [&] {
          if (get_local_rank() == 0) std::ofstream(folder_ / "done") << "done";
        },
        signals);
    EXPECT_TRUE(fs::exists(folder_ / "done"));
    fail_on_local_rank_0([&](const auto& body) { busy_wait_for_local_rank_zero(body, signals); });
    barrier();
    EXPECT_TRUE(fs::is_empty(signals));
  });
}

TEST_F(LocalZero, AFileIsWaitedForUntilItIsThereOrLocalRank0HasFailed) {
  testing::in_world(2, [&] {
    local_rank_zero_download_and_wait(folder_ / "data", [&] {
      EXPECT_EQ(fs::exists(folder_ / "data"), get_local_rank() == 1);
      std::ofstream(folder_ / "data") << "data";
    });
    const auto never = [&] { local_rank_zero_download_and_wait(folder_ / "never", [] { throw Unusual("no space"); }); };
    if (get_local_rank() == 0) {
      EXPECT_THROW(never(), Unusual);
    } else {
      EXPECT_THROW(never(), base::PeerError);
    }
  });
}

TEST_F(LocalZero, AloneNobodyWaits) {
  testing::alone([&] {
    EXPECT_THROW(run_local_rank_zero_first([] { throw Unusual("mine"); }), Unusual);
    EXPECT_THROW(busy_wait_for_local_rank_zero([] { throw Unusual("mine"); }, folder_), Unusual);
    EXPECT_THROW(local_rank_zero_download_and_wait(folder_ / "x", [] { throw Unusual("mine"); }), Unusual);
    EXPECT_TRUE(fs::is_empty(folder_));
    const auto path = write_signal_file(get_node_signal_file_name(), folder_ / "new");
    EXPECT_TRUE(fs::exists(path));
    EXPECT_THAT(path, HasSubstr("._signal_file_node0_"));
  });
}

}  // namespace
}  // namespace lamina::dist
