// SPDX-License-Identifier: Apache-2.0
#include "lamina/checkpoint/save.h"

#include <c10/core/StreamGuard.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <utility>

#include "lamina/archive/whole_model.h"
#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/device/streams.h"
#include "lamina/faces/sayings.h"
#include "lamina/messaging/outcome.h"

namespace lamina::checkpoint {
namespace {

using messaging::to_error;
using messaging::to_text;
using value::Value;

constexpr auto kToken = "seen";  // a file that shows that all ranks see one folder
constexpr auto kBeat = std::chrono::seconds(1);
constexpr auto kLook = std::chrono::milliseconds(1);      // how often a device is asked for its copies
constexpr std::uint64_t kSlack = std::uint64_t{1} << 20;  // of manifest and headers, beside the bytes of parts

// Words on the channel of a save: a letter, and what follows it.
constexpr char kGoesOn = 'g', kWaits = 'w', kManifest = 'm', kFailed = 'f', kDone = 'd', kSteps = 's';

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

base::PeerError lost_in(const std::string& tag, const base::Loss& loss) {
  return base::PeerError(base::str("save of checkpoint ", tag, ": ", loss.text()), loss, base::Code{"group-lost"});
}

[[noreturn]] void refuse(const std::string& why) {
  throw base::UsageError("save_checkpoint(): " + why, base::Code{"checkpoint-refused"});
}

// The request with its folder as the working directory of this process now has it, whichever that is later.
SaveRequest with_place(SaveRequest request) {
  std::error_code unknown;
  auto found = std::filesystem::absolute(request.folder, unknown);
  if (!unknown) request.folder = std::move(found);
  return request;
}

}  // namespace

std::size_t Peers::index() const { return static_cast<std::size_t>(std::ranges::find(world, rank()) - world.begin()); }

Save::Save(archive::FileSystem& files, SaveRequest request, Peers peers)
    : files_(files),
      request_(with_place(std::move(request))),
      peers_(std::move(peers)),
      store_(files, request_.folder, request_.form) {
  agree();
  channel_ = "checkpoint " + id_;
  spread_ = messaging::spread(peers_.world, peers_.rank());
}

Save::~Save() {
  dropped_ = true;
  if (thread_.joinable()) thread_.join();
}

// The first rank takes the tag, and leaves a token there.
void Save::claim() {
  if (!peers_.is_first()) return;
  id_ = new_id();
  claim_.emplace(store_.begin(request_.tag, id_, who(peers_.rank())));
  place_ = claim_->folder();
  files_.create(place_ / kToken)->write(std::as_bytes(std::span(id_)));
}

// Each rank looks whether the folder is the first one's, and that one whether it has room for so many bytes.
void Save::look_around(std::uint64_t bytes) {
  try {
    const auto seen = archive::read_all(files_, place_ / kToken, 4096);
    if (seen != id_) throw base::FormatError("it is another save's");
  } catch (const base::Error& error) {
    refuse(base::str("rank ", peers_.rank(), " does not see the folder that rank ", peers_.first(), " has made: ",
                     error.what(), ". The folder of checkpoints has to be the same one on all machines"));
  }
  if (!peers_.is_first()) return;
  const auto free = files_.free_bytes(place_);
  if (bytes <= free) return;
  refuse(faces::said("no-room", request_.folder.string(), bytes, free));
}

void Save::agree() {
  using value::Tuple;
  // The error of an act as text, which all are to hear of.
  const auto problem_of = [&](const auto& act) -> std::string {
    try {
      act();
      return "";
    } catch (...) {
      return to_text(std::current_exception(), peers_.rank());
    }
  };
  // The first rank's id and place, the bytes of all, and the first problem.
  const auto join = [](Value low, const Value& high) -> Value {
    auto& one = low.as<Tuple>().items;
    const auto& other = high.as<Tuple>().items;
    if (one.at(0).as<std::string>().empty()) one[0] = other.at(0);
    one.at(3) = one[3].as<std::int64_t>() + other.at(3).as<std::int64_t>();
    return low;
  };
  const auto agreed = [&](Tuple word) {
    const auto all = peers_.mailbox.exchange(peers_.world, "save", std::move(word), join, peers_.patience);
    const auto& problem = all.as<Tuple>().items.at(0).as<std::string>();
    if (!problem.empty()) std::rethrow_exception(to_error(problem));
    return all;
  };
  std::int64_t own = 0;
  for (const auto& part : request_.parts) own += size_bytes(part);
  for (const auto& file : request_.own_files) own += file.bytes;
  const auto problem = problem_of([&] { claim(); });
  const auto all = agreed({{problem, id_, place_.string(), own}});
  const auto& items = all.as<Tuple>().items;
  id_ = items.at(1).as<std::string>();
  place_ = items.at(2).as<std::string>();
  const auto bytes = kSlack + static_cast<std::uint64_t>(items.at(3).as<std::int64_t>());
  agreed({{problem_of([&] { look_around(bytes); }), id_, "", std::int64_t{0}}});
}

void Save::start(Snapshot* snapshot) {
  try {
    if (snapshot != nullptr) copied_ = snapshot->take(request_.parts);
  } catch (...) {
    error_ = std::current_exception();
  }
  // Parts of a device are read after what the training has computed until now.
  thread_ = std::thread([this, stream = devices::current_stream()] {
    const c10::OptionalStreamGuard on_stream(stream);
    write();
  });
}

bool Save::is_over() const {
  std::lock_guard guard(mutex_);
  return over_;
}

void Save::wait() {
  await_end();
  std::lock_guard guard(mutex_);
  told_ = true;
  if (error_) std::rethrow_exception(error_);
}

void Save::end() {
  {
    std::lock_guard guard(mutex_);
    if (told_) return;
  }
  wait();
}

void Save::check_before_step() {
  {
    std::lock_guard guard(mutex_);
    if (told_ || (!failed_ && !error_)) {
      ++steps_;
      return;
    }
  }
  await_end();
  std::lock_guard guard(mutex_);
  if (steps_++ < begun_) return;
  told_ = true;
  std::rethrow_exception(error_);
}

void Save::await_end() {
  std::unique_lock lock(mutex_);
  auto said = base::Clock::now();
  std::int64_t seen = -1;
  std::optional<base::Deadline> lost;
  while (!over_) {
    ended_.wait_for(lock, base::kInterruptSlice);
    if (over_) break;
    lock.unlock();
    try {
      if (peers_.patience.check_interrupt) peers_.patience.check_interrupt();
      // The thread says so itself, unless the disk keeps it. A rank that knows how the save ended may leave before this
      // one hears of it.
      auto loss = decided_ ? std::nullopt : peers_.mailbox.first_loss();
      if (loss && !peers_.mailbox.waits().left(loss->rank).empty()) loss.reset();
      if (!loss) lost.reset();
      if (!lost && loss) lost = base::Deadline::after(kBeat / 2);
      if (lost && lost->expired()) throw lost_in(request_.tag, *loss);
    } catch (...) {
      dropped_ = true;
      throw;
    }
    const auto now = base::Clock::now();
    if (peers_.alive && now - said >= kBeat && std::exchange(seen, progress_.load()) != progress_) {
      said = now;
      peers_.alive();
    }
    lock.lock();
  }
}

void Save::write() {
  heard_ = said_ = base::Clock::now();
  std::exception_ptr error;
  try {
    error = outcome();
  } catch (...) {
    error = std::current_exception();
  }
  claim_.reset();
  request_.parts.clear();
  request_.own_files.clear();
  std::lock_guard guard(mutex_);
  error_ = error;
  over_ = true;
  ended_.notify_all();
}

// How it ended: on all ranks alike.
std::exception_ptr Save::outcome() {
  archive::Manifest own;
  std::string word;
  try {
    if (error_) std::rethrow_exception(error_);
    await_copies();
    own = write_own();
    word = kManifest + archive::write_manifest(own, archive::Elements::kSome);
  } catch (...) {
    word = kFailed + to_text(std::current_exception(), peers_.rank());
  }
  if (!peers_.is_first()) {
    try {
      word = hand_in(word);
    } catch (const base::CancelledError&) {  // the others agree on a step all the same
      word = kFailed + to_text(std::current_exception(), peers_.rank());
    } catch (const base::Error&) {
      pass_on(kFailed + to_text(std::current_exception(), peers_.rank()));
      throw;
    }
    pass_on(word);
  } else {
    std::string failure = word.front() == kFailed ? word : "";
    if (!failure.empty()) pass_on(failure);
    auto manifests = collect(std::move(own), failure);
    word = failure;
    if (failure.empty()) {
      word = kDone;
      try {
        commit(std::move(manifests));
      } catch (...) {
        word = kFailed + to_text(std::current_exception(), peers_.rank());
      }
      pass_on(word);
    }
  }
  if (word.front() == kDone) return nullptr;
  agree_on_step();
  return to_error(word.substr(1));
}

// Agrees on the step before which all throw: the first one that no rank had begun when it had heard of the failure.
// Where ranks cannot, it stays this rank's next one.
void Save::agree_on_step() {
  std::int64_t begun = 0;
  {
    std::lock_guard guard(mutex_);
    failed_ = true;
    begun = steps_;
  }
  const auto take = [&](base::Rank, const std::string& text) {
    if (text.front() != kSteps) return false;
    begun = std::max(begun, std::int64_t{std::stoll(text.substr(1))});
    return true;
  };
  const auto word = [](std::int64_t steps) { return kSteps + std::to_string(steps); };
  Silence silence{.since = {}, .most = peers_.patience.timeout};
  for (const auto rank : peers_.world) {
    const bool heard = peers_.is_first() ? all_handed_in_ : rank == *spread_.from;
    if (heard && rank != peers_.rank()) silence.since[rank] = base::Clock::now();
  }
  bool is_known = peers_.is_first();
  try {
    if (!peers_.is_first()) peers_.mailbox.send(peers_.first(), channel_, word(begun));
    if (!silence.since.empty()) hear(silence, take, [] {});
    is_known = true;
  } catch (const base::Error&) {  // the failure itself is what is to be thrown
  }
  pass_on(word(is_known ? begun : 0));
  std::lock_guard guard(mutex_);
  begun_ = begun;
}

// Looks now and then, as a thread that sends does: the device may be far behind the host.
void Save::await_copies() {
  const auto deadline = base::Deadline::after(peers_.patience.timeout);
  while (copied_ != nullptr && !copied_->passed()) {
    went_on();
    if (deadline.expired()) {
      const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(peers_.patience.timeout).count();
      throw base::TimeoutError(base::str("save of checkpoint ", request_.tag, ": the device has computed for ", seconds,
                                         " s and has not copied what is saved; raise timeout_s if it needs longer"));
    }
    std::this_thread::sleep_for(kLook);
  }
}

archive::Manifest Save::write_own() {
  const auto wrote = [this](std::int64_t) { went_on(); };
  auto own = write_rank_files(files_, place_, peers_.index(), request_.parts, wrote);
  for (const auto& file : request_.own_files) own.files.push_back(write_own_file(files_, place_, file, wrote));
  return own;
}

// Between two writes.
void Save::went_on() {
  require_wanted();
  ++progress_;
  while (spread_.from) {
    const auto word = peers_.mailbox.poll(*spread_.from, channel_);
    if (!word) break;
    const auto& text = word->as<std::string>();
    heard_ = base::Clock::now();
    if (text.front() != kFailed) {
      pass_on(text);
      continue;
    }
    last_word_ = text;
    decided_ = true;
    std::rethrow_exception(to_error(text.substr(1)));
  }
  require_peers();
  const auto now = base::Clock::now();
  if (now - said_ < kBeat) return;
  said_ = now;
  if (peers_.is_first()) return pass_on(std::string(1, kGoesOn));
  peers_.mailbox.send(peers_.first(), channel_, std::string(1, kGoesOn));
}

void Save::require_wanted() const {
  if (dropped_) throw base::CancelledError(base::str("the save of checkpoint ", request_.tag, " was interrupted"));
}

// The first rank looks at all, and tells the others, who look at the one they hear it from: one that has heard how it
// ended may go.
void Save::require_peers() const {
  const auto loss = peers_.is_first() ? peers_.mailbox.first_loss()
                                      : peers_.mailbox.loss({&*spread_.from, 1}, std::chrono::milliseconds(0));
  if (loss) throw lost_in(request_.tag, *loss);
}

// Gives the first rank this one's last word, and hears how it ended, unless that is known.
std::string Save::hand_in(const std::string& word) {
  peers_.mailbox.send(peers_.first(), channel_, word);
  Silence silence{.since = {{*spread_.from, heard_}}, .most = peers_.patience.timeout};
  std::string beats;  // heard and not yet passed on
  const auto take = [&](base::Rank, const std::string& text) {
    if (text.front() == kGoesOn || text.front() == kWaits) {
      beats = text;
      return false;
    }
    last_word_ = text;
    return decided_ = true;
  };
  const auto attend = [&] {
    if (!beats.empty()) pass_on(std::exchange(beats, ""));
  };
  if (last_word_.empty()) hear(silence, take, attend);
  return last_word_;
}

// Hears the last words of all, also when there is an error already, so that nobody writes any more when it returns. The
// first error is told at once.
std::vector<archive::Manifest> Save::collect(archive::Manifest own, std::string& failure) {
  Silence silence{.since = {}, .most = peers_.patience.timeout};
  for (const auto rank : peers_.world) {
    if (rank != peers_.first()) silence.since[rank] = base::Clock::now();
  }
  const auto fail = [&](const std::string& word) {
    if (!failure.empty()) return;
    failure = word;
    pass_on(failure);
  };
  const auto fail_here = [&] { fail(kFailed + to_text(std::current_exception(), peers_.rank())); };
  bool goes_on = false;
  std::map<base::Rank, std::string> last;
  const auto take = [&](base::Rank from, const std::string& text) {
    if (text.front() != kGoesOn) last[from] = text;
    goes_on = true;
    return text.front() != kGoesOn;
  };
  const auto attend = [&] {
    for (const auto& [rank, word] : last) {
      if (word.front() == kFailed) fail(word);
    }
    const auto now = base::Clock::now();
    if (now - said_ < kBeat) return;
    said_ = now;
    pass_on(std::string(1, std::exchange(goes_on, false) ? kGoesOn : kWaits));
  };
  while (!silence.since.empty() && !dropped_) {
    try {
      hear(silence, take, attend);
      attend();
    } catch (const base::PeerError& lost) {
      fail_here();
      base::internal_check(lost.loss().has_value(), "a loss of no rank");
      silence.since.erase(lost.loss()->rank);
    } catch (...) {
      fail_here();
    }
  }
  all_handed_in_ = last.size() + 1 == peers_.world.size();
  std::vector<archive::Manifest> manifests{std::move(own)};
  try {
    require_wanted();
    for (const auto& [rank, word] : last) {
      if (word.front() == kManifest)
        manifests.push_back(archive::read_manifest(std::string_view(word).substr(1), archive::Elements::kSome));
    }
  } catch (...) {
    fail_here();
  }
  return manifests;
}

// Hears ranks until `take` has had enough of each, which is then no more in `silence`, as is one that has said nothing
// for too long; that is an error. `attend` is called now and then.
void Save::hear(Silence& silence, const std::function<bool(base::Rank, const std::string&)>& take,
                const std::function<void()>& attend) {
  std::vector<base::Rank> from;
  for (const auto& [rank, since] : silence.since) from.push_back(rank);
  const auto heard = [&](base::Rank rank, const Value& value) {
    const auto& text = value.as<std::string>();
    if (text.front() != kWaits) ++progress_;
    const bool enough = take(rank, text);
    if (enough) silence.since.erase(rank);
    if (!enough) silence.since[rank] = base::Clock::now();
    return enough;
  };
  base::Patience patience{base::Clock::duration::max() / 4};  // each rank has its own
  patience.tell = nullptr;                                    // a save takes as long as it takes
  patience.check_interrupt = [&] {
    require_wanted();
    attend();
    for (const auto& [rank, since] : silence.since) {
      if (base::Clock::now() - since < silence.most) continue;
      const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(silence.most).count();
      const auto silent = rank;
      silence.since.erase(rank);
      throw base::TimeoutError(base::str("save of checkpoint ", request_.tag, ": rank ", silent,
                                         ", which writes its part, has said nothing for ", seconds,
                                         " s; raise timeout_s if it needs longer"));
    }
  };
  const auto what = [&](std::span<const base::Rank>) { return base::str("save of checkpoint ", request_.tag); };
  peers_.mailbox.hear(std::move(from), channel_, patience, heard, what);
}

void Save::commit(std::vector<archive::Manifest> manifests) {
  base::internal_check(manifests.size() == peers_.world.size(), "a save without the files of some rank");
  files_.remove(place_ / kToken);
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
  if (request_.keep > 0 && request_.form == archive::Store::Form::kPartial) store_.prune(request_.keep);
}

// Says a word of the first rank, or of one that cannot go on, to those who hear from this one.
void Save::pass_on(const std::string& word) {
  if (word.front() != kGoesOn && word.front() != kWaits) decided_ = true;
  for (const auto rank : spread_.to) {
    try {
      peers_.mailbox.send(rank, channel_, word);
    } catch (const base::PeerError&) {  // who waits for it says so
    }
  }
}

}  // namespace lamina::checkpoint
