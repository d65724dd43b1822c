// SPDX-License-Identifier: Apache-2.0
#include "lamina/checkpoint/save.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <fstream>
#include <random>
#include <set>
#include <thread>

#include "lamina/archive/piece_reader.h"
#include "lamina/archive/verify.h"
#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/checkpoint/chunks.h"
#include "lamina/messaging/outcome.h"
#include "tests/archive/temp_folder.h"
#include "tests/messaging/mailboxes.h"

namespace lamina::checkpoint {
namespace {

using archive::testing::TempFolder;
using messaging::Mailboxes;

constexpr int kRanks = 8;  // of which 2, 4 and 6 tell others what the first one says

std::string text_of(const std::exception_ptr& error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  }
}

SaveRequest request_of(const std::filesystem::path& folder, const std::string& tag, int rank, double value) {
  SaveRequest request{.folder = folder, .tag = tag};
  request.parts.push_back(
      whole_part(base::str("w", rank), archive::Kind::kParameter, at::full({100, 3}, value + rank)));
  request.about = {{"value", value}};
  return request;
}

Peers peers_of(Mailboxes& boxes, int rank, std::chrono::milliseconds timeout = std::chrono::seconds(30)) {
  return {boxes.ranks(), boxes[rank], base::Patience{timeout}};
}

std::vector<std::exception_ptr> save(Mailboxes& boxes, const std::filesystem::path& folder, const std::string& tag,
                                     double value) {
  return boxes.run([&](int rank) {
    Save save(archive::file_system(), request_of(folder, tag, rank, value), peers_of(boxes, rank));
    save.start();
    save.wait();
  });
}

double value_of(const std::filesystem::path& folder, const std::string& tag) {
  const auto found = archive::Store(archive::file_system(), folder).find(tag);
  EXPECT_TRUE(archive::verify(archive::file_system(), found.folder, [](auto, auto) {}).empty());
  archive::PieceReader reader(archive::file_system(), found.folder, found.manifest);
  const auto value = found.manifest.about["value"].get<double>();
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto saved = std::ranges::find(found.manifest.tensors, base::str("w", rank), &archive::SavedTensor::name);
    const auto read = at::empty({100, 3}, scalar_type(saved->dtype));
    reader.read(*saved, 0, bytes_of(read));
    EXPECT_TRUE(at::equal(read, at::full({100, 3}, value + rank)));
  }
  return value;
}

TEST(Save, OfAllRanksIsOneCheckpoint) {
  const TempFolder folder;
  Mailboxes boxes(kRanks);
  for (const double value : {1.0, 2.0}) {  // the second in the place of the first
    for (const auto& error : save(boxes, folder / "c", "a", value)) EXPECT_EQ(text_of(error), "");
    EXPECT_EQ(value_of(folder / "c", "a"), value);
  }
}

TEST(Save, OfAWholeModelRemovesNoOtherOne) {
  const TempFolder folder;
  Mailboxes boxes(kRanks);
  for (const auto* tag : {"a", "b"}) {
    const auto errors = boxes.run([&](int rank) {
      auto request = request_of(folder / "c", tag, rank, 1.0);
      request.form = archive::Store::Form::kFull;
      request.keep = 1;  // partial checkpoints
      Save save(archive::file_system(), std::move(request), peers_of(boxes, rank));
      save.start();
      save.wait();
    });
    for (const auto& error : errors) EXPECT_EQ(text_of(error), "");
  }
  EXPECT_EQ(archive::Store(archive::file_system(), folder / "c", archive::Store::Form::kFull).list().size(), 2);
}

TEST(Save, ThatOneRankCannotWriteFailsAlikeOnAllAndLeavesTheOneBefore) {
  const TempFolder folder;
  Mailboxes boxes(kRanks);
  save(boxes, folder / "c", "a", 1);
  const auto errors = boxes.run([&](int rank) {
    Save save(archive::file_system(), request_of(folder / "c", "a", rank, 2), peers_of(boxes, rank));
    if (rank == 1) {  // somebody has taken the name of its file
      for (const auto& entry : std::filesystem::directory_iterator(folder / "c")) {
        if (entry.path().filename().string().find(".tmp-") == std::string::npos) continue;
        std::ofstream(entry.path() / "model-00002.safetensors") << "x";
      }
    }
    save.start();
    save.wait();
  });
  for (const auto& error : errors) {
    EXPECT_NE(text_of(error).find("on rank 1: creating"), std::string::npos) << text_of(error);
    EXPECT_THROW(std::rethrow_exception(error), base::FileError);
  }
  EXPECT_EQ(value_of(folder / "c", "a"), 1);
  for (const auto& error : save(boxes, folder / "c", "a", 3)) EXPECT_EQ(text_of(error), "");
  EXPECT_EQ(value_of(folder / "c", "a"), 3);
}

