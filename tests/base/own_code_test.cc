// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/own_code.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "lamina/base/error.h"
#include "tests/message_of.h"

namespace lamina::base::testing {
namespace {

using ::testing::HasSubstr;

class OwnCode : public ::testing::Test {
 protected:
  OwnCode() {
    std::string name = (std::filesystem::temp_directory_path() / "code.XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
    file_ = folder_ / "above/lib/code.so";
    std::filesystem::create_directories(file_.parent_path());
    std::ofstream(file_) << "code";
    for (const auto& each : {folder_ / "above", folder_ / "above/lib"}) set_mode(each, 0755);
    set_mode(file_, 0644);
  }
  ~OwnCode() override { std::filesystem::remove_all(folder_); }

  static void set_mode(const std::filesystem::path& path, mode_t mode) { ASSERT_EQ(::chmod(path.c_str(), mode), 0); }
  static std::string refusal(const std::filesystem::path& path, Writers writers = Writers::kGroup) {
    return message_of<ConfigError>([&] { require_own_code(path.string(), "LAMINA_UCX", writers); });
  }
  static void accept(const std::filesystem::path& path, Writers writers = Writers::kGroup) {
    EXPECT_NO_THROW(require_own_code(path.string(), "LAMINA_UCX", writers));
  }

  std::filesystem::path folder_, file_;
};

TEST_F(OwnCode, IsTakenFromAFolderOfThisUserBelowOneForAll) {
  accept(file_);
  accept(folder_ / "above/lib/../lib/code.so");
  accept(folder_ / "none/at/all");
}

TEST_F(OwnCode, IsRefusedWhereOthersMayWriteToItOrAFolderAbove) {
  for (const auto& place : {file_, folder_ / "above/lib", folder_ / "above"}) {
    const auto before = std::filesystem::status(place).permissions();
    set_mode(place, 0777);
    EXPECT_THAT(refusal(file_), HasSubstr(place.string() + " can be written to by all users"));
    EXPECT_THAT(refusal(file_, Writers::kAnybody), HasSubstr("by all users"));
    set_mode(place, 0775);
    EXPECT_THAT(refusal(file_), HasSubstr(place.string() + " can be written to by a group"));
    accept(file_, Writers::kAnybody);
    std::filesystem::permissions(place, before);
  }
  set_mode(folder_ / "above", 01777);
  accept(file_);
  EXPECT_THAT(refusal(folder_ / "above"), HasSubstr("by all users"));  // where anybody may add a library
}

TEST_F(OwnCode, IsRefusedBehindALinkInAFolderOfOthers) {
  std::filesystem::create_directory(folder_ / "open");
  std::filesystem::create_symlink(file_, folder_ / "open/link");
  set_mode(folder_ / "open", 0755);
  std::filesystem::create_symlink("open/link", folder_ / "first");
  accept(folder_ / "first");
  set_mode(folder_ / "open", 0777);
  EXPECT_THAT(refusal(folder_ / "first"), HasSubstr("open can be written to by all users"));
  std::filesystem::create_symlink("loop", folder_ / "loop");
  accept(folder_ / "loop");  // nothing can be loaded from it
}

TEST_F(OwnCode, IsRefusedOfAnotherOwner) {
  if (::geteuid() != 0) return;  // only root may give files away
  ASSERT_EQ(::chown(file_.c_str(), 12345, 12345), 0);
  EXPECT_THAT(refusal(file_), HasSubstr("belongs to user 12345"));
  accept(file_, Writers::kAnybody);
}

}  // namespace
}  // namespace lamina::base::testing
