// SPDX-License-Identifier: Apache-2.0
#include "apps/lamina/doctor_command.h"

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <filesystem>

#include "apps/lamina/embedded_script.h"
#include "lamina/launch/options/command_line.h"

namespace lamina::embedded {
extern const char* const kDoctor;  // doctor.py
}

namespace lamina::command {

int doctor(const std::vector<std::string>& arguments) {
  CLI::App app("Says what this machine and its libraries are, and whether two ranks work here.", "lamina doctor");
  bool json = false;
  app.add_flag("--json", json, "print all of it as JSON, for reports of faults");
  if (auto code = launch::parse(app, "lamina doctor", arguments)) return *code;
  std::vector<std::string> words = {LAMINA_VERSION, std::filesystem::read_symlink("/proc/self/exe")};
  if (json) words.push_back("--json");
  return become_script("lamina doctor", embedded::kDoctor, words);
}

}  // namespace lamina::command
