// SPDX-License-Identifier: Apache-2.0
#include "lamina/checkpoint/save.h"

#include <unistd.h>

#include <algorithm>
#include <random>
#include <utility>

#include "lamina/archive/model_folder.h"
#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/checkpoint/outcome.h"
#include "lamina/checkpoint/rank_files.h"

namespace lamina::checkpoint {
namespace {

using value::Value;

constexpr auto kToken = "seen";  // a file that shows that all ranks see one folder
constexpr auto kBeat = std::chrono::seconds(1);
constexpr auto kGrace = std::chrono::seconds(10);  // for the first rank to say whom it has waited for
constexpr std::uint64_t kSlack = std::uint64_t{1} << 20;  // of manifest and headers, beside the bytes of parts

// Words on the channel of a save: a letter, and what follows it.
constexpr char kGoesOn = 'g', kManifest = 'm', kFailed = 'f', kDone = 'd';

std::string new_id() {
  std::random_device random;
  std::string id;
  for (int i = 0; i < 16; ++i) id.push_back("0123456789abcdef"[random() % 16]);
  return id;
}

std::string who(base::Rank rank) {
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  return base::str("rank ", rank, ", process ", ::getpid(), " on ", host);
}

}  // namespace

std::size_t Peers::index() const {
  return static_cast<std::size_t>(std::ranges::find(world, rank()) - world.begin());
}

Save::Save(archive::FileSystem& files, SaveRequest request, Peers peers)
    : files_(files), request_(std::move(request)), peers_(std::move(peers)), store_(files, request_.folder, request_.form) {
  agree();
  channel_ = "checkpoint " + id_;
}

Save::~Save() {
  if (thread_.joinable()) thread_.join();
}

// The first rank takes the tag, and leaves a token there. Returns what went wrong.
std::string Save::claim() {
  if (!peers_.is_first()) return "";
  try {
    id_ = new_id();
    claim_.emplace(store_.begin(request_.tag, id_, who(peers_.rank())));
    place_ = claim_->folder();
    files_.create(place_ / kToken)->write(std::as_bytes(std::span(id_)));
    return "";
  } catch (const base::Error& error) {
    return error.what();
  }
}

// Each rank looks whether the folder is the first one's, and that one whether it has room for so many bytes. Returns
// what is wrong.
std::string Save::look_around(std::uint64_t bytes) {
  try {
    const auto seen = archive::read_all(files_, place_ / kToken, 4096);
    if (seen != id_) throw base::FormatError("it is another save's");
  } catch (const base::Error& error) {
    return base::str("rank ", peers_.rank(), " does not see the folder that rank ", peers_.first(), " has made: ",
                     error.what(), ". The folder of checkpoints has to be the same one on all machines");
  }
  if (!peers_.is_first()) return "";
  try {
    const auto free = files_.free_bytes(place_);
    if (bytes <= free) return "";
    return base::str(request_.folder.string(), ": the checkpoint needs ", bytes, " bytes, and ", free,
                     " are free: make room, or take another folder");
  } catch (const base::Error& error) {
    return error.what();
  }
}

void Save::agree() {
  using value::Tuple;
  const auto gather = [&](Tuple word) {
    std::vector<Tuple> words;
    for (auto& each : peers_.mailbox.all_gather(peers_.world, std::move(word), peers_.patience)) {
      words.push_back(each.as<Tuple>());
      const auto& problem = words.back().items.at(0).as<std::string>();
      if (!problem.empty()) throw base::UsageError(base::str("save_checkpoint(): ", problem), base::Code{"checkpoint-refused"});
    }
    return words;
  };
  std::int64_t own = 0;
  for (const auto& part : request_.parts) own += size_bytes(part);
  const auto place = request_.folder.string() + "\n" + request_.tag;
  const auto problem = claim();
  const auto words = gather({{problem, id_, place_.string(), place, own}});
  const auto& first = words.front().items;
  id_ = first.at(1).as<std::string>();
  place_ = first.at(2).as<std::string>();
  std::uint64_t bytes = kSlack;
  for (const auto& word : words) {
    bytes += static_cast<std::uint64_t>(word.items.at(4).as<std::int64_t>());
    if (word.items.at(3).as<std::string>() == first.at(3).as<std::string>()) continue;
    throw base::UsageError("save_checkpoint(): ranks were given different folders or tags; all of them make one checkpoint",
                           base::Code{"checkpoint-refused"});
  }
  gather({{look_around(bytes)}});
  if (peers_.is_first()) files_.remove(place_ / kToken);
}

void Save::start() {
  thread_ = std::thread([this] { write(); });
}

bool Save::is_over() const {
  std::lock_guard guard(mutex_);
  return over_;
}

void Save::wait() {
  std::unique_lock lock(mutex_);
  auto said = base::Deadline::Clock::now();
  std::int64_t seen = -1;
  while (!over_) {
    ended_.wait_for(lock, base::kInterruptSlice);
    if (over_) break;
    lock.unlock();
    try {
      if (peers_.patience.check_interrupt) peers_.patience.check_interrupt();
    } catch (...) {
      dropped_ = true;
      throw;
    }
    const auto now = base::Deadline::Clock::now();
    if (peers_.alive && now - said >= kBeat && std::exchange(seen, progress_.load()) != progress_) {
      said = now;
      peers_.alive();
    }
    lock.lock();
  }
  if (error_) std::rethrow_exception(error_);
}

void Save::write() {
  std::exception_ptr error;
  try {
    error = outcome();
  } catch (...) {
    error = std::current_exception();
  }
  claim_.reset();
  request_.parts.clear();
  std::lock_guard guard(mutex_);
  error_ = error;
  over_ = true;
  ended_.notify_all();
}

// How it ended: on all ranks alike.
std::exception_ptr Save::outcome() {
  archive::Manifest own;
  std::string word;
  std::exception_ptr error;
  try {
    own = write_own();
    word = kManifest + archive::write_manifest(own, archive::Elements::kSome);
  } catch (...) {
    error = std::current_exception();
    word = kFailed + to_text(error, peers_.rank());
  }
  if (!peers_.is_first()) return hand_in(word);
  if (error) tell_others(word);
  auto manifests = collect(std::move(own), error);
  if (error) return error;
  try {
    commit(std::move(manifests));
  } catch (...) {
    error = std::current_exception();
  }
  tell_others(error ? kFailed + to_text(error, peers_.rank()) : std::string(1, kDone));
  return error;
}

archive::Manifest Save::write_own() {
  return write_rank_files(files_, place_, peers_.index(), request_.parts, [this](std::int64_t) { went_on(); });
}

// Between two writes.
void Save::went_on() {
  if (dropped_) throw base::CancelledError("the save was interrupted");
  ++progress_;
  while (!peers_.is_first()) {
    const auto word = peers_.mailbox.poll(peers_.first(), channel_);
    if (!word) break;
    const auto& text = word->as<std::string>();
    if (text.front() == kFailed) std::rethrow_exception(to_error(text.substr(1)));
  }
  const auto now = base::Deadline::Clock::now();
  if (now - told_ < kBeat) return;
  told_ = now;
  if (peers_.is_first()) return tell_others(std::string(1, kGoesOn));
  peers_.mailbox.send(peers_.first(), channel_, std::string(1, kGoesOn));
}

// Gives the first rank this one's last word, and hears from it how it ended.
std::exception_ptr Save::hand_in(const std::string& word) {
  peers_.mailbox.send(peers_.first(), channel_, word);
  while (true) {
    const auto text = next_word(peers_.first(), peers_.patience.timeout + kGrace);
    if (text.front() == kDone) return nullptr;
    if (text.front() == kFailed) return to_error(text.substr(1));
  }
}

// Hears the last words of all, also when there is an error already, so that nobody writes any more when it returns. The
// first error is told at once.
std::vector<archive::Manifest> Save::collect(archive::Manifest own, std::exception_ptr& error) {
  std::vector<archive::Manifest> manifests{std::move(own)};
  for (const auto rank : peers_.world) {
    if (rank == peers_.first()) continue;
    std::exception_ptr found;
    try {
      const auto word = final_word(rank);
      if (word.front() == kFailed) found = to_error(word.substr(1));
      if (!found) manifests.push_back(archive::read_manifest(std::string_view(word).substr(1), archive::Elements::kSome));
    } catch (const base::Error&) {
      found = std::current_exception();
    }
    if (!found || error) continue;
    error = found;
    tell_others(kFailed + to_text(error, peers_.rank()));
  }
  return manifests;
}

std::string Save::final_word(base::Rank from) {
  while (true) {
    auto word = next_word(from, peers_.patience.timeout);
    if (word.front() != kGoesOn) return word;
    told_ = base::Deadline::Clock::now();
    tell_others(std::string(1, kGoesOn));
  }
}

std::string Save::next_word(base::Rank from, base::Deadline::Clock::duration timeout) {
  base::Patience patience{timeout};
  patience.tell = nullptr;  // a save takes as long as it takes
  std::string word;
  const auto take = [&](base::Rank, const Value& value) {
    word = value.as<std::string>();
    return true;
  };
  const auto what = [&](std::span<const base::Rank>) {
    return base::str("save of checkpoint ", request_.tag, ": a word of rank ", from, ", which writes its part");
  };
  peers_.mailbox.hear({from}, channel_, patience, take, what);
  ++progress_;
  return word;
}

void Save::commit(std::vector<archive::Manifest> manifests) {
  for (const auto& [name, text] : request_.texts) manifests.push_back(write_text(files_, place_, name, text));
  auto manifest = merge(manifests);
  auto index = archive::model_index(manifest);
  if (index.empty() && request_.form == archive::Store::Form::kFull) {
    manifest = archive::make_whole(files_, place_, manifest, kMostFileBytes, [this] { went_on(); });
    index = archive::model_index(manifest);
  }
  if (!index.empty()) manifest.files.push_back(write_text(files_, place_, archive::kModelIndex, index).files.front());
  manifest.about = request_.about;
  claim_->commit(std::move(manifest));
  claim_.reset();
  if (request_.keep > 0) store_.prune(request_.keep);
}

// Says a word to all that are there to hear it.
void Save::tell_others(const std::string& word) {
  for (const auto rank : peers_.world) {
    if (rank == peers_.rank()) continue;
    try {
      peers_.mailbox.send(rank, channel_, word);
    } catch (const base::PeerError&) {  // who waits for it says so
    }
  }
}

}  // namespace lamina::checkpoint
