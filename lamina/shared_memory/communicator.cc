// SPDX-License-Identifier: Apache-2.0
#include "lamina/shared_memory/communicator.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>

#include "lamina/base/error.h"
#include "lamina/base/hash.h"
#include "lamina/base/str.h"

namespace lamina::shared_memory {
namespace {

using base::str;

constexpr std::size_t kChunkBytes = 256 << 10;      // of a collective: the processor's caches hold some of them
constexpr std::size_t kLaneChunkBytes = 128 << 10;  // of a send
constexpr std::size_t kTogetherBytes = 16 << 10;    // sums of less than this by all members are made by each of them
constexpr std::size_t kLine = 64;                   // bytes that a processor's cache keeps together
constexpr std::size_t kPage = 4096;
constexpr std::size_t kInPlaceBytes = kChunkBytes;  // of a buffer that may be read in place: others are in the caches
constexpr std::size_t kTurnBytes = 2 << 20;         // of a buffer, by one of two ways that are compared
constexpr std::size_t kReadAtOnce = 256 << 10;      // of all members' ordinary memory, to be summed from the caches
// Address space for the arenas of all members. Pages that nobody touches take no memory.
constexpr std::size_t kArenasBytes = std::size_t{64} << 30;

std::string_view name_of(Reduction reduction) {
  constexpr std::array<std::string_view, 8> kNames{"sum",     "mean",    "product", "minimum",
                                                   "maximum", "bit and", "bit or",  "bit xor"};
  return kNames[static_cast<std::size_t>(reduction)];
}

Buffer itself(const Buffer& buffer) { return buffer; }
Buffer mine_of(const Divided& divided) { return divided.mine; }

// Whatever is said of an operation has to be the same on all members.
template <class Buffers, class Mine, class... Words>
Operation operation_over(const char* kind, const Buffers& buffers, const Mine& mine, const Words&... words) {
  std::string what = str(kind, " of ");
  if (buffers.size() != 1) what += str(buffers.size(), " buffers: ");
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const Buffer buffer = mine(buffers[i]);
    what += str(i == 0 ? "" : " and ", buffer.count, " ", layout::traits(buffer.dtype).name);
  }
  what += str("", words...);
  const auto digest = base::hash64(what);
  return {std::move(what), digest};
}

template <class... Words>
Operation operation(const char* kind, const Buffer& buffer, const Words&... words) {
  return operation_over(kind, std::span(&buffer, 1), itself, words...);
}

// Calls `work` with beginning and length of each chunk: at least once, as members have to meet.
template <class Work>
void in_chunks(Exchange& exchange, std::size_t count, std::size_t most, const Work& work) {
  std::size_t begin = 0;
  do {
    if (exchange.met()) exchange.next_chunk();
    const auto length = std::min(most, count - begin);
    work(begin, length);
    begin += length;
  } while (begin < count);
}

// A segment: the area of the collectives, those of the lanes to and from each member, the arena.
std::size_t areas_bytes(int members) {
  return Exchange::area_bytes(kChunkBytes) + std::size_t{2} * members * Exchange::area_bytes(kLaneChunkBytes);
}

// Without arenas where some member may not have as much address space.
std::vector<Segment> share_segments(const Neighbours& neighbours, base::Deadline deadline) {
  const auto areas = areas_bytes(neighbours.size());
  try {
    return neighbours.share(areas + kArenasBytes / neighbours.size() / kPage * kPage, deadline);
  } catch (const base::PeerError&) {
    throw;
  } catch (const base::TimeoutError&) {
    throw;
  } catch (const base::Error&) {
    return neighbours.share(areas, deadline);
  }
}

// Elements that members share out: neighbouring ones to each, in whole lines of the cache.
class EvenParts {
 public:
  EvenParts(std::size_t count, int members) : count_(count), share_((count / members / kLine + 1) * kLine) {}
  std::size_t begin(int member) const { return std::min(count_, share_ * member); }

 private:
  std::size_t count_, share_;
};

bool overlap(const Buffer& one, const Buffer& other) {
  const std::less<> before;
  return before(one.data, other.at(other.count)) && before(other.data, one.at(one.count));
}

void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

}  // namespace

std::vector<Buffer> parts_of(const Buffer& all, std::span<const std::size_t> counts) {
  std::vector<Buffer> parts;
  std::size_t begin = 0;
  for (const auto count : counts) {
    parts.push_back({all.at(begin), count, all.dtype});
    begin += count;
  }
  return parts;
}

