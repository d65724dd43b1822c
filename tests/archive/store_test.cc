// SPDX-License-Identifier: Apache-2.0
#include "lamina/archive/store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lamina/archive/verify.h"
#include "lamina/base/error.h"
#include "tests/archive/checkpoints.h"
#include "tests/archive/simulated_files.h"
#include "tests/message_of.h"

namespace lamina::archive::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const Path kFolder = "/checkpoints";

std::vector<std::string> tags_of(Store& store) {
  std::vector<std::string> tags;
  for (const auto& each : store.list()) tags.push_back(each.tag);
  return tags;
}

// Damages a file in place: as a writer of its own would.
void overwrite(FileSystem& files, const Path& path, std::string_view text) {
  files.remove(path);
  files.create(path)->write(std::as_bytes(std::span(text)));
}

TEST(Store, FindsWhatWasSaved) {
  SimulatedFiles files;
  save(files, kFolder, "step-10", {.seed = 5});
  Store store(files, kFolder);
  const auto found = store.find("step-10");
  EXPECT_EQ(found.folder, kFolder / "step-10_partial");
  EXPECT_EQ(found.manifest.id, "id5");
  EXPECT_EQ(found.manifest.about["counters"]["step"], 5);
  EXPECT_THAT(verify(files, found.folder, [](auto, auto) {}), IsEmpty());
}

TEST(Store, ListsTheLatestFirstAndTheDamagedLast) {
  SimulatedFiles files;
  for (std::uint64_t i = 0; i < 4; ++i) save(files, kFolder, std::string(1, "bdca"[i]), {.seed = i + 1});
  overwrite(files, kFolder / "c_partial" / kManifestName, "{");
  Store store(files, kFolder);
  EXPECT_THAT(tags_of(store), ElementsAre("a", "d", "b", "c"));
  EXPECT_THAT(store.list().back().damage, HasSubstr("/checkpoints/c_partial/manifest.json: "));
}

TEST(Store, TheOneBeforeIsTheLatestWholeOneSavedEarlier) {
  SimulatedFiles files;
  for (std::uint64_t i = 0; i < 4; ++i) save(files, kFolder, std::string(1, "bdca"[i]), {.seed = i + 1});
  overwrite(files, kFolder / "c_partial" / kManifestName, "{");
  Store store(files, kFolder);
  EXPECT_EQ(store.before("a"), "d");
  EXPECT_EQ(store.before("d"), "b");
  EXPECT_EQ(store.before("b"), "");
  EXPECT_EQ(store.before("c"), "");
  EXPECT_EQ(store.before("x"), "");
}

TEST(Store, TheNewestIsWhatWasSavedLastAlsoUnderAnOlderTag) {
  SimulatedFiles files;
  save(files, kFolder, "a", {.seed = 1});
  save(files, kFolder, "b", {.seed = 2});
  save(files, kFolder, "a", {.seed = 3});
  Store store(files, kFolder);
  EXPECT_EQ(store.newest([](const auto& text) { FAIL() << text; })->tag, "a");
  EXPECT_THAT(tags_of(store), ElementsAre("a", "b"));
}

TEST(Store, TakesTheLatestWholeOneWhereTheNewestIsDamagedAndSaysSo) {
  SimulatedFiles files;
  for (std::uint64_t i = 0; i < 3; ++i) save(files, kFolder, std::string(1, "abc"[i]), {.seed = i + 1});
  overwrite(files, kFolder / "c_partial/model-00002.safetensors", "short");
  Store store(files, kFolder);
  std::string told;
  EXPECT_EQ(store.newest([&](const auto& text) { told = text; })->tag, "b");
  EXPECT_THAT(told, HasSubstr("c_partial/model-00002.safetensors: 5 bytes, where "));
  EXPECT_THAT(told, HasSubstr("the latest one that is whole is taken, b"));
}

TEST(Store, NamesTheGoodOnesWhereANamedOneIsMissingOrDamaged) {
  SimulatedFiles files;
  save(files, kFolder, "a", {.seed = 1});
  save(files, kFolder, "b", {.seed = 2});
  files.remove(kFolder / "b_partial/model-00003.safetensors");
  Store store(files, kFolder);
  EXPECT_THAT(message_of<base::UsageError>([&] { store.find("x"); }),
              HasSubstr("no checkpoint x in /checkpoints: here are a"));
  const auto damaged = message_of<base::FormatError>([&] { store.find("b"); });
  EXPECT_THAT(damaged, HasSubstr("opening /checkpoints/b_partial/model-00003.safetensors: No such file"));
  EXPECT_THAT(damaged, HasSubstr("here are a"));
}

