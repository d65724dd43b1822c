// SPDX-License-Identifier: Apache-2.0
#include "lamina/job_checkpoint/kept_job.h"

#include <algorithm>
#include <array>
#include <functional>
#include <iterator>
#include <numeric>
#include <set>
#include <thread>
#include <utility>

#include "lamina/base/deadline.h"
#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/checkpoint/packed_parts.h"
#include "lamina/job_checkpoint/contents.h"
#include "lamina/job_checkpoint/together.h"

namespace lamina::job_checkpoint {
namespace {

using checkpoint::Part;
using membership::KeptBy;
using membership::KeptHere;
using membership::KeptVersion;
using value::List;
using value::Tuple;
using value::Value;

constexpr auto kChannel = "kept";
constexpr auto kLook = std::chrono::milliseconds(1);  // at a device that copies

// Alike for the same parts in any order.
std::uint64_t hash_of(const std::vector<Part>& parts) {
  return std::accumulate(parts.begin(), parts.end(), std::uint64_t{0},
                         [](std::uint64_t sum, const Part& part) { return sum + checkpoint::hash_of(part); });
}

// Refuses what a change of the layout does, as far as that is known before one.
void require_keepable(const JobAccess& job) {
  for (const auto* row : job.table().here()) {
    if (const auto* other = job.table().sharer(row->tensor)) {
      throw base::UsageError(base::str(row->layout.name, " and ", other->layout.name,
                                       " lie in one memory, and would not in another layout: a run that is to outlive "
                                       "ranks needs tensors of their own"),
                             base::Code{"elastic-refused"});
    }
  }
}

std::vector<int> machines_of(const topology::Topology& topology, std::span<const base::Rank> world) {
  std::vector<int> machines;
  for (const auto rank : world) {
    machines.push_back(static_cast<int>(topology.members(topology::Group::kNode, rank).front().value));
  }
  return machines;
}

Value to_value(const About& about) {
  std::vector<at::Tensor> tensors;
  const auto told = write_about(about, tensors, /*allow_objects=*/true);
  return Tuple{{told.dump(), List{std::vector<Value>(tensors.begin(), tensors.end())}}};
}

About to_about(const Value& told) {
  const auto& items = told.as<Tuple>().items;
  const auto tensor = [&](std::size_t at) { return items.at(1).as<List>().items.at(at).as<at::Tensor>(); };
  return read_about(nlohmann::json::parse(items.at(0).as<std::string>()), tensor, {.allow_objects = true});
}

List hashes_of(const std::vector<Part>& parts) {
  List hashes;
  for (const auto& part : parts) hashes.items.emplace_back(static_cast<std::int64_t>(checkpoint::hash_of(part)));
  return hashes;
}

KeptHere to_here(const Value& told) {
  const auto& items = told.as<List>().items;
  const auto number = [&](std::size_t at) { return items.at(at).as<std::int64_t>(); };
  KeptHere here{.version = {number(0), number(1)}, .own = static_cast<int>(number(2)), .others = {}};
  for (std::size_t at = 3; at < items.size(); ++at) here.others.push_back(static_cast<int>(number(at)));
  return here;
}

std::vector<KeptBy> to_kept(const std::vector<Value>& told) {
  std::vector<KeptBy> all;
  for (const auto& each : told) {
    const auto& items = each.as<List>().items;
    auto& by = all.emplace_back(KeptBy{{}, {items.at(0).as<std::int64_t>(), items.at(1).as<std::int64_t>()}});
    for (std::size_t at = 2; at < items.size(); ++at) by.versions.push_back(to_here(items[at]));
  }
  return all;
}

}  // namespace

KeptJob::~KeptJob() {
  if (sending_.joinable()) sending_.join();
}

void KeptJob::keep(JobAccess& job, std::int64_t epoch, std::int64_t updates, Value word) {
  const auto peers = job.peers();
  const auto& topology = job.ranks().topology;
  job.settle();
  Own own{.version = {epoch, updates}, .rank = static_cast<int>(peers.rank().value)};
  std::optional<Contents> contents;
  together(peers, [&] {
    require_keepable(job);
    contents.emplace(job, Contents::Of::kAll, SaveList::Has::kAll).collect();
    own.about = to_value(contents->describe());
  });
  own.word = std::move(word);
  own.written = contents->list().take();
  own.others = contents->list().take_others();
  own.rows = rows_of(job.table());
  own.first_copy = topology.members(topology::kOneCopy, peers.first());

  // The version before is whole once all have met with what they keep of it for others.
  if (!own_.empty() && own_.back().version.epoch == epoch) receive_packages(peers);
  const auto holding = static_cast<std::int64_t>(hash_of(own.written) + hash_of(own.others));
  for (const auto& each : peers.mailbox.all_gather(peers.world, holding, peers.patience)) {
    own.holdings.push_back(static_cast<std::uint64_t>(each.as<std::int64_t>()));
  }
  end_sending();
  if (!own_.empty()) {
    const auto before = own_.back().version;
    while (own_.front().version < before) own_.pop_front();
    std::erase_if(packages_, [&](const Package& package) { return package.version < before; });
    own.memory = 1 - own_.back().memory;
  }

  const auto keepers = membership::keepers_of(own.holdings, machines_of(topology, peers.world));
  if (text_epoch_ != epoch || keepers != keepers_) sent_text_.reset();
  text_epoch_ = epoch;
  keepers_ = keepers;
  const auto keeper = keepers_[static_cast<std::size_t>(own.rank)];
  if (keeper) own.others.clear();  // nobody needs them: they are written elsewhere
  const auto count = static_cast<std::ptrdiff_t>(own.written.size());
  std::vector<Part> all = std::move(own.written);
  std::ranges::move(own.others, std::back_inserter(all));
  const auto copied = memory_[own.memory].take(all);
  own.others.assign(std::make_move_iterator(all.begin() + count), std::make_move_iterator(all.end()));
  all.resize(static_cast<std::size_t>(count));
  own.written = std::move(all);
  own_.push_back(std::move(own));
  if (keeper) begin_to_send(base::Rank(*keeper), peers, copied);
}

// Waits for what this rank keeps for others of the newest version.
void KeptJob::receive_packages(const checkpoint::Peers& peers) {
  for (const auto ward : wards()) {
    while (!has(ward)) take(peers.mailbox.receive(base::Rank(ward), kChannel, peers.patience), ward);
  }
}

void KeptJob::complete(const checkpoint::Peers& peers) {
  receive_packages(peers);
  peers.mailbox.barrier(peers.world, peers.patience);
}

// The ranks for which this one keeps what they have of the newest version.
std::vector<int> KeptJob::wards() const {
  std::vector<int> wards;
  for (std::size_t rank = 0; rank < keepers_.size(); ++rank) {
    if (keepers_[rank] == own_.back().rank) wards.push_back(static_cast<int>(rank));
  }
  return wards;
}

bool KeptJob::has(int ward) const {
  const auto is_it = [&](const Package& each) { return each.rank == ward && each.version == own_.back().version; };
  return std::ranges::any_of(packages_, is_it);
}

// In a thread of its own: nothing else uses the channel.
void KeptJob::begin_to_send(base::Rank keeper, const checkpoint::Peers& peers,
                            std::shared_ptr<const devices::Mark> copied) {
  const auto& own = own_.back();
  const auto hash = hash_of(own.written);
  const auto text = hash == sent_text_ ? std::string() : checkpoint::text_of_parts(own.written);
  sent_text_ = hash;
  for (const auto& part : own.written) sent_bytes_ += static_cast<std::uint64_t>(checkpoint::size_bytes(part));
  const auto send = [keeper, text, &mailbox = peers.mailbox, copied = std::move(copied), version = own.version,
                     about = own.about, parts = own.written, deadline = base::Deadline::after(peers.patience.timeout)] {
    while (!copied->passed()) {
      if (deadline.expired()) throw base::TimeoutError("the device has not copied in time what its rank keeps");
      std::this_thread::sleep_for(kLook);
    }
    mailbox.send(keeper, kChannel, Tuple{{version.epoch, version.updates, text, about, checkpoint::pack(parts)}});
  };
  sending_ = std::thread([this, send] {
    try {
      send();
    } catch (...) {
      failure_ = std::current_exception();
    }
  });
}

void KeptJob::end_sending() {
  if (sending_.joinable()) sending_.join();
  if (const auto failure = std::exchange(failure_, nullptr)) std::rethrow_exception(failure);
}

void KeptJob::take(const Value& told, int from) {
  const auto& items = told.as<Tuple>().items;
  Package package{.version = {items.at(0).as<std::int64_t>(), items.at(1).as<std::int64_t>()},
                  .rank = from,
                  .text = items.at(2).as<std::string>(),
                  .about = items.at(3),
                  .parts = items.at(4)};
  if (package.text.empty()) {  // as before
    const auto is_its = [&](const Package& each) { return each.rank == from; };
    const auto last = std::find_if(packages_.rbegin(), packages_.rend(), is_its);
    base::internal_check(last != packages_.rend(), "a keeper does not know what it keeps");
    package.text = last->text;
  }
  packages_.push_back(std::move(package));
}

Value KeptJob::told(messaging::Mailbox& mailbox) {
  try {
    end_sending();
  } catch (const base::Error&) {  // NOLINT(bugprone-empty-catch): the keeper is lost, or has not got it
  }
  if (!own_.empty()) {
    for (const auto ward : wards()) {
      while (const auto package = mailbox.poll(base::Rank(ward), kChannel)) take(*package, ward);
    }
  }
  const auto came_with = has_come_ ? came_with_ : KeptBy().came_with;
  List versions{{came_with.epoch, came_with.updates}};
  for (const auto& own : own_) {
    if (own.rank == kCame) continue;
    List here{{own.version.epoch, own.version.updates, std::int64_t{own.rank}}};
    for (const auto& package : packages_) {
      if (package.version == own.version) here.items.emplace_back(std::int64_t{package.rank});
    }
    versions.items.emplace_back(std::move(here));
  }
  return versions;
}

void KeptJob::decide(const std::vector<Value>& told) {
  const auto all = to_kept(told);
  if (std::ranges::all_of(all, [](const KeptBy& each) { return each.has_come() && each.versions.empty(); })) {
    throw base::PeerError("the states of all that are left were lost with those who had them", {},
                          base::Code{"elastic-ended"});
  }
  if (has_come_ && !has_parts()) return come();
  const auto [version, why_not] = membership::newest_whole(all, holdings());
  if (!version) {
    throw base::PeerError(base::str("the ranks that are left do not go on from memory: ", why_not,
                                    "; start the job again, from its newest checkpoint"),
                          {}, base::Code{"elastic-lost"});
  }
  while (own_.back().version != *version) own_.pop_back();
  left_.clear();
  for (const auto& [versions, came_with] : all) {
    if (*version > came_with) left_.insert(std::ranges::find(versions, *version, &KeptHere::version)->own);
  }
}

std::map<KeptVersion, membership::Holdings> KeptJob::holdings() const {
  std::map<KeptVersion, membership::Holdings> holdings;
  for (const auto& own : own_) holdings[own.version] = own.holdings;
  return holdings;
}

std::vector<bool> KeptJob::may_leave(const std::vector<Value>& told, const std::vector<bool>& want) const {
  return membership::may_leave(to_kept(told), want, holdings());
}

bool KeptJob::is_new(const Value& told) const {
  return own_.empty() || own_.back().version <= to_kept({told}).front().came_with;
}

void KeptJob::come() {
  own_.clear();
  has_come_ = true;
  came_with_ = membership::kLaterThanAll;
}

Value KeptJob::outline() const {
  const auto& own = own_.back();
  List holdings, rows, first_copy;
  for (const auto holding : own.holdings) holdings.items.emplace_back(static_cast<std::int64_t>(holding));
  for (const auto& row : own.rows) rows.items.emplace_back(row);
  for (const auto rank : own.first_copy) first_copy.items.emplace_back(rank.value);
  return Tuple{{own.version.epoch, own.version.updates, holdings, rows, first_copy, own.word}};
}

void KeptJob::take_outline(const Value& outline) {
  const auto& items = outline.as<Tuple>().items;
  Own own{.version = {items.at(0).as<std::int64_t>(), items.at(1).as<std::int64_t>()}, .rank = kCame};
  for (const auto& each : items.at(2).as<List>().items) {
    own.holdings.push_back(static_cast<std::uint64_t>(each.as<std::int64_t>()));
  }
  for (const auto& each : items.at(3).as<List>().items) own.rows.push_back(each.as<std::string>());
  for (const auto& each : items.at(4).as<List>().items) own.first_copy.emplace_back(each.as<std::int64_t>());
  own.word = items.at(5);
  came_with_ = own.version;
  own_.clear();
  own_.push_back(std::move(own));
}

// All know who has what. Of those who have a part one gives it: whoever wrote it, or keeps it for that one, comes
// first.
HeldJob KeptJob::hold(const checkpoint::Peers& peers) const {
  const auto& own = own_.back();
  auto written = own.written, others = own.others;
  List abouts;
  if (has_parts()) abouts.items.emplace_back(Tuple{{std::int64_t{own.rank}, own.about}});
  together(peers, [&] {
    for (const auto& package : packages_) {
      if (package.version != own.version || left_.contains(package.rank)) continue;
      std::ranges::move(checkpoint::unpack(package.text, package.parts), std::back_inserter(written));
      abouts.items.emplace_back(Tuple{{std::int64_t{package.rank}, package.about}});
    }
  });
  const auto told = peers.mailbox.all_gather(
      peers.world, Tuple{{hashes_of(written), hashes_of(others), std::move(abouts)}}, peers.patience);
  std::map<std::int64_t, std::size_t> givers;
  std::map<int, About> known;
  together(peers, [&] {
    for (const std::size_t list : {0, 1}) {
      for (std::size_t place = 0; place < told.size(); ++place) {
        for (const auto& hash : told[place].as<Tuple>().items.at(list).as<List>().items) {
          givers.emplace(hash.as<std::int64_t>(), place);
        }
      }
    }
    for (const auto& each : told) {
      for (const auto& about : each.as<Tuple>().items.at(2).as<List>().items) {
        const auto& items = about.as<Tuple>().items;
        known.emplace(static_cast<int>(items.at(0).as<std::int64_t>()), to_about(items.at(1)));
      }
    }
  });
  std::vector<Part> given, kept;
  for (auto* parts : {&written, &others}) {
    for (auto& part : *parts) {
      const auto giver = givers.find(static_cast<std::int64_t>(checkpoint::hash_of(part)));
      const bool gives = giver != givers.end() && giver->second == peers.index();
      if (gives) givers.erase(giver);  // once
      (gives ? given : kept).push_back(std::move(part));
    }
  }
  return {merged(known), std::make_shared<checkpoint::HeldPieces>(peers, given, kept)};
}

// Puts together what the ranks of one copy of the model have told; another one that has the same speaks for a lost one.
About KeptJob::merged(const std::map<int, About>& known) const {
  const auto& own = own_.back();
  std::vector<About> copy;
  for (const auto rank : own.first_copy) {
    const auto holding = own.holdings.at(static_cast<std::size_t>(rank.value));
    auto found = known.find(static_cast<int>(rank.value));
    if (found == known.end()) {
      found = std::ranges::find_if(
          known, [&](const auto& each) { return own.holdings.at(static_cast<std::size_t>(each.first)) == holding; });
    }
    base::internal_check(found != known.end(), "a version was whole, and is not");
    copy.push_back(found->second);
  }
  return about_of_copy(copy, own.rows);
}

}  // namespace lamina::job_checkpoint