std::vector<Buffer> equal_parts(const Buffer& all, int members) {
  return parts_of(all, std::vector<std::size_t>(members, all.count / members));
}

Communicator::Communicator(Neighbours neighbours, base::Deadline deadline, Reading reading)
    : neighbours_(std::move(neighbours)), segments_(share_segments(neighbours_, deadline)), to_(size()), from_(size()) {
  std::vector<int> all;
  for (int member = 0; member < size(); ++member) {
    all.push_back(member);
    memory_.push_back(segments_[member].data());
  }
  arena_ = std::make_shared<Arena>(std::move(segments_[rank()]), areas_bytes(size()));
  together_ = std::make_unique<Exchange>(neighbours_, std::move(all), memory_, kChunkBytes);
  reach_ = std::make_unique<Reach>(*together_, *arena_, memory_, reading);
  for (int member = 0; member < size(); ++member) {
    if (member == rank()) continue;
    to_[member] = lane(rank(), member);
    from_[member] = lane(member, rank());
  }
}

std::unique_ptr<Exchange> Communicator::lane(int from, int to) const {
  const auto area = [&](int owner, int other, bool sends) {
    const std::size_t number = sends ? other : size() + other;
    return memory_[owner] + Exchange::area_bytes(kChunkBytes) + number * Exchange::area_bytes(kLaneChunkBytes);
  };
  return std::make_unique<Exchange>(neighbours_, std::vector{from, to},
                                    std::vector{area(from, to, true), area(to, from, false)}, kLaneChunkBytes);
}

// Copies a part of the buffer to this member's staging memory.
void Communicator::stage(const Buffer& buffer, std::size_t begin, std::size_t count, std::size_t offset) {
  copy_bytes(together_->staging(rank()) + offset, buffer.at(begin), count * buffer.element_bytes());
}

// Where the buffers lie of which all members read some of each other, by member and number; nullptr for one that has to
// be staged. `written`: what this member writes while others read. All members get the same.
std::vector<std::byte*> Communicator::locate(Buffers read, Buffers written) {
  std::vector<std::byte*> places(size() * read.size());
  if (read.front().count * read.front().element_bytes() < kInPlaceBytes) return places;
  if (together_->met()) together_->next_chunk();
  const auto offsets = [&](int member) { return reinterpret_cast<std::uint64_t*>(together_->staging(member)); };
  for (std::size_t i = 0; i < read.size(); ++i) {
    const bool changes = std::ranges::any_of(written, [&](const auto& other) { return overlap(read[i], other); });
    offsets(rank())[i] = changes ? 0 : arena_->offset_of(read[i].data);
  }
  together_->meet();
  for (std::size_t i = 0; i < places.size(); ++i) {
    const auto member = static_cast<int>(i / read.size());
    const auto offset = offsets(member)[i % read.size()];
    if (offset != 0) places[i] = memory_[member] + offset;
  }
  return places;
}

void Communicator::all_reduce(Buffer buffer, Reduction reduction, const Check& check) {
  all_reduce(std::span<const Buffer>(&buffer, 1), reduction, check);
}

void Communicator::all_reduce(std::span<const Buffer> buffers, Reduction reduction, const Check& check) {
  together_->run(operation_over("all_reduce", buffers, itself, ", ", name_of(reduction)), check, [&] {
    for (const auto& buffer : buffers) {
      Reach::Places places{.mapped = std::vector<const std::byte*>(size())};
      const auto bytes = buffer.count * buffer.element_bytes();
      if (bytes >= kInPlaceBytes) places = reach_->find(buffer.data, bytes);
      switch (places.way) {
        case Way::kStaged:
          sum_parts(buffer, reduction, kEverybody, places.mapped);
          break;
        case Way::kRead:
          sum_where_they_lie(buffer, reduction, places);
          break;
        case Way::kInTurns:
          sum_in_turns(buffer, reduction, places);
      }
    }
    meet_at_least_once();
  });
}

