// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/options/variables.h"

#include <ctype.h>
#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <optional>

namespace lamina::launch {
namespace {

std::string expand_home(const std::string& word, const Variables& environment) {
  if (word.empty() || word.front() != '~') return word;
  const auto slash = std::min(word.find('/'), word.size());
  const std::string user = word.substr(1, slash - 1);
  std::optional<std::string> home;
  if (user.empty()) home = find(environment, "HOME");
  if (!home) {
    const passwd* entry = user.empty() ? ::getpwuid(::getuid()) : ::getpwnam(user.c_str());
    if (entry == nullptr) return word;
    home = entry->pw_dir;
  }
  while (home->ends_with('/')) home->pop_back();
  const std::string whole = *home + word.substr(slash);
  return whole.empty() ? "/" : whole;
}

// The end of the name that begins at `begin`.
std::size_t name_end(const std::string& word, std::size_t begin) {
  while (begin < word.size() && (::isalnum(static_cast<unsigned char>(word[begin])) || word[begin] == '_')) ++begin;
  return begin;
}

}  // namespace

std::optional<std::string> find(const Variables& variables, const std::string& name) {
  for (const std::string& entry : variables) {
    if (entry.starts_with(name + "=")) return entry.substr(name.size() + 1);
  }
  return {};
}

Variables own_environment() {
  Variables result;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) result.emplace_back(*entry);
  return result;
}

std::string expand(const std::string& word, const Variables& environment) {
  const std::string text = expand_home(word, environment);
  std::string result;
  std::size_t at = 0;
  while (at < text.size()) {
    const auto dollar = std::min(text.find('$', at), text.size());
    result += text.substr(at, dollar - at);
    if (dollar == text.size()) break;
    const bool braced = text.substr(dollar + 1, 1) == "{";
    const auto begin = dollar + (braced ? 2 : 1);
    const auto end = braced ? text.find('}', begin) : name_end(text, begin);
    at = end == std::string::npos ? dollar + 1 : end + (braced ? 1 : 0);
    const auto found = end == std::string::npos ? std::nullopt : find(environment, text.substr(begin, end - begin));
    const bool known = found && end > begin;
    const bool escaped = known && dollar > 0 && text[dollar - 1] == '\\';
    if (escaped) result.pop_back();
    result += known && !escaped ? *found : text.substr(dollar, at - dollar);
  }
  return result;
}

}  // namespace lamina::launch