TEST(Store, HasNoNewestWhereNothingWasSavedAndAnErrorWhereAllIsDamaged) {
  SimulatedFiles files;
  Store store(files, kFolder);
  EXPECT_FALSE(store.newest([](const auto& text) { FAIL() << text; }));
  save(files, kFolder, "a", {.seed = 1});
  overwrite(files, kFolder / "a_partial" / kManifestName, "");
  EXPECT_THAT(message_of<base::FormatError>([&] { store.newest([](const auto&) {}); }),
              HasSubstr("no checkpoint in /checkpoints is whole: /checkpoints/a_partial/manifest.json"));
}

TEST(Store, ASecondSaveOfATagIsToldWhoHoldsIt) {
  SimulatedFiles files;
  Store store(files, kFolder);
  auto first = std::make_optional(store.begin("a", "1", "job 7 on host n3"));
  Store other(files, kFolder);
  EXPECT_EQ(message_of<base::UsageError>([&] { other.begin("a", "2", "job 8"); }),
            "/checkpoints/a_partial is being saved by job 7 on host n3: wait for it, or take another tag");
  EXPECT_EQ(files.list(kFolder / "a_partial.tmp-1").size(), 0);  // and it is still there
  first->commit(write_files(files, first->folder(), {.seed = 1}));
  first.reset();
  auto second = other.begin("a", "2", "job 8");
  second.commit(write_files(files, second.folder(), {.seed = 2}));
  EXPECT_EQ(store.find("a").manifest.id, "2");
}

TEST(Store, SavesOfTwoTagsAtOnceDoNotDisturbEachOther) {
  SimulatedFiles files;
  Store store(files, kFolder), other(files, kFolder);
  auto a = store.begin("a", "1", "job 7");
  auto first = write_files(files, a.folder(), {.seed = 1});
  auto b = other.begin("b", "2", "job 8");  // which removes what dead saves have left, and `a` is none
  b.commit(write_files(files, b.folder(), {.seed = 2}));
  a.commit(std::move(first));
  EXPECT_EQ(store.newest([](const auto& text) { FAIL() << text; })->tag, "a");
  EXPECT_EQ(store.find("b").manifest.id, "2");
}

TEST(Store, ASaveWithoutACommitLeavesNothing) {
  SimulatedFiles files;
  save(files, kFolder, "a", {.seed = 1});
  {
    Store store(files, kFolder);
    auto save = store.begin("a", "2", "a test");
    write_files(files, save.folder(), {.seed = 2});
  }
  std::vector<std::string> names;
  for (const auto& entry : files.list(kFolder)) names.push_back(entry.name);
  EXPECT_THAT(names, ElementsAre("a_partial", "newest"));
  EXPECT_EQ(Store(files, kFolder).find("a").manifest.id, "id1");
}

TEST(Store, CommitsNothingWhereAFileIsNotAsItsWriterSays) {
  SimulatedFiles files;
  save(files, kFolder, "a", {.seed = 1});
  Store store(files, kFolder);
  for (const bool missing : {false, true}) {
    auto save = store.begin("a", "2", "a test");
    auto manifest = write_files(files, save.folder(), {.seed = 2});
    const auto path = save.folder() / manifest.files[1].name;
    if (missing) {
      files.remove(path);
      EXPECT_THROW(save.commit(manifest), base::FileError);
    } else {
      overwrite(files, path, "short");
      EXPECT_THAT(message_of<base::FormatError>([&] { save.commit(manifest); }),
                  HasSubstr(path.string() + ": 5 bytes"));
    }
  }
  EXPECT_EQ(store.find("a").manifest.id, "id1");
}

TEST(Store, RefusesAnAddressWhichWouldBecomeAFolder) {
  SimulatedFiles files;
  for (const auto* address : {"s3://bucket/saved", "gs://bucket", "hf://a/b", "memory://c"}) {
    EXPECT_THROW(Store(files, address), base::UsageError) << address;
  }
  EXPECT_NO_THROW(Store(files, "runs/a:b"));
}

TEST(Store, RefusesTagsAndIdsThatAreNoPartsOfNames) {
  SimulatedFiles files;
  Store store(files, kFolder);
  const std::vector<std::string> bad{"", "..", ".a", "a/b", "a.tmp-1", "a.old-1", std::string(300, 'a')};
  for (const auto& tag : bad) {
    EXPECT_THROW(store.begin(tag, "1", "a test"), base::UsageError) << tag;
    EXPECT_THROW(store.find(tag), base::UsageError) << tag;
    EXPECT_THROW(store.begin("a", tag, "a test"), base::UsageError) << tag;
  }
  const auto words = message_of<base::UsageError>([&] { store.find(std::string("a\0b", 3)); });
  EXPECT_TRUE(words.starts_with("\"a\\x00b\" is no tag: it becomes")) << words;
}

