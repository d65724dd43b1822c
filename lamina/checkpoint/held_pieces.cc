// SPDX-License-Identifier: Apache-2.0
#include "lamina/checkpoint/held_pieces.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <ranges>
#include <utility>

#include "lamina/archive/checksums.h"
#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/checkpoint/chunks.h"
#include "lamina/checkpoint/packed_parts.h"
#include "lamina/checkpoint/rank_files.h"
#include "lamina/device/capabilities.h"
#include "lamina/layout/common.h"
#include "lamina/messaging/agreement.h"
#include "lamina/messaging/outcome.h"

namespace lamina::checkpoint {
namespace {

using value::List;
using value::Value;

constexpr auto kChannel = "pieces";
// So many bytes of pieces may lie between two ranks, and in all that a rank has not put into their places yet.
constexpr std::uint64_t kPortionBytes = std::uint64_t{16} << 20;
constexpr std::uint64_t kLeastPortionBytes = std::uint64_t{1} << 20;

List to_list(const layout::Region& region) {
  List list{{std::int64_t{region.dim}, region.extent, region.begin, region.end, region.size}};
  for (const auto& stripe : region.stripes) {
    for (const auto number : {stripe.begin, stripe.at, stripe.count}) list.items.emplace_back(number);
  }
  return list;
}

layout::Region to_region(const Value& told, const layout::Shape& whole) {
  const auto& items = told.as<List>().items;
  const auto number = [&](std::size_t at) { return items.at(at).as<std::int64_t>(); };
  layout::Region region{.whole = whole,
                        .dim = static_cast<int>(number(0)),
                        .stripes = {},
                        .extent = number(1),
                        .begin = number(2),
                        .end = number(3),
                        .size = number(4)};
  for (std::size_t at = 5; at < items.size(); at += 3)
    region.stripes.push_back({number(at), number(at + 1), number(at + 2)});
  return region;
}

// Bytes that follow each other both in a part and in what is wanted of it.
struct Stretch {
  std::size_t item;  // of the list
  std::uint64_t from, to, bytes;
};

// A walk over all that one rank gives another: the runs that pairs of regions have in common, in their order, cut where
// a portion ends. Both ends make the same one.
class Walk {
 public:
  struct Item {
    layout::Region from, to;
    std::uint64_t element_bytes;
  };
  explicit Walk(std::vector<Item> items) : items_(std::move(items)) {}

  // Calls take(stretch) for the next so many bytes at most. Returns how many there were.
  template <class Take>
  std::uint64_t next(std::uint64_t most, const Take& take) {
    std::uint64_t done = 0;
    while (done < most && find()) {
      const auto bytes = std::min(most - done, left_.bytes);
      take(Stretch{left_.item, left_.from, left_.to, bytes});
      left_.from += bytes;
      left_.to += bytes;
      left_.bytes -= bytes;
      done += bytes;
    }
    return done;
  }
  bool is_over() { return !find(); }

 private:
  bool find() {
    while (left_.bytes == 0) {
      if (!runs_) {
        if (item_ == items_.size()) return false;
        runs_.emplace(items_[item_].from, items_[item_].to);
      }
      const auto run = runs_->next();
      if (!run) {
        runs_.reset();
        ++item_;
        continue;
      }
      const auto size = items_[item_].element_bytes;
      left_ = {item_, static_cast<std::uint64_t>(run->from) * size, static_cast<std::uint64_t>(run->to) * size,
               static_cast<std::uint64_t>(run->count) * size};
    }
    return true;
  }

  std::vector<Item> items_;
  std::size_t item_ = 0;
  std::optional<layout::CommonRuns> runs_;
  Stretch left_{0, 0, 0, 0};
};

std::int64_t common_elements(const layout::Region& one, const layout::Region& other) {
  layout::CommonRuns runs(one, other);
  std::int64_t count = 0;
  while (const auto run = runs.next()) count += run->count;
  return count;
}

std::span<const std::byte> bytes_here(const at::Tensor& elements) {
  return std::span<const std::byte>(static_cast<const std::byte*>(elements.const_data_ptr()), elements.nbytes());
}

}  // namespace

// A piece of a rank's that this one has something to get of.
struct HeldPieces::Need {
  const archive::Wanted* wanted;
  const archive::SavedPiece* piece;
};

// This rank's end of all that one rank gives it.
class HeldPieces::Takes {
 public:
  explicit Takes(const std::vector<Need>& needs) : walk_(items_of(needs)) {
    for (const auto& need : needs) {
      into_.push_back(need.wanted->into);
      asked_.items.emplace_back(List{{static_cast<std::int64_t>(need.piece->begin), to_list(need.wanted->region)}});
    }
  }