// Sums a part of the buffer by each way in turns, and keeps what that took. What is then left of a large one is staged.
void Communicator::sum_in_turns(const Buffer& buffer, Reduction reduction, const Reach::Places& places) {
  const auto size_of = buffer.element_bytes();
  const auto most = (std::min(kTurnBytes / size_of, buffer.count / 2) / kLine + 1) * kLine;
  std::size_t begin = 0;
  for (int turn = 0; turn < 2 * Trial::kRounds && begin < buffer.count; ++turn) {
    const Buffer part{buffer.at(begin), std::min(most, buffer.count - begin), buffer.dtype};
    const auto there = places.from(begin * size_of);
    const auto start = Trial::now();
    if (turn % 2 == 0) {
      sum_parts(part, reduction, kEverybody, there.mapped);
      together_->meet();
      places.trial->add_staged(Trial::now() - start, part.count * size_of);
    } else {
      sum_where_they_lie(part, reduction, there);
      places.trial->add_read(Trial::now() - start, part.count * size_of);
    }
    begin += part.count;
  }
  if (begin == buffer.count) return;
  const Buffer rest{buffer.at(begin), buffer.count - begin, buffer.dtype};
  sum_parts(rest, reduction, kEverybody, places.from(begin * size_of).mapped);
}

void Communicator::reduce(Buffer buffer, Reduction reduction, int root, const Check& check) {
  together_->run(operation("reduce", buffer, ", ", name_of(reduction), ", to ", neighbours_.name(root)), check, [&] {
    const auto places = locate(std::span(&buffer, 1), {});
    sum_parts(buffer, reduction, root, {places.begin(), places.end()});
  });
}

// Each member reduces a part of all, of which the others read nothing, in its own buffer, and then reads the rest.
void Communicator::sum_where_they_lie(const Buffer& buffer, Reduction reduction, const Reach::Places& places) {
  const auto size_of = buffer.element_bytes();
  const EvenParts parts(buffer.count, size());
  const bool copies = std::ranges::count(places.mapped, nullptr) > 0;
  const auto mine = parts.begin(rank()), end = parts.begin(rank() + 1);
  const auto most = copies ? std::max(kReadAtOnce / size_of / size() / kLine, std::size_t{1}) * kLine : buffer.count;
  const std::unique_ptr<std::byte[]> read(copies ? new std::byte[most * size_of * size()] : nullptr);
  for (auto begin = mine; begin < end; begin += most) {
    const auto length = std::min(most, end - begin);
    std::vector<const std::byte*> sources;
    for (int member = 0; member < size(); ++member) {
      auto* to = read.get() + member * most * size_of;
      sources.push_back(member == rank() ? buffer.at(begin)
                                         : reach_->read(places, member, begin * size_of, length * size_of, to));
    }
    shared_memory::reduce(buffer.dtype, reduction, buffer.at(begin), sources, length);
  }
  together_->meet();
  for (int i = 1; i < size(); ++i) {
    const int member = (rank() + i) % size();
    const auto begin = parts.begin(member), bytes = (parts.begin(member + 1) - begin) * size_of;
    auto* to = buffer.at(begin);
    copy_bytes(to, reach_->read(places, member, begin * size_of, bytes, to), bytes);
  }
  together_->meet();
}

// Each member stages what others reduce of a chunk, reduces a part to its own staging memory, and takes the other parts
// from theirs. Where a chunk is small, each reduces all of it, and nobody waits a second time. `mapped`: buffers that
// need not be staged.
void Communicator::sum_parts(Buffer buffer, Reduction reduction, int root,
                             const std::vector<const std::byte*>& mapped) {
  const auto size_of = buffer.element_bytes();
  const bool takes = root == kEverybody || root == rank();
  in_chunks(*together_, buffer.count, kChunkBytes / size_of, [&](std::size_t begin, std::size_t length) {
    const bool small = length * size_of * size() <= kTogetherBytes;
    const auto staged = [&](int member, std::size_t element) { return together_->staging(member) + element * size_of; };
    std::vector<const std::byte*> sources;
    if (small) {
      stage(buffer, begin, length);
      together_->meet();
      for (int member = 0; member < size(); ++member) sources.push_back(staged(member, 0));
      if (takes) shared_memory::reduce(buffer.dtype, reduction, buffer.at(begin), sources, length);
      return;
    }
    const EvenParts parts(length, size());
    const auto mine = parts.begin(rank()), end = parts.begin(rank() + 1);
    if (mapped[rank()] == nullptr) {
      stage(buffer, begin, mine);
      stage(buffer, begin + end, length - end, end * size_of);
    }
    together_->meet();
    for (int member = 0; member < size(); ++member) {
      sources.push_back(member == rank()            ? buffer.at(begin + mine)
                        : mapped[member] != nullptr ? mapped[member] + (begin + mine) * size_of
                                                    : staged(member, mine));
    }
    shared_memory::reduce(buffer.dtype, reduction, staged(rank(), mine), sources, end - mine);
    together_->meet();
    for (int member = 0; takes && member < size(); ++member) {
      const auto first = parts.begin(member);
      copy_bytes(buffer.at(begin + first), staged(member, first), (parts.begin(member + 1) - first) * size_of);
    }
  });
}

