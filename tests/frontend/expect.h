// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <string>
#include <vector>

// Expectations of programs that run as ranks, whose exit codes are the result: exit_code() at the end.
namespace lamina::frontend::test {

inline int failures = 0;

inline int exit_code() { return failures == 0 ? 0 : 1; }

inline void expect(bool right, const std::string& what) {
  if (right) return;
  ++failures;
  std::printf("rank %s: %s\n", std::getenv("RANK"), what.c_str());
}

// `call` throws a `Thrown` that has all of these words.
template <class Thrown>
void expect_error(const std::function<void()>& call, const std::vector<std::string>& words) {
  try {
    call();
    expect(false, "no error that says " + words.front());
  } catch (const Thrown& error) {
    for (const auto& word : words) {
      expect(std::string(error.what()).find(word) != std::string::npos, word + " is not in: " + error.what());
    }
  } catch (const std::exception& error) {
    expect(false, std::string("an error of another type: ") + error.what());
  }
}

}  // namespace lamina::frontend::test
