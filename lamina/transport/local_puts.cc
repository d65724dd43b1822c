// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/local_puts.h"

#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>

#include "lamina/base/str.h"

namespace lamina::transport {

// A put and its post, as far as they have come.
struct LocalPuts::Meeting {
  std::optional<Parcel> put, posted;
  bool ended = false;
  std::exception_ptr error;
};

struct LocalPuts::Table {
  using Key = std::tuple<base::Rank, base::Rank, std::string>;  // from, to, name
  std::mutex mutex;
  std::condition_variable changed;
  std::map<Key, std::shared_ptr<Meeting>> open;
  std::map<base::Rank, base::Loss> lost;

  void end(std::map<Key, std::shared_ptr<Meeting>>::iterator at, std::exception_ptr error) {
    at->second->error = std::move(error);
    at->second->ended = true;
    open.erase(at);
    changed.notify_all();
  }
};

struct LocalPuts::End : Transfer {
  End(std::shared_ptr<Table> in, Table::Key key, std::shared_ptr<Meeting> meeting, bool sender)
      : table(std::move(in)), name(std::move(key)), met(std::move(meeting)), sends(sender) {}
  ~End() override {
    std::lock_guard guard(table->mutex);
    if (met->ended || sends) return;
    met->posted.reset();
    met->error = std::make_exception_ptr(given_up(std::get<2>(name), std::get<1>(name)));
  }

  bool done() override {
    std::lock_guard guard(table->mutex);
    return over();
  }

  void wait(const base::Patience& patience) override {
    std::unique_lock lock(table->mutex);
    base::wait_until(
        lock, table->changed, patience, [&] { return over(); },
        [&] { return base::str(std::get<2>(name), ", with rank ", peer()); });
    if (met->error) std::rethrow_exception(met->error);
    if (met->ended) return;
    const auto& loss = table->lost.at(peer());
    throw base::PeerError(loss.text(), loss);
  }

  base::Rank peer() const { return sends ? std::get<1>(name) : std::get<0>(name); }
  bool over() const { return met->ended || table->lost.contains(peer()); }

  const std::shared_ptr<Table> table;
  const Table::Key name;
  const std::shared_ptr<Meeting> met;
  const bool sends;
};

LocalPuts::LocalPuts() : table_(std::make_shared<Table>()) {}
LocalPuts::~LocalPuts() = default;

std::unique_ptr<Transfer> LocalPuts::put(base::Rank from, base::Rank to, Parcel parcel) {
  return come(from, to, std::move(parcel), /*sends=*/true);
}

std::unique_ptr<Transfer> LocalPuts::post(base::Rank at, base::Rank from, Parcel parcel) {
  return come(from, at, std::move(parcel), /*sends=*/false);
}

std::unique_ptr<Transfer> LocalPuts::come(base::Rank from, base::Rank to, Parcel parcel, bool sends) {
  require_dense(parcel);
  std::lock_guard guard(table_->mutex);
  const Table::Key key{from, to, parcel.name};
  const auto at = table_->open.try_emplace(key, std::make_shared<Meeting>()).first;
  const auto meeting = at->second;
  auto& own = sends ? meeting->put : meeting->posted;
  base::internal_check(!own, "two transfers of one name");
  own = std::move(parcel);
  if (meeting->error) {
    table_->end(at, meeting->error);  // the post was given up before
  } else if (meeting->put && meeting->posted) {
    const auto sender = end_of(from, *meeting->put), receiver = end_of(to, *meeting->posted);
    if (sender.fits(receiver)) {
      if (sender.size_bytes > 0) {
        std::memcpy(meeting->posted->memory.mutable_data_ptr(), meeting->put->memory.const_data_ptr(),
                    static_cast<std::size_t>(sender.size_bytes));
      }
      table_->end(at, nullptr);
    } else {
      table_->end(at, std::make_exception_ptr(ends_differ(std::get<2>(key), sender, receiver)));
    }
  }
  return std::make_unique<End>(table_, key, meeting, sends);
}

void LocalPuts::lose(const base::Loss& loss) {
  {
    std::lock_guard guard(table_->mutex);
    table_->lost.try_emplace(loss.rank, loss);
  }
  table_->changed.notify_all();
}

}  // namespace lamina::transport
