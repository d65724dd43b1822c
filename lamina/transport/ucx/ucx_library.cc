// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/transport/ucx/plugin.h"

namespace lamina::transport::ucx {
namespace {

constexpr const char* kLibrary = "liblamina_ucx.so";

std::filesystem::path beside_this_library() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&load_plugin), &info) == 0 || info.dli_fname == nullptr) return kLibrary;
  return std::filesystem::path(info.dli_fname).replace_filename(kLibrary);
}

MakeEndpoint* open_library() {
  // UCX reads these while it loads: without them it takes over SIGSEGV and its like, and hooks the memory allocator.
  ::setenv("UCX_HANDLE_ERRORS", "none", 0);
  ::setenv("UCX_MEM_EVENTS", "n", 0);
  const auto path = beside_this_library();
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw base::Error(base::str("ranks talk over UCX, which cannot be loaded: ", ::dlerror(),
                                "\nInstall it (Debian, Ubuntu: `apt install libucx0`), or build lamina where "
                                "`libucx-dev` is installed if liblamina_ucx.so is what is missing."),
                      base::Code{"start-ucx-missing"});
  }
  void* make = ::dlsym(library, "lamina_ucx_make_endpoint");
  if (make == nullptr)
    throw base::Error(base::str(path, " is not of this version of lamina: ", ::dlerror()),
                      base::Code{"start-ucx-missing"});
  return reinterpret_cast<MakeEndpoint*>(make);
}

}  // namespace

MakeEndpoint& load_plugin() {
  static MakeEndpoint* const make = open_library();
  return *make;
}

}  // namespace lamina::transport::ucx
