// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/coded.h"

#include <algorithm>

#include "lamina/base/printable.h"
#include "lamina/base/str.h"

namespace lamina::base {
namespace {

constexpr std::string_view kHint = "\nmore: lamina explain ";
constexpr std::string_view kOfCodes = "abcdefghijklmnopqrstuvwxyz0123456789-";

struct Message {
  std::string text;  // without hints
  std::string code;  // of the last hint
};

Message taken_apart(std::string_view text) {
  Message message;
  for (auto at = text.find(kHint); at != std::string_view::npos; at = text.find(kHint)) {
    message.text += text.substr(0, at);
    text.remove_prefix(at + kHint.size());
    const auto length = std::min(text.find_first_not_of(kOfCodes), text.size());
    message.code = text.substr(0, length);
    text.remove_prefix(length);
  }
  message.text += text;
  return message;
}

}  // namespace

std::string coded(std::string_view text, std::string_view code) {
  auto [shown, of_another] = taken_apart(printable(text));
  if (!code.empty()) shown.insert(std::min(shown.find('\n'), shown.size()), str(" [", code, "]"));
  const auto explained = code.empty() ? std::string_view(of_another) : code;
  if (explained.empty()) return shown;
  if (shown.ends_with('\n')) shown.pop_back();
  return str(shown, kHint, explained);
}

std::string without_hints(std::string_view text) { return taken_apart(text).text; }

std::string hint_of(std::string_view text) {
  const auto code = taken_apart(text).code;
  return code.empty() ? "" : str(kHint, code);
}

}  // namespace lamina::base
