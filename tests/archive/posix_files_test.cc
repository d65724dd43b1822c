// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <set>
#include <thread>

#include "lamina/archive/file_failure.h"
#include "lamina/archive/file_system.h"
#include "lamina/archive/verify.h"
#include "lamina/base/error.h"
#include "tests/archive/checkpoints.h"
#include "tests/archive/temp_folder.h"
#include "tests/message_of.h"

namespace lamina::archive::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

FileSystem& files() { return file_system(); }

void write(const Path& path, std::string_view text) { files().create(path)->write(std::as_bytes(std::span(text))); }

std::vector<std::string> names_in(const Path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : files().list(folder)) names.push_back(entry.name);
  return names;
}

TEST(PosixFiles, SavesReplacesAndPrunesCheckpoints) {
  const TempFolder temp;
  const auto folder = temp / "runs/7";
  save(files(), folder, "a", {.seed = 1});
  save(files(), folder, "a", {.seed = 2});
  save(files(), folder, "b", {.seed = 3});
  Store store(files(), folder);
  const auto found = store.newest([](const auto& text) { FAIL() << text; });
  EXPECT_EQ(found->tag, "b");
  EXPECT_EQ(store.find("a").manifest.id, "id2");
  EXPECT_THAT(verify(files(), found->folder, [](auto, auto) {}), IsEmpty());
  EXPECT_THAT(store.prune(1), ElementsAre("a"));
  EXPECT_THAT(names_in(folder), ElementsAre("b_partial", "newest"));
}

TEST(PosixFiles, KeepWhatIsThere) {
  const TempFolder temp;
  write(temp / "f", "one");
  EXPECT_THAT(message_of<base::FileError>([&] { files().create(temp / "f"); }),
              HasSubstr("creating " + (temp / "f").string() + ": File exists"));
  files().make_folder(temp / "d/e");
  files().make_folder(temp / "d/e");
  EXPECT_THROW(files().rename(temp / "f", temp / "d"), base::FileError);
  EXPECT_EQ(read_all(files(), temp / "f", 10), "one");
  EXPECT_THAT(message_of<base::FormatError>([&] { read_all(files(), temp / "f", 2); }), HasSubstr("3 bytes"));
  EXPECT_THAT(files().list(temp / "nowhere"), IsEmpty());
  EXPECT_NO_THROW(files().remove(temp / "nowhere"));
}

TEST(PosixFiles, ExchangeFoldersAtOnce) {
  const TempFolder temp;
  files().make_folder(temp / "one");
  files().make_folder(temp / "other");
  write(temp / "one/f", "1");
  if (!files().exchange(temp / "one", temp / "other")) return;  // not on every file system
  EXPECT_THAT(names_in(temp / "other"), ElementsAre("f"));
  EXPECT_THROW(files().exchange(temp / "one", temp / "nowhere"), base::FileError);
}

TEST(PosixFiles, OpenRegularFilesOnly) {
  const TempFolder temp;
  ASSERT_EQ(::mkfifo((temp / "pipe").c_str(), 0600), 0);
  EXPECT_THROW(files().open(temp / "pipe"), base::FormatError);
  EXPECT_THROW(files().open("/dev/zero"), base::FormatError);
  EXPECT_THROW(files().open(temp / ""), base::FormatError);
  EXPECT_THROW(files().open(temp / "nothing"), base::FileError);
}

TEST(PosixFiles, RefuseALinkInThePlaceOfADataFile) {
  const TempFolder temp;
  save(files(), temp / "c", "a", {.seed = 1});
  const auto path = temp / "c/a_partial/model-00001.safetensors";
  std::filesystem::rename(path, temp / "elsewhere");
  std::filesystem::create_symlink(temp / "elsewhere", path);
  EXPECT_THAT(message_of<base::FormatError>([&] { Store(files(), temp / "c").find("a"); }), HasSubstr(": a link"));
  const auto damage = verify(files(), temp / "c/a_partial", [](auto, auto) {});
  ASSERT_EQ(damage.size(), 1);
  EXPECT_EQ(damage[0].file, "model-00001.safetensors");
  EXPECT_THAT(damage[0].what, HasSubstr("a link"));
}

TEST(PosixFiles, FollowNoLinkThatOthersPutInThePlaceOfALock) {
  const TempFolder temp;
  write(temp / "victim", "precious");
  files().make_folder(temp / "c");
  Store store(files(), temp / "c");
  for (const auto* lock : {"a_partial.lock", "newest.lock"}) {
    for (const auto* target : {"victim", "made"}) {
      std::filesystem::create_symlink(temp / target, temp / "c" / lock);
      EXPECT_THAT(message_of<base::FileError>([&] { save(files(), temp / "c", "a", {}); }),
                  AllOf(HasSubstr(lock), HasSubstr("a link")));
      save(files(), temp / "elsewhere", target, {});  // which nobody hinders
      std::filesystem::remove(temp / "c" / lock);
    }
  }
  EXPECT_EQ(read_all(files(), temp / "victim", 100), "precious");
  EXPECT_FALSE(std::filesystem::exists(temp / "made"));
  save(files(), temp / "c", "a", {});
}

