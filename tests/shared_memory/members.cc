// SPDX-License-Identifier: Apache-2.0
#include "tests/shared_memory/members.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::shared_memory {

void LocalBoard::put(const std::string& key, const std::string& word) {
  std::lock_guard guard(mutex_);
  words_[key] = word;
  changed_.notify_all();
}

std::string LocalBoard::get(const std::string& key, const std::function<void()>& check) {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, std::chrono::milliseconds(50), [&] { return words_.contains(key); })) {
    lock.unlock();
    check();
    lock.lock();
  }
  return words_.at(key);
}

std::string FileBoard::path(const std::string& key) const {
  auto name = key;
  std::ranges::replace(name, '/', '_');
  return folder_ + "/" + name;
}

void FileBoard::put(const std::string& key, const std::string& word) {
  const auto unfinished = path(key) + ".part";
  std::ofstream(unfinished, std::ios::binary) << word;
  std::filesystem::rename(unfinished, path(key));
}

std::string FileBoard::get(const std::string& key, const std::function<void()>& check) {
  for (int look = 0; !std::filesystem::exists(path(key)); ++look) {
    std::this_thread::yield();
    if (look % 10000 == 0) check();
  }
  std::ostringstream word;
  word << std::ifstream(path(key), std::ios::binary).rdbuf();
  return word.str();
}

std::vector<std::string> together(int members, const Work& work, const std::vector<Reading>& readings) {
  LocalBoard board;
  std::vector<std::string> ends(members);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < members; ++rank) {
    threads.emplace_back([&, rank] {
      ends[rank] = error_of([&] {
        const auto deadline = base::Deadline::after(std::chrono::seconds(30));
        Neighbours neighbours(board, rank, names(members), deadline);
        if (!neighbours.why_not().empty()) throw base::Error(neighbours.why_not());
        Communicator group(std::move(neighbours), deadline, readings.empty() ? Reading::kWhereFaster : readings[rank]);
        work(group, rank);
      });
    });
  }
  threads.clear();
  return ends;
}

std::vector<std::string> names(int members) {
  std::vector<std::string> names;
  for (int member = 0; member < members; ++member) names.push_back(base::str("member ", member, " of ", members));
  return names;
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
    return "";
  } catch (const base::DesyncError& error) {
    return std::string("DesyncError: ") + error.what();
  } catch (const base::PeerError& error) {
    return std::string("PeerError: ") + error.what();
  } catch (const base::CancelledError& error) {
    return std::string("CancelledError: ") + error.what();
  } catch (const std::exception& error) {
    return std::string("Error: ") + error.what();
  }
}

}  // namespace lamina::shared_memory
