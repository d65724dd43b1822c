// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/nccl_library.h"

#include <dlfcn.h>

#include <cstdlib>

#include "lamina/base/own_code.h"
#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"
#include "lamina/device/rank_device.h"

namespace lamina::collective::nccl {
namespace {

constexpr int kOldest = 21400;  // has communicators that do not block

std::string version_name(int version) {
  return base::str(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

// Functions of an open library; the first that it lacks is remembered.
class Symbols {
 public:
  explicit Symbols(void* of) : library_(of) {}
  template <class Function>
  void find(const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(::dlsym(library_, name));
    if (function == nullptr && lacking_.empty()) lacking_ = name;
  }
  const std::string& lacking() const { return lacking_; }

 private:
  void* const library_;
  std::string lacking_;
};

std::string fill(Library& library) {
  void* const opened = ::dlopen(library.name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) return ::dlerror();
  Symbols symbols(opened);
  Result (*get_version)(int*) = nullptr;
  symbols.find("ncclGetVersion", get_version);
  symbols.find("ncclGetUniqueId", library.get_unique_id);
  symbols.find("ncclCommInitRankConfig", library.comm_init_rank_config);
  symbols.find("ncclCommAbort", library.comm_abort);
  symbols.find("ncclCommGetAsyncError", library.comm_get_async_error);
  symbols.find("ncclGetErrorString", library.get_error_string);
  symbols.find("ncclGetLastError", library.get_last_error);
  symbols.find("ncclGroupStart", library.group_start);
  symbols.find("ncclGroupEnd", library.group_end);
  symbols.find("ncclAllReduce", library.all_reduce);
  symbols.find("ncclBroadcast", library.broadcast);
  symbols.find("ncclReduce", library.reduce);
  symbols.find("ncclAllGather", library.all_gather);
  symbols.find("ncclReduceScatter", library.reduce_scatter);
  symbols.find("ncclSend", library.send);
  symbols.find("ncclRecv", library.recv);
  if (!symbols.lacking().empty()) return base::str(library.name, " has no ", symbols.lacking());
  if (get_version(&library.version) != Result::kSuccess) return base::str(library.name, " does not tell its version");
  if (library.version >= kOldest) return "";
  return base::str(library.name, " is of version ", version_name(library.version), "; it has to be ",
                   version_name(kOldest), " or later");
}

Library open() {
  Library library{};
  const char* named = std::getenv("LAMINA_NCCL");
  const bool is_named = named != nullptr && *named != '\0';
  if (is_named) base::require_own_code(named, "LAMINA_NCCL", base::Writers::kGroup);
  library.name = is_named ? named : devices::collective_library(devices::rank_device());
  if (!library.name.empty()) library.why_not = fill(library);
  return library;
}

}  // namespace

std::string Library::title() const { return "NCCL " + version_name(version); }

const Library& library() {
  static const auto& opened = *new Library(open());  // for good: groups may outlive what is static
  return opened;
}

}  // namespace lamina::collective::nccl
