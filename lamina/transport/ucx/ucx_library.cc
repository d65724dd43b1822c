// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/base/own_code.h"
#include "lamina/base/str.h"
#include "lamina/transport/ucx/plugin.h"

namespace lamina::transport::ucx {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPlugin = "liblamina_ucx.so";

// Libraries of an installation, each after those that it needs, which are found by name once they are loaded. The first
// calls functions of the second all the same, so what they call is sought when it is called.
constexpr std::array kNeeded = {"libucm.so.0", "libucs.so.0", "libuct.so.0", "libucp.so.0"};

fs::path this_folder() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&load_plugin), &info) == 0 || info.dli_fname == nullptr) return ".";
  return fs::path(info.dli_fname).parent_path();
}

// Loads UCX from `folder`, or from where the system has it; returns why that failed, or nothing.
std::string load_ucx(const fs::path& folder) {
  std::vector<void*> loaded;
  const auto load = [&](const fs::path& path) {
    void* library = ::dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
    if (library != nullptr) loaded.push_back(library);
    return library != nullptr;
  };
  if (folder.empty()) return load(kNeeded.back()) ? "" : ::dlerror();

  // The system may lack it, so the package brings it.
  const fs::path beside = folder / "libnuma.so.1";
  if (fs::exists(beside)) load(beside);
  for (const char* name : kNeeded) {
    if (load(folder / name)) continue;
    std::string why = ::dlerror();
    for (void* library : loaded) ::dlclose(library);
    return why;
  }
  return "";
}

// Refuses a folder in which others may have put libraries. UCX's modules are in a folder below.
void require_own(const std::string& folder) {
  const auto check = [](const fs::path& path) {
    base::require_own_code(path.string(), "LAMINA_UCX", base::Writers::kGroup);
  };
  check(folder);
  std::error_code ignored;
  for (const fs::path& each : {fs::path(folder), fs::path(folder) / "ucx"}) {
    for (const auto& entry : fs::directory_iterator(each, ignored)) {
      if (entry.path().filename() == "ucx" || entry.path().string().find(".so") != std::string::npos)
        check(entry.path());
    }
  }
}

[[noreturn]] void refuse(const std::string& why) {
  throw base::Error(base::str("ranks talk over UCX, which cannot be loaded: ", why), base::Code{"start-ucx-missing"});
}

// [Note: which UCX] LAMINA_UCX names the folder of one, and then no other is taken. Else the package libucx of PyPI
// comes first, for somebody has installed it for its CUDA. The system's knows the hardware of the network. The one in
// lamina's package, which knows shared memory and TCP, comes last.
void load_first_ucx() {
  const fs::path package = this_folder().parent_path();  // which has a folder for each torch that it knows
  if (const char* named = std::getenv("LAMINA_UCX"); named != nullptr && *named != '\0') {
    require_own(named);
    if (const auto why = load_ucx(named); !why.empty())
      refuse(base::str(why, "\nLAMINA_UCX names ", named, ": it has to be the folder of libucp.so.0, or unset."));
    return;
  }
  std::string tried;
  for (const fs::path& folder : {package.parent_path() / "libucx/lib", fs::path(), package / "ucx"}) {
    if (!folder.empty() && !fs::exists(folder)) continue;
    const auto why = load_ucx(folder);
    if (why.empty()) return;
    tried += base::str(tried.empty() ? "" : "; ", why);
  }
  refuse(base::str(tried,
                   "\nInstall it (Debian, Ubuntu: `apt install libucx0`; elsewhere: `pip install libucx-cu12`), or "
                   "name its folder of libraries in LAMINA_UCX."));
}

MakeEndpoint* open_library() {
  // UCX reads these while it loads: without them it takes over SIGSEGV and its like, and hooks the memory allocator.
  ::setenv("UCX_HANDLE_ERRORS", "none", 0);
  ::setenv("UCX_MEM_EVENTS", "n", 0);
  load_first_ucx();
  const auto path = this_folder() / kPlugin;
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    refuse(
        base::str(::dlerror(), "\nBuild lamina where UCX's headers are (Debian, Ubuntu: `apt install libucx-dev`)."));
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