void Communicator::broadcast(Buffer buffer, int root, const Check& check) {
  together_->run(operation("broadcast", buffer, ", from ", neighbours_.name(root)), check, [&] {
    const auto size_of = buffer.element_bytes();
    const auto* place = locate(std::span(&buffer, 1), {})[root];
    const auto most = place != nullptr ? buffer.count : kChunkBytes / size_of;
    in_chunks(*together_, buffer.count, most, [&](std::size_t begin, std::size_t length) {
      if (place == nullptr) {
        if (rank() == root) stage(buffer, begin, length);
        together_->meet();
      }
      if (rank() == root) return;
      copy_bytes(buffer.at(begin), place != nullptr ? place : together_->staging(root), length * size_of);
    });
    if (place != nullptr) together_->meet();
  });
}

void Communicator::all_gather(Buffers all, Buffer mine, const Check& check) {
  const Divided one{mine, {all.begin(), all.end()}};
  all_gather(std::span<const Divided>(&one, 1), check);
}

void Communicator::all_gather(std::span<const Divided> buffers, const Check& check) {
  together_->run(operation_over("all_gather", buffers, mine_of), check, [&] {
    for (const auto& [mine, all] : buffers) gather_parts(all, mine, kEverybody);
    meet_at_least_once();
  });
}

void Communicator::gather(Buffers all, Buffer mine, int root, const Check& check) {
  together_->run(operation("gather", mine, ", to ", neighbours_.name(root)), check,
                 [&] { gather_parts(all, mine, root); });
}

void Communicator::gather_parts(Buffers all, Buffer mine, int root) {
  const auto size_of = mine.element_bytes();
  const bool takes = root == kEverybody || root == rank();
  std::vector<Buffer> written(all.begin(), all.end());
  if (takes) written.erase(written.begin() + rank());
  const auto places = locate(std::span(&mine, 1), written);
  const auto staged = std::ranges::count(places, nullptr);
  const auto most = staged == 0 ? mine.count : kChunkBytes / size_of;
  in_chunks(*together_, mine.count, most, [&](std::size_t begin, std::size_t length) {
    if (places[rank()] == nullptr) stage(mine, begin, length);
    if (staged > 0) together_->meet();
    for (int i = 0; takes && i < size(); ++i) {
      const int member = (rank() + i) % size();  // its own first, which another one's may overwrite
      const auto* from = member == rank()            ? mine.at(begin)
                         : places[member] != nullptr ? places[member] + begin * size_of
                                                     : together_->staging(member);
      copy_bytes(all[member].at(begin), from, length * size_of);
    }
  });
  if (staged < size()) together_->meet();
}

void Communicator::reduce_scatter(Buffer mine, Buffers all, Reduction reduction, const Check& check) {
  const Divided one{mine, {all.begin(), all.end()}};
  reduce_scatter(std::span<const Divided>(&one, 1), reduction, check);
}

void Communicator::reduce_scatter(std::span<const Divided> buffers, Reduction reduction, const Check& check) {
  together_->run(operation_over("reduce_scatter", buffers, mine_of, ", ", name_of(reduction)), check, [&] {
    for (const auto& [mine, all] : buffers) sum_to_owners(mine, all, reduction);
    meet_at_least_once();
  });
}

// For no buffers at all.
void Communicator::meet_at_least_once() {
  if (!together_->met()) together_->meet();
}

void Communicator::sum_to_owners(Buffer mine, Buffers all, Reduction reduction) {
  const auto size_of = mine.element_bytes();
  const auto part_bytes = kChunkBytes / size() / kLine * kLine;
  auto places = locate(all, std::span(&mine, 1));
  const auto place = [&](int member, int part) -> std::byte*& { return places[member * size() + part]; };
  for (int member = 0; member < size(); ++member)
    place(member, member) = memory_[member];  // nobody reads that of others
  const auto staged = std::ranges::count(places, nullptr);
  const auto most = staged == 0 ? mine.count : part_bytes / size_of;
  in_chunks(*together_, mine.count, most, [&](std::size_t begin, std::size_t length) {
    for (int part = 0; part < size(); ++part) {
      if (place(rank(), part) == nullptr) stage(all[part], begin, length, part * part_bytes);
    }
    if (staged > 0) together_->meet();
    std::vector<const std::byte*> sources;
    for (int member = 0; member < size(); ++member) {
      const auto* in_place = place(member, rank());
      sources.push_back(member == rank()      ? all[rank()].at(begin)
                        : in_place != nullptr ? in_place + begin * size_of
                                              : together_->staging(member) + rank() * part_bytes);
    }
    shared_memory::reduce(mine.dtype, reduction, mine.at(begin), sources, length);
  });
  if (staged < std::ssize(places) - size()) together_->meet();
}