  List request() { return std::move(asked_); }
  bool go_on() { return is_owed_ && !walk_.is_over(); }
  std::uint64_t bytes() const { return bytes_; }

  // Puts a portion into its places. Throws what the other rank has said in its place.
  void take(const Value& word, base::Rank giver, base::Rank own) {
    if (const auto* text = word.get_if<std::string>()) {
      is_owed_ = false;
      std::rethrow_exception(messaging::to_error(*text));
    }
    const auto& items = word.as<value::Tuple>().items;
    const auto tensor = items.at(0).as<at::Tensor>();
    const auto bytes = bytes_here(tensor);
    std::uint64_t at = 0;
    walk_.next(bytes.size(), [&](const Stretch& stretch) {
      std::memcpy(into_[stretch.item].data() + stretch.to, bytes.data() + at, stretch.bytes);
      at += stretch.bytes;
    });
    bytes_ += at;
    base::internal_check(at == bytes.size(), "two ranks know of other pieces");
    if (static_cast<std::int64_t>(archive::checksum(bytes)) == items.at(1).as<std::int64_t>()) return;
    throw base::FormatError(base::str("what rank ", giver, " has sent rank ", own,
                                      " of the model is not what it had: its checksum differs"),
                            base::Code{"change-damaged"});
  }

 private:
  static std::vector<Walk::Item> items_of(const std::vector<Need>& needs) {
    std::vector<Walk::Item> items;
    for (const auto& [wanted, piece] : needs) {
      items.push_back({piece->region, wanted->region, archive::element_bytes(wanted->tensor->dtype)});
    }
    return items;
  }

  Walk walk_;
  std::vector<std::span<std::byte>> into_;
  List asked_;
  bool is_owed_ = true;
  std::uint64_t bytes_ = 0;
};

// This rank's end of all that it gives one rank, which has asked for it.
class HeldPieces::Gives {
 public:
  Gives(const Value& request, const std::map<std::uint64_t, const Part*>& by_offset)
      : walk_(items_of(request, by_offset)) {}

  bool goes_on() { return !walk_.is_over(); }

  // The next portion, with its checksum.
  Value next(std::uint64_t most) {
    most = std::min(most, left_);
    const auto room = at::empty({static_cast<std::int64_t>(most)}, at::kByte);
    auto* const memory = static_cast<std::byte*>(room.data_ptr());
    std::uint64_t size = 0;
    walk_.next(most, [&](const Stretch& stretch) {
      std::memcpy(memory + size, bytes_here(parts_[stretch.item]).data() + stretch.from, stretch.bytes);
      size += stretch.bytes;
    });
    left_ -= size;
    const auto sum = static_cast<std::int64_t>(archive::checksum({memory, size}));
    return value::Tuple{{room.narrow(0, 0, static_cast<std::int64_t>(size)), sum}};
  }

 private:
  std::vector<Walk::Item> items_of(const Value& request, const std::map<std::uint64_t, const Part*>& by_offset) {
    std::vector<Walk::Item> items;
    for (const auto& line : request.as<List>().items) {
      const auto& words = line.as<List>().items;
      const auto& part = *by_offset.at(static_cast<std::uint64_t>(words.at(0).as<std::int64_t>()));
      auto region = part.region;
      region.size = count(region);
      items.push_back(
          {std::move(region), to_region(words.at(1), part.tensor.shape), archive::element_bytes(part.tensor.dtype)});
      parts_.push_back(devices::on_host(part.elements));
      left_ +=
          static_cast<std::uint64_t>(common_elements(items.back().from, items.back().to)) * items.back().element_bytes;
    }
    return items;
  }

