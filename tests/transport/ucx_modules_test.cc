// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>

#include "tests/transport/rank_processes.h"

// Which modules of UCX's are in the process: those of the libraries that are in it, and no others.
namespace lamina::transport {
namespace {

namespace fs = std::filesystem;
using base::Rank;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Inbox;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::object;
using testing::RankProcesses;
using ::testing::StartsWith;

const fs::path kSystem = LAMINA_SYSTEM_UCX;  // the folder of its libraries

// Files in this process whose names begin so.
std::set<std::string> mapped(const std::string& begin) {
  std::set<std::string> found;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const auto path = line.find('/');
    if (path != std::string::npos && fs::path(line.substr(path)).filename().string().starts_with(begin))
      found.insert(line.substr(path));
  }
  return found;
}

// UCX's modules in this process: libuct_cma, libuct_ib, ...
std::set<std::string> modules() {
  std::set<std::string> found = mapped("libuct_");
  found.merge(mapped("libucm_"));
  return found;
}

class UcxModules : public ::testing::Test {
 protected:
  UcxModules() {
    std::string name = (fs::temp_directory_path() / "ucx.XXXXXX").string();
    folder_ = fs::canonical(::mkdtemp(name.data()));
  }
  ~UcxModules() override { fs::remove_all(folder_); }

  // A copy of the system's libraries with one of their modules, or none.
  fs::path copy(const std::string& name, bool with_module) {
    const fs::path made = folder_ / name;
    fs::create_directories(made);
    for (const char* library : {"libucm.so.0", "libucs.so.0", "libuct.so.0", "libucp.so.0"})
      fs::copy_file(kSystem / library, made / library);
    if (with_module) copy_module(made / "ucx");
    return made;
  }
  static fs::path copy_module(const fs::path& folder) {
    fs::create_directories(folder);
    fs::copy_file(kSystem / "ucx/libuct_cma.so.0", folder / "libuct_cma.so.0");
    return folder;
  }

  // Two ranks with these variables send each other a message; `look` is told what they said on stderr when they met.
  using Variables = std::map<std::string, fs::path>;
  template <typename Look>
  static void talk(const Variables& variables, const Look& look) {
    RankProcesses job(2);
    for (const int rank : {0, 1}) {
      job.start(rank, [&, rank] {
        for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
        ::testing::internal::CaptureStderr();
        const auto transport = open_ucx(job.options(rank));
        const std::string said = ::testing::internal::GetCapturedStderr();
        Inbox inbox;
        transport->start(inbox.events());
        transport->send(Rank(1 - rank), object("c", std::string(100000, 'x')));
        EXPECT_EQ(inbox.next().fields, "c");
        look(said);
        transport->close(true);
      });
    }
    job.expect_success();
  }

  fs::path folder_;
};

// Whatever the environment says; pytest runs it with others.
TEST_F(UcxModules, AreThoseBesideTheLibraries) {
  RankProcesses job(2);
  job.run([](Transport&, Inbox&) {
    const auto libraries = mapped("libuct.so");
    ASSERT_EQ(libraries.size(), 1);
    EXPECT_THAT(modules(), Each(StartsWith((fs::path(*libraries.begin()).parent_path() / "ucx/").string())));
  });
  job.expect_success();
}

TEST_F(UcxModules, OfTheSystemAreNotTakenForThoseThatAFolderLacks) {
  const fs::path libraries = copy("whole", true);
  talk({{"LAMINA_UCX", libraries}}, [&](const std::string& said) {
    EXPECT_THAT(modules(), ElementsAre((libraries / "ucx/libuct_cma.so.0").string()));
    EXPECT_THAT(said, Not(HasSubstr("modules")));
  });
}

TEST_F(UcxModules, AreDoneWithoutWhereTheFolderHasNoneWhichIsTold) {
  const fs::path libraries = copy("bare", false);
  talk({{"LAMINA_UCX", libraries}}, [&](const std::string& said) {
    EXPECT_THAT(modules(), IsEmpty());
    EXPECT_THAT(said, HasSubstr("there is no folder " + (libraries / "ucx").string()));
  });
}

TEST_F(UcxModules, AreFoundWhereLinksToLibrariesLead) {
  const fs::path libraries = copy("whole", true), links = folder_ / "links";
  fs::create_directories(links);
  for (const auto& entry : fs::directory_iterator(libraries)) {
    if (!entry.is_directory()) fs::create_symlink(entry.path(), links / entry.path().filename());
  }
  talk({{"LAMINA_UCX", links}},
       [&](const std::string&) { EXPECT_THAT(modules(), ElementsAre((libraries / "ucx/libuct_cma.so.0").string())); });
}

TEST_F(UcxModules, ThatTheUserNamesElsewhereAreNotTakenWhichIsTold) {
  const fs::path libraries = copy("whole", true), others = copy_module(folder_ / "others");
  fs::copy_file(others / "libuct_cma.so.0", others / "libuct_ib.so.0");
  talk({{"LAMINA_UCX", libraries}, {"UCX_MODULE_DIR", others}}, [&](const std::string& said) {
    EXPECT_THAT(modules(), ElementsAre((libraries / "ucx/libuct_cma.so.0").string()));
    EXPECT_THAT(said, AllOf(HasSubstr("UCX_MODULE_DIR=" + others.string() + " is not heeded"),
                            HasSubstr((libraries / "ucx").string())));
    EXPECT_EQ(std::getenv("UCX_MODULE_DIR"), others.string());  // for processes that this one starts
  });
}

TEST_F(UcxModules, ThatTheUserNamesToo) {
  const fs::path libraries = copy("whole", true);
  talk({{"LAMINA_UCX", libraries}, {"UCX_MODULE_DIR", libraries / "../whole/ucx"}},
       [&](const std::string& said) { EXPECT_THAT(said, Not(HasSubstr("UCX_MODULE_DIR"))); });
}

}  // namespace
}  // namespace lamina::transport
