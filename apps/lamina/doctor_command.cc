// SPDX-License-Identifier: Apache-2.0
#include "apps/lamina/doctor_command.h"

#include <unistd.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <filesystem>

#include "apps/lamina/say.h"
#include "lamina/base/error.h"
#include "lamina/base/system_error.h"
#include "lamina/launch/options/command_line.h"
#include "lamina/launch/options/program.h"

namespace lamina::embedded {
extern const char* const kDoctor;  // doctor.py
}

namespace lamina::command {

int doctor(const std::vector<std::string>& arguments) {
  CLI::App app("Says what this machine and its libraries are, and whether two ranks work here.", "lamina doctor");
  bool json = false;
  app.add_flag("--json", json, "print all of it as JSON, for reports of faults");
  if (auto code = launch::parse(app, "lamina doctor", arguments)) return *code;
  try {
    const std::string python = launch::find_interpreter();
    const std::string itself = std::filesystem::read_symlink("/proc/self/exe");
    std::vector<const char*> words = {python.c_str(), "-c", embedded::kDoctor, LAMINA_VERSION, itself.c_str()};
    if (json) words.push_back("--json");
    words.push_back(nullptr);
    ::execv(python.c_str(), const_cast<char* const*>(words.data()));
    complain("lamina doctor: cannot start ", python, ": ", base::system_error());
  } catch (const base::Error& error) {
    complain("lamina doctor: ", error.what());
  }
  return 2;
}

}  // namespace lamina::command
