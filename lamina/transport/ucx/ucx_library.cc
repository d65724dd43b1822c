// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <link.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
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

// Where the modules of UCX's libraries in `folder` are: beside them, or beside what they link to.
fs::path modules_of(const fs::path& folder) {
  std::error_code none;
  const fs::path beside = fs::absolute(folder / "ucx");
  if (fs::is_directory(beside, none)) return beside;
  const fs::path target = fs::canonical(folder / kNeeded.back(), none);
  return target.empty() ? beside : target.parent_path() / "ucx";
}

// [Note: modules] UCX loads the parts that know a network or a device from the folder "ucx" beside its library. What is
// not there it takes from where it was installed when it was built, which is the system's as a rule. A module of
// another version ends the process with signal 11 or works by luck. UCX_MODULE_DIR takes the place of the second
// folder, so it names the first one, too, while the libraries are loaded; they read it then. What the user has in it is
// another UCX's or the same folder; processes that this one starts find it again.
class OwnModules {
 public:
  explicit OwnModules(const fs::path& folder) : folder_(modules_of(folder)) {
    if (const char* set = std::getenv(kVariable); set != nullptr) users_ = set;
    ::setenv(kVariable, folder_.c_str(), 1);
  }
  ~OwnModules() {
    if (users_) {
      ::setenv(kVariable, users_->c_str(), 1);
    } else {
      ::unsetenv(kVariable);
    }
  }
  OwnModules(const OwnModules&) = delete;
  OwnModules& operator=(const OwnModules&) = delete;

  // Says what is otherwise than the user may expect of the libraries, which are loaded.
  void tell() const {
    std::error_code none;
    if (!fs::is_directory(folder_, none)) {
      base::log_warning(base::str("UCX has been loaded without modules, for there is no folder ", folder_.string(),
                                  ": ranks talk over shared memory and TCP, and use no other network. Copy the folder "
                                  "ucx that lay beside UCX's libraries, too."));
    }
    if (users_ && !fs::equivalent(*users_, folder_, none)) {
      base::log_warning(base::str(kVariable, "=", *users_,
                                  " is not heeded: UCX takes the modules beside its libraries, ", folder_.string(),
                                  ". To take others, name the folder of their libraries in "
                                  "LAMINA_UCX."));
    }
  }

 private:
  static constexpr const char* kVariable = "UCX_MODULE_DIR";
  const fs::path folder_;
  std::optional<std::string> users_;
};

// Libraries that stay loaded if all of them could be.
class Libraries {
 public:
  ~Libraries() {
    for (void* library : loaded_) ::dlclose(library);
  }
  // Returns where the library was found; empty where it cannot be loaded, and dlerror() says why.
  fs::path load(const fs::path& path) {
    void* library = ::dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
    if (library == nullptr) return {};
    loaded_.push_back(library);
    link_map* map = nullptr;
    return ::dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 ? fs::path(map->l_name) : path;
  }
  void keep() { loaded_.clear(); }

 private:
  std::vector<void*> loaded_;
};

// Loads UCX from `folder`, or from where the system has it; returns why that failed, or nothing.
std::string load_ucx(const fs::path& folder) {
  Libraries libraries;
  // The first library needs no other, so it tells where the system's are before one looks for modules.
  const fs::path first = libraries.load(folder / kNeeded.front());
  if (first.empty()) return ::dlerror();
  const OwnModules modules(first.parent_path());
  // The system may lack it, so the package brings it.
  const fs::path beside = folder / "libnuma.so.1";
  if (!folder.empty() && fs::exists(beside)) libraries.load(beside);
  for (const char* name : kNeeded) {
    if (libraries.load(folder / name).empty()) return ::dlerror();
  }
  libraries.keep();
  modules.tell();
  return "";
}

// Refuses a folder in which others may have put libraries, or the modules of these.
void require_own(const std::string& folder) {
  const auto check = [](const fs::path& path) {
    base::require_own_code(path.string(), "LAMINA_UCX", base::Writers::kGroup);
  };
  check(folder);
  std::error_code ignored;
  for (const fs::path& each : {fs::path(folder), modules_of(folder)}) {
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
