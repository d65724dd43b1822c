// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/output_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/fsuid.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "lamina/base/error.h"
#include "tests/message_of.h"

namespace lamina::base::testing {
namespace {

using ::testing::HasSubstr;

class OutputFile : public ::testing::Test {
 protected:
  OutputFile() {
    std::string name = (std::filesystem::temp_directory_path() / "output.XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
    victim_ = folder_ / "precious";
    std::ofstream(victim_) << "precious";
  }
  ~OutputFile() override { std::filesystem::remove_all(folder_); }

  static std::string text(const std::filesystem::path& path) {
    return (std::stringstream() << std::ifstream(path).rdbuf()).str();
  }
  static std::string refusal(const std::filesystem::path& path) {
    return message_of<FileError>([&] { write_output(path, "new"); });
  }

  std::filesystem::path folder_, victim_;
};

TEST_F(OutputFile, IsMadeAndReplaced) {
  const auto path = folder_ / "file";
  write_output(path, "longer than the next");
  write_output(path, "next");
  EXPECT_EQ(text(path), "next");
}

TEST_F(OutputFile, IsNoLinkWhereverThatLeads) {
  for (const auto& target : {victim_, folder_ / "made"}) {
    const auto path = folder_ / "link";
    std::filesystem::create_symlink(target, path);
    EXPECT_THAT(refusal(path), HasSubstr("a link"));
    std::filesystem::remove(path);
  }
  EXPECT_EQ(text(victim_), "precious");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "made"));
}

TEST_F(OutputFile, HasNoSecondName) {
  std::filesystem::create_hard_link(victim_, folder_ / "other");
  EXPECT_THAT(refusal(folder_ / "other"), HasSubstr("2 names"));
  EXPECT_EQ(text(victim_), "precious");
}

TEST_F(OutputFile, IsOfThisUser) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
  ASSERT_EQ(::chown(victim_.c_str(), 12345, 12345), 0);
  EXPECT_THAT(refusal(victim_), HasSubstr("another user (12345)"));
  EXPECT_EQ(text(victim_), "precious");
}

TEST_F(OutputFile, IsOfThisUserWhereAMountNamesAnother) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make files of others";
  std::filesystem::permissions(folder_, std::filesystem::perms::all);
  const auto path = folder_ / "file";
  ::setfsuid(12345);  // as a mount does that gives files of root to nobody
  const auto made = message_of<FileError>([&] { write_output(path, "new"); });
  const auto again = message_of<FileError>([&] { write_output(path, "newer"); });
  ::setfsuid(0);
  EXPECT_EQ(made + again, "nothing was thrownnothing was thrown");
  EXPECT_EQ(text(path), "newer");
  EXPECT_THAT(refusal(path), HasSubstr("another user (12345)"));
}

TEST_F(OutputFile, MayBeADeviceOrAPipeOnlyWhereOthersCannotPutOne) {
  const auto pipe = folder_ / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const Fd reader(::open(pipe.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  write_output(pipe, "through");
  std::filesystem::permissions(folder_, std::filesystem::perms::all);
  EXPECT_THAT(refusal(pipe), HasSubstr("no regular file"));
  write_output("/dev/null", "gone");
}

}  // namespace
}  // namespace lamina::base::testing
