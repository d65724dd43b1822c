// SPDX-License-Identifier: Apache-2.0
#include "lamina/environment/job_door.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "lamina/base/error.h"
#include "lamina/environment/address.h"
#include "lamina/environment/elastic_terms.h"

namespace lamina::environment {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

const JobDoor kDoor{.door = "10.0.0.1 4711",
                    .launchers = {"10.0.0.1 1", "10.0.0.2 2"},
                    .terms = {.least = 2, .most = 8, .join_every = std::chrono::seconds(30)}};

TEST(JobDoor, TravelsAsText) {
  const auto read = JobDoor::read(kDoor.text());
  EXPECT_EQ(read.text(), kDoor.text());
  EXPECT_EQ(read.launchers, kDoor.launchers);
  EXPECT_EQ(read.terms.most, 8);
  EXPECT_EQ(read.terms.join_every, 30s);
  EXPECT_FALSE(read.is_over);
  for (const auto* text : {"", "{}", "[1]", "HTTP/1.1 400", R"({"by": "others"})", R"({"by": 3})"}) {
    EXPECT_THROW(JobDoor::read(text), base::FormatError) << text;
  }
  auto odd = kDoor;
  odd.launchers[1] = "10.0.0.2 no port";
  EXPECT_THROW(JobDoor::read(odd.text()), base::FormatError);
  odd = kDoor;
  odd.door = "somewhere";
  EXPECT_THROW(JobDoor::read(odd.text()), base::FormatError);
}

TEST(DoorPlate, KeepsWhatWasWrittenLastAndNoHalfOfIt) {
  const base::Fd file(::memfd_create("plate", MFD_CLOEXEC));
  const DoorPlate plate(file.get());
  EXPECT_EQ(plate.read().text(), JobDoor().text()) << "nobody has written";
  auto door = kDoor;
  door.launchers.resize(40, "10.0.0.3 3");
  plate.write(door);
  EXPECT_EQ(plate.read().launchers.size(), DoorPlate::kMostLaunchers);
  plate.write(kDoor);
  EXPECT_EQ(plate.read().text(), kDoor.text());
  plate.write_over();
  EXPECT_TRUE(plate.read().is_over);
  EXPECT_EQ(plate.read().launchers, kDoor.launchers);
  ASSERT_EQ(::pwrite(file.get(), "?", 1, 12), 1);
  EXPECT_EQ(plate.read().text(), JobDoor().text()) << "amid a write";
}

class AskLauncher : public testing::Test {
 protected:
  std::string failure(base::Clock::duration within = 10s) const {
    try {
      ask_launcher(Address::bound_to(listener_).text(), base::Deadline::after(within));
    } catch (const base::PeerError& error) {
      return error.what();
    }
    return "it has answered";
  }
  // Has whoever comes first read that.
  std::thread answer(const std::string& text) const {
    return std::thread([this, text] {
      while (true) {
        const base::Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
        if (!socket) continue;  // it does not block
        ::send(socket.get(), text.data(), text.size(), MSG_NOSIGNAL);
        return;
      }
    });
  }

  base::Fd listener_ = Address::parse("127.0.0.1 0").listen();
};

TEST_F(AskLauncher, HearsWhatItKnows) {
  auto launcher = answer(kDoor.text());
  EXPECT_EQ(ask_launcher(Address::bound_to(listener_).text(), base::Deadline::after(10s)).text(), kDoor.text());
  launcher.join();
}

TEST_F(AskLauncher, TellsAnotherServerFromALauncher) {
  for (const auto& text : {std::string("220 mail.example.org\r\n"), std::string(100000, 'x'), std::string()}) {
    auto other = answer(text);
    EXPECT_THAT(failure(), HasSubstr("it answers, but not as a launcher of lamina does"));
    other.join();
  }
}

TEST_F(AskLauncher, WaitsForNoAnswerForLong) { EXPECT_THAT(failure(100ms), HasSubstr("no answer in time")); }

TEST_F(AskLauncher, NoticesThatNobodyListens) {
  const auto address = Address::bound_to(listener_).text();
  listener_.reset();
  try {
    ask_launcher(address, base::Deadline::after(10s));
    ADD_FAILURE() << "it has answered";
  } catch (const base::PeerError& error) {
    EXPECT_THAT(error.what(), HasSubstr("Connection refused"));
  }
}

TEST_F(AskLauncher, MayBeInterrupted) {
  const auto interrupt = [] { throw base::UsageError("Ctrl-C"); };
  EXPECT_THROW(ask_launcher(Address::bound_to(listener_).text(), base::Deadline::after(10s), interrupt),
               base::UsageError);
}

TEST(ElasticTerms, AreWhatTheLauncherTells) {
  const auto read = [](const std::string& elastic, const std::string& every) {
    return ElasticTerms::read([=](const std::string& name) -> std::optional<std::string> {
      const auto& text = name == "LAMINA_ELASTIC" ? elastic : every;
      return text.empty() ? std::nullopt : std::optional(text);
    });
  };
  EXPECT_FALSE(read("", "30"));
  EXPECT_EQ(read("2", "")->least, 2);
  EXPECT_EQ(read("2", "")->most, 0);
  EXPECT_EQ(read("2:8", "")->most, 8);
  EXPECT_EQ(read("2:8", "")->join_every, ElasticTerms::kJoinEvery);
  EXPECT_EQ(read("2:8", "0")->join_every, 0s);
}

TEST(NewcomerTerms, SayHowLongToWaitAndWhoElseComes) {
  const auto read = [](const std::string& together, const std::string& wait) {
    return NewcomerTerms::read([=](const std::string& name) -> std::optional<std::string> {
      const auto& text = name == "LAMINA_NEWCOMER" ? together : wait;
      return text.empty() ? std::nullopt : std::optional(text);
    });
  };
  EXPECT_EQ(read("3", "20").together, 3);
  EXPECT_EQ(read("3", "20").spare_wait, 20s);
  EXPECT_EQ(read("0", "").together, 0) << "it comes back";
  EXPECT_EQ(read("0", "").spare_wait, NewcomerTerms::kSpareWait);
}

}  // namespace
}  // namespace lamina::environment
