// SPDX-License-Identifier: Apache-2.0
#include "lamina/environment/job_door.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <nlohmann/json.hpp>

#include "lamina/base/error.h"
#include "lamina/base/hash.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"
#include "lamina/base/whole_number.h"
#include "lamina/environment/address.h"
#include "lamina/environment/environment.h"
#include "lamina/environment/rank_contract.h"

namespace lamina::environment {
namespace {

using nlohmann::json;

constexpr int kSlice = 50;  // milliseconds
constexpr std::size_t kMostText = 4096;
constexpr auto kWho = "launcher of lamina";  // whose answers these are

// The file's content: the hash of the text, so that a half of it is not read, the text, and zeros.
using PlateBytes = std::array<char, kMostText>;
constexpr std::size_t kHash = sizeof(std::uint64_t);

}  // namespace

std::string JobDoor::text() const {
  const json told{{"least", terms.least}, {"most", terms.most}, {"join_every_s", terms.join_every.count()}};
  return json{{"by", kWho},      {"door", door},  {"launchers", launchers},
              {"over", is_over}, {"terms", told}, {"witness", witness}}
      .dump();
}

JobDoor JobDoor::read(const std::string& text) {
  try {
    const auto told = json::parse(text);
    if (told.at("by").get<std::string>() != kWho) throw base::FormatError("it is no launcher of lamina");
    const auto& terms = told.at("terms");
    JobDoor read{.door = told.at("door").get<std::string>(),
                 .launchers = told.at("launchers").get<std::vector<std::string>>(),
                 .is_over = told.at("over").get<bool>(),
                 .terms = {.least = terms.at("least").get<int>(),
                           .most = terms.at("most").get<int>(),
                           .join_every = std::chrono::seconds(terms.at("join_every_s").get<std::int64_t>())},
                 .witness = told.at("witness").get<std::string>()};
    for (const auto& launcher : read.launchers) Address::parse(launcher);
    if (!read.door.empty()) Address::parse(read.door);
    return read;
  } catch (const json::exception&) {
    throw base::FormatError("what is told of a job's door cannot be read");
  }
}

std::optional<DoorPlate> DoorPlate::of_environment() {
  const auto fd = base::whole_number(process_environment()(kDoorVariable).value_or(""));
  return fd && *fd >= 0 ? std::optional(DoorPlate(*fd)) : std::nullopt;
}

void DoorPlate::write(const JobDoor& door) const {
  auto kept = door;
  if (kept.launchers.size() > kMostLaunchers) kept.launchers.resize(kMostLaunchers);
  const auto text = kept.text();
  const auto hash = base::hash64(text);
  PlateBytes bytes{};
  std::memcpy(bytes.data(), &hash, kHash);
  text.copy(bytes.data() + kHash, bytes.size() - kHash - 1);
  if (::pwrite(fd_, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size())) return;
  throw base::Error(base::str(kDoorVariable, " cannot be written to: ", base::system_error()));
}

JobDoor DoorPlate::read() const {
  PlateBytes bytes{};
  if (::pread(fd_, bytes.data(), bytes.size() - 1, 0) < 0) {
    throw base::ConfigError(base::str(kDoorVariable, " cannot be read (", base::system_error(),
                                      "): it is for the launcher (`lamina run`) to set; unset it"));
  }
  std::uint64_t hash = 0;
  std::memcpy(&hash, bytes.data(), kHash);
  const std::string text(bytes.data() + kHash);
  return text.empty() || hash != base::hash64(text) ? JobDoor() : JobDoor::read(text);
}

void DoorPlate::write_over() const {
  auto door = read();
  door.is_over = true;
  write(door);
}

// It says nothing itself: what a launcher does not read would take the answer away.
JobDoor ask_launcher(const std::string& launcher, const base::Deadline& deadline,
                     const std::function<void()>& check_interrupt) {
  const auto socket = Address::parse(launcher).begin_connect();
  std::string text;
  const auto fail = [&](const std::string& why) { throw base::PeerError(base::str(launcher, ": ", why)); };
  while (true) {
    pollfd ready{socket.get(), POLLIN, 0};
    ::poll(&ready, 1, kSlice);
    if (check_interrupt) check_interrupt();
    if (deadline.expired()) fail("no answer in time");
    if (ready.revents == 0) continue;
    std::array<char, 512> bytes;
    const auto count = ::recv(socket.get(), bytes.data(), bytes.size(), 0);
    if (count == 0) break;
    if (count > 0) {
      text.append(bytes.data(), static_cast<std::size_t>(count));
      if (text.size() > kMostText) fail("it answers, but not as a launcher of lamina does");
    } else if (errno == ENOTCONN) {
      fail(base::system_error(ECONNREFUSED));
    } else if (errno != EAGAIN && errno != EINTR) {
      fail(base::system_error());
    }
  }
  try {
    return JobDoor::read(text);
  } catch (const base::FormatError&) {
    fail("it answers, but not as a launcher of lamina does");
  }
  return {};
}

}  // namespace lamina::environment
