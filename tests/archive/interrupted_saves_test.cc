// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cerrno>
#include <set>

#include "lamina/archive/verify.h"
#include "lamina/base/error.h"
#include "lamina/base/system_error.h"
#include "tests/archive/checkpoints.h"
#include "tests/archive/simulated_files.h"

namespace lamina::archive::testing {
namespace {

const Path kFolder = "/jobs/run/checkpoints";

// A save of 4 writers, "b", into a folder where a save "a" has been, and "b" too where it replaces one.
struct Case {
  bool replaces = false;
  bool exchanges = true;
};

std::unique_ptr<SimulatedFiles> prepared(const Case& given) {
  auto files = std::make_unique<SimulatedFiles>(given.exchanges);
  save(*files, kFolder, "a", {.seed = 1});
  if (given.replaces) save(*files, kFolder, "b", {.seed = 2});
  return files;
}

// The number of operations of that save, when nothing ends it.
std::uint64_t operations_of(const Case& given) {
  const auto files = prepared(given);
  files->kill_at(~0ULL);
  save(*files, kFolder, "b", {.seed = 3});
  return files->operations();
}

// The seed of the save whose checkpoint this is, after all its bytes were read.
std::uint64_t seed_of(SimulatedFiles& files, const Found& found) {
  for (const auto& damage : verify(files, found.folder, [](auto, auto) {})) {
    ADD_FAILURE() << found.folder << ": " << damage.file << ": " << damage.what;
  }
  return found.manifest.about.at("counters").at("step");
}

void expect_no_leftovers(SimulatedFiles& files) {
  const std::set<std::string> expected{"a_partial", "b_partial", "newest"};
  std::set<std::string> names;
  for (const auto& entry : files.list(kFolder)) names.insert(entry.name);
  EXPECT_EQ(names, expected);
}

// Expects that all is as before that save, or as after it, and that the next one works and leaves nothing else.
// `committed`: it had returned.
void expect_one_or_the_other(SimulatedFiles& files, const Case& given, bool committed) {
  Store store(files, kFolder);
  std::string told;
  const auto newest = store.newest([&](const std::string& text) { told = text; });
  ASSERT_TRUE(newest);
  EXPECT_EQ(told, "");
  EXPECT_EQ(seed_of(files, store.find("a")), 1);
  bool there = false;
  for (const auto& each : store.list()) {
    EXPECT_EQ(each.damage, "") << each.tag;
    if (each.tag != "b") continue;
    there = true;
    const auto seed = seed_of(files, store.find("b"));
    EXPECT_TRUE(seed == 3 || (given.replaces && !committed && seed == 2)) << seed;
  }
  EXPECT_TRUE(there || (!given.replaces && !committed));
  EXPECT_TRUE(!committed || newest->tag == "b") << newest->tag;

  save(files, kFolder, "b", {.seed = 4});
  EXPECT_EQ(seed_of(files, store.find("b")), 4);
  EXPECT_EQ(store.newest([](const auto&) {})->tag, "b");
  expect_no_leftovers(files);
}

// Saves, unless the process is killed before the commit.
bool commits(auto& files) {
  try {
    save(files, kFolder, "b", {.seed = 3});
    return true;
  } catch (const Killed&) {
    return false;
  }
}

class InterruptedSave : public ::testing::TestWithParam<Case> {};

TEST_P(InterruptedSave, KilledAtAnyOperationLeavesTheOldOneOrTheNewOne) {
  const auto operations = operations_of(GetParam());
  ASSERT_GT(operations, 30);
  for (std::uint64_t at = 0; at <= operations; ++at) {
    SCOPED_TRACE(at);
    const auto files = prepared(GetParam());
    files->kill_at(at);
    const bool committed = commits(*files);
    ASSERT_EQ(committed, at == operations);
    files->restart();
    expect_one_or_the_other(*files, GetParam(), committed);
  }
}

TEST_P(InterruptedSave, PowerCutAtAnyOperationLeavesTheOldOneOrTheNewOne) {
  const auto operations = operations_of(GetParam());
  for (std::uint64_t at = 0; at <= operations; ++at) {
    for (std::uint64_t random = 0; random < 5; ++random) {
      SCOPED_TRACE(::testing::Message() << at << ", " << random);
      const auto files = prepared(GetParam());
      files->kill_at(at);
      const bool committed = commits(*files);
      files->cut_power(random);
      expect_one_or_the_other(*files, GetParam(), committed);
    }
  }
}

// A process is killed, the next one saves, and then the power is cut.
TEST_P(InterruptedSave, PowerCutInTheSaveAfterAKilledOneLosesNothing) {
  const auto operations = operations_of(GetParam());
  for (std::uint64_t first = operations - std::min<std::uint64_t>(operations, 20); first < operations; ++first) {
    for (std::uint64_t second = 0; second < 8; ++second) {
      for (std::uint64_t random = 0; random < 3; ++random) {
        SCOPED_TRACE(::testing::Message() << first << ", " << second << ", " << random);
        const auto files = prepared(GetParam());
        files->kill_at(first);
        EXPECT_THROW(save(*files, kFolder, "b", {.seed = 3}), Killed);
        files->restart();
        files->kill_at(second);
        EXPECT_THROW(save(*files, kFolder, "b", {.seed = 3}), Killed);
        files->cut_power(random);
        expect_one_or_the_other(*files, GetParam(), false);
      }
    }
  }
}

TEST_P(InterruptedSave, FaultAtAnyOperationNamesThePathAndLeavesEarlierCheckpoints) {
  const auto operations = operations_of(GetParam());
  for (const int code : {ENOSPC, EDQUOT, EROFS, EIO}) {
    for (std::uint64_t at = 0; at < operations; ++at) {
      for (std::uint64_t random = 0; random < 4; ++random) {
        SCOPED_TRACE(::testing::Message() << code << " at " << at << ", " << random);
        const auto files = prepared(GetParam());
        files->fail_at(at, code);
        bool committed = false;
        try {
          save(*files, kFolder, "b", {.seed = 3});
          committed = true;  // where it was no operation that such a fault concerns
        } catch (const base::Error& error) {
          const std::string words = error.what();
          EXPECT_NE(words.find(kFolder.string()), std::string::npos) << words;
          EXPECT_NE(words.find(base::system_error(code)), std::string::npos) << words;
          if (code == ENOSPC) {
            EXPECT_NE(words.find("0 bytes are free"), std::string::npos) << words;
            const bool writes = words.starts_with("writing");
            EXPECT_EQ(words.find(" bytes to write") != std::string::npos, writes) << words;
          }
        }
        random == 0 ? files->restart() : files->cut_power(random);
        expect_one_or_the_other(*files, GetParam(), committed);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, InterruptedSave,
                         ::testing::Values(Case{false, true}, Case{true, true}, Case{false, false}, Case{true, false}),
                         [](const auto& info) {
                           return std::string(info.param.replaces ? "Replacing" : "New") +
                                  (info.param.exchanges ? "" : "WithoutExchange");
                         });

TEST(FirstSave, PowerCutAfterItsCommitLosesNothingOfIt) {
  for (std::uint64_t random = 0; random < 20; ++random) {
    SimulatedFiles files;
    save(files, kFolder, "a", {.seed = 1});
    files.cut_power(random);
    EXPECT_EQ(seed_of(files, Store(files, kFolder).find("a")), 1);
  }
}

// Kept are the latest two of "a" to "d", and after the next save nothing is left of the others.
TEST(InterruptedPrune, EndAtAnyOperationLeavesWholeCheckpoints) {
  for (std::uint64_t at = 0; at < 40; ++at) {
    for (std::uint64_t random = 0; random < 6; ++random) {
      SCOPED_TRACE(::testing::Message() << at << ", " << random);
      SimulatedFiles files;
      for (std::uint64_t i = 0; i < 4; ++i)
        save(files, kFolder, std::string(1, "abcd"[i]), {.seed = i + 1, .writers = 1});
      files.kill_at(at);
      try {
        Store(files, kFolder).prune(2);
      } catch (const Killed&) {
      }
      random == 0 ? files.restart() : files.cut_power(random);
      Store store(files, kFolder);
      std::set<std::string> tags;
      for (const auto& each : store.list()) {
        EXPECT_EQ(each.damage, "") << each.tag;
        tags.insert(each.tag);
        seed_of(files, store.find(each.tag));
      }
      EXPECT_TRUE(tags.contains("c") && tags.contains("d"));
      store.prune(1);
      save(files, kFolder, "d", {.seed = 9});
      std::set<std::string> names;
      for (const auto& entry : files.list(kFolder)) names.insert(entry.name);
      EXPECT_EQ(names, (std::set<std::string>{"d_partial", "newest"}));
    }
  }
}

}  // namespace
}  // namespace lamina::archive::testing
