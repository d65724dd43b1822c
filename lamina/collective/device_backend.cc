// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/device_backend.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/base/hash.h"
#include "lamina/base/log.h"
#include "lamina/base/rank_list.h"
#include "lamina/base/str.h"
#include "lamina/collective/nccl_backend.h"
#include "lamina/collective/nccl_library.h"
#include "lamina/collective/staged_backend.h"
#include "lamina/device/rank_device.h"
#include "lamina/device/sharing.h"
#include "lamina/rendezvous/place.h"

namespace lamina::collective {
namespace {

constexpr auto kLook = std::chrono::milliseconds(5);  // how often a word in the store is looked for

// Told by each member to the others: whether it can use NCCL.
struct MemberWord {
  enum class Can : std::int64_t { kYes, kNo, kHasNone };  // kHasNone: its devices know no such library
  Can can = Can::kYes;
  std::uint64_t device = 0;  // that it computes on, among all
  std::array<char, 512> why_not{};
};

MemberWord own_word() {
  const auto& library = nccl::library();
  MemberWord word;
  word.device = base::hash64(std::string_view(base::str(rendezvous::own_place(), " ", devices::seat_name())));
  const auto& why_not = library.why_not;
  word.can = library.name.empty() ? MemberWord::Can::kHasNone
             : why_not.empty()    ? MemberWord::Can::kYes
                                  : MemberWord::Can::kNo;
  std::copy_n(why_not.data(), std::min(why_not.size(), word.why_not.size() - 1), word.why_not.data());
  return word;
}

std::vector<MemberWord> told_by_all(const MemberWord& own, c10d::Backend& on_host) {
  constexpr auto kSize = static_cast<std::int64_t>(sizeof(MemberWord));
  auto mine = at::empty({kSize}, at::kByte), all = at::empty({kSize * on_host.getSize()}, at::kByte);
  std::memcpy(mine.mutable_data_ptr(), &own, sizeof own);
  on_host._allgather_base(all, mine)->wait();
  std::vector<MemberWord> words(static_cast<std::size_t>(on_host.getSize()));
  std::memcpy(words.data(), all.const_data_ptr(), words.size() * sizeof(MemberWord));
  return words;
}

// Two members that compute on one device; none where there are none.
std::optional<std::pair<base::Rank, base::Rank>> sharing(const std::vector<MemberWord>& words,
                                                         const BackendOptions& options) {
  std::map<std::uint64_t, base::Rank> seen;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const auto [at, is_new] = seen.try_emplace(words[i].device, options.members[i]);
    if (!is_new) return std::pair{at->second, options.members[i]};
  }
  return std::nullopt;
}

// Why the group goes through the host; nothing where it goes over NCCL, and "" where nobody expects that.
std::optional<std::string> why_staged(const std::vector<MemberWord>& words, const BackendOptions& options) {
  const auto all_have_none = [](const MemberWord& word) { return word.can == MemberWord::Can::kHasNone; };
  if (words.size() == 1 || std::ranges::all_of(words, all_have_none)) return "";
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (words[i].can == MemberWord::Can::kYes) continue;
    const auto has_none = words[i].can == MemberWord::Can::kHasNone;
    return base::str("rank ", options.members[i], ": ",
                     has_none ? "its device has no such library" : words[i].why_not.data());
  }
  if (const auto two = sharing(words, options)) {
    return base::str("ranks ", two->first, " and ", two->second, " compute on one device");
  }
  return std::nullopt;
}

// The id of the group's communicator, which the first member makes and tells by the store.
nccl::UniqueId agreed_id(const nccl::Library& library, const BackendOptions& options, base::Deadline made_by,
                         const std::function<void()>& check) {
  constexpr auto kKey = "nccl";
  nccl::UniqueId id;
  if (options.rank == 0) {
    const auto result = library.get_unique_id(&id);
    const bool is_made = result == nccl::Result::kSuccess;
    const std::string word = is_made ? std::string(id.bytes.begin(), id.bytes.end()) : library.get_error_string(result);
    options.store->set(kKey, std::vector<std::uint8_t>(word.begin(), word.end()));
  }
  while (!options.store->check({kKey})) {
    check();
    if (made_by.expired()) throw base::TimeoutError(base::str("rank ", options.members[0], " has told no id in time"));
    std::this_thread::sleep_for(kLook);
  }
  const auto told = options.store->get(kKey);
  if (told.size() != id.bytes.size()) {
    throw base::Error(base::str(library.title(), " gives rank ", options.members[0],
                                " no id of a communicator: ", std::string(told.begin(), told.end())));
  }
  std::ranges::copy(told, id.bytes.begin());
  return id;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_device_backend(const BackendOptions& options,
                                                      c10::intrusive_ptr<c10d::Backend> on_host) {
  const auto words = told_by_all(own_word(), *on_host);
  auto staged = make_staged_backend(std::move(on_host), options.timeout);
  if (const auto why = why_staged(words, options)) {
    if (options.rank == 0 && !why->empty()) {
      base::log_warning(base::str("tensors of devices in the group of ", base::name_ranks(options.members),
                                  " go through the host, not over NCCL: ", *why));
    }
    return staged;
  }
  const c10::DeviceGuard on_device(devices::rank_device());  // which NCCL takes
  const auto& library = nccl::library();
  const auto made_by = options.made_by.value_or(base::Deadline::after(options.timeout));
  const auto check = [&] {
    if (options.check_interrupt) options.check_interrupt();
    if (options.check_members) options.check_members();
  };
  const auto id = agreed_id(library, options, made_by, check);
  auto communicator =
      std::make_shared<nccl::Communicator>(library, id, options.rank, static_cast<int>(words.size()), made_by, check);
  return make_nccl_backend(std::move(communicator), library, std::move(staged));
}

}  // namespace lamina::collective
