// SPDX-License-Identifier: Apache-2.0
#include "lamina/membership/witness.h"

#include "lamina/base/error.h"

namespace lamina::membership {

std::optional<EpochWord> Witness::answer(std::int64_t session, const EpochWord& word) {
  if (word.kind != EpochWord::Kind::kAsks && word.kind != EpochWord::Kind::kProposes) {
    throw base::FormatError("no question to a witness");
  }
  auto& vote = votes_.try_emplace(word.epoch, Vote{session, {}}).first->second;
  if (vote.session != session) return std::nullopt;
  return vote.acceptor.answer(word);
}

}  // namespace lamina::membership
