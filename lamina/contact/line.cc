// SPDX-License-Identifier: Apache-2.0
#include "lamina/contact/line.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/fork_guard.h"

namespace lamina::contact {

Line::Line(Connection connection) : connection_(std::move(connection)) { base::close_in_forked_children(fd()); }

Line::~Line() {
  if (connection_.socket) base::keep_in_forked_children(fd());
}

Mac Line::sign(const Secret& key, std::int64_t number, std::string_view text) const {
  return authenticate(key, "line", {std::to_string(number), text});
}

bool Line::say(std::string_view text) {
  text = text.substr(0, kMostWord);
  const auto mac = sign(connection_.outgoing, said_++, text);
  const auto size = static_cast<std::uint32_t>(text.size());
  std::string bytes(reinterpret_cast<const char*>(&size), sizeof size);
  bytes.append(mac.begin(), mac.end()).append(text);
  return ::send(fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(bytes.size());
}

std::optional<std::string> Line::hear() {
  constexpr std::size_t kHead = sizeof(std::uint32_t) + sizeof(Mac);
  while (true) {
    std::uint32_t size = 0;
    if (in_.size() >= kHead) std::memcpy(&size, in_.data(), sizeof size);
    if (size > kMostWord) throw base::PeerError("what comes is no word");
    const auto wanted = in_.size() < kHead ? kHead : kHead + size;
    if (in_.size() >= kHead && in_.size() == wanted) {
      Mac mac;
      std::memcpy(mac.data(), in_.data() + sizeof size, sizeof mac);
      auto text = in_.substr(kHead);
      in_.clear();
      if (!same(mac, sign(connection_.incoming, heard_++, text))) {
        throw base::PeerError("what was said was changed on its way");
      }
      return text;
    }
    std::array<char, 512> bytes;
    const auto count = ::recv(fd(), bytes.data(), std::min(bytes.size(), wanted - in_.size()), MSG_DONTWAIT);
    if (count > 0) {
      in_.append(bytes.data(), static_cast<std::size_t>(count));
    } else if (count == 0 || (errno != EAGAIN && errno != EINTR)) {
      throw base::PeerError("the connection has ended");
    } else {
      return std::nullopt;
    }
  }
}

}  // namespace lamina::contact
