// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "lamina/contact/handshake.h"

namespace lamina::contact {

// One end of a connection whose ends have proven that they have the job's secret: each word is signed, and numbered.
// Nothing here blocks. Forked children have it no more.
class Line {
 public:
  explicit Line(Connection connection);
  Line(Line&& other) noexcept = default;
  Line& operator=(Line&& other) noexcept = default;
  ~Line();

  int fd() const { return connection_.socket.get(); }
  const std::string& told() const { return connection_.told; }

  static constexpr std::size_t kMostWord = 65536;

  // False where the other end has gone, or takes nothing any more. A text that is too long is cut.
  bool say(std::string_view text);
  // The next word, if it has come whole. Throws base::PeerError at the end of the line, and where it was changed.
  std::optional<std::string> hear();

 private:
  Mac sign(const Secret& key, std::int64_t number, std::string_view text) const;

  Connection connection_;
  std::int64_t said_ = 0, heard_ = 0;
  std::string in_;
};

}  // namespace lamina::contact
