// SPDX-License-Identifier: Apache-2.0
// Which tensors of a device go to another one as they are, and who asks for that.
#include "lamina/device/lending.h"

#include <gmock/gmock.h>

#include <optional>
#include <string>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"
#include "lamina/device/rank_device.h"
#include "lamina/session/lanes.h"
#include "lamina/transport/lender.h"
#include "tests/message_of.h"

namespace lamina::transport {
namespace {

TEST(Lending, TakesLargeBuffersBetweenRanksWhoseMemoryIsOfOneKind) {
  const std::string kinds[]{"", "cuda", "rocm"};
  for (const auto& own : kinds) {
    for (const auto& others : kinds) {
      for (const std::int64_t size : {std::int64_t{0}, std::int64_t{1}, kLeastLent - 1}) {
        EXPECT_FALSE(goes_lent(own, others, size)) << own << " to " << others << ": " << size;
      }
      for (const std::int64_t size : {kLeastLent, std::int64_t{1} << 40}) {
        EXPECT_EQ(goes_lent(own, others, size), own == others && own != "") << own << " to " << others << ": " << size;
      }
    }
  }
}

TEST(Lending, LendsCudasMemoryWhereItLies) {
  const auto cuda = devices::lending_of(at::Device(at::kCUDA, 1));
  ASSERT_TRUE(cuda);
  EXPECT_EQ(cuda->memory, "cuda");
  EXPECT_EQ(cuda->address(&cuda), &cuda);
  EXPECT_FALSE(devices::lending_of(at::Device(devices::kHost)));
}

class AskedLending : public testing::Test {
 protected:
  ~AskedLending() override { devices::set_rank_device(at::Device(devices::kHost)); }

  static std::optional<devices::Lending> asked(std::optional<std::string> value) {
    return session::asked_lending(
        [&](const std::string& name) { return name == "LAMINA_LANES" ? value : std::nullopt; });
  }
};

TEST_F(AskedLending, IsOneOrNothing) {
  for (const auto* word : {"yes", "2", "01", " 1", "on"}) {
    EXPECT_EQ(message_of<base::ConfigError>([&] { asked(word); }),
              base::str("LAMINA_LANES: \"", word,
                        "\" is not allowed; expected 1, for values that go from device to device, or 0"));
  }
  EXPECT_FALSE(asked("1")) << "on the host";
}

TEST_F(AskedLending, SaysThatADeviceLendsNothingAndUsesWhatOneLends) {
  devices::set_rank_device({at::kPrivateUse1, 0});
  const auto said = [&](std::optional<std::string> value) {
    testing::internal::CaptureStderr();
    EXPECT_FALSE(asked(std::move(value)));
    return testing::internal::GetCapturedStderr();
  };
  for (const auto& off :
       {std::optional<std::string>(), std::optional<std::string>(""), std::optional<std::string>("0")})
    EXPECT_EQ(said(off), "");
  EXPECT_THAT(said("1"), testing::HasSubstr("LAMINA_LANES=1: devices of type emulated lend no memory, so their tensors "
                                            "go through the host"));
  devices::lend(at::kPrivateUse1, {"host", [](const void*) -> void* { return nullptr; }});
  ASSERT_TRUE(asked("1"));
  EXPECT_EQ(asked("1")->memory, "host");
  EXPECT_FALSE(asked("0"));
}

}  // namespace
}  // namespace lamina::transport