TEST(PosixFiles, LeaveOtherTagsLocksThatAreNotTheirs) {
  const TempFolder temp;
  write(temp / "victim", "precious");
  files().make_folder(temp / "c");
  std::filesystem::create_symlink(temp / "victim", temp / "c/b_partial.lock");
  save(files(), temp / "c", "a", {});
  EXPECT_EQ(read_all(files(), temp / "victim", 100), "precious");
}

TEST(PosixFiles, ASaveBeginsInANewFolder) {
  const TempFolder temp;
  files().make_folder(temp / "foreign");
  std::filesystem::create_directory_symlink(temp / "foreign", temp / "linked");
  EXPECT_THROW(files().make_new_folder(temp / "linked"), base::FileError);
  EXPECT_THROW(files().make_new_folder(temp / "foreign"), base::FileError);
  files().make_new_folder(temp / "own");
}

// The system's own limit of a file's size stands for a full disk, which a test cannot have everywhere.
TEST(PosixFiles, NameWhatTheyWroteWhereTheSystemRefuses) {
  const TempFolder temp;
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{1000, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto words = message_of<base::FileError>([&] { write(temp / "f", std::string(4000, 'a')); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(words, "writing " + (temp / "f").string() + ": File too large");
}

TEST(FileFailure, SaysWhatIsNeededAndWhatIsFreeWhereSpaceIsMissing) {
  EXPECT_STREQ(file_failure("writing", "/a/b", ENOSPC, 4096, 512).what(),
               "writing /a/b: No space left on device (4096 bytes to write, 512 bytes are free)");
  EXPECT_STREQ(file_failure("writing", "/a/b", EDQUOT, 4096, 512).what(),
               "writing /a/b: Disk quota exceeded (4096 bytes to write, 512 bytes are free; the quota of this user is "
               "used up)");
  EXPECT_STREQ(file_failure("creating", "/a/b", ENOSPC).what(), "creating /a/b: No space left on device");
  EXPECT_STREQ(file_failure("creating", "/a/b", EROFS, 4096, 512).what(), "creating /a/b: Read-only file system");
  EXPECT_EQ(file_failure("creating", "/a/b", EROFS).error_number(), EROFS);
}

// A child that claims a tag, says so, and lives until it is killed.
class Claimer {
 public:
  explicit Claimer(const Path& folder) {
    int ends[2];
    if (::pipe(ends) != 0) throw std::runtime_error("no pipe");
    process_ = ::fork();
    if (process_ == 0) {
      Store store(files(), folder);
      auto save = store.begin("a", "1", "job 7");
      write(save.folder() / "model-00001.safetensors", "half of it");
      const auto said = ::write(ends[1], "x", 1);
      while (said == 1) ::pause();
      ::_exit(1);
    }
    ::close(ends[1]);
    char said = 0;
    ready_ = ::read(ends[0], &said, 1) == 1;
    ::close(ends[0]);
  }
  ~Claimer() { kill(); }

  bool ready() const { return ready_; }
  void kill() {
    if (process_ <= 0) return;
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
    process_ = 0;
  }

 private:
  pid_t process_ = 0;
  bool ready_ = false;
};

TEST(PosixFiles, TheClaimOfAKilledProcessEndsAndWhatItLeftGoes) {
  const TempFolder temp;
  Claimer claimer(temp / "c");
  ASSERT_TRUE(claimer.ready());
  Store store(files(), temp / "c");
  EXPECT_THAT(message_of<base::UsageError>([&] { store.begin("a", "2", "job 8"); }),
              HasSubstr("is being saved by job 7"));
  save(files(), temp / "c", "b", {.seed = 2});  // which leaves it alone
  EXPECT_THAT(names_in(temp / "c"), ElementsAre("a_partial.lock", "a_partial.tmp-1", "b_partial", "newest"));
  claimer.kill();
  save(files(), temp / "c", "b", {.seed = 3});
  EXPECT_THAT(names_in(temp / "c"), ElementsAre("b_partial", "newest"));
}

TEST(PosixFiles, SavesOfSeveralTagsAtOnceGetNumbersThatDiffer) {
  const TempFolder temp;
  constexpr std::uint64_t kThreads = 4, kSaves = 8;
  {
    std::vector<std::jthread> threads;
    for (std::uint64_t thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&temp, thread] {
        for (std::uint64_t i = 0; i < kSaves; ++i) {
          save(files(), temp / "c", std::to_string(thread) + "-" + std::to_string(i), {.seed = thread * kSaves + i});
        }
      });
    }
  }
  Store store(files(), temp / "c");
  std::set<std::int64_t> numbers;
  for (const auto& each : store.list()) numbers.insert(each.number);
  EXPECT_EQ(numbers.size(), kThreads * kSaves);
  EXPECT_EQ(*numbers.rbegin(), store.newest([](const auto&) {})->manifest.number);
  EXPECT_THAT(names_in(temp / "c"), ::testing::Not(::testing::Contains(HasSubstr(".lock"))));
}

}  // namespace
}  // namespace lamina::archive::testing