  std::uint64_t left_ = 0;  // this and the next before the walk, for which both are filled
  std::vector<at::Tensor> parts_;
  Walk walk_;
};

HeldPieces::HeldPieces(const Peers& peers, std::span<const Part> written, std::span<const Part> others) {
  const auto together = [&](const std::function<void()>& act) {
    messaging::act_together(peers.mailbox, peers.world, act, peers.patience);
  };
  std::string text;
  together([&] { text = archive::write_manifest(manifest_of(peers.index(), written), archive::Elements::kSome); });
  const auto texts = peers.mailbox.all_gather(peers.world, text, peers.patience);
  together([&] {
    std::vector<archive::Manifest> manifests;
    for (const auto& each : texts) {
      manifests.push_back(archive::read_manifest(each.as<std::string>(), archive::Elements::kSome));
    }
    manifest_ = merge(manifests);
  });
  std::uint64_t offset = 0;
  for (const auto& part : written) {
    const auto bytes = static_cast<std::uint64_t>(size_bytes(part));
    const auto here = parts_.emplace(key_of(part.tensor), part);
    if (bytes > 0) by_offset_.emplace(offset, &here->second);
    offset += bytes;
  }
  for (const auto& part : others) parts_.emplace(key_of(part.tensor), part);
}

HeldPieces::Key HeldPieces::key_of(const archive::SavedTensor& tensor) {
  return {tensor.name, tensor.kind, tensor.optimizer, tensor.state};
}

// Takes what this rank has itself, all of it or nothing.
bool HeldPieces::take_own(const archive::Wanted& wanted) const {
  const auto& tensor = *wanted.tensor;
  if (tensor.kind == archive::Kind::kBuffer) return false;
  const auto own = std::ranges::subrange(parts_.lower_bound(key_of(tensor)), parts_.upper_bound(key_of(tensor)));
  const auto found = std::ranges::find_if(own, [&](const auto& each) {
    return common_elements(each.second.region, wanted.region) == count(wanted.region);
  });
  if (found == own.end()) return false;
  const auto& part = found->second;
  const auto elements = devices::on_host(part.elements);
  const auto from = bytes_here(elements);
  Walk walk({{part.region, wanted.region, archive::element_bytes(tensor.dtype)}});
  walk.next(~std::uint64_t{0}, [&](const Stretch& stretch) {
    std::memcpy(wanted.into.data() + stretch.to, from.data() + stretch.from, stretch.bytes);
  });
  return true;
}

// Says what is needed of each rank, in the order in which it is asked.
std::vector<std::vector<HeldPieces::Need>> HeldPieces::needs(std::span<const archive::Wanted> wanted) const {
  std::vector<std::vector<Need>> of(peers_->world.size());
  for (const auto& each : wanted) {
    if (count(each.region) == 0 || take_own(each)) continue;
    for (const auto& piece : each.tensor->pieces) {
      if (count(piece.region) == 0 || common_elements(piece.region, each.region) == 0) continue;
      of.at(piece.file).push_back({&each, &piece});
    }
  }
  return of;
}

// Ranks meet in rounds: in each one a rank gives to one and takes from another, a portion in turn, so that nobody is
// far ahead of the one it takes from. An error of a rank goes to those that it owes something, in the place of that. It
// ends the call when all rounds are over, so that nobody waits for a rank that has left.
void HeldPieces::read(std::span<const archive::Wanted> wanted, const WentOn& went_on) {
  base::internal_check(peers_.has_value(), "pieces are read before it is known with whom");
  const auto& peers = *peers_;
  const auto count = peers.world.size(), self = peers.index();
  std::exception_ptr failure;
  const auto trying = [&failure](const auto& act) {
    try {
      act();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  };
  std::vector<std::vector<Need>> own_needs(count);
  trying([&] { own_needs = needs(wanted); });
  const auto portion = std::max(kPortionBytes / std::max<std::size_t>(count - 1, 1), kLeastPortionBytes);
  for (std::size_t round = 0; round < count; ++round) {
    const auto taker = peers.world[(self + round) % count];
    const auto from = (self + count - round) % count;
    const auto giver = peers.world[from];
    Takes takes(own_needs[from]);
    peers.mailbox.send(giver, kChannel, takes.request());
    const auto request = peers.mailbox.receive(taker, kChannel, peers.patience);
    std::optional<Gives> gives;
    trying([&] { gives.emplace(request, by_offset_); });
    while (true) {
      const bool gave = gives && gives->goes_on();
      if (gave) {
        Value word;
        trying([&] {
          if (failure) std::rethrow_exception(failure);
          word = gives->next(portion);
        });
        if (failure) {
          word = messaging::to_text(failure, peers.rank());
          gives.reset();
        }
        peers.mailbox.send(taker, kChannel, std::move(word));
      }
      const bool took = takes.go_on();
      if (took) {
        const auto word = peers.mailbox.receive(giver, kChannel, peers.patience);
        trying([&] { takes.take(word, giver, peers.rank()); });
      }
      if (!gave && !took) break;
      went_on();
    }
    if (round > 0) received_bytes_ += takes.bytes();
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace lamina::checkpoint