TEST(Save, IsRefusedOnAllRanksBeforeAnythingIsWritten) {
  const TempFolder folder;
  Mailboxes boxes(kRanks);
  for (const auto& error : save(boxes, folder / "c", "red\x1b[31m", 1)) {
    EXPECT_NE(text_of(error).find("\"red\\x1b[31m\" is no tag"), std::string::npos) << text_of(error);
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "c"));
}

TEST(Save, OfATagThatSomebodyElseSavesIsRefusedWithThatOne) {
  const TempFolder folder;
  Mailboxes boxes(kRanks);
  archive::Store store(archive::file_system(), folder / "c");
  const auto other = store.begin("a", "1", "another job");
  for (const auto& error : save(boxes, folder / "c", "a", 1)) {
    EXPECT_NE(text_of(error).find("by another job"), std::string::npos) << text_of(error);
  }
  for (const auto& error : save(boxes, folder / "c", "b", 1)) EXPECT_EQ(text_of(error), "");
}

// One with nobody behind it, and one that stands between the first one and two others, of which one is behind the
// other.
TEST(Save, NamesARankThatSaysNothing) {
  for (const int silent : {1, 4}) {
    const TempFolder folder;
    Mailboxes boxes(kRanks);
    const auto errors = boxes.run([&](int rank) {
      Save save(archive::file_system(), request_of(folder / "c", "a", rank, 1),
                peers_of(boxes, rank, std::chrono::milliseconds(2500)));
      if (rank == silent) return;  // and never writes
      save.start();
      save.wait();
    });
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto said = base::str("rank ", silent, ", which writes its part, has said nothing");
      EXPECT_EQ(text_of(errors[rank]).find(said) != std::string::npos, rank != silent) << text_of(errors[rank]);
    }
    EXPECT_THROW(std::rethrow_exception(errors[0]), base::TimeoutError);
  }
}

// A file that is made in two writes; or, by rank 2 where `fails`, in one and an error.
OwnFile file_of(int rank, bool fails) {
  const auto bytes = [](const std::string& text) { return std::as_bytes(std::span(text)); };
  return {base::str("file_", rank), 8, [=](const OwnFile::Write& write) {
            write(bytes("some"));
            if (fails && rank == 2) throw base::UsageError("nothing more to say");
            write(bytes(base::str("thing", rank)));
          }};
}

TEST(Save, OfFilesThatRanksMakeKnowsTheirBytes) {
  const TempFolder folder;
  Mailboxes boxes(kRanks);
  for (const bool fails : {false, true}) {
    const auto errors = boxes.run([&](int rank) {
      SaveRequest request{.folder = folder / "c", .tag = "a"};
      request.about = nlohmann::json::object();
      request.own_files.push_back(file_of(rank, fails));
      Save save(archive::file_system(), std::move(request), peers_of(boxes, rank));
      save.start();
      save.wait();
    });
    for (const auto& error : errors) {
      EXPECT_TRUE(text_of(error).ends_with(fails ? "on rank 2: nothing more to say" : "")) << text_of(error);
      EXPECT_EQ(error != nullptr, fails);
    }
    const auto found = archive::Store(archive::file_system(), folder / "c").find("a");
    EXPECT_EQ(found.manifest.files.size(), std::size_t{kRanks});
    EXPECT_EQ(archive::read_all(archive::file_system(), found.folder / "file_1", 100), "something1");
    EXPECT_TRUE(archive::verify(archive::file_system(), found.folder, [](auto, auto) {}).empty());
    std::ofstream(found.folder / "file_1", std::ios::in | std::ios::out) << "S";
    const auto damage = archive::verify(archive::file_system(), found.folder, [](auto, auto) {});
    ASSERT_EQ(damage.size(), 1U);
    EXPECT_EQ(damage.front().file, "file_1");
    std::ofstream(found.folder / "file_1", std::ios::in | std::ios::out) << "s";
  }
}

// Ranks have begun three steps more than the one before when the file of one fails.
TEST(Save, ThatFailsThrowsOnceBeforeTheSameStepOnAllRanks) {
  const TempFolder folder;
  Mailboxes boxes(kRanks);
  std::barrier all(kRanks + 1);
  std::vector<int> begun(kRanks);
  const auto errors = boxes.run([&](int rank) {
    SaveRequest request{.folder = folder / "c", .tag = "a"};
    request.about = nlohmann::json::object();
    if (rank == 2) {
      request.own_files.push_back({"file", 8, [&](const OwnFile::Write&) {
                                     all.arrive_and_wait();
                                     throw base::UsageError("nothing to say");
                                   }});
    }
    Save save(archive::file_system(), std::move(request), peers_of(boxes, rank));
    save.start();
    for (; begun[rank] < 3 * rank; ++begun[rank]) save.check_before_step();
    all.arrive_and_wait();
    try {
      for (;; ++begun[rank]) save.check_before_step();
    } catch (const base::UsageError&) {
      save.check_before_step();
      save.end();
      throw;
    }
  });
  for (const auto& error : errors) EXPECT_TRUE(text_of(error).ends_with("on rank 2: nothing to say"));
  EXPECT_GE(begun[0], 3 * (kRanks - 1));
  EXPECT_EQ(begun, std::vector<int>(kRanks, begun[0]));
}

