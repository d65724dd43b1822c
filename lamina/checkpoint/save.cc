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
#include "lamina/transport/news.h"
#include "lamina/transport/silence.h"

namespace lamina::checkpoint {
namespace {

using messaging::to_error;
using messaging::to_text;
using value::Value;

constexpr auto kToken = "seen";  // a file that shows that all ranks see one folder
constexpr auto kBeat = std::chrono::seconds(1);
constexpr auto kLook = std::chrono::milliseconds(1);      // how often a device is asked for its copies
constexpr std::uint64_t kSlack = std::uint64_t{1} << 20;  // of manifest and headers, beside the bytes of parts

// Words on the channel of a save: a letter, and what follows it. Up the tree kFailed goes ahead of kHandedIn, which
// ends what a rank has to say of writing. Down it kFailed and kDone are the end.
constexpr char kGoesOn = 'g', kWaits = 'w', kPortion = 'p', kHandedIn = 'm', kFailed = 'f', kDone = 'd', kSteps = 's';
constexpr std::size_t kPortionBytes = std::size_t{32} << 20;  // of manifests that are handed in in one word
constexpr char kBetween = '\0';                               // two manifests
constexpr std::int64_t kUnknownStep = -1;

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
  awaited_ = {spread_.to.begin(), spread_.to.end()};
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
      // one hears of it, and before words on why it leaves.
      auto loss = decided_ ? std::nullopt : peers_.mailbox.first_loss();
      const auto has_left = [&] {
        return loss->cause == transport::kCalledShutdown || !peers_.mailbox.waits().left(loss->rank).empty();
      };
      if (loss && has_left()) loss.reset();
      if (!loss) lost.reset();
      if (!lost && loss) lost = base::Deadline::after(kBeat / 2);
      if (lost && lost->expired()) {
        std::lock_guard guard(mutex_);
        if (!over_ && !decided_) {
          dropped_ = true;
          error_ = std::make_exception_ptr(lost_in(request_.tag, *loss));
          std::rethrow_exception(error_);
        }
      }
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
  try {
    {
      std::lock_guard guard(mutex_);
      if (error_) std::rethrow_exception(error_);
    }
    await_copies();
    manifests_[peers_.rank()] = {archive::write_manifest(write_own(), archive::Elements::kSome)};
  } catch (...) {
    fail_here();
  }
  has_written_ = true;
  hear_others();
  if (word_.empty()) {
    std::string word(1, kDone);
    try {
      auto manifests = handed_in();
      {
        std::lock_guard guard(mutex_);
        if (!dropped_) decided_ = true;
      }
      require_wanted();
      transport::Silence::await_looks();  // a rank that others go on without writes nothing
      commit(std::move(manifests));
    } catch (...) {
      word = kFailed + to_text(std::current_exception(), peers_.rank());
    }
    decide(word);
  }
  if (word_.front() == kDone) return nullptr;
  agree_on_step();
  return cut_off_ ? cut_off_ : to_error(word_.substr(1));
}

// Agrees on the step before which all throw: the first one that no rank had begun when it had heard of the failure.
// Where ranks cannot, it stays this rank's next one.
void Save::agree_on_step() {
  std::int64_t own = 0;
  {
    std::lock_guard guard(mutex_);
    failed_ = true;
    own = steps_;
  }
  std::optional<std::int64_t> begun;  // none where that of some rank is not known
  if (all_handed_in_ && !cut_off_) begun = own;
  const auto hear_of = [&](std::span<const base::Rank> ranks, const std::function<void(std::int64_t)>& take) {
    Silence silence{.since = {}, .most = peers_.patience.timeout};
    for (const auto rank : ranks) silence.since[rank] = base::Clock::now();
    const auto take_steps = [&](base::Rank, const std::string& text) {
      if (text.front() == kSteps) take(std::stoll(text.substr(1)));
      return text.front() == kSteps;
    };
    if (!ranks.empty()) hear(silence, take_steps, [] {});
  };
  const auto word = [&] { return kSteps + std::to_string(begun.value_or(kUnknownStep)); };
  try {
    if (begun) {
      hear_of(spread_.to, [&](std::int64_t steps) {
        if (begun) begun = std::max(*begun, steps);
        if (steps == kUnknownStep) begun.reset();
      });
    }
    if (spread_.from && !cut_off_) {
      peers_.mailbox.send(*spread_.from, channel_, word());
      if (begun) hear_of({&*spread_.from, 1}, [&](std::int64_t steps) { begun = steps; });
      if (begun == kUnknownStep) begun.reset();
    }
  } catch (const base::Error&) {  // the failure itself is what is to be thrown
    begun.reset();
  }
  pass_on(word());
  std::lock_guard guard(mutex_);
  begun_ = begun.value_or(own);
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
  goes_on_ = true;
  const auto hear_from = [&](base::Rank rank) {
    while (const auto word = peers_.mailbox.poll(rank, channel_)) {
      if (take(rank, word->as<std::string>())) break;
    }
  };
  if (spread_.from) hear_from(*spread_.from);
  for (const auto rank : std::vector(awaited_.begin(), awaited_.end())) hear_from(rank);
  attend();
  if (cut_off_) std::rethrow_exception(cut_off_);
  if (!word_.empty()) std::rethrow_exception(to_error(word_.substr(1)));
  require_peers();
}

void Save::require_wanted() const {
  if (!dropped_) return;
  std::lock_guard guard(mutex_);
  if (error_) std::rethrow_exception(error_);
  throw base::CancelledError(base::str("the save of checkpoint ", request_.tag, " was interrupted"));
}

// Each rank looks at those with which it exchanges words: one that has heard how the save ended may go.
void Save::require_peers() {
  std::vector<base::Rank> looked_at(awaited_.begin(), awaited_.end());
  if (spread_.from) looked_at.push_back(*spread_.from);
  const auto loss =
      peers_.is_first() ? peers_.mailbox.first_loss() : peers_.mailbox.loss(looked_at, std::chrono::milliseconds(0));
  if (!loss) return;
  const auto error = std::make_exception_ptr(lost_in(request_.tag, *loss));
  if (loss->rank == spread_.from) cut_off_ = error;
  std::rethrow_exception(error);
}

// Takes a word, and sends none. True where that rank has no more to say for now.
bool Save::take(base::Rank from, const std::string& text) {
  const char kind = text.front();
  if (from == spread_.from) {
    heard_ = base::Clock::now();
    if (kind == kGoesOn) goes_on_above_ = true;
    if (kind == kGoesOn || kind == kWaits) return false;
    word_ = text;
    decided_ = true;
    pass_on_ = true;
    return true;
  }
  if (kind != kWaits) goes_on_ = true;
  if (kind == kFailed) fail(text);
  if (kind == kPortion || kind == kHandedIn) manifests_[from].push_back(text.substr(1));
  if (kind != kHandedIn) return false;
  awaited_.erase(from);
  return true;
}

// Says what has become of what was taken.
void Save::attend() {
  if (std::exchange(pass_on_, false)) pass_on(word_);
  if (word_.empty() && !failure_.empty()) {
    if (peers_.is_first() || cut_off_)
      decide(failure_);
    else if (!std::exchange(told_failure_, true))
      tell_above(failure_);
  }
  if (spread_.from && has_written_ && awaited_.empty() && !std::exchange(has_handed_in_, true)) hand_in();
  const auto now = base::Clock::now();
  if (now - said_ < kBeat) return;
  said_ = now;
  const auto beat = [](bool goes_on) { return std::string(1, goes_on ? kGoesOn : kWaits); };
  if (!has_handed_in_) tell_above(beat(goes_on_));
  if (word_.empty()) pass_on(beat(goes_on_ || goes_on_above_));
  goes_on_ = goes_on_above_ = false;
}

void Save::hand_in() {
  std::string portion;
  for (const auto& [rank, texts] : manifests_) {
    for (const auto& text : texts) {
      if (!portion.empty() && portion.size() + text.size() > kPortionBytes) {
        tell_above(kPortion + std::exchange(portion, ""));
      }
      if (!portion.empty()) portion += kBetween;
      portion += text;
    }
  }
  tell_above(kHandedIn + portion);
}

// Tells the rank that tells this one; nothing where that cannot be: then this one is cut off.
void Save::tell_above(const std::string& word) {
  if (!spread_.from || cut_off_) return;
  try {
    peers_.mailbox.send(*spread_.from, channel_, word);
  } catch (const base::Error&) {
    cut_off_ = std::current_exception();
    fail_here();
  }
}

// The first failure counts.
void Save::fail(const std::string& word) {
  if (failure_.empty()) failure_ = word;
}

void Save::fail_here() { fail(kFailed + to_text(std::current_exception(), peers_.rank())); }

void Save::decide(const std::string& word) {
  word_ = word;
  pass_on(word);
}

// Hears the ranks that this one tells until each has handed in, and the rank that tells this one, of how the save
// ended. An error does not end it, so that nobody writes any more when it returns.
void Save::hear_others() {
  Silence silence{.since = {}, .most = peers_.patience.timeout};
  for (const auto rank : awaited_) silence.since[rank] = base::Clock::now();
  if (spread_.from && word_.empty()) silence.since[*spread_.from] = heard_;
  const auto take_word = [this](base::Rank from, const std::string& text) { return take(from, text); };
  while (!cut_off_) {
    std::exception_ptr error;
    try {
      attend();
      if (silence.since.empty()) break;
      hear(silence, take_word, [this] { attend(); });
    } catch (const base::PeerError& lost) {
      error = std::current_exception();
      if (lost.loss()) silence.since.erase(lost.loss()->rank);
    } catch (...) {
      error = std::current_exception();
    }
    if (dropped_) silence.since.clear();
    if (error) fail(kFailed + to_text(error, peers_.rank()));
    const auto is_given_up = [&](base::Rank rank) { return !silence.since.contains(rank); };
    if (std::erase_if(awaited_, is_given_up) > 0) all_handed_in_ = false;
    if (spread_.from && word_.empty() && is_given_up(*spread_.from) && !dropped_) cut_off_ = error;
  }
  if (word_.empty() && !failure_.empty()) decide(failure_);
}

// Manifests of all ranks, in their order.
std::vector<archive::Manifest> Save::handed_in() const {
  require_wanted();
  std::vector<archive::Manifest> all;
  for (const auto& [rank, texts] : manifests_) {
    for (const std::string_view text : texts) {
      for (std::size_t begin = 0, end = 0; end != std::string_view::npos; begin = end + 1) {
        end = text.find(kBetween, begin);
        all.push_back(archive::read_manifest(text.substr(begin, end - begin), archive::Elements::kSome));
      }
    }
  }
  return all;
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

// Says a word to those who hear from this rank.
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