void Communicator::scatter(Buffer mine, Buffers all, int root, const Check& check) {
  const auto size_of = mine.element_bytes();
  const auto part_bytes = kChunkBytes / size() / kLine * kLine;
  together_->run(operation("scatter", mine, ", from ", neighbours_.name(root)), check, [&] {
    in_chunks(*together_, mine.count, part_bytes / size_of, [&](std::size_t begin, std::size_t length) {
      for (int member = 0; rank() == root && member < size(); ++member) {
        stage(all[member], begin, length, member * part_bytes);
      }
      together_->meet();
      copy_bytes(mine.at(begin), together_->staging(root) + rank() * part_bytes, length * size_of);
    });
  });
}

// First all learn from all how much goes where: so each sees what does not fit, and how many chunks there are.
void Communicator::all_to_all(Buffers received, Buffers sent, const Check& check) {
  const auto size_of = sent.front().element_bytes();
  const auto part_bytes = kChunkBytes / size() / kLine * kLine;
  const auto kind = layout::traits(sent.front().dtype).name;
  const Operation said{str("all_to_all of ", kind), base::hash64(kind, base::hash64("all_to_all"))};
  together_->run(said, check, [&] {
    in_chunks(*together_, agree_on_counts(received, sent), part_bytes / size_of,
              [&](std::size_t begin, std::size_t length) {
                const auto of = [&](const Buffer& part) {
                  return std::min(part.count - std::min(part.count, begin), length);
                };
                for (int member = 0; member < size(); ++member) {
                  stage(sent[member], begin, of(sent[member]), member * part_bytes);
                }
                together_->meet();
                for (int member = 0; member < size(); ++member) {
                  copy_bytes(received[member].at(begin), together_->staging(member) + rank() * part_bytes,
                             of(received[member]) * size_of);
                }
              });
  });
}

// Returns the most elements that go from one member to another.
std::size_t Communicator::agree_on_counts(Buffers received, Buffers sent) {
  const auto counts = [&](int member) { return reinterpret_cast<std::uint64_t*>(together_->staging(member)); };
  for (int member = 0; member < size(); ++member) {
    counts(rank())[member] = sent[member].count;
    counts(rank())[size() + member] = received[member].count;
  }
  together_->meet();
  std::size_t most = 0;
  for (int from = 0; from < size(); ++from) {
    for (int to = 0; to < size(); ++to) {
      const std::size_t gives = counts(from)[to], takes = counts(to)[size() + from];
      most = std::max(most, gives);
      if (gives == takes) continue;
      together_->refuse(str("all_to_all: ", neighbours_.name(from), " sends ", gives, " elements to ",
                            neighbours_.name(to), ", which expects ", takes));
    }
  }
  return most;
}

void Communicator::barrier(const Check& check) {
  together_->run({"barrier", base::hash64("barrier")}, check, [&] { together_->meet(); });
}

void Communicator::send(Buffer buffer, int to, int tag, const Check& check) {
  pass(*to_.at(to), buffer, tag, /*sends=*/true, check);
}

void Communicator::receive(Buffer buffer, int from, int tag, const Check& check) {
  pass(*from_.at(from), buffer, tag, /*sends=*/false, check);
}

// A broadcast from the sender, the first of the lane's two members.
void Communicator::pass(Exchange& lane, Buffer buffer, int tag, bool sends, const Check& check) {
  auto both = operation("send", buffer, ", tag ", tag);
  if (!sends) both.what = operation("recv", buffer, ", tag ", tag).what;  // as this member called it
  lane.run(both, check, [&] {
    in_chunks(lane, buffer.count, kLaneChunkBytes / buffer.element_bytes(), [&](std::size_t begin, std::size_t length) {
      const auto bytes = length * buffer.element_bytes();
      if (sends) copy_bytes(lane.staging(0), buffer.at(begin), bytes);
      lane.meet();
      if (!sends) copy_bytes(buffer.at(begin), lane.staging(0), bytes);
    });
  });
}

}  // namespace lamina::shared_memory
