// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "lamina/membership/epoch_word.h"

namespace lamina::membership {

// Words between a member and the witness. A question has the number of its session; an answer is as EpochWord has it,
// or a refusal, after which the line ends. One word says that its sender is there, and is said back.
inline constexpr const char* kWitnessName = "witness";  // of the connection
inline constexpr const char* kHere = "here";

std::string question(std::int64_t session, const EpochWord& word);
// Throws base::FormatError.
std::pair<std::int64_t, EpochWord> read_question(const std::string& text);

std::string refusal(const std::string& why);
bool is_refusal(const std::string& text);
std::string refusal_in(const std::string& text);

}  // namespace lamina::membership