// One rank ends before the others know that the save has failed: nobody waits for it.
TEST(Save, ThatARankGivesUpThrowsAtTheNextStep) {
  const TempFolder folder;
  Mailboxes boxes(kRanks);
  const auto errors = boxes.run([&](int rank) {
    Save save(archive::file_system(), request_of(folder / "c", "a", rank, 1), peers_of(boxes, rank));
    if (rank == 4) save.give_up();
    save.start();
    if (rank == 4) return;
    while (true) save.check_before_step();
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(text_of(errors[rank]).find("was interrupted") != std::string::npos, rank != 4) << text_of(errors[rank]);
  }
}

// Ranks 4 and 6 stand between the first one and the last.
TEST(Save, OfWhichRanksAreLostThatTellOthersEndsOnAll) {
  const TempFolder folder;
  Mailboxes boxes(kRanks);
  std::barrier all(kRanks);
  const auto errors = boxes.run([&](int rank) {
    Save save(archive::file_system(), request_of(folder / "c", "a", rank, 1), peers_of(boxes, rank));
    all.arrive_and_wait();
    for (const int lost : {4, 6}) boxes[rank].lose({base::Rank(lost), "its process ended", ""});
    if (rank == 4 || rank == 6) return;
    save.start();
    save.wait();
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    const bool is_lost = rank == 4 || rank == 6;
    EXPECT_EQ(text_of(errors[rank]).find("is lost: its process ended") != std::string::npos, !is_lost)
        << rank << ": " << text_of(errors[rank]);
    if (!is_lost) EXPECT_THROW(std::rethrow_exception(errors[rank]), base::PeerError);
  }
}

// Any but the first one, whose process would leave its folder.
TEST(Save, OfWhichRanksEndAtAnyMomentEndsOnTheOthersAtOnceAndAlike) {
  constexpr int kMany = 16;
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    const TempFolder folder;
    std::mt19937_64 random(seed);
    Mailboxes boxes(kMany, seed);
    std::set<int> ended;
    for (auto left = 1 + random() % 3; left > 0; --left) ended.insert(1 + static_cast<int>(random() % (kMany - 1)));
    const std::chrono::microseconds after(random() % 30000);  // the save may be over by then
    const bool begins = seed % 4 != 0;
    std::barrier all(kMany);
    const auto errors = boxes.run([&](int rank) {
      Save save(archive::file_system(), request_of(folder / "c", "a", rank, 1), peers_of(boxes, rank));
      all.arrive_and_wait();
      if (begins || !ended.contains(rank)) save.start();
      if (ended.contains(rank)) {
        std::this_thread::sleep_for(after);
        boxes.network().kill(base::Rank(rank));
        save.give_up();
      } else {
        save.wait();
      }
    });
    for (int rank = 0; rank < kMany; ++rank) {
      if (errors[rank] == nullptr) {
        EXPECT_TRUE(errors[0] == nullptr || ended.contains(rank)) << seed << ", rank " << rank;
      } else {
        EXPECT_NE(text_of(errors[rank]).find("is lost"), std::string::npos)
            << seed << ", rank " << rank << ": " << text_of(errors[rank]);
      }
    }
    if (!begins) EXPECT_NE(errors[0], nullptr) << seed;
    const auto saved = archive::Store(archive::file_system(), folder / "c").list();
    EXPECT_EQ(saved.size(), errors[0] == nullptr ? 1U : 0U) << seed;
  }
}

TEST(Outcome, NamesTheRankThatHasMetAnErrorOnce) {
  using messaging::to_error;
  using messaging::to_text;
  const auto met = to_text(std::make_exception_ptr(base::UsageError("no room")), base::Rank(2));
  EXPECT_EQ(text_of(to_error(to_text(to_error(met), base::Rank(0)))), "on rank 2: no room");
}

TEST(Save, KeepsAsManyAsItIsTold) {
  const TempFolder folder;
  Mailboxes boxes(kRanks);
  for (const auto* tag : {"a", "b", "c", "d"}) {
    boxes.run([&](int rank) {
      auto request = request_of(folder / "c", tag, rank, 1);
      request.keep = 2;
      Save save(archive::file_system(), std::move(request), peers_of(boxes, rank));
      save.start();
      save.wait();
    });
  }
  std::vector<std::string> tags;
  for (const auto& each : archive::Store(archive::file_system(), folder / "c").list()) tags.push_back(each.tag);
  EXPECT_EQ(tags, (std::vector<std::string>{"d", "c"}));
}

}  // namespace
}  // namespace lamina::checkpoint