TEST(Store, LeavesFilesOfOthersBesideWholeModels) {
  SimulatedFiles files;
  for (const auto* name : {"uv.lock", "data/x", "data.old-2023/x", "data.tmp-1/x", "a.newest", "app/manifest.json"}) {
    const Path path = kFolder / name;
    files.make_folder(path.parent_path());
    files.create(path)->write(bytes_of("mine"));
  }
  const auto before = files.list(kFolder);
  Store store(files, kFolder, Store::Form::kFull);
  for (const std::uint64_t seed : {1, 2}) {
    auto save = store.begin("final", "id" + std::to_string(seed), "a test");
    save.commit(write_files(files, save.folder(), {.seed = seed}));
  }
  EXPECT_EQ(store.find("final").manifest.id, "id2");
  for (const auto* taken : {"data", "uv.lock", "app"})
    EXPECT_THROW(store.begin(taken, "3", "a test"), base::UsageError);
  files.remove(kFolder / "final");
  files.remove(kFolder / "newest");
  const auto after = files.list(kFolder);
  EXPECT_TRUE(std::ranges::equal(before, after, {}, &FileSystem::Entry::name, &FileSystem::Entry::name));
}

TEST(Store, ReadsThroughASaveThatReplacesWhatIsRead) {
  for (const bool exchanges : {true, false}) {
    for (std::uint64_t at = 0; at < 30; ++at) {
      SimulatedFiles files(exchanges);
      save(files, kFolder, "a", {.seed = 1});
      files.restart();
      files.interfere([&](std::uint64_t number) {
        if (number == at) save(files, kFolder, "a", {.seed = 2, .rows = 16});
      });
      const auto found = Store(files, kFolder).find("a");
      EXPECT_TRUE(found.manifest.id == "id1" || found.manifest.id == "id2");
    }
  }
}

TEST(Prune, KeepsTheLatestTheOneBeingReadAndTheNewest) {
  SimulatedFiles files;
  for (std::uint64_t i = 0; i < 6; ++i) save(files, kFolder, std::string(1, "abcdef"[i]), {.seed = i + 1});
  write_new(files, kFolder / "newest", "b_partial\n");  // the process of `f` was killed before that
  Store store(files, kFolder);
  EXPECT_THAT(store.prune(2, "c"), ElementsAre("d", "a"));
  EXPECT_THAT(tags_of(store), ElementsAre("f", "e", "c", "b"));
  EXPECT_THROW(store.prune(0), base::UsageError);
}

TEST(Prune, CountsOnlyWholeOnes) {
  SimulatedFiles files;
  for (std::uint64_t i = 0; i < 3; ++i) save(files, kFolder, std::string(1, "abc"[i]), {.seed = i + 1});
  overwrite(files, kFolder / "c_partial" / kManifestName, "");
  Store store(files, kFolder);
  EXPECT_THAT(store.prune(1), ElementsAre("a"));
  EXPECT_THAT(tags_of(store), ElementsAre("b", "c"));
}

TEST(Prune, LeavesWhatIsBeingSavedOrWasSavedAnew) {
  SimulatedFiles files;
  for (std::uint64_t i = 0; i < 3; ++i) save(files, kFolder, std::string(1, "abc"[i]), {.seed = i + 1});
  Store store(files, kFolder);
  {
    auto save = store.begin("a", "9", "a test");
    EXPECT_THAT(store.prune(1), ElementsAre("b"));
  }
  EXPECT_THAT(tags_of(store), ElementsAre("c", "a"));
  for (std::uint64_t at = 0; at < 40; ++at) {  // while it is pruned
    SCOPED_TRACE(at);
    SimulatedFiles raced;
    for (std::uint64_t i = 0; i < 3; ++i) save(raced, kFolder, std::string(1, "abc"[i]), {.seed = i + 1});
    raced.restart();
    bool saved = false;
    raced.interfere([&](std::uint64_t number) {
      if (number != at) return;
      try {
        save(raced, kFolder, "a", {.seed = 4});
        saved = true;
      } catch (const base::UsageError&) {  // the prune holds it
      }
    });
    Store(raced, kFolder).prune(1);
    EXPECT_TRUE(!saved || Store(raced, kFolder).find("a").manifest.id == "id4");
  }
}

}  // namespace
}  // namespace lamina::archive::testing
