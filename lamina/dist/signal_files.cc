// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <random>
#include <thread>

#include "lamina/base/error.h"
#include "lamina/base/output_file.h"
#include "lamina/base/str.h"
#include "lamina/dist/current.h"
#include "lamina/dist/dist.h"
#include "lamina/dist/local_zero.h"
#include "lamina/rendezvous/job_store.h"
#include "lamina/value/failure.h"

namespace lamina::dist {
namespace {

namespace fs = std::filesystem;

constexpr auto kLookAgain = std::chrono::milliseconds(100);

// `look` may throw, which ends the wait.
template <class Look>
void wait_for(const std::string& path, const Look& look) {
  while (!fs::exists(path)) {
    look();
    std::this_thread::sleep_for(kLookAgain);
  }
}

std::string next_failure() { return rendezvous::next_meeting(base::str("dist/c++/wait/", get_node_rank())); }

}  // namespace

std::string get_node_signal_file_name() {
  static constexpr std::string_view kLetters = "abcdefghijklmnopqrstuvwxyz0123456789";
  std::random_device random;
  std::uniform_int_distribution<std::size_t> letter(0, kLetters.size() - 1);
  std::string letters;
  for (int i = 0; i < 6; ++i) letters += kLetters[letter(random)];
  std::vector<Value> names{letters};
  broadcast_object_list(names);
  return base::str("._signal_file_node", get_node_rank(), "_", names[0].as<std::string>());
}

std::string write_signal_file(const std::string& name, const std::string& folder) {
  const fs::path where = folder.empty() ? fs::current_path() : fs::path(folder);
  const std::string path = where / name;
  if (get_local_rank() != 0) return path;
  std::error_code error;
  fs::create_directories(where, error);
  try {
    base::write_output(path, "local rank 0 is done");
  } catch (const base::FileError& failure) {
    throw base::Error(base::str(failure.what(), ": give a folder that all ranks of this machine can write"));
  }
  return path;
}

void busy_wait_for_local_rank_zero(const std::function<void()>& body, const std::string& folder) {
  if (group_for("busy_wait_for_local_rank_zero()") == nullptr) return body();
  const std::string name = get_node_signal_file_name();
  std::exception_ptr failure;
  try {
    body();
  } catch (...) {
    failure = std::current_exception();
  }
  const std::string path = write_signal_file(name, folder);
  if (get_local_rank() != 0) wait_for(path, [] {});
  // Every rank has seen the file when its collective ends, well or not.
  struct Removal {
    const std::string& path;
    ~Removal() {
      std::error_code ignored;
      if (get_local_rank() == 0) fs::remove(path, ignored);
    }
  } const removal{path};
  share_failures(failure);
}

void local_rank_zero_download_and_wait(const std::string& expected_file, const std::function<void()>& body) {
  const std::string failure = next_failure();
  Current* current = find_current();
  rendezvous::JobStore* store = current != nullptr && current->meeting ? &current->meeting->store() : nullptr;
  if (get_local_rank() != 0) {
    wait_for(expected_file, [&] {
      if (store == nullptr || !store->wait({failure}, base::Deadline::after({})).empty()) return;
      throw base::PeerError(base::str("local rank 0 of machine ", get_node_rank(), " failed before ", expected_file,
                                      ": ", store->get(failure)));
    });
    return body();
  }
  try {
    body();
  } catch (...) {
    if (store != nullptr) {
      const base::Rank rank(get_global_rank());
      store->set(failure, value::Failures().describe(std::current_exception(), rank).message);
    }
    throw;
  }
}

}  // namespace lamina::dist
